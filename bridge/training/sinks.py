"""The places that a run's values go to besides its own files: TensorBoard, MLflow and Weights & Biases."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import RunConfigError
from bridge.training.config import LoggingConfig

PACKAGES = {"mlflow": "mlflow-skinny", "wandb": "wandb"}
"""Field of the logging section, and the module that it needs -> the package."""
EXPERIMENT = "precision-bridge"

log = logging.getLogger("bridge.training")


@dataclass(kw_only=True)
class Sink:
    """One place. Its methods take the values of a record by name, a distribution, and the end of the run."""

    name: str
    scalars: Callable[[Mapping[str, float], int], object]
    histogram: Callable[[str, Sequence[float], int], object] = lambda _name, _values, _step: None
    close: Callable[[], object]

    def write(self, values: Mapping[str, float], distributions: Mapping[str, Sequence[float]], step: int) -> bool:
        """Write a record; return False, with a warning, where the place is out of reach: training goes on."""
        try:
            self.scalars(values, step)
            for name, each in distributions.items():
                self.histogram(name, each, step)
        except Exception as error:  # noqa: BLE001  any error of a server or a client must not end a training run
            log.warning("logging.%s: takes no values from step %d on: %s", self.name, step, error)
            return False
        return True


def open_sinks(config: LoggingConfig, run_dir: Path, *, resumed_at: int) -> Iterator[Sink]:
    """Yield the sinks that a config names.

    Raises:
        RunConfigError: One cannot be opened.
    """
    if config.tensorboard:
        yield _tensorboard(run_dir, resumed_at)
    for name, opens in (("mlflow", _mlflow), ("wandb", _wandb)):
        value = getattr(config, name)
        if value is None:
            continue
        try:
            yield opens(value, run_dir)
        except Exception as error:
            rule = f"cannot be opened ({type(error).__name__}: {error})"
            raise RunConfigError.of(
                f"logging.{name}", rule, value, f"Correct it, or set logging.{name}=null."
            ) from error


def _tensorboard(run_dir: Path, resumed_at: int) -> Sink:
    from torch.utils.tensorboard import SummaryWriter  # heavy, and only the first rank writes

    events: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None)

    def scalars(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            events.add_scalar(name, value, step)

    def histogram(name: str, values: Sequence[float], step: int) -> None:
        events.add_histogram(name, np.array(values), step)

    return Sink(name="tensorboard", scalars=scalars, histogram=histogram, close=events.close)


def _mlflow(store: str, run_dir: Path) -> Sink:
    """Return a run of an experiment in a tracking store; MLflow has no histograms."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(tracking_uri=store)
    found = client.get_experiment_by_name(EXPERIMENT)
    experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT)
    run = client.create_run(experiment, run_name=run_dir.name).info.run_id

    def scalars(values: Mapping[str, float], step: int) -> None:
        client.log_batch(run, metrics=[Metric(name, value, 0, step) for name, value in values.items()])

    return Sink(name="mlflow", scalars=scalars, close=lambda: client.set_terminated(run))


def _wandb(project: str, run_dir: Path) -> Sink:
    """Return a run of a project; W&B's own variables, WANDB_MODE=offline say, decide about the network."""
    import wandb

    run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir))

    def histogram(name: str, values: Sequence[float], step: int) -> None:
        run.log({name: wandb.Histogram(list(values))}, step=step)

    return Sink(
        name="wandb",
        scalars=lambda values, step: run.log(dict(values), step=step),
        histogram=histogram,
        close=run.finish,
    )
