"""`precision-bridge report --watch RUN`: a run in progress by its files, so that SSH is enough."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bridge.cli.described_logs import DescribedLog, is_log, read_described_log
from bridge.cli.output import print_json, print_report
from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.runtime.audit.early_warnings import EARLY_WARNINGS, WarningInputs, find_early_warnings
from bridge.runtime.audit.log_warning_inputs import make_log_warning_inputs
from bridge.runtime.audit.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import RenderableType

POLL_SECONDS = 2.0
"""Between two looks."""


def format_warning_thresholds() -> str:
    """Return the early warnings with their thresholds, as a list for the command's help."""
    lines = ["warnings:"]
    for name, row in EARLY_WARNINGS.items():
        lines.append(f"  {name:<25} {row.threshold}")
    return "\n".join(lines)


def watch_run(args: argparse.Namespace) -> int | None:
    """Print the state of the run, on a terminal until it ends or Ctrl-C.

    Exit code 1 where a warning stands then.
    """
    from rich.console import Console
    from rich.live import Live

    for name in args.silence:
        if name not in EARLY_WARNINGS:
            remedy = did_you_mean(close_matches(name, EARLY_WARNINGS))
            if not remedy:
                remedy = f"Warnings: {', '.join(EARLY_WARNINGS)}."
            raise RunConfigError.of("--silence", "must be the name of a warning", name, remedy)
    every = args.every
    if every is None:
        every = POLL_SECONDS
    if not every > 0:
        raise RunConfigError.of("--every", "must be more than 0 seconds", every, "Use 2.")
    if len(args.runs) > 1:
        raise RunConfigError.of("--watch", "is about one run", len(args.runs), "Give one folder.")
    watched = _read_watched(args.runs[0], args.silence)
    if args.json:
        print_json(watched.state())
    elif args.once or watched.has_ended() or not Console().is_terminal:
        print_report(watched.view())
    else:
        with Live(watched.view(), auto_refresh=False) as live, suppress(KeyboardInterrupt):
            while not watched.has_ended():
                time.sleep(every)
                watched = _read_watched(args.runs[0], args.silence)
                live.update(watched.view(), refresh=True)
        watched = _read_watched(args.runs[0], args.silence)
    return int(bool(watched.warnings()))


def _read_watched(path: Path, silenced: Sequence[str]) -> Watched:
    """Return a run as its files show it now."""
    if not is_log(path):
        return WatchedFolder(run=RunFolder.from_path(path), silenced=silenced)
    return WatchedLog(described=read_described_log(path), silenced=silenced)


class Watched(Protocol):
    """A run in progress."""

    def state(self) -> dict[str, Any]:
        """Return the last records and the warnings as plain data."""

    def view(self) -> RenderableType:
        """Return the state for a terminal."""

    def has_ended(self) -> bool:
        """Return whether the run has come to its end."""

    def warnings(self) -> list[tuple[str, str]]:
        """Return (name, sentence) of each early warning that stands."""


@dataclass(frozen=True, kw_only=True)
class WatchedFolder:
    """A run of ours."""

    run: RunFolder
    silenced: Sequence[str]

    def state(self) -> dict[str, Any]:
        """Return the last records, the audit and the warnings as plain data."""
        run = self.run
        last = {kind: run.metrics(kind)[-1:] for kind in ("train", "validation")}
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
        """Return (name, sentence) of each early warning that stands."""
        return find_early_warnings(WarningInputs.from_run_folder(self.run, silenced=self.silenced))


@dataclass(frozen=True, kw_only=True)
class WatchedLog:
    """A run of another trainer by its log."""

    described: DescribedLog
    silenced: Sequence[str]

    def state(self) -> dict[str, Any]:
        """Return the last records, the figures that the log lacks and the warnings as plain data."""
        log = self.described.log
        return {
            "train": log.records()[-1:],
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
        """Return whether the log shows the last step that the run was to make."""
        return self.described.log.has_ended

    def warnings(self) -> list[tuple[str, str]]:
        """Return (name, sentence) of each early warning that stands."""
        return find_early_warnings(
            make_log_warning_inputs(self.described.log, silenced=self.silenced)
        )
