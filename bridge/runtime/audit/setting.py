"""A key of a run's config and a field of its precision: who set it, and its trace in the records of the run.

The sync's report has the fields that the precision wrote, with what it replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.precision.config import FIELDS
from bridge.runtime.audit.compare import format_gemms
from bridge.runtime.audit.record import Record
from bridge.runtime.audit.run_folder import RunFolder

FILE = "origins.json"
"""The file of a run with the defaults of its fields, and who set them."""

STATE = ("master weights", "optimizer state")
TENSORS: dict[str, tuple[str, ...]] = {
    "Mode": ("parameters", "activations", *STATE),
    "Parameters and gradients": ("parameters", "gradients", "gradient reduction"),
    "Optimizer state": ("gradients", *STATE),
    "Communication": ("sent between stages", "gradient reduction"),
    "Megatron-FSDP": ("parameters", "gradients", *STATE),
}
"""Subject of a field -> the kinds of tensors in the census that it decides; the others decide about GEMMs."""


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
    """Who decided the value: the last that set it, the sync, the default, or Megatron Core's own derivation."""
    ran: str
    """One sentence on the trace in the run's records; empty where there is none."""

    @classmethod
    def of(cls, run: RunFolder, key: str) -> Setting | None:
        """Return the setting with a key, or with the name of a field; None: the run's config has no such section."""
        section, _, field = key.partition(".")
        fields = run.config.get(section)
        if not field:
            sections = [
                name for name, held in run.config.items() if isinstance(held, dict) and key in held
            ]
            if len(sections) > 1:
                matches = [f"{name}.{key}" for name in sections]
                raise RunConfigError.of(
                    "FIELD", "must name one section", key, did_you_mean(matches), matches
                )
            return cls.of(run, f"{sections[0]}.{key}") if sections else None
        if not isinstance(fields, dict):
            return None
        if field not in fields:
            matches = [f"{section}.{name}" for name in close_matches(field, fields)]
            hint = did_you_mean(matches) or f"`{run.path}/config.yaml` lists them."
            raise RunConfigError.of(
                "FIELD", f"must be a field of {section} in the run", key, hint, matches
            )
        origins = run.json_of(FILE)
        value = fields[field]
        default = origins.get("defaults", {}).get(key, value)
        set_by = origins.get("set_by", {}).get(key, {})
        written = {f"{row['owner']}.{row['attribute']}" for row in run.sync.get("rows", ())}
        by = "default" if value == default else "derived by Megatron Core when its config was built"
        by = "the sync" if key in written else next(reversed(set_by), by)
        return cls(
            key=key, value=value, default=default, set_by=set_by, by=by, ran=_trace(run, key)
        )


def _trace(run: RunFolder, key: str) -> str:
    train = run.metrics("train")
    if not train:
        return ""
    if key in {"optimizer.lr", "optimizer.min_lr"}:
        rates = [one["learning_rate"] for one in train]
        course = (
            f"{rates[0]:g} in the first record, {max(rates):g} at most, {rates[-1]:g} in the last"
        )
        return f"Learning rate: {course}"
    return (
        f"Steps: the last record is of step {train[-1]['step']}"
        if key == "train.train_iters"
        else ""
    )


def effect_in(run: RunFolder, field: str) -> str:
    """Return the trace of a field in the last record of a run; empty where there is none yet."""
    row = FIELDS[field]
    subject = row.subject.title if row.subject is not None else ""
    if subject == "Loss scale":
        return _loss_scale(run)
    record = run.record
    if record is None:
        return ""
    kinds = ("parameters",) if row.twin is not None else TENSORS.get(subject)
    gemms = f"GEMMs of step {record.step}: {format_gemms(record.gemms)}"
    if kinds is None:
        return gemms
    tensors = f"Tensors of step {record.step}: {_tensors(record, kinds)}"
    return f"{tensors}. {gemms}" if subject == "Mode" else tensors


def _tensors(record: Record, kinds: tuple[str, ...]) -> str:
    dtypes = {kind: [row.dtype for row in record.census if row.kind == kind] for kind in kinds}
    return "; ".join(
        f"{kind} {' and '.join(dict.fromkeys(own))}" for kind, own in dtypes.items() if own
    )


def _loss_scale(run: RunFolder) -> str:
    train = run.metrics("train")
    if not train:
        return ""
    scales = [one["loss_scale"] for one in train]
    course = f"{scales[0]:g} in the first record and {scales[-1]:g} in the last"
    return f"Loss scale: {course}, {train[-1]['skipped_steps']} steps skipped"
