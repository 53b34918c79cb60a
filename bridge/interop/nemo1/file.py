"""A NeMo 1.x configuration as it is read: references followed, sections found, defaults of the shipped file at hand.

Megatron's models have settings of their own, and training scripts of their own that read them. Speech, BERT on Hugging
Face weights and the rest of the toolkit know none of those: Lightning trains them as its Trainer's arguments say.
"""

import re
from collections.abc import Mapping
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.reading.settings import Settings
from bridge.interop.table import table

TABLE = table("nemo1")
MEGATRON = re.compile(TABLE.data["megatron"].replace(" |", "|"))
OTHERS = TABLE.data["others"]
MEGATRON_CORE = (1, 21)
"""The first release that reads `mcore_gpt`."""
REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.]+)\s*\}")
"""OmegaConf's reference to another key of the file; dots in front make it relative to the key it stands at."""
DEEPEST = 16


class Model(Settings):
    """The section of the model; a reference is followed when its value is read."""

    def __init__(self, file: "File", values: Mapping[Any, Any]) -> None:
        super().__init__(values, "nemo1", "model")
        self.file = file

    def __getitem__(self, key: str) -> Any:
        return self.file.follow(self.values.get(key), self.name(key))

    def switch(self, key: str) -> bool:
        """Return true or false, false where it is not there; PayloadError for anything else."""
        value = self[key]
        text = str(value).lower()
        if value is None or value in (0, 1) or (isinstance(value, str) and text in ("true", "false")):
            return text in ("1", "1.0", "true")
        raise PayloadError(f"{self.name(key)}: must be true or false, got {value!r:.60}. Correct it in the file.")


class File:
    """The configuration with its references, its sections and its defaults."""

    def __init__(self, payload: Mapping[Any, Any], version: str | None) -> None:
        model = payload.get("model")
        self.payload, self.version, self.has_model = payload, version, isinstance(model, Mapping)
        self.model = Model(self, model if isinstance(model, Mapping) else payload)
        self.written = Settings(self.model.values, "nemo1", "model")  # with references as they stand
        self.release: tuple[int, int] | None = None
        self.shipped: Mapping[str, Any] = {}
        if version is not None:
            found = re.match(r"v?(\d+)\.(\d+)", str(version))
            if found is None:
                raise PayloadError(f"nemo_version: must be a version, got {version!r}. Write nemo_version=1.23.")
            self.release = (int(found[1]), int(found[2]))
            self.shipped = next(row for row in TABLE.data["shipped"] if self.release < tuple(row["before"]))

    @property
    def is_megatron(self) -> bool:
        """Whether one of Megatron's models is trained; a release says so too, as its shipped file is of one."""
        if self.has_megatrons_keys() or (self.has_model and "precision" in self.model):
            return True
        return self.release is not None and not any(key in self.model for key in OTHERS)

    def has_megatrons_keys(self, *, other_than: str = "") -> bool:
        """Return whether a key, other than `other_than`, is one that only Megatron's models read."""
        keys = {str(key) for section in (self.written.values, self.payload) for key in section}
        return any(MEGATRON.fullmatch(key) for key in keys - {other_than})

    @property
    def is_on_megatron_core(self) -> bool:
        """Whether GPT is Megatron Core's, and not the transformer that NeMo brings itself."""
        if self.release is not None and self.release < MEGATRON_CORE:
            return False
        return self.model.switch("mcore_gpt") if self.model.given("mcore_gpt") else self.shipped.get("mcore_gpt", False)

    def raw(self, path: str, absent: object = None) -> Any:
        """Return a value by its dotted path from the top as it is written, `absent` where there is none."""
        value: Any = self.payload
        for word in path.split("."):
            value = value.get(word, absent) if isinstance(value, Mapping) else absent
        return value

    def get(self, path: str) -> Any:
        """Return a value by its dotted path from the top, with references followed."""
        return self.follow(self.raw(path), path)

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
