"""`read_logs`: the runs of a log, a folder of logs or an exported history."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.errors import UnreadFileError
from bridge.precision import strict_yaml
from bridge.read.logs import golden_values, history, megatron, mlflow, nemo_rl, tensorboard
from bridge.runtime.audit.run_log import RunLog

MAX_LOG_BYTES = 512 * 2**20
"""Bytes of the largest log that is read. A log with a million lines about steps is smaller."""
CUT_NOTE = "Its last line has no end, so that it may be cut, and was left out."
READABLE_LOGS = (
    "the folder of a run of ours, the log that Megatron-LM, Megatron Bridge or NeMo-RL prints, "
    "a TensorBoard folder, a history of W&B (CSV, JSON), an MLflow run (folder, CSV, JSON) or "
    "golden values of Megatron-LM"
)


def read_logs(path: Path) -> list[RunLog]:
    """Return the runs of a log. The export of a chart, or a folder with folders, may have several.

    Args:
        path: A file or a folder.

    Raises:
        UnreadFileError: The log cannot be read, has no known format, or has no training loss.
        MissingExtraError: TensorBoard's files need a package that is not installed.
    """
    if tensorboard.is_event_file(path):
        return tensorboard.read(path, [path])
    if path.is_dir():
        return _read_folder(path)
    log_bytes = strict_yaml.read_bytes(path, error=UnreadFileError, limit=MAX_LOG_BYTES)
    if len(log_bytes) > MAX_LOG_BYTES:
        size = f"{MAX_LOG_BYTES // 2**20} MiB"
        raise UnreadFileError(f"{path}: a log must not be larger than {size}. Give a part of it.")
    return _read_text(log_bytes.decode(errors="replace"), path)


def _read_folder(path: Path) -> list[RunLog]:
    """Return the runs in a folder of MLflow, TensorBoard or Megatron-LM's golden values."""
    runs = mlflow.list_run_folders(path)
    if runs:
        return mlflow.read(path, runs)
    folders = tensorboard.list_event_folders(path)
    if folders:
        return tensorboard.read(path, folders)
    logs: list[RunLog] = []
    for file in golden_values.list_files(path):
        logs.extend(read_logs(file))
    if logs:
        return logs
    raise _make_unread_error(path)


def _read_text(text: str, path: Path) -> list[RunLog]:
    """Return the runs of a printed log, of JSON or of a CSV."""
    for log_format in (megatron, nemo_rl):
        if log_format.is_of(text):
            return [_read_printed(log_format.read, text, path)]
    if text.lstrip().startswith(("{", "[")):
        return _read_json(text, path)
    logs = history.parse_csv(text, path)
    if logs is None:
        raise _make_unread_error(path)
    return logs


def _read_printed(read: Callable[[str, Path], RunLog], text: str, path: Path) -> RunLog:
    """Return the run of a printed log, without an incomplete last line.

    A trainer that is still running, or that was killed, may leave an incomplete line. Its last
    number may lack digits, and the loss may be missing.
    """
    complete_lines, newline, last = text.rpartition("\n")
    log = read(complete_lines + newline, path)
    if last.strip():
        log = replace(log, notes=(*log.notes, CUT_NOTE))
    return log


def _read_json(text: str, path: Path) -> list[RunLog]:
    """Return the runs of golden values, or of a history as JSON or lines of JSON."""
    content: Any
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = history.parse_json_lines(text)
    if golden_values.is_of(content):
        return [golden_values.read(content, path)]
    logs = history.parse_history(content, path)
    if logs is None:
        raise _make_unread_error(path)
    return logs


def _make_unread_error(path: Path) -> UnreadFileError:
    """Return the error about a log of an unknown format."""
    return UnreadFileError(
        f"{path}: no run is read from it. Give {READABLE_LOGS}.",
        kind="it is no log of a known format",
    )
