"""A key of a run's config and a field of its precision: who set it, and its trace in the records.

The sync's report has the fields that the precision wrote, with what it replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.precision.config import FIELDS
from bridge.runtime.audit.plan_comparison import format_gemms
from bridge.runtime.audit.record import Record
from bridge.runtime.audit.run_folder import RunFolder

ORIGINS_FILE = "origins.json"
"""The file of a run with the defaults of its fields, and who set them."""

LOSS_SCALE_SUBJECT = "Loss scale"
"""Subject of the fields about it."""
STATE_KINDS = ("master weights", "optimizer state")
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
    def from_run(cls, run: RunFolder, key: str) -> Setting | None:
        """Return the setting with a key, or with the name of a field.

        The result is None where the run's config has no such section.
        """
        section, _, field = key.partition(".")
        if not field:
            owner = _find_section(run, key)
            if owner is None:
                return None
            return cls.from_run(run, f"{owner}.{key}")
        fields = run.config.get(section)
        if not isinstance(fields, dict):
            return None
        if field not in fields:
            matches = [f"{section}.{name}" for name in close_matches(field, fields)]
            rule = f"must be a field of {section} in the run"
            hint = did_you_mean(matches) or f"`{run.path}/config.yaml` lists them."
            raise RunConfigError.of("FIELD", rule, key, hint, matches)
        origins = run.read_json(ORIGINS_FILE)
        value = fields[field]
        default = origins.get("defaults", {}).get(key, value)
        set_by = origins.get("set_by", {}).get(key, {})
        if _is_written_by_sync(run, key):
            by = "the sync"
        elif set_by:
            by = list(set_by)[-1]
        elif value == default:
            by = "default"
        else:
            by = "derived by Megatron Core when its config was built"
        ran = _read_trace(run, key)
        return cls(key=key, value=value, default=default, set_by=set_by, by=by, ran=ran)


def _find_section(run: RunFolder, field: str) -> str | None:
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


def _is_written_by_sync(run: RunFolder, key: str) -> bool:
    """Return whether the sync has a row about a key."""
    rows = run.sync.get("rows", ())
    return any(f"{row['owner']}.{row['attribute']}" == key for row in rows)


def _read_trace(run: RunFolder, key: str) -> str:
    """Return the trace of a setting in the steps of a run."""
    return describe_trace(key, run.metrics("train"))


def describe_trace(key: str, train: Sequence[Mapping[str, Any]]) -> str:
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


def describe_effect(run: RunFolder, field: str) -> str:
    """Return the trace of a field in the last record of a run; empty where there is none yet."""
    row = FIELDS[field]
    subject = ""
    if row.subject is not None:
        subject = row.subject.title
    if subject == LOSS_SCALE_SUBJECT:
        return describe_loss_scale(run.metrics("train"))
    record = run.record
    if record is None:
        return ""
    gemms = f"GEMMs of step {record.step}: {format_gemms(record.gemms)}"
    kinds = TENSOR_KINDS_OF_SUBJECT.get(subject)
    if row.twin is not None:
        kinds = ("parameters",)
    if kinds is None:
        return gemms
    tensors = f"Tensors of step {record.step}: {_describe_tensors(record, kinds)}"
    if subject == "Mode":
        return f"{tensors}. {gemms}"
    return tensors


def _describe_tensors(record: Record, kinds: tuple[str, ...]) -> str:
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


def describe_loss_scale(train: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence on the loss scale in the records of steps; empty without records."""
    if not train:
        return ""
    first, last = train[0], train[-1]
    scales = f"{first['loss_scale']:g} in the first record and {last['loss_scale']:g} in the last"
    return f"Loss scale: {scales}, {last['skipped_steps']} steps skipped"
