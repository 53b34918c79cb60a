"""`Setting`: one key of a run's config, with its value, its source and its trace in the records.

`explain` shows it.

The trace of a field of the precision is the dtypes and GEMMs of the last record that it decides.
The report of the sync has the fields that the precision wrote, with the values that it replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.precision.precision_config import FIELDS
from bridge.runtime.audit.gemm_formats import format_gemms
from bridge.runtime.audit.record import Record
from bridge.runtime.audit.run_folder import RunFolder

ORIGINS_FILE = "origins.json"
"""The file of a run with the default of each field, and the files that set it."""

LOSS_SCALE_SUBJECT = "Loss scale"
"""Subject of the fields of the loss scale."""
STATE_KINDS = ("master weights", "optimizer state")
"""Kinds of tensors that the optimizer keeps."""
TENSOR_KINDS_OF_SUBJECT: dict[str, tuple[str, ...]] = {
    "Mode": ("parameters", "activations", *STATE_KINDS),
    "Parameters and gradients": ("parameters", "gradients", "gradient reduction"),
    "Optimizer state": ("gradients", *STATE_KINDS),
    "Communication": ("sent between stages", "gradient reduction"),
    "Megatron-FSDP": ("parameters", "gradients", *STATE_KINDS),
}
"""Subject of a field -> the kinds of tensors in the census that it decides.

Fields of other subjects decide about GEMMs.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A key of a run's config."""

    key: str
    """Section and field, for example ``optimizer.lr``."""
    value: Any
    """The value of the run, after the sync and Megatron's checks."""
    default: Any
    """The default of the section's class."""
    set_by: dict[str, Any]
    """File, or the command line -> the value that it set, in the order of composition."""
    by: str
    """The source that decided the value.

    It is the last file that set the value, the sync, the default, or a derivation of Megatron Core.
    """
    ran: str
    """One sentence about the trace in the run's records; empty without a trace."""

    @classmethod
    def from_run(cls, folder: RunFolder, key: str) -> Setting | None:
        """Return a setting of a run.

        Args:
            key: Section and field, or a field that only one section has.

        Returns:
            The setting, or None if the run's config has no such section.

        Raises:
            RunConfigError: The section has no such field, or several sections have the field.
        """
        section, _, field = key.partition(".")
        if not field:
            owner = _find_section(folder, key)
            if owner is None:
                return None
            return cls.from_run(folder, f"{owner}.{key}")
        fields = folder.config.get(section)
        if not isinstance(fields, dict):
            return None
        if field not in fields:
            matches = [f"{section}.{name}" for name in close_matches(field, fields)]
            rule = f"must be a field of {section} in the run"
            hint = did_you_mean(matches) or f"`{folder.path}/config.yaml` lists them."
            raise RunConfigError.of("FIELD", rule, key, hint, matches)
        return cls._from_value(folder, key, fields[field])

    @classmethod
    def _from_value(cls, folder: RunFolder, key: str, value: Any) -> Setting:
        """Return the setting of a key with this value."""
        origins = folder.read_json(ORIGINS_FILE)
        default = origins.get("defaults", {}).get(key, value)
        set_by = origins.get("set_by", {}).get(key, {})
        if _is_written_by_sync(folder, key):
            by = "the sync"
        elif set_by:
            by = list(set_by)[-1]
        elif value == default:
            by = "default"
        else:
            by = "derived by Megatron Core when its config was built"
        ran = describe_trace(key, folder.read_metrics("train"))
        return cls(key=key, value=value, default=default, set_by=set_by, by=by, ran=ran)


def _find_section(folder: RunFolder, field: str) -> str | None:
    """Return the section that has a field, or None if no section has it.

    Raises:
        RunConfigError: Several sections have the field.
    """
    sections = []
    for name, fields in folder.config.items():
        if isinstance(fields, dict) and field in fields:
            sections.append(name)
    if len(sections) > 1:
        matches = [f"{name}.{field}" for name in sections]
        hint = did_you_mean(matches)
        raise RunConfigError.of("FIELD", "must name one section", field, hint, matches)
    if not sections:
        return None
    return sections[0]


def _is_written_by_sync(folder: RunFolder, key: str) -> bool:
    """Return whether the report of the sync has a row for a key."""
    rows = folder.sync.get("rows", ())
    return any(f"{row['owner']}.{row['attribute']}" == key for row in rows)


def describe_trace(key: str, train: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the trace of a key in the records of steps; empty without a trace."""
    if not train:
        return ""
    if key in {"optimizer.lr", "optimizer.min_lr"}:
        rates = [record["learning_rate"] for record in train]
        return (
            f"Learning rate: {rates[0]:g} in the first record, {max(rates):g} at most, "
            f"{rates[-1]:g} in the last"
        )
    if key == "train.train_iters":
        return f"Steps: the last record is of step {train[-1]['step']}"
    return ""


def describe_effect(folder: RunFolder, field: str) -> str:
    """Return the trace of a field of the precision in the last record; empty without a record."""
    stated_field = FIELDS[field]
    subject = ""
    if stated_field.subject is not None:
        subject = stated_field.subject.title
    if subject == LOSS_SCALE_SUBJECT:
        return describe_loss_scale(folder.read_metrics("train"))
    record = folder.record
    if record is None:
        return ""
    gemms = f"GEMMs of step {record.step}: {format_gemms(record.gemms)}"
    kinds = TENSOR_KINDS_OF_SUBJECT.get(subject)
    if stated_field.twin is not None:  # fp8_param or fp4_param, which decide stored weights
        kinds = ("parameters",)
    if kinds is None:
        return gemms
    tensors = f"Tensors of step {record.step}: {_describe_tensors(record, kinds)}"
    if subject == "Mode":
        return f"{tensors}. {gemms}"
    return tensors


def _describe_tensors(record: Record, kinds: tuple[str, ...]) -> str:
    """Return the recorded dtypes of some kinds of tensors, for a sentence."""
    parts = []
    for kind in kinds:
        dtypes: dict[str, None] = {}
        for row in record.census:
            if row.kind == kind:
                dtypes[row.dtype] = None
        if dtypes:
            parts.append(f"{kind} {' and '.join(dtypes)}")
    return "; ".join(parts)


def describe_loss_scale(train: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the loss scale in the records of steps; empty without records."""
    if not train:
        return ""
    first, last = train[0], train[-1]
    return (
        f"Loss scale: {first['loss_scale']:g} in the first record and {last['loss_scale']:g} in "
        f"the last, {last['skipped_steps']} steps skipped"
    )
