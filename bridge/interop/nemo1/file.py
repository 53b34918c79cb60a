"""A NeMo 1.x configuration as it is read: references followed, sections found, defaults of the shipped file at hand.

Megatron's models have settings of their own, and training scripts of their own that read them. Speech, BERT on Hugging
Face weights and the rest of the toolkit know none of those: Lightning trains them as its Trainer's arguments say.
"""

import re
from collections.abc import Mapping
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.builders import DELAYED

SHIPPED_OLD: dict[str, Any] = {"fp8_e4m3": False, "fp8_hybrid": False, **DELAYED}
SHIPPED_NEW = {**SHIPPED_OLD, "fp8_hybrid": True, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
MEGATRON = re.compile(
    r"megatron_\w+|mcore_\w+|native_amp_\w+|fp8\w*|transformer_engine|hysteresis|reduce_amax|restore_from_path|peft"
    r"|(tensor|pipeline|virtual_pipeline|expert|context)_(model_)?parallel_size|(micro|global)_batch_size"
    r"|sequence_parallel|activations_checkpoint_\w+|apply_query_key_layer_scaling|ffn_hidden_size|encoder_seq_length"
    r"|grad_allreduce_chunk_size_mb|grad_div_ar_fusion|language_model_path|gpt_model_file|data"
)
"""Keys of the model section that only Megatron's models read."""
OTHERS = ("train_ds", "sample_rate", "preprocessor", "language_model", "labels")
"""Keys of the model section that other models have and Megatron's do not."""
MEGATRON_CORE = (1, 21)
"""The first release that reads `mcore_gpt`."""
REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.]+)\s*\}")
"""OmegaConf's reference to another key of the file; dots in front make it relative to the key it stands at."""
DEEPEST = 16


class File:
    """The configuration with its references, its sections and its defaults."""

    def __init__(self, payload: Mapping[Any, Any], version: str | None) -> None:
        self.payload = payload
        model = payload.get("model")
        self.model: Mapping[Any, Any] = model if isinstance(model, Mapping) else payload
        self.version = version
        self.release: tuple[int, int] | None = None
        self.shipped: dict[str, Any] | None = None
        if version is not None:
            found = re.match(r"v?(\d+)\.(\d+)", str(version))
            if found is None:
                raise PayloadError(f"nemo_version: must be a version, got {version!r}. Write nemo_version=1.23.")
            self.release = release = (int(found[1]), int(found[2]))
            is_2 = release >= (2, 0)
            self.shipped = dict(SHIPPED_NEW if release >= (1, 22) else SHIPPED_OLD)
            self.shipped |= {"precision": "bf16" if is_2 else "16", "megatron_amp_O2": is_2, "mcore_gpt": is_2}

    @property
    def is_megatron(self) -> bool:
        """Whether one of Megatron's models is trained; a release says so too, as its shipped file is of one."""
        if self.has_megatrons_keys():
            return True
        if self.model is not self.payload and "precision" in self.model:
            return True
        return self.release is not None and not any(key in self.model for key in OTHERS)

    def has_megatrons_keys(self, *, other_than: tuple[str, ...] = ()) -> bool:
        """Return whether a key, other than those in `other_than`, is one that only Megatron's models read."""
        keys = {str(key) for section in (self.model, self.payload) for key in section}
        return any(MEGATRON.fullmatch(key) for key in keys - {*other_than})

    @property
    def is_on_megatron_core(self) -> bool:
        """Whether GPT is Megatron Core's, and not the transformer that NeMo brings itself."""
        if self.release is not None and self.release < MEGATRON_CORE:
            return False
        return self.switch("mcore_gpt") if "mcore_gpt" in self else bool((self.shipped or {}).get("mcore_gpt"))

    def raw(self, path: str, absent: object = None) -> Any:
        """Return a value by its dotted path from the top as it is written, `absent` where there is none."""
        value: Any = self.payload
        for word in path.split("."):
            value = value.get(word, absent) if isinstance(value, Mapping) else absent
        return value

    def get(self, path: str) -> Any:
        """Return a value by its dotted path from the top, with references followed."""
        return self.follow(self.raw(path), path)

    def setting(self, key: str) -> Any:
        """Return a key of the model's section, None where it is not there."""
        return self.follow(self.model.get(key), f"model.{key}")

    def follow(self, value: Any, where: str, depth: int = 0) -> Any:
        """Return what a value written at `where` comes to; PayloadError where the file does not state it."""
        if value == "???":
            rule = "must be given where the run is started, and the file leaves it open"
            raise PayloadError(f"{where}: {rule}, got {value!r}. Write the value itself.")
        if not isinstance(value, str) or "${" not in value:
            return value
        found = REFERENCE.fullmatch(value)
        if found is None:
            rule = "is computed when the run is started"
            raise PayloadError(f"{where}: {rule}, got {value!r:.80}. Write the value that it comes to.")
        path = ".".join([*where.split(".")[: -len(found[1])], found[2]]) if found[1] else found[2]
        written = self.raw(path, absent=...)
        if written is ... or depth == DEEPEST:
            rule = "leads in a circle" if depth == DEEPEST else "leads nowhere"
            raise PayloadError(f"{where}: the reference {value!r:.80} {rule}. Write the value itself.")
        return self.follow(written, path, depth + 1)

    def __contains__(self, key: str) -> bool:
        return self.model.get(key) is not None

    def switch(self, key: str) -> bool:
        """Return a switch of the model's section, False where it is not there."""
        value = self.setting(key)
        return False if value is None else switch(value, f"model.{key}")


def switch(value: Any, where: str) -> bool:
    """Return true or false; PayloadError for anything else."""
    text = str(value).lower()
    if value in (0, 1) or (isinstance(value, str) and text in ("true", "false")):
        return text in ("1", "1.0", "true")
    raise PayloadError(f"{where}: must be true or false, got {value!r:.60}. Correct it in the file.")
