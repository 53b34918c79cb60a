"""A run in MLflow's file store: a folder with `metrics/`, a file per metric.

    RUN/meta.yaml              run_name: ...
    RUN/metrics/lm loss        1756000000000 10.89 1      timestamp, value, step
    RUN/metrics/train/loss     a metric with a slash in its name

Source: MLflow 3.17.2 mlflow/store/tracking/file_store.py FileStore._log_run_metric.
"""

from pathlib import Path

from bridge.errors import UnreadFileError
from bridge.precision import strict_yaml
from bridge.read.logs.series import has_loss, log_of, no_loss, number, step_of
from bridge.runtime.audit.run_log import RunLog

SOURCE = "an MLflow run"
FOLDER = "metrics"
META = "meta.yaml"
MAX_BYTES = 64 * 2**20


def runs_in(path: Path) -> list[Path]:
    """Return the folders of runs, a path itself or below it; `metrics/` itself stands for its run."""
    if path.name == FOLDER and (path.parent / META).is_file():
        return [path.parent]
    return sorted(file.parent for file in path.rglob(META) if (file.parent / FOLDER).is_dir())


def read(path: Path, runs: list[Path]) -> list[RunLog]:
    """Return the runs of folders.

    Raises:
        UnreadFileError: No run has a training loss.
    """
    logs = []
    names: dict[str, dict[int, float]] = {}
    for run in runs:
        series = _series(run / FOLDER)
        names.update(series)
        if has_loss(series):
            logs.append(log_of(series, path=run, source=SOURCE, name=_name(run)))
    if not logs:
        raise no_loss(path, SOURCE, names)
    return logs


def _series(folder: Path) -> dict[str, dict[int, float]]:
    series: dict[str, dict[int, float]] = {}
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        content = strict_yaml.read_bytes(file, error=UnreadFileError, limit=MAX_BYTES)
        values: dict[int, float] = {}
        for line in content.decode(errors="replace").splitlines():
            words = line.split()
            if len(words) < 3:  # a line that is being written
                continue
            value, step = number(words[1]), step_of(words[2])
            if value is not None and step is not None:
                values[step] = value
        series[file.relative_to(folder).as_posix()] = values
    return series


def _name(run: Path) -> str:
    content = strict_yaml.read_bytes(run / META, error=UnreadFileError)
    text = strict_yaml.decoded(content, str(run / META), error=UnreadFileError)
    documents = strict_yaml.load_all(text, str(run / META), error=UnreadFileError)
    if documents and isinstance(documents[0], dict):
        return str(documents[0].get("run_name") or run.name)
    return run.name
