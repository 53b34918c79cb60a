"""`compare_with_serving`: compares the schemes of linear layers in training and in serving."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from bridge.convert.serving.formats import MODELOPT, VLLM, format_scheme
from bridge.convert.serving.manifest import Manifest
from bridge.convert.serving.module_names import describe_fused_conflicts
from bridge.convert.serving.serving_config import ServingConfig
from bridge.errors import PayloadError
from bridge.plan.precision_plan import format_ranges
from bridge.precision.foreign_names import PROJ

CACHE_SUBJECT = "key-value cache"
"""The role of the row about stored keys and values. Training does not store them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRow:
    """Modules with the same name within their layers and the same schemes on either side."""

    role: str
    """Megatron's name within a layer."""
    training: str | None
    """The scheme in training; None: not quantised."""
    serving: str | None
    """The scheme in serving; None: not quantised."""
    modules: int
    """Modules of the checkpoint, each expert counted."""
    layers: tuple[str, ...]
    """The labels of their layers."""
    readers: tuple[str, ...]
    """The systems that read the config so; empty if every system does."""
    differs: bool
    """Whether serving has another scheme than training."""

    def sentence(self, mode: str) -> str:
        """Return a row that differs as a sentence.

        Args:
            mode: The dtype of high precision in training.
        """
        noun = "modules"
        if self.modules == 1:
            noun = "module"
        subject = f"{self.role} ({self.modules} {noun}, layers {format_ranges(self.layers)})"
        reader = " and ".join(self.readers) or "Serving"
        training = format_scheme(self.training)
        serving = format_scheme(self.serving)
        if self.serving is None:
            return f"{reader} does not quantise {subject}; training does: {training}."
        if self.training is None:
            return f"{reader} quantises {subject}: {serving}; training has it in {mode}."
        return f"{reader} has {subject} in another scheme: {serving}; training: {training}."


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingComparison:
    """A manifest of training and a serving config, module by module."""

    mode: str
    """The dtype of high precision in training."""
    rows: tuple[ServedRow, ...]
    refused: tuple[str, ...] = ()
    """Sentences about modules that vLLM fuses, and that have different schemes in the config."""

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


def compare_with_serving(
    manifest: Manifest, config: ServingConfig, reader: str | None = None
) -> ServingComparison:
    """Return the comparison of a manifest of training with a serving config.

    Args:
        manifest: The linear layers of the trained model.
        reader: The system that serves the model; None: every system that reads the config.

    Raises:
        RunConfigError: The names of modules are not known.
        PayloadError: The system does not read such a config.
    """
    manifest.require_names()
    if reader is not None and config.is_fp8 and reader not in config.readers:
        rule = f"quant_method {config.method} is read by {' and '.join(config.readers)}"
        raise PayloadError.of(config.path, rule, reader, "Name one of them with --for, or none.")
    readers = config.readers
    if reader in config.readers:
        readers = [reader]
    rows = list(_make_rows(manifest, config, readers))
    if config.kv_cache is not None:
        rows.append(_make_cache_row(manifest, config.kv_cache))
    refused: tuple[str, ...] = ()
    if reader in {None, VLLM}:
        refused = tuple(_list_vllm_refusals(manifest, config))
    return ServingComparison(mode=manifest.mode, rows=tuple(rows), refused=refused)


def _make_cache_row(manifest: Manifest, kv_cache: str) -> ServedRow:
    """Return the row of the keys and values that serving stores, one for each attention layer."""
    layers = tuple(row.layer for row in manifest.rows if row.role == PROJ)
    return ServedRow(
        role=CACHE_SUBJECT,
        training=None,
        serving=kv_cache,
        modules=len(layers),
        layers=layers,
        readers=(),
        differs=True,
    )


def _list_vllm_refusals(manifest: Manifest, config: ServingConfig) -> Iterator[str]:
    """Yield a sentence for each group of modules that vLLM loads as one, with several schemes.

    In ModelOpt's list, vLLM looks for the complete names of the group first. It refuses a list with
    only some of these names.
    """
    if VLLM not in config.readers:
        return
    schemes: dict[str, str | None] = {}
    for row in manifest.rows:
        for name in row.iterate_served_names():
            if config.method != MODELOPT:
                schemes[name] = config.scheme_of(name, VLLM)
            elif name in config.kept:
                schemes[name] = None
            else:
                schemes[name] = MODELOPT
    yield from describe_fused_conflicts(schemes)


class _ModuleKind(NamedTuple):
    """The key of a row."""

    role: str
    training: str | None
    serving: str | None


@dataclass(kw_only=True, slots=True)
class _Members:
    """The modules of a row and their layers, in the order of the model, and the reading systems."""

    names: dict[str, None] = field(default_factory=dict)
    layers: dict[str, None] = field(default_factory=dict)
    readers: dict[str, None] = field(default_factory=dict)


def _make_rows(
    manifest: Manifest, config: ServingConfig, readers: Sequence[str]
) -> Iterator[ServedRow]:
    """Yield a row for each kind of module.

    Args:
        manifest: The linear layers of the trained model.
        readers: The systems that read the config.
    """
    members_by_kind: dict[_ModuleKind, _Members] = {}
    for row in manifest.rows:
        for name in row.iterate_served_names():
            for reader in readers:
                serving = None
                if row.role not in manifest.plain:
                    serving = config.scheme_of(name, reader)
                kind = _ModuleKind(row.role, row.scheme, serving)
                members = members_by_kind.setdefault(kind, _Members())
                members.names[name] = None
                members.layers[row.layer] = None
                members.readers[reader] = None
    for kind, members in members_by_kind.items():
        named_readers = tuple(members.readers)
        if named_readers == tuple(config.readers):
            named_readers = ()
        yield ServedRow(
            role=kind.role,
            training=kind.training,
            serving=kind.serving,
            modules=len(members.names),
            layers=tuple(members.layers),
            readers=named_readers,
            differs=kind.training != kind.serving,
        )
