"""`precision-bridge report --watch RUN`: a run in progress by its files, so that SSH is enough."""

import argparse
import time
from contextlib import suppress

from bridge.cli.output import print_json, show
from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.runtime.audit.early_warnings import WARNINGS, Signs, early_warnings
from bridge.runtime.audit.run_folder import RunFolder

SECONDS = 2.0
"""Between two looks."""


def warnings_by_threshold() -> str:
    """Return the early warnings with their thresholds, as a list for the command's help."""
    lines = ["warnings:"]
    for name, row in WARNINGS.items():
        lines.append(f"  {name:<25} {row.threshold}")
    return "\n".join(lines)


def watch_run(chosen: argparse.Namespace) -> int | None:
    """Print the state of the run, on a terminal until it ends or Ctrl-C.

    Exit code 1 where a warning stands then.
    """
    from rich.console import Console
    from rich.live import Live

    from bridge.report.watch import watch_view

    for name in chosen.silence:
        if name not in WARNINGS:
            remedy = did_you_mean(close_matches(name, WARNINGS))
            if not remedy:
                remedy = f"Warnings: {', '.join(WARNINGS)}."
            raise RunConfigError.of("--silence", "must be the name of a warning", name, remedy)
    every = chosen.every
    if every is None:
        every = SECONDS
    if not every > 0:
        raise RunConfigError.of("--every", "must be more than 0 seconds", every, "Use 2.")
    if len(chosen.runs) > 1:
        raise RunConfigError.of("--watch", "is about one run", len(chosen.runs), "Give one folder.")
    run = RunFolder.of(chosen.runs[0])
    warnings = early_warnings(Signs.of(run, silenced=chosen.silence))
    if chosen.json:
        last = {kind: run.metrics(kind)[-1:] for kind in ("train", "validation")}
        audit = None
        if run.record is not None:
            audit = list(run.record.audit)
        end = {"ended": run.has_ended(), "stopped": run.stopped}
        print_json({**last, "audit": audit, "warnings": dict(warnings), **end})
    elif chosen.once or run.has_ended() or not Console().is_terminal:
        show(watch_view(run, silenced=chosen.silence))
    else:
        with (
            Live(watch_view(run, silenced=chosen.silence), auto_refresh=False) as live,
            suppress(KeyboardInterrupt),
        ):
            while not run.has_ended():
                time.sleep(every)
                live.update(watch_view(run, silenced=chosen.silence), refresh=True)
        warnings = early_warnings(Signs.of(run, silenced=chosen.silence))
    return int(bool(warnings))
