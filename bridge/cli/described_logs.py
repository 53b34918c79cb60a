"""`DescribedLog`: the log of another trainer's run, with the run that its arguments describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, RunConfigError
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.audit.run_log import RunLog, make_unique_names

if TYPE_CHECKING:
    from bridge.preflight.run import Run
    from bridge.runtime.compare.logged_run import LoggedRun

TRAINING_ARGUMENTS = (
    "data_path",
    "split",
    "train_iters",
    "train_samples",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "rampup_batch_size",
    "load",
)
"""Arguments that decide the losses and that no config of Megatron Core has."""


@dataclass(frozen=True, kw_only=True)
class DescribedLog:
    """A log, and the run that its arguments describe."""

    log: RunLog
    name: str
    """The name of the log, which is unique on the command line."""
    run: Run | None
    """The run. None: the log has no arguments, or no run can be read from its arguments."""

    @property
    def precision(self) -> str:
        """The mode and the scheme; empty if no argument states them. A log never has a recipe."""
        if self.run is None:
            return ""
        from bridge.registry.nearest_recipe import format_mode_and_scheme

        return format_mode_and_scheme(self.run.prediction.values["model"])

    def fields(self) -> dict[str, Any]:
        """Return dotted name of a field -> its value, for the fields that the arguments state.

        Values that Megatron-LM sets at start are left out, since they follow from the others.
        """
        if self.run is None:
            return {}
        derived = {value.path for value in self.run.reading.derived}
        fields: dict[str, Any] = {}
        for section, values in self.run.sections.items():
            if not isinstance(values, dict):
                continue
            for name, value in values.items():
                if f"{section}.{name}" not in derived:
                    fields[f"{section}.{name}"] = value
        for name in TRAINING_ARGUMENTS:
            if name in self.log.arguments:
                fields[name] = self.log.arguments[name]
        return fields

    def to_logged_run(self) -> LoggedRun:
        """Return the log in the form that a comparison needs."""
        from bridge.runtime.compare.logged_run import LoggedRun

        return LoggedRun(
            log=self.log, name=self.name, precision=self.precision, fields=self.fields()
        )


def is_log(path: Path) -> bool:
    """Return whether a path is a log: every path that is not a run folder of this project."""
    return not RunFolder.is_run(path)


def read_described_logs(paths: Sequence[Path]) -> list[DescribedLog]:
    """Return the runs of logs, in the order of the paths.

    Raises:
        UnreadFileError: A path is not a log of a known format.
    """
    from bridge.front.folders import find_path
    from bridge.read.logs.files import read_logs

    logs: list[RunLog] = []
    for path in paths:
        logs.extend(read_logs(find_path(path)))
    described = []
    for log, name in zip(logs, make_unique_names(logs), strict=True):
        described.append(DescribedLog(log=log, name=name, run=_load_described_run(log)))
    return described


def read_described_log(path: Path) -> DescribedLog:
    """Return the run of a log with one run.

    Raises:
        UnreadFileError: The path is not a log of a known format.
        RunConfigError: The log has several runs.
    """
    logs = read_described_logs([path])
    if len(logs) > 1:
        names = ", ".join(log.name for log in logs)
        raise RunConfigError.of(str(path), "must be the log of one run", names, "Give one of them.")
    return logs[0]


def _load_described_run(log: RunLog) -> Run | None:
    """Return the run that a log's arguments describe. None if it cannot be read or predicted."""
    if log.described_by is None:
        return None
    from bridge.front.loader import load_run

    try:
        run = load_run(config_file=log.described_by, strict=False)
        run.prediction  # noqa: B018  raises for a run that cannot be predicted; computed once
    except BridgeError:
        return None
    return run
