"""`precision-bridge plan`: a run's formats as a table, CSV or picture, or against a recipe."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.output import answer, show, unwritable
from bridge.cli.planned_answer import answer_runs, plan_of, show_assumed, show_planned
from bridge.cli.run_arguments import read_run, read_saved
from bridge.errors import RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import label_of

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.preflight.run import Run
    from bridge.registry.schedule import Phase

PICTURES = (".png", ".svg", ".pdf")


def show_plan(args: argparse.Namespace) -> int:
    """Print the plan of a run.

    Return 2 where it is shown with an error of the run's check, else 0.
    """
    return answer_runs(args, _answer, _show)


def draw_plan(args: argparse.Namespace) -> None:
    """Draw the plan of a run into a file."""
    plan = _first_plan(read_run(args))
    path = Path(args.picture)
    if path.suffix not in PICTURES:
        raise RunConfigError(
            f"--picture: must end in {', '.join(PICTURES)}, got {str(path)!r}. Choose one of them."
        )
    require_extra("train", "precision-bridge plan --picture")
    from bridge.report.plan_picture import draw_plan as draw  # matplotlib takes a second to import

    try:
        draw(plan, path)
    except OSError as error:
        raise unwritable(path, "--picture", error) from None
    print(f"{path}: {len(plan.layers)} rows.")


def print_csv(args: argparse.Namespace) -> None:
    """Print the plan of a run as CSV."""
    from bridge.report.plan_table import plan_csv  # rich is heavy

    print(plan_csv(_first_plan(read_run(args))), end="")


def show_difference(args: argparse.Namespace) -> None:
    """Print where the plan of a run differs from that of another recipe, or of a YAML file."""
    from bridge.report.plan_table import difference_table  # rich is heavy

    plan = _first_plan(read_run(args))
    if args.against.endswith((".yaml", ".yml")):
        other = plan_of(read_saved(args, args.against))
    else:
        other = plan_of(read_run(args, recipe=args.against))
    rows = plan.diff(other)
    content = {"a": plan.label, "b": other.label, "differences": list(map(asdict, rows))}
    answer(args, content, difference_table(plan.label, other.label, rows))


def _first_plan(run: Run) -> PrecisionPlan:
    """Return the plan of a run.

    The plan of a precision schedule is that of its first phase, which a line on stderr says.
    """
    plan = plan_of(run)
    if _later_plans(run):
        print("Phase 1 of the precision schedule.", file=sys.stderr)
    return plan


def _later_plans(run: Run) -> list[tuple[Phase, PrecisionPlan]]:
    """Return the later phases of the run's precision schedule, each with its plan."""
    plans = []
    for phase in run.phases[1:]:
        plans.append((phase, plan_of(run, phase.precision)))
    return plans


def _answer(run: Run) -> dict[str, Any]:
    """Return the plan of a run as plain data."""
    content = plan_of(run).to_dict()
    phases = []
    for phase, plan in _later_plans(run):
        row = {
            "first": phase.first,
            "last": phase.last,
            "precision": label_of(phase.precision),
            "plan": plan.to_dict(),
        }
        phases.append(row)
    if phases:
        content["later_phases"] = phases
    content["rests_on_unknown"] = run.rests_on(lambda: plan_of(run))
    return content


def _show(run: Run) -> None:
    """Print the plan of a run for people."""
    from bridge.report.plan_table import difference_table, plan_table  # rich is heavy

    plan = plan_of(run)
    show(plan_table(plan))
    for phase, planned in _later_plans(run):
        show(difference_table(plan.label, str(phase), plan.diff(planned)))
    show_assumed(run.rests_on(lambda: plan_of(run)))
    show_planned(run)
