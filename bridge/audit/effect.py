"""The traces of a precision's fields in the records of a run, one sentence per field."""

from bridge.audit.record import Record
from bridge.audit.run_folder import RunFolder
from bridge.audit.sentence import format_gemms
from bridge.precision.config import FIELDS

STATE = ("master weights", "optimizer state")
TENSORS: dict[str, tuple[str, ...]] = {
    "Mode": ("parameters", "activations", *STATE),
    "Parameters and gradients": ("parameters", "gradients", "gradient reduction"),
    "Optimizer state": ("gradients", *STATE),
    "Communication": ("sent between stages", "gradient reduction"),
    "Megatron-FSDP": ("parameters", "gradients", *STATE),
}
"""Subject of a field -> the kinds of tensors in the census that it decides; the others decide about GEMMs."""


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
    return "; ".join(f"{kind} {' and '.join(dict.fromkeys(own))}" for kind, own in dtypes.items() if own)


def _loss_scale(run: RunFolder) -> str:
    train = run.metrics("train")
    if not train:
        return ""
    scales = [one["loss_scale"] for one in train]
    course = f"{scales[0]:g} in the first record and {scales[-1]:g} in the last"
    return f"Loss scale: {course}, {train[-1]['skipped_steps']} steps skipped"
