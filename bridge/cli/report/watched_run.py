"""`WatchedRun`: a run in progress, as its files show it now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bridge.cli.described_logs import DescribedLog, is_log, read_described_log
from bridge.runtime.audit.early_warnings import WarningInputs, find_early_warnings
from bridge.runtime.audit.log_warning_inputs import make_log_warning_inputs
from bridge.runtime.audit.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import RenderableType


class WatchedRun(Protocol):
    """A run in progress, as its files show it now."""

    def state(self) -> dict[str, Any]:
        """Return the last records and the warnings as plain data."""

    def view(self) -> RenderableType:
        """Return the state for a terminal."""

    def has_ended(self) -> bool:
        """Return whether the run has ended."""

    def warnings(self) -> list[tuple[str, str]]:
        """Return (name, sentence) of each early warning."""


@dataclass(frozen=True, kw_only=True)
class WatchedFolder:
    """A run of this project, by its folder."""

    run: RunFolder
    silenced: Sequence[str]

    def state(self) -> dict[str, Any]:
        """Return the last records, the audit and the warnings as plain data."""
        run = self.run
        last = {kind: run.read_metrics(kind)[-1:] for kind in ("train", "validation")}
        audit = None
        if run.record is not None:
            audit = list(run.record.audit)
        end = {"ended": run.has_ended(), "stopped": run.stopped}
        return {**last, "audit": audit, "warnings": dict(self.warnings()), **end}

    def view(self) -> RenderableType:
        """Return the state for a terminal."""
        from bridge.report.watch import make_watch_view

        return make_watch_view(self.run, silenced=self.silenced)

    def has_ended(self) -> bool:
        """Return whether the run has written its summary."""
        return self.run.has_ended()

    def warnings(self) -> list[tuple[str, str]]:
        """Return (name, sentence) of each early warning."""
        return find_early_warnings(WarningInputs.from_run_folder(self.run, silenced=self.silenced))


@dataclass(frozen=True, kw_only=True)
class WatchedLog:
    """A run of another trainer, by its log."""

    described: DescribedLog
    silenced: Sequence[str]

    def state(self) -> dict[str, Any]:
        """Return the last records, the missing metrics and the warnings as plain data."""
        log = self.described.log
        return {
            "train": log.list_records()[-1:],
            "validation": log.list_validations()[-1:],
            "precision": self.described.precision or None,
            "source": log.source,
            "missing": log.missing,
            "warnings": dict(self.warnings()),
            "ended": log.has_ended,
        }

    def view(self) -> RenderableType:
        """Return the state for a terminal."""
        from bridge.report.log_content import make_log_view

        return make_log_view(
            self.described.log, silenced=self.silenced, precision=self.described.precision
        )

    def has_ended(self) -> bool:
        """Return whether the log has the last step of the run."""
        return self.described.log.has_ended

    def warnings(self) -> list[tuple[str, str]]:
        """Return (name, sentence) of each early warning."""
        return find_early_warnings(
            make_log_warning_inputs(self.described.log, silenced=self.silenced)
        )


def read_watched_run(path: Path, silenced: Sequence[str]) -> WatchedRun:
    """Return a run as its files show it now.

    Args:
        path: A run folder of ours, or a log.
        silenced: Names of early warnings that are left out.
    """
    if not is_log(path):
        return WatchedFolder(run=RunFolder.from_path(path), silenced=silenced)
    return WatchedLog(described=read_described_log(path), silenced=silenced)
