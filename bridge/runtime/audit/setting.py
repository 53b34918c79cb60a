"""A key of a run's config and a field of its precision: who set it, and its trace in the records.

The sync's report has the fields that the precision wrote, with what it replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.precision.config import FIELDS
from bridge.runtime.audit.compare import format_gemms
from bridge.runtime.audit.record import Record
from bridge.runtime.audit.run_folder import RunFolder

FILE = "origins.json"
"""The file of a run with the defaults of its fields, and who set them."""

LOSS_SCALE = "Loss scale"
"""Subject of the fields about it."""
STATE = ("master weights", "optimizer state")
TENSORS: dict[str, tuple[str, ...]] = {
    "Mode": ("parameters", "activations", *STATE),
    "Parameters and gradients": ("parameters", "gradients", "gradient reduction"),
    "Optimizer state": ("gradients", *STATE),
    "Communication": ("sent between stages", "gradient reduction"),
    "Megatron-FSDP": ("parameters", "gradients", *STATE),
}
"""Subject of a field -> the kinds of tensors in the census that it decides.

Fields of other subjects decide about GEMMs.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A key of a run's config."""

    key: str
    """``optimizer.lr``."""
    value: Any
    """The value of the run, after the sync and Megatron's own checks."""
    default: Any
    """That of the section's class."""
    set_by: dict[str, Any]
    """Each file, and the command line, that set it, in the order of composition -> the value."""
    by: str
    """Who decided the value.

    The last layer that set it, the sync, the default, or Megatron Core's own derivation.
    """
    ran: str
    """One sentence on the trace in the run's records; empty where there is none."""

    @classmethod
    def of(cls, run: RunFolder, key: str) -> Setting | None:
        """Return the setting with a key, or with the name of a field.

        The result is None where the run's config has no such section.
        """
        section, _, field = key.partition(".")
        if not field:
            owner = _section_of(run, key)
            if owner is None:
                return None
            return cls.of(run, f"{owner}.{key}")
        fields = run.config.get(section)
        if not isinstance(fields, dict):
            return None
        if field not in fields:
            matches = [f"{section}.{name}" for name in close_matches(field, fields)]
            rule = f"must be a field of {section} in the run"
            hint = did_you_mean(matches) or f"`{run.path}/config.yaml` lists them."
            raise RunConfigError.of("FIELD", rule, key, hint, matches)
        origins = run.json_of(FILE)
        value = fields[field]
        default = origins.get("defaults", {}).get(key, value)
        set_by = origins.get("set_by", {}).get(key, {})
        if _is_written(run, key):
            by = "the sync"
        elif set_by:
            by = list(set_by)[-1]
        elif value == default:
            by = "default"
        else:
            by = "derived by Megatron Core when its config was built"
        ran = _trace(run, key)
        return cls(key=key, value=value, default=default, set_by=set_by, by=by, ran=ran)


def _section_of(run: RunFolder, field: str) -> str | None:
    """Return the section that has a field; None where no section has it."""
    sections = []
    for name, fields in run.config.items():
        if isinstance(fields, dict) and field in fields:
            sections.append(name)
    if len(sections) > 1:
        matches = [f"{name}.{field}" for name in sections]
        hint = did_you_mean(matches)
        raise RunConfigError.of("FIELD", "must name one section", field, hint, matches)
    if not sections:
        return None
    return sections[0]


def _is_written(run: RunFolder, key: str) -> bool:
    """Return whether the sync has a row about a key."""
    rows = run.sync.get("rows", ())
    return any(f"{row['owner']}.{row['attribute']}" == key for row in rows)


def _trace(run: RunFolder, key: str) -> str:
    """Return the trace of a setting in the steps of a run."""
    return trace_of(key, run.metrics("train"))


def trace_of(key: str, train: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence on the trace of a key in the records of steps; empty without a trace."""
    if not train:
        return ""
    if key in {"optimizer.lr", "optimizer.min_lr"}:
        rates = [record["learning_rate"] for record in train]
        most = f"{max(rates):g} at most"
        return f"Learning rate: {rates[0]:g} in the first record, {most}, {rates[-1]:g} in the last"
    if key == "train.train_iters":
        return f"Steps: the last record is of step {train[-1]['step']}"
    return ""


def effect_in(run: RunFolder, field: str) -> str:
    """Return the trace of a field in the last record of a run; empty where there is none yet."""
    row = FIELDS[field]
    subject = ""
    if row.subject is not None:
        subject = row.subject.title
    if subject == LOSS_SCALE:
        return loss_scale_trace(run.metrics("train"))
    record = run.record
    if record is None:
        return ""
    gemms = f"GEMMs of step {record.step}: {format_gemms(record.gemms)}"
    kinds = TENSORS.get(subject)
    if row.twin is not None:
        kinds = ("parameters",)
    if kinds is None:
        return gemms
    tensors = f"Tensors of step {record.step}: {_tensors(record, kinds)}"
    if subject == "Mode":
        return f"{tensors}. {gemms}"
    return tensors


def _tensors(record: Record, kinds: tuple[str, ...]) -> str:
    """Return the recorded dtypes of some kinds of tensors as a list in words."""
    parts = []
    for kind in kinds:
        dtypes: dict[str, None] = {}
        for row in record.census:
            if row.kind == kind:
                dtypes[row.dtype] = None
        if dtypes:
            parts.append(f"{kind} {' and '.join(dtypes)}")
    return "; ".join(parts)


def loss_scale_trace(train: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence on the loss scale in the records of steps; empty without records."""
    if not train:
        return ""
    first, last = train[0], train[-1]
    scales = f"{first['loss_scale']:g} in the first record and {last['loss_scale']:g} in the last"
    return f"Loss scale: {scales}, {last['skipped_steps']} steps skipped"
