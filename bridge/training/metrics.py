"""`Metrics`: writes the records of a run to ``metrics.jsonl``, ``quantisation.csv`` and the sinks.

A sink is a service or format that gets the same values: TensorBoard, MLflow or Weights & Biases.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np

from bridge.errors import RunConfigError
from bridge.runtime.audit.quantisation import (
    QUANTISATION_FILE,
    QuantisationRow,
    group_by_operand,
    replace_non_finite,
    write_rows,
)
from bridge.runtime.audit.run_folder import METRICS_FILE, RunFolder
from bridge.training.config import LoggingConfig

log = logging.getLogger("bridge.training")

SINK_PACKAGES = {"mlflow": "mlflow-skinny", "wandb": "wandb"}
"""Field of the logging section, which is also the name of the imported module -> the package."""
EXPERIMENT = "precision-bridge"
"""Name of the experiment in MLflow."""

Scalars = Mapping[str, float]
"""Name -> value of one step."""
Distributions = Mapping[str, Sequence[float]]
"""Name -> samples of one step."""


class Sink(NamedTuple):
    """An open sink of a run."""

    name: str
    """Field of the logging section."""
    write: Callable[[Scalars, Distributions, int], object]
    """Writes scalars and distributions of a step; the last argument is the number of the step."""
    close: Callable[[], object]
    """Sends what is left, and ends the connection."""


def open_sinks(config: LoggingConfig, run_dir: Path, *, resumed_at: int) -> Iterator[Sink]:
    """Open the sinks that a config names, and yield each.

    Args:
        config: The logging section.
        run_dir: Folder of the run's files.
        resumed_at: Step of the checkpoint that the run resumed from, or 0.

    Raises:
        RunConfigError: MLflow or Weights & Biases cannot be opened.
    """
    if config.tensorboard:
        yield _open_tensorboard(run_dir, resumed_at)
    for name, open_sink in (("mlflow", _open_mlflow), ("wandb", _open_wandb)):
        value = getattr(config, name)
        if value is None:
            continue
        try:
            yield open_sink(value, run_dir)
        except Exception as error:
            rule = f"cannot be opened ({type(error).__name__}: {error})"
            remedy = f"Correct it, or set logging.{name}=null."
            raise RunConfigError.of(f"logging.{name}", rule, value, remedy) from error


def _open_tensorboard(run_dir: Path, resumed_at: int) -> Sink:
    """Return the sink of TensorBoard's events in the run folder.

    Events of steps after the checkpoint that the run resumed from are hidden.
    """
    from torch.utils.tensorboard import SummaryWriter  # heavy, and only the first rank needs it

    purge_step = None
    if resumed_at:
        purge_step = resumed_at + 1
    events: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def write(values: Scalars, distributions: Distributions, step: int) -> None:
        for name, value in values.items():
            events.add_scalar(name, value, step)
        for name, samples in distributions.items():
            events.add_histogram(name, np.array(samples), step)

    return Sink("tensorboard", write, events.close)


def _open_mlflow(store: str, run_dir: Path) -> Sink:
    """Return the sink of a new run in MLflow's tracking store. MLflow has no histograms."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(tracking_uri=store)
    stored = client.get_experiment_by_name(EXPERIMENT)
    if stored:
        experiment = stored.experiment_id
    else:
        experiment = client.create_experiment(EXPERIMENT)
    run = client.create_run(experiment, run_name=run_dir.name).info.run_id

    def write(values: Scalars, _distributions: Distributions, step: int) -> None:
        metrics = [Metric(name, value, 0, step) for name, value in values.items()]
        client.log_batch(run, metrics=metrics)

    return Sink("mlflow", write, lambda: client.set_terminated(run))


def _open_wandb(project: str, run_dir: Path) -> Sink:
    """Return the sink of a new run in a project of Weights & Biases.

    Environment variables such as WANDB_MODE=offline decide how the values are sent.
    """
    import wandb

    run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir))

    def write(values: Scalars, distributions: Distributions, step: int) -> None:
        content: dict[str, Any] = dict(values)
        for name, samples in distributions.items():
            content[name] = wandb.Histogram(list(samples))
        run.log(content, step=step)

    return Sink("wandb", write, run.finish)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecord:
    """A logged step: every skipped step, and every `logging.log_interval`-th step."""

    kind: ClassVar = "train"
    step: int
    loss: float
    """Mean loss of the steps after the previous record, in nats per token."""
    skipped: bool
    """Whether a gradient of this step had NaN or Inf. Then no weight was updated."""
    skipped_steps: int
    """Skipped steps of the run so far, with those before a resumed checkpoint."""
    grad_norm: float | None
    """Norm of the gradients before clipping. None: the step was skipped."""
    loss_scale: float
    learning_rate: float
    tokens_per_second: float
    """Speed since the previous record, without the time of validations and checkpoints."""
    consumed_samples: int
    """Samples that the run has trained on, over all ranks."""
    not_finite: str | None = None
    """Where the backward pass of a skipped step first had NaN or Inf. None: another step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationRecord:
    """The result of a validation."""

    kind: ClassVar = "validation"
    step: int
    loss: float
    """Mean loss of `train.eval_iters` global batches, in nats per token. All validations of a run
    have the same batches."""


class Metrics:
    """Writes records to the run folder and the sinks, and keeps them for the curves."""

    def __init__(
        self, run_dir: Path | None = None, lines: IO[str] | None = None, sinks: Sequence[Sink] = ()
    ) -> None:
        """Begin without records.

        Args:
            run_dir: Folder of the run's files.
            lines: The open ``metrics.jsonl``. Without it nothing is written or kept; all ranks
                except the first have such metrics.
            sinks: The open sinks.
        """
        self.train: list[dict[str, Any]] = []
        """Training records, as they were written."""
        self.validation: list[dict[str, Any]] = []
        """Validation records, as they were written."""
        self.quantisation: list[QuantisationRow] = []
        """Quantisation errors of all measured steps."""
        self._run_dir = run_dir
        self._lines = lines
        self._sinks = list(sinks)

    def add(self, record: TrainRecord | ValidationRecord) -> None:
        """Write and keep a record. Numbers that are not finite become null in JSON."""
        if self._lines is None:
            return
        values = {"kind": record.kind, **replace_non_finite(asdict(record))}
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()
        self.keep(values)
        scalars = {}
        for name, value in values.items():
            if name != "step" and isinstance(value, int | float):
                scalars[f"{record.kind}/{name}"] = value
        self._send(scalars, {}, record.step)

    def add_quantisation(self, rows: Sequence[QuantisationRow]) -> None:
        """Write and keep the quantisation errors of a step."""
        if self._run_dir is None or not rows:
            return
        write_rows(self._run_dir / QUANTISATION_FILE, rows, append=bool(self.quantisation))
        self.quantisation += rows
        scalars: dict[str, float] = {}
        distributions: dict[str, list[float]] = {}
        for operand, operand_rows in group_by_operand(rows).items():
            name = f"quantisation/{operand}"
            ratios = [row.sqnr_db for row in operand_rows if math.isfinite(row.sqnr_db)]
            if ratios:
                distributions[f"{name}_db"] = ratios
                scalars[f"{name}_db_mean"] = sum(ratios) / len(ratios)
            scalars[f"{name}_underflow_max"] = max(row.underflow for row in operand_rows)
            scalars[f"{name}_saturated_max"] = max(row.saturated for row in operand_rows)
        self._send(scalars, distributions, rows[0].step)

    def _send(self, values: Scalars, distributions: Distributions, step: int) -> None:
        """Write the values of a step to all sinks. A sink that fails is dropped with a warning."""
        for sink in tuple(self._sinks):
            try:
                sink.write(values, distributions, step)
            except Exception as error:  # noqa: BLE001  a sink's error must not end a run
                message = "logging.%s: takes no values from step %d on: %s"
                log.warning(message, sink.name, step, error)
                self._sinks.remove(sink)

    def keep(self, values: dict[str, Any]) -> None:
        """Keep a record, as it was written, for the curves."""
        if values["kind"] == "train":
            self.train.append(values)
        else:
            self.validation.append(values)


@contextmanager
def open_metrics(run_dir: Path, *, resumed_at: int, config: LoggingConfig) -> Iterator[Metrics]:
    """Open the metrics of a run, and close its file and its sinks after the ``with`` block.

    Args:
        run_dir: Folder of the run's files.
        resumed_at: Step of the checkpoint that the run resumed from. The records up to it are kept.
            0 keeps none.
        config: The logging section.

    Raises:
        RunConfigError: MLflow or Weights & Biases cannot be opened.
    """
    path = run_dir / METRICS_FILE
    folder = RunFolder(run_dir)
    earlier: list[dict[str, Any]] = []
    rows: list[QuantisationRow] = []
    if resumed_at:
        message = "%s:%d: is no record and is left out. A crash can leave a line torn."
        warn = partial(log.warning, message, path)
        earlier = [values for values in folder.read_records(warn) if values["step"] <= resumed_at]
        rows = [row for row in folder.quantisation if row.step <= resumed_at]
    # The old file stays as it was if the process crashes before the new file is complete.
    new_file = path.with_suffix(".tmp")
    new_file.write_text("".join(f"{json.dumps(values)}\n" for values in earlier))
    new_file.replace(path)
    (run_dir / QUANTISATION_FILE).unlink(missing_ok=True)
    with ExitStack() as stack:
        lines = stack.enter_context(path.open("a"))
        sinks = []
        for sink in open_sinks(config, run_dir, resumed_at=resumed_at):
            stack.callback(sink.close)
            sinks.append(sink)
        metrics = Metrics(run_dir, lines, sinks)
        for values in earlier:
            metrics.keep(values)
        if rows:
            write_rows(run_dir / QUANTISATION_FILE, rows)
            metrics.quantisation += rows
        yield metrics
