"""`precision-bridge plan --csv`: the formats of a run as CSV."""

from __future__ import annotations

import argparse

from bridge.cli.plan.first_phase import plan_first_phase
from bridge.cli.run_arguments import read_run


def print_csv(args: argparse.Namespace) -> None:
    """Print the plan of a run as CSV, a line for each layer, module and GEMM or tensor."""
    from bridge.report.plan.plan_csv import format_plan_csv

    print(format_plan_csv(plan_first_phase(read_run(args))), end="")
