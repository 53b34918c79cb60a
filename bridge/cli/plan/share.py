"""`precision-bridge plan` of several files: the share of linear layers in FP8 or FP4 per run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge.cli.many_runs import RunAnswer, answer_many_runs, format_precision, precision_to_dict
from bridge.cli.run_answer import compute_exit_code, plan_run

if TYPE_CHECKING:
    from bridge.preflight.run import Run


def print_shares(args: argparse.Namespace, paths: Sequence[str]) -> int:
    """Print a line for each run, and return the largest exit code."""
    return answer_many_runs(args, paths, _answer_share)


def _answer_share(run: Run) -> RunAnswer:
    """Return how many linear layers of a run compute in each scaling scheme."""
    from bridge.front.loader import require_plannable
    from bridge.preflight.check import get_report

    require_plannable(run)
    plan = plan_run(run)
    setup = get_report(run).context
    _, linears = plan.linears()
    schemes = plan.schemes()
    parts = []
    for scheme, count in schemes.items():
        parts.append(f"{count} of {linears} linear layers in {scheme}")
    unknown = run.rests_on(lambda: plan_run(run))
    if not parts:
        parts = [f"all {linears} linear layers in {setup.mode}"]
    if unknown:
        parts.append(f"rests on {len(unknown)} settings that nothing states")
    content = {
        **precision_to_dict(setup),
        "linear_layers": linears,
        "low_precision": schemes,
        "rests_on_unknown": unknown,
    }
    return RunAnswer(
        text=f"{format_precision(setup)}; {'; '.join(parts)}",
        content=content,
        code=compute_exit_code(run),
    )
