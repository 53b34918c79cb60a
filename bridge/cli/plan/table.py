"""`precision-bridge plan`: the formats of a run as a table, or as JSON."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_report
from bridge.cli.run_answer import answer_branches, plan_run, print_assumptions, print_check_notes
from bridge.precision.mode import format_label

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.preflight.run import Run
    from bridge.registry.schedule import Phase


def print_plan(args: argparse.Namespace) -> int:
    """Print the plan of a run and of its other branches.

    Returns:
        2 if the check of a run has an error, else 0.
    """
    return answer_branches(args, _plan_to_dict, _print_plan_table)


def _plan_to_dict(run: Run) -> dict[str, Any]:
    """Return the plan of a run as plain data, with the plans of the later phases of its schedule."""
    content = plan_run(run).to_dict()
    phases = []
    for phase, plan in _plan_later_phases(run):
        row = {
            "first": phase.first,
            "last": phase.last,
            "precision": format_label(phase.precision),
            "plan": plan.to_dict(),
        }
        phases.append(row)
    if phases:
        content["later_phases"] = phases
    content["rests_on_unknown"] = run.rests_on(lambda: plan_run(run))
    return content


def _print_plan_table(run: Run) -> None:
    """Print the plan of a run as a table, and the difference of each later phase from it."""
    from bridge.report.plan.plan_difference import make_difference_table  # rich is heavy
    from bridge.report.plan.plan_table import make_plan_table

    plan = plan_run(run)
    print_report(make_plan_table(plan))
    for phase, later_plan in _plan_later_phases(run):
        print_report(make_difference_table(plan.label, str(phase), plan.diff(later_plan)))
    print_assumptions(run.rests_on(lambda: plan_run(run)))
    print_check_notes(run)


def _plan_later_phases(run: Run) -> list[tuple[Phase, PrecisionPlan]]:
    """Return the later phases of the run's precision schedule, each with its plan."""
    plans = []
    for phase in run.phases[1:]:
        plans.append((phase, plan_run(run, phase.precision)))
    return plans
