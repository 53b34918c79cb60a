"""A serving config against the training: the scheme of each linear layer in both."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from bridge.convert.serving.formats import title_of
from bridge.convert.serving.manifest import Manifest
from bridge.convert.serving.names import split
from bridge.convert.serving.reader import ServingConfig
from bridge.errors import PayloadError
from bridge.plan.precision_plan import compact
from bridge.precision.foreign_names import PROJ

CACHE = "key-value cache"
"""Role of the keys and values that serving stores, which training has in high precision."""


@dataclass(frozen=True, slots=True)
class ServedRow:
    """Modules of one kind with one scheme in training and one in serving."""

    role: str
    """Megatron's name within a layer."""
    training: str | None
    serving: str | None
    modules: int
    """Modules of the checkpoint, each expert counted."""
    layers: tuple[str, ...]
    readers: tuple[str, ...]
    """The systems that read the config so; empty: all."""
    differs: bool
    """Whether serving has another scheme than training."""

    def sentence(self, mode: str) -> str:
        """Return the row as a sentence."""
        plural = "s"
        if self.modules == 1:
            plural = ""
        count = f"{self.modules} module{plural}, layers {compact(self.layers)}"
        where = f"{self.role} ({count})"
        who = " and ".join(self.readers) or "Serving"
        training, serving = title_of(self.training), title_of(self.serving)
        if self.serving is None:
            return f"{who} does not quantise {where}; training does: {training}."
        if self.training is None:
            return f"{who} quantises {where}: {serving}; training has it in {mode}."
        return f"{who} has {where} in another scheme: {serving}; training: {training}."


@dataclass(frozen=True, slots=True)
class ServingComparison:
    """A manifest of training and a serving config, module by module."""

    mode: str
    rows: tuple[ServedRow, ...]
    refused: tuple[str, ...] = ()
    """Sentences: modules that vLLM fuses, and to which the config gives different schemes."""

    @property
    def differences(self) -> tuple[ServedRow, ...]:
        """The rows in which the two differ."""
        return tuple(row for row in self.rows if row.differs)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {
            "same": not self.differences,
            "rows": list(map(asdict, self.rows)),
            "refused": self.refused,
        }


def compare(
    manifest: Manifest, config: ServingConfig, reader: str | None = None
) -> ServingComparison:
    """Hold a serving config against the manifest of training.

    The config is read as each system reads it, or as `reader` alone does.
    RunConfigError where the names of modules are not known, PayloadError where `reader` reads no
    such config.
    """
    manifest.require_names()
    if reader is not None and config.is_fp8 and reader not in config.readers:
        rule = f"quant_method {config.method} is read by {' and '.join(config.readers)}"
        raise PayloadError.of(config.path, rule, reader, "Name one of them with --for, or none.")
    readers = config.readers
    if reader in config.readers:
        readers = [reader]
    rows: list[ServedRow] = []
    for (role, training, serving), places in _places(manifest, config, readers).items():
        names, layer_names, by_readers = map(dict.fromkeys, zip(*places, strict=True))
        layers, by = tuple(layer_names), tuple(by_readers)
        if len(by) == len(readers) and reader is None:
            by = ()
        rows.append(ServedRow(role, training, serving, len(names), layers, by, training != serving))
    if config.kv_cache is not None:
        layers = tuple(row.layer for row in manifest.rows if row.role == PROJ)
        rows.append(ServedRow(CACHE, None, config.kv_cache, len(layers), layers, (), differs=True))
    refused: tuple[str, ...] = ()
    if reader in {None, "vllm"} and {"", "vllm"} & {*config.readers}:
        by_vllm = {}
        for row in manifest.rows:
            for name in row.each():
                by_vllm[name] = config.scheme_of(name, "vllm")
        refused = tuple(split(by_vllm))
    return ServingComparison(manifest.mode, tuple(rows), refused)


class _Place(NamedTuple):
    """A module of the checkpoint, as a system reads the config."""

    name: str
    layer: str
    reader: str


def _places(
    manifest: Manifest, config: ServingConfig, readers: Sequence[str]
) -> dict[tuple[str, str | None, str | None], list[_Place]]:
    """Return (role, scheme in training, scheme in serving) -> the modules, by each reader."""
    places: dict[tuple[str, str | None, str | None], list[_Place]] = {}
    for row in manifest.rows:
        for name, reader in product(row.each(), readers):
            serving = None
            if row.role not in manifest.plain:
                serving = config.scheme_of(name, reader)
            place = _Place(name, row.layer, reader)
            places.setdefault((row.role, row.scheme, serving), []).append(place)
    return places
