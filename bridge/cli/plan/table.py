"""`precision-bridge plan`: a run's formats as a table, CSV or picture, or against a recipe."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.output import make_unwritable_error, print_answer, print_report
from bridge.cli.run_answer import answer_branches, plan_run, print_assumptions, print_check_notes
from bridge.cli.run_arguments import read_run, read_without_overrides
from bridge.errors import RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import format_label

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.preflight.run import Run
    from bridge.registry.schedule import Phase

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def print_plan(args: argparse.Namespace) -> int:
    """Print the plan of a run.

    Return 2 where it is shown with an error of the run's check, else 0.
    """
    return answer_branches(args, _plan_to_dict, _print_run_plan)


def draw_plan(args: argparse.Namespace) -> None:
    """Draw the plan of a run into a file."""
    plan = _plan_first_phase(read_run(args))
    path = Path(args.picture)
    if path.suffix not in PICTURE_SUFFIXES:
        raise RunConfigError(
            f"--picture: must end in {', '.join(PICTURE_SUFFIXES)}, got {str(path)!r}. Choose one of them."
        )
    require_extra("train", "precision-bridge plan --picture")
    from bridge.report.plan_picture import draw_plan as draw  # matplotlib takes a second to import

    try:
        draw(plan, path)
    except OSError as error:
        raise make_unwritable_error(path, "--picture", error) from None
    print(f"{path}: {len(plan.layers)} rows.")


def print_csv(args: argparse.Namespace) -> None:
    """Print the plan of a run as CSV."""
    from bridge.report.plan_table import format_plan_csv  # rich is heavy

    print(format_plan_csv(_plan_first_phase(read_run(args))), end="")


def print_difference(args: argparse.Namespace) -> None:
    """Print where the plan of a run differs from that of another recipe, or of a YAML file."""
    from bridge.report.plan_table import make_difference_table  # rich is heavy

    plan = _plan_first_phase(read_run(args))
    if args.against.endswith((".yaml", ".yml")):
        other = plan_run(read_without_overrides(args, args.against))
    else:
        other = plan_run(read_run(args, recipe=args.against))
    rows = plan.diff(other)
    content = {"a": plan.label, "b": other.label, "differences": list(map(asdict, rows))}
    print_answer(args, content, make_difference_table(plan.label, other.label, rows))


def _plan_first_phase(run: Run) -> PrecisionPlan:
    """Return the plan of a run.

    The plan of a precision schedule is that of its first phase, which a line on stderr says.
    """
    plan = plan_run(run)
    if _plan_later_phases(run):
        print("Phase 1 of the precision schedule.", file=sys.stderr)
    return plan


def _plan_later_phases(run: Run) -> list[tuple[Phase, PrecisionPlan]]:
    """Return the later phases of the run's precision schedule, each with its plan."""
    plans = []
    for phase in run.phases[1:]:
        plans.append((phase, plan_run(run, phase.precision)))
    return plans


def _plan_to_dict(run: Run) -> dict[str, Any]:
    """Return the plan of a run as plain data."""
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


def _print_run_plan(run: Run) -> None:
    """Print the plan of a run for people."""
    from bridge.report.plan_table import make_difference_table, make_plan_table  # rich is heavy

    plan = plan_run(run)
    print_report(make_plan_table(plan))
    for phase, planned in _plan_later_phases(run):
        print_report(make_difference_table(plan.label, str(phase), plan.diff(planned)))
    print_assumptions(run.rests_on(lambda: plan_run(run)))
    print_check_notes(run)
