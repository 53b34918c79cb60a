"""Records of a run in progress: ``metrics.jsonl`` and TensorBoard events."""

from __future__ import annotations

import json
import logging
import math
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"

log = logging.getLogger("bridge.training")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecord:
    """One logged step. A skipped step is always logged, the others every `logging.log_interval` steps."""

    step: int
    loss: float
    """Mean over the steps since the last record, in nats per token."""
    skipped: bool
    """Whether a gradient of this step held NaN or Inf, so that nothing was updated."""
    skipped_steps: int
    """Skipped steps of the run so far, those before a resumed checkpoint included."""
    grad_norm: float | None
    """Before clipping; None for a skipped step."""
    loss_scale: float
    learning_rate: float
    tokens_per_second: float
    """Since the last record, without validation and checkpoints."""
    consumed_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationRecord:
    """One validation."""

    step: int
    loss: float
    """Mean over `train.eval_iters` global batches, in nats per token; the same batches every time."""


class Metrics:
    """Writes records as they come and keeps the curves; without a file, on all ranks but the first, it does nothing."""

    def __init__(self, lines: IO[str] | None = None, events: SummaryWriter | None = None) -> None:
        """Take an open ``metrics.jsonl`` and, optionally, a TensorBoard writer."""
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self._lines = lines
        self._events = events

    def add(self, record: TrainRecord | ValidationRecord) -> None:
        """Write one record; numbers that are not finite become null in JSON and are left out of the curves."""
        if self._lines is None:
            return
        kind = "train" if isinstance(record, TrainRecord) else "validation"
        values = {"kind": kind, **finite(asdict(record))}
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()
        self.keep(values)
        if self._events is None:
            return
        for name, value in values.items():
            if name not in ("kind", "step") and value is not None:
                self._events.add_scalar(f"{kind}/{name}", value, record.step)

    def keep(self, values: dict[str, Any]) -> None:
        """Add a record's point to the curves."""
        if values["loss"] is not None:
            curve = self.train if values["kind"] == "train" else self.validation
            curve.append((int(values["step"]), float(values["loss"])))


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with numbers that JSON has: None for infinity and NaN."""
    return {name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in row.items()}


@contextmanager
def metrics_log(run_dir: Path, *, resumed_at: int, tensorboard: bool) -> Iterator[Metrics]:
    """Open the run's metrics; a resumed run keeps the earlier records up to where it begins.

    Args:
        run_dir: Gets ``metrics.jsonl`` and ``tensorboard/``.
        resumed_at: Step of the checkpoint the run continues from; 0 for a fresh one.
        tensorboard: Whether to write events.
    """
    path = run_dir / METRICS
    earlier = [values for values in _read(path) if values["step"] <= resumed_at] if resumed_at else []
    scratch = path.with_suffix(".tmp")  # a crash here leaves the old file as it was
    scratch.write_text("".join(f"{json.dumps(values)}\n" for values in earlier))
    scratch.replace(path)
    with ExitStack() as stack:
        lines = stack.enter_context(path.open("a"))
        events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # heavy, and only the first rank writes

            events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None)
            stack.callback(events.close)
        metrics = Metrics(lines, events)
        for values in earlier:
            metrics.keep(values)
        yield metrics


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; a line that a crash left torn is passed over with a warning."""
    records = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.is_file() else (), start=1):
        try:
            values = json.loads(line)
            records.append({**values, "step": int(values["step"]), "kind": str(values["kind"]), "loss": values["loss"]})
        except (ValueError, TypeError, KeyError):
            log.warning("%s:%d: is no record and is left out. A crash can leave a line torn.", path, number)
    return records
