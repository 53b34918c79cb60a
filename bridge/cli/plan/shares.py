"""`precision-bridge plan FILE FILE ...`: the linear layers of each run in FP8 or FP4, in a line."""

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
    """Return the number of linear layers of a run that compute in each scaling scheme."""
    from bridge.front.loader import require_plannable
    from bridge.preflight.rule_check import get_report

    require_plannable(run)
    plan = plan_run(run)
    context = get_report(run).context
    _, linear_count = plan.linears()
    counts = plan.schemes()
    unknown = run.rests_on(lambda: plan_run(run))
    parts = [format_precision(context)]
    for scheme, count in counts.items():
        parts.append(f"{count} of {linear_count} linear layers in {scheme}")
    if not counts:
        parts.append(f"all {linear_count} linear layers in {context.mode}")
    if len(unknown) == 1:
        parts.append("rests on 1 setting that nothing states")
    elif unknown:
        parts.append(f"rests on {len(unknown)} settings that nothing states")
    content = {
        **precision_to_dict(context),
        "linear_layers": linear_count,
        "low_precision": counts,
        "rests_on_unknown": unknown,
    }
    return RunAnswer(text="; ".join(parts), content=content, code=compute_exit_code(run))
