"""Reads TensorBoard's event files, by TensorBoard's package.

Each folder with event files is a run, as in TensorBoard. NeMo-RL also writes a folder with only
hyperparameters. It has no loss, so it is not a run.
"""

from pathlib import Path

from bridge.extras import require_extra
from bridge.read.logs.series import Series, has_loss, make_no_loss_error, make_run_log
from bridge.runtime.audit.run_log import RunLog

SOURCE = "a TensorBoard folder"
EVENT_FILE_GLOB = "*tfevents*"
GENERIC_FOLDER_NAMES = ("tensorboard", "tb_logs", "tb", "logs", "events")
"""Generic names of folders. The folder above such a folder has the name of the run."""


def list_event_folders(path: Path) -> list[Path]:
    """Return the folders with event files: the path itself, or folders below it."""
    return sorted({file.parent for file in path.rglob(EVENT_FILE_GLOB)})


def is_event_file(path: Path) -> bool:
    """Return whether a file is one of TensorBoard's event files."""
    return path.is_file() and "tfevents" in path.name


def read(path: Path, folders: list[Path]) -> list[RunLog]:
    """Return the runs of folders with event files, or of one such file.

    Raises:
        MissingExtraError: TensorBoard is not installed.
        UnreadFileError: No run has a training loss.
    """
    require_extra("train", f"{path}: reading {SOURCE}")
    logs = []
    names: dict[str, dict[int, float]] = {}
    for folder in folders:
        series = _read_series(folder)
        names.update({name: dict(values) for name, values in series.items()})
        if has_loss(series):
            logs.append(
                make_run_log(series, path=folder, source=SOURCE, name=_get_run_name(folder))
            )
    if not logs:
        raise make_no_loss_error(path, SOURCE, names)
    return logs


def _read_series(folder: Path) -> Series:
    """Return name of a metric -> step -> value, of the event files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import (  # heavy
        SCALARS,
        TENSORS,
        EventAccumulator,
    )
    from tensorboard.util.tensor_util import make_ndarray

    # 0 keeps every event. By default only 10,000 events of a scalar are kept.
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0, TENSORS: 0})
    events.Reload()
    tags = events.Tags()
    series: dict[str, dict[int, float]] = {}
    for tag in tags[SCALARS]:
        series[tag] = {event.step: event.value for event in events.Scalars(tag)}
    for tag in tags[TENSORS]:  # a scalar of TensorFlow 2's writer
        for event in events.Tensors(tag):
            array = make_ndarray(event.tensor_proto)
            if array.size == 1 and array.dtype.kind in "fiu":
                series.setdefault(tag, {})[event.step] = float(array.item())
    return series


def _get_run_name(folder: Path) -> str:
    """Return the name of a run: its folder, or the folder above if the name is generic."""
    if folder.is_file():
        folder = folder.parent
    if folder.name.lower() in GENERIC_FOLDER_NAMES:
        return folder.resolve().parent.name
    return folder.resolve().name
