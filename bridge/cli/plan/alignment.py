"""`precision-bridge plan --align`: the dimensions of a rank's GEMMs, and the tokens to pad to."""

from __future__ import annotations

import argparse

from bridge.cli.planned_answer import answer_planned
from bridge.cli.run_arguments import read_run


def show_alignment(args: argparse.Namespace) -> int:
    """Print the dimensions and token counts that the scaling scheme takes, for the GEMMs of a rank.

    Return 2 where the check of the run finds an error, else 0.
    """
    from bridge.plan.alignment import align_report
    from bridge.report.align_table import align_table  # rich is heavy

    run = read_run(args)
    planned = run.planned
    report = align_report(planned.plan, planned.workload)
    return answer_planned(args, run, report.to_dict(), align_table(report))
