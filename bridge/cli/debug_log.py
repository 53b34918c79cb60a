"""The log of Transformer Engine's debugger: a table, and the early warnings."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.cli.output import print_answer
from bridge.errors import RunConfigError
from bridge.runtime.audit.quantisation import replace_non_finite

if TYPE_CHECKING:
    from bridge.runtime.audit.quantisation import QuantisationRow

DEBUG_LOG_TITLE = "logged by Transformer Engine's debugger"
OTHER_COMMAND_REMEDY = "Drop it; or use precision-bridge quantisation-error --debug-log {folder}."


def print_debug_log(args: argparse.Namespace, rows: Sequence[QuantisationRow]) -> int:
    """Print the rows of a debugger's log, and the early warnings.

    Returns:
        1 if there is an early warning, else 0.
    """
    from bridge.report.quantisation_table import make_quantisation_table
    from bridge.runtime.audit.early_warnings import WarningInputs, find_early_warnings

    warnings = find_early_warnings(WarningInputs(train=(), quantisation=rows))
    content = {
        "rows": [replace_non_finite(dataclasses.asdict(row)) for row in rows],
        "warnings": dict(warnings),
    }
    print_answer(args, content, make_quantisation_table(rows, title=DEBUG_LOG_TITLE))
    if not args.json:
        for name, sentence in warnings:
            print(f"Early warning {name}: {sentence}")
    return int(bool(warnings))


def report_debug_log(args: argparse.Namespace, folder: Path) -> int:
    """Print a debugger's log for the command `report`, which has no page about such a log.

    Returns:
        1 if there is an early warning, else 0.

    Raises:
        RunConfigError: The command line has an option of a page, or other runs.
    """
    from bridge.read.debug_log import read_debug_log

    options = {"--out": args.out, "--format": args.format, "--watch": args.watch or None}
    for option, value in options.items():
        if value is not None:
            rule = "has no effect on the log of Transformer Engine's debugger"
            raise RunConfigError.of(
                option, rule, str(value), OTHER_COMMAND_REMEDY.format(folder=folder)
            )
    if len(args.runs) > 1:
        rule = "the log of Transformer Engine's debugger is shown by itself"
        raise RunConfigError.of(str(folder), rule, len(args.runs), "Give this folder alone.")
    return print_debug_log(args, read_debug_log(folder))
