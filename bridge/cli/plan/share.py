"""`precision-bridge plan` of several files: the share of linear layers in FP8 or FP4 per run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge.cli.planned_answer import plan_of, planned_code
from bridge.cli.several import RunAnswer, answer_several, precision_dict, precision_text

if TYPE_CHECKING:
    from bridge.preflight.run import Run


def show_shares(args: argparse.Namespace, paths: Sequence[str]) -> int:
    """Print a line for each run, and return the largest exit code."""
    return answer_several(args, paths, _share)


def _share(run: Run) -> RunAnswer:
    """Return how many linear layers of a run compute in each scaling scheme."""
    from bridge.front.loader import require_strict
    from bridge.preflight.check import report_of

    require_strict(run)
    plan = plan_of(run)
    setup = report_of(run).context
    _, linears = plan.linears()
    schemes = plan.schemes()
    parts = []
    for scheme, count in schemes.items():
        parts.append(f"{count} of {linears} linear layers in {scheme}")
    unknown = run.rests_on(lambda: plan_of(run))
    if not parts:
        parts = [f"all {linears} linear layers in {setup.mode}"]
    if unknown:
        parts.append(f"rests on {len(unknown)} settings that nothing states")
    content = {
        **precision_dict(setup),
        "linear_layers": linears,
        "low_precision": schemes,
        "rests_on_unknown": unknown,
    }
    return RunAnswer(
        text=f"{precision_text(setup)}; {'; '.join(parts)}", content=content, code=planned_code(run)
    )
