"""`precision-bridge watch RUN`: a run in progress, over SSH as well as here; it reads the run's files alone."""

import argparse
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridge.cli.arguments import add_command, print_json, show
from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.runtime.audit.early_warnings import WARNINGS, Signs, early_warnings
from bridge.runtime.audit.run_folder import RunFolder


def add_parsers(commands: Any) -> None:
    """Add the command."""
    text = "show a run in progress: step, loss, loss scale, speed, early warnings"
    epilog = "warnings:\n" + "\n".join(f"  {name:<25} {row.threshold}" for name, row in WARNINGS.items())
    parser = add_command(commands, "watch", _watch, text, json="print the state once as JSON", epilog=epilog)
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--once", action="store_true", help="print the state and end")
    text = "time between two looks (default 2)"
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help=text)
    text = "leave a warning out; repeatable"
    parser.add_argument("--silence", action="append", default=[], metavar="NAME", help=text)


def _watch(chosen: argparse.Namespace) -> int | None:
    """Print the state of the run, on a terminal until it ends or Ctrl-C; exit code 1 where a warning stands then."""
    from rich.console import Console
    from rich.live import Live

    from bridge.report.watch import watch_view

    for name in chosen.silence:
        if name not in WARNINGS:
            remedy = did_you_mean(close_matches(name, WARNINGS)) or f"Warnings: {', '.join(WARNINGS)}."
            raise RunConfigError.of("--silence", "must be the name of a warning", name, remedy)
    if not chosen.every > 0:
        raise RunConfigError.of("--every", "must be more than 0 seconds", chosen.every, "Use 2.")
    run = RunFolder.of(chosen.run_folder)
    warnings = early_warnings(Signs.of(run, silenced=chosen.silence))
    if chosen.json:
        last = {kind: run.metrics(kind)[-1:] for kind in ("train", "validation")}
        audit = list(run.record.audit) if run.record is not None else None
        end = {"ended": run.has_ended(), "stopped": run.stopped}
        print_json({**last, "audit": audit, "warnings": dict(warnings), **end})
    elif chosen.once or run.has_ended() or not Console().is_terminal:
        show(watch_view(run, silenced=chosen.silence))
    else:
        with Live(watch_view(run, silenced=chosen.silence), auto_refresh=False) as live, suppress(KeyboardInterrupt):
            while not run.has_ended():
                time.sleep(chosen.every)
                live.update(watch_view(run, silenced=chosen.silence), refresh=True)
        warnings = early_warnings(Signs.of(run, silenced=chosen.silence))
    return 1 if warnings else None
