"""`precision-bridge report RUN [RUN ...]`: a page about runs; `--watch`: a run in progress."""

from __future__ import annotations

import argparse
from pathlib import Path

from bridge.cli.debug_log import report_debug_log
from bridge.cli.described_logs import is_log
from bridge.cli.parser import add_json_option, refuse_options_without
from bridge.cli.report.page import REPORT_FORMATS, write_page
from bridge.cli.report.watch import (
    DEFAULT_INTERVAL_SECONDS,
    format_warning_thresholds,
    watch_run,
)
from bridge.errors import RunConfigError
from bridge.read.debug_log import is_debug_log

WATCH_OPTIONS = ("--once", "--every", "--silence", "--json")
"""Options that have an effect only with ``--watch``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    help_text = (
        "folder of a run of ours, or a log of Megatron-LM, Megatron Bridge or NeMo-RL, "
        "a TensorBoard folder, a history of W&B or MLflow, golden values, or the log folder of "
        "Transformer Engine's debugger, whose table is printed"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help=help_text)
    help_text = (
        "file to write (default: report.FORMAT in the first run, or next to a log); "
        "- prints the report"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=help_text)
    help_text = "html (default) needs no network; md is for a comment"
    parser.add_argument("--format", choices=REPORT_FORMATS, help=help_text)
    help_text = (
        "show a run in progress instead: step, loss, loss scale, speed, early warnings; "
        "1 where a warning stands"
    )
    parser.add_argument("--watch", action="store_true", help=help_text)
    parser.add_argument("--once", action="store_true", help="with --watch: print the state and end")
    help_text = f"with --watch: time between two looks (default {DEFAULT_INTERVAL_SECONDS:g})"
    parser.add_argument("--every", type=float, metavar="SECONDS", help=help_text)
    help_text = "with --watch: leave a warning out; repeatable"
    parser.add_argument("--silence", action="append", default=[], metavar="NAME", help=help_text)
    add_json_option(
        parser, "with --watch: print the state once as JSON; a report is JSON with --format json"
    )
    parser.epilog = format_warning_thresholds()


def run(args: argparse.Namespace) -> int | None:
    """Write a report, or show a run in progress or a debugger's log.

    Returns:
        1 if a run in progress or a debugger's log has an early warning. None for a report.
    """
    refuse_options_without(args, "--watch", WATCH_OPTIONS)
    for path in args.runs:
        if is_log(path) and is_debug_log(path):
            return report_debug_log(args, path)
    if not args.watch:
        write_page(args)
        return None
    for option, value in (("--out", args.out), ("--format", args.format)):
        if value is not None:
            raise RunConfigError(f"{option}: has no effect with --watch. Leave one of them out.")
    return watch_run(args)
