"""`precision-bridge plan --align`: the dimensions of a rank's GEMMs, and the tokens to pad to."""

from __future__ import annotations

import argparse

from bridge.cli.run_answer import answer_run
from bridge.cli.run_arguments import read_run


def print_alignment(args: argparse.Namespace) -> int:
    """Print the dimensions of a rank's GEMMs, and the multiples that the scaling scheme needs.

    Returns:
        2 if the check of the run has an error, else 0.
    """
    from bridge.plan.alignment import build_alignment_report
    from bridge.report.plan.alignment_table import make_alignment_table  # rich is heavy

    run = read_run(args)
    planned = run.planned
    report = build_alignment_report(planned.plan, planned.workload)
    return answer_run(args, run, report.to_dict(), make_alignment_table(report))
