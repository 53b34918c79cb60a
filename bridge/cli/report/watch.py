"""`precision-bridge report --watch RUN`: the view of a run in progress, from its files.

Only the files are read, so the command can run on any machine that sees them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bridge.cli.output import print_json, print_report
from bridge.cli.report.watched_run import WatchedRun, read_watched_run
from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.runtime.audit.early_warnings import EARLY_WARNINGS

DEFAULT_INTERVAL_SECONDS = 2.0
"""Seconds between two readings of the files."""


def format_warning_thresholds() -> str:
    """Return the early warnings with their thresholds, as a list for the command's help."""
    lines = ["warnings:"]
    for name, row in EARLY_WARNINGS.items():
        lines.append(f"  {name:<25} {row.threshold}")
    return "\n".join(lines)


def watch_run(args: argparse.Namespace) -> int:
    """Print the state of a run. On a terminal, update it until the run ends or Ctrl-C is pressed.

    Returns:
        1 if there is an early warning at the end, else 0.

    Raises:
        RunConfigError: The command line names several runs or an unknown warning, or its interval
            is not positive.
    """
    from rich.console import Console

    _require_warning_names(args.silence)
    interval = _get_interval_seconds(args)
    if len(args.runs) > 1:
        raise RunConfigError.of("--watch", "is about one run", len(args.runs), "Give one folder.")
    path = args.runs[0]
    watched = read_watched_run(path, args.silence)
    if args.json:
        print_json(watched.state())
    elif args.once or watched.has_ended() or not Console().is_terminal:
        print_report(watched.view())
    else:
        watched = _show_until_end(watched, path, args.silence, interval)
    return int(bool(watched.warnings()))


def _require_warning_names(names: Sequence[str]) -> None:
    """Refuse a name that is not the name of an early warning.

    Raises:
        RunConfigError: There is no such warning.
    """
    for name in names:
        if name not in EARLY_WARNINGS:
            remedy = did_you_mean(close_matches(name, EARLY_WARNINGS))
            if not remedy:
                remedy = f"Warnings: {', '.join(EARLY_WARNINGS)}."
            raise RunConfigError.of("--silence", "must be the name of a warning", name, remedy)


def _get_interval_seconds(args: argparse.Namespace) -> float:
    """Return the seconds between two readings.

    Raises:
        RunConfigError: They are not positive.
    """
    seconds = args.every
    if seconds is None:
        return DEFAULT_INTERVAL_SECONDS
    if not seconds > 0:  # NaN is refused too
        raise RunConfigError.of("--every", "must be more than 0 seconds", seconds, "Use 2.")
    return float(seconds)


def _show_until_end(
    watched: WatchedRun, path: Path, silenced: Sequence[str], interval_seconds: float
) -> WatchedRun:
    """Show the state of a run on the terminal until it ends, and return its last state."""
    from rich.live import Live

    with Live(watched.view(), auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while not watched.has_ended():
            time.sleep(interval_seconds)
            watched = read_watched_run(path, silenced)
            live.update(watched.view(), refresh=True)
    return read_watched_run(path, silenced)
