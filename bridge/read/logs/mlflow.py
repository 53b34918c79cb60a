"""Reads a run in MLflow's file store: a folder with `metrics/`, which has a file for each metric.

    RUN/meta.yaml              run_name: ...
    RUN/metrics/lm loss        1756000000000 10.89 1      timestamp, value, step
    RUN/metrics/train/loss     a metric with a slash in its name

Source: MLflow 3.17.2 mlflow/store/tracking/file_store.py FileStore._log_run_metric.
"""

from pathlib import Path

from bridge.errors import UnreadFileError
from bridge.precision import strict_yaml
from bridge.read.logs.series import (
    has_loss,
    make_no_loss_error,
    make_run_log,
    parse_number,
    parse_step,
)
from bridge.runtime.audit.run_log import RunLog

SOURCE = "an MLflow run"
METRICS_FOLDER = "metrics"
META_FILE = "meta.yaml"
MAX_METRIC_BYTES = 64 * 2**20


def list_run_folders(path: Path) -> list[Path]:
    """Return the folders of runs: the path itself, or the run folders below it.

    The path `RUN/metrics` means the folder `RUN`.
    """
    if path.name == METRICS_FOLDER and (path.parent / META_FILE).is_file():
        return [path.parent]
    return sorted(
        file.parent for file in path.rglob(META_FILE) if (file.parent / METRICS_FOLDER).is_dir()
    )


def read(path: Path, runs: list[Path]) -> list[RunLog]:
    """Return the runs of folders.

    Raises:
        UnreadFileError: No run has a training loss.
    """
    logs = []
    names: dict[str, dict[int, float]] = {}
    for run in runs:
        series = _read_series(run / METRICS_FOLDER)
        names.update(series)
        if has_loss(series):
            logs.append(make_run_log(series, path=run, source=SOURCE, name=_read_run_name(run)))
    if not logs:
        raise make_no_loss_error(path, SOURCE, names)
    return logs


def _read_series(folder: Path) -> dict[str, dict[int, float]]:
    """Return name of a metric -> step -> value, of the folder `metrics/` of a run."""
    series: dict[str, dict[int, float]] = {}
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        content = strict_yaml.read_bytes(file, error=UnreadFileError, limit=MAX_METRIC_BYTES)
        values: dict[int, float] = {}
        for line in content.decode(errors="replace").splitlines():
            cells = line.split()  # timestamp, value, step
            if len(cells) < 3:  # a line that is being written
                continue
            value = parse_number(cells[1])
            step = parse_step(cells[2])
            if value is not None and step is not None:
                values[step] = value
        series[file.relative_to(folder).as_posix()] = values
    return series


def _read_run_name(run: Path) -> str:
    """Return the name of a run, or of its folder if it has none."""
    content = strict_yaml.read_bytes(run / META_FILE, error=UnreadFileError)
    meta_yaml = strict_yaml.decode_text(content, str(run / META_FILE), error=UnreadFileError)
    documents = strict_yaml.load_documents(meta_yaml, str(run / META_FILE), error=UnreadFileError)
    if documents and isinstance(documents[0], dict):
        return str(documents[0].get("run_name") or run.name)
    return run.name
