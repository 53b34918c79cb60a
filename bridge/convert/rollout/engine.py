"""`Rollout`: what the engine that generates samples will use, and the scheme that it gives to one module.

An engine quantises by a config that its framework hands over, or that stands in the checkpoint. `ServingConfig` reads
it. Names that vLLM loads as one layer have one scheme: an entry of ModelOpt's lists is compared with vLLM's own name
for them, so that `mlp.gate` takes `mlp.gate_up_proj` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from bridge.convert.serving.reader import LINEAR, MODELOPT, ServingConfig
from bridge.read.foreign.row_files import rows

ROWS = rows("rollout")
"""Frameworks, dtypes of the cache and fused names; the file describes its columns."""
VLLM = "vllm"
SGLANG = "sglang"
MODEL_DTYPE = "auto"
FUSED: Mapping[str, list[str]] = ROWS["fused"]
CACHE: Mapping[str, bool] = ROWS["cache"]
POWERS_OF_TWO = "powers of two"
FP32 = "FP32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """The numbers that scales are, in blocks of 128; None: not known."""

    weights: str | None = None
    inputs: str | None = None
    decided_by: str = ""
    """What decides a number that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What the engine of a run will use to generate samples."""

    engine: str
    """vllm, sglang, or another engine's name; empty: not known."""
    framework: str = ""
    """The framework that starts it; empty: a serving config alone is known."""
    quantization: Mapping[str, Any] | None = None
    """The quantization config that it is handed; empty: none; None: not known."""
    quantization_decided_by: str = ""
    """What decides the quantization config where it is not known."""
    first: int = 0
    """First layers in high precision."""
    last: int = 0
    kept_parts: tuple[str, ...] = ()
    """Parts of names that stay in high precision."""
    kept_ends: tuple[str, ...] = ()
    """Ends of names that stay in high precision."""
    dtype: str | None = None
    """Dtype of what is not quantised: bf16, fp16, fp32; None: not known."""
    cache: str | None = MODEL_DTYPE
    """Dtype of keys and values as the engine is given it; None: not known."""
    scales: Scales = Scales()
    sent: str = ""
    """The form that weights are sent in, as a sentence."""
    notes: tuple[str, ...] = ()

    def config_for(self, names: Mapping[str, tuple[int, int]]) -> ServingConfig | None:
        """Return the config with its list of modules; None where it is not known.

        Args:
            names: Name of a module in the checkpoint -> its layer from 1, and the number of layers.
        """
        if self.quantization is None:
            return None
        if not self.quantization:
            return ServingConfig(path=self.framework or "rollout")
        block = dict(self.quantization)
        kept = [name for name, place in names.items() if self._keeps(name, *place)]
        if kept:
            key = "ignore" if block.get("quant_method") == MODELOPT else "ignored_layers"
            block[key] = [*block.get(key, ()), *kept]
        return ServingConfig.of({"quantization_config": block}, self.framework or "rollout")

    def _keeps(self, name: str, layer: int, num_layers: int) -> bool:
        if layer and (layer <= self.first or layer > num_layers - self.last):
            return True
        for part in self.kept_parts:
            if part in name:
                return True
        return name.endswith(self.kept_ends)


def schemes_in(config: ServingConfig, name: str, engine: str) -> set[str | None]:
    """Return the scheme of a module of the checkpoint, None: it is not quantised; several where engines differ.

    An empty engine is any that reads such a config.
    """
    if config.method == MODELOPT and engine in {VLLM, ""} and config.targets:
        if _is_excluded_by_vllm(config.kept, name):
            return {None}
        return {scheme for target, scheme in config.targets if target == LINEAR}
    readers = config.readers
    if engine in readers:
        readers = [engine]
    return {config.scheme_of(name, reader) for reader in readers}


def _is_excluded_by_vllm(kept: tuple[str, ...], name: str) -> bool:
    """Return whether vLLM's reading of ModelOpt's list leaves out a module, by the name that it loads it under."""
    parent, _, last = name.rpartition(".")
    loaded = name
    if ".experts." in name:
        loaded = name.partition(".experts.")[0] + ".experts"
    for fused, parts in FUSED.items():
        if last not in parts or ".experts." in name:
            continue
        loaded = f"{parent}.{fused}"
        if all(f"{parent}.{part}" in kept for part in parts):
            return True
    if name in kept and loaded == name:
        return True
    for entry in kept:
        is_expert = ".experts." in entry and entry.startswith(f"{loaded}.")
        if entry in loaded or fnmatchcase(loaded, entry) or is_expert:
            return True
    return False
