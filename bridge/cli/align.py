"""`precision-bridge align`: which dimensions and token counts a scaling scheme can take, and the nearest that fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bridge.cli.run_values import add_run_arguments, described

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("align", help="check every GEMM's dimensions, and say what to pad tokens to")
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print the GEMMs of a rank."""
    from bridge.plan.alignment import align_report

    this = described(chosen)
    report = align_report(this.plan, this.workload)
    if chosen.json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    from bridge.report.align_table import align_table
    from bridge.report.table import show  # rich is heavy

    show(align_table(report))
