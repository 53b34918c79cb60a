"""`precision-bridge plan` and `align`: a run's formats per layer, and the dimensions of its GEMMs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.arguments import (
    add_run_command,
    answer,
    answer_runs,
    plan_of,
    planned_code,
    read_run,
    show,
    show_assumed,
    show_planned,
    unwritable,
)
from bridge.errors import RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import label_of

if TYPE_CHECKING:
    from bridge.front.loader import RunValues
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.registry.schedule import Phase

PICTURES = (".png", ".svg", ".pdf")


def add_parsers(commands: Any) -> None:
    """Add the commands."""
    text = "show what each layer computes, keeps and sends, in which format"
    plan = add_run_command(commands, "plan", _plan, text, json="print JSON, equal layers folded")
    plan.add_argument("--against", metavar="NAME", help="compare with another recipe, or with a YAML file")
    plan.add_argument("--csv", action="store_true", help="print CSV, one line per layer, module and GEMM or tensor")
    plan.add_argument("--picture", metavar="FILE", help="draw it: layers down, tensors across (png, svg or pdf)")
    add_run_command(commands, "align", _align, "check every GEMM's dimensions, and say what to pad tokens to")


def _plan(chosen: argparse.Namespace) -> int:
    """Print the plan; return 2 where it is shown with an error of the run's check, else 0."""
    if chosen.picture or chosen.csv or chosen.against:
        _plan_of_one(chosen)
        return 0
    return answer_runs(chosen, _answer, _show)


def _plan_of_one(chosen: argparse.Namespace) -> None:
    """Draw a plan, print it as CSV, or compare it with another one."""
    from bridge.report.plan_table import difference_table, plan_csv  # rich is heavy

    run = read_run(chosen)
    plan = plan_of(run)
    if _later_plans(run):
        print("Phase 1 of the precision schedule.", file=sys.stderr)
    if chosen.picture:
        _draw(plan, Path(chosen.picture))
    elif chosen.against:
        place = "file" if chosen.against.endswith((".yaml", ".yml")) else "recipe"
        other = plan_of(read_run(chosen, **{place: chosen.against}))
        rows = plan.diff(other)
        content = {"a": plan.label, "b": other.label, "differences": [asdict(row) for row in rows]}
        answer(chosen, content, difference_table(plan.label, other.label, rows))
    else:
        print(plan_csv(plan), end="")


def _later_plans(run: RunValues) -> list[tuple[Phase, PrecisionPlan]]:
    """Return the later phases of the run's precision schedule, each with its plan."""
    from bridge.preflight.check import phases_of

    return [(phase, plan_of(run, phase.precision)) for phase in phases_of(run.sections, run.prediction)[1:]]


def _answer(run: RunValues) -> dict[str, Any]:
    """Return the plan of a run as plain data."""
    content = plan_of(run).to_dict()
    phases = []
    for phase, plan in _later_plans(run):
        row = {"first": phase.first, "last": phase.last, "precision": label_of(phase.precision), "plan": plan.to_dict()}
        phases.append(row)
    if phases:
        content["later_phases"] = phases
    content["rests_on_unknown"] = run.rests_on(lambda: plan_of(run))
    return content


def _show(run: RunValues) -> None:
    """Print the plan of a run for people."""
    from bridge.report.plan_table import difference_table, plan_table  # rich is heavy

    plan = plan_of(run)
    show(plan_table(plan))
    for phase, planned in _later_plans(run):
        show(difference_table(plan.label, str(phase), plan.diff(planned)))
    show_assumed(run.rests_on(lambda: plan_of(run)))
    show_planned(run)


def _draw(plan: PrecisionPlan, path: Path) -> None:
    if path.suffix not in PICTURES:
        raise RunConfigError(f"--picture: must end in {', '.join(PICTURES)}, got {str(path)!r}. Choose one of them.")
    require_extra("train", "precision-bridge plan --picture")
    from bridge.report.plan_picture import draw_plan  # matplotlib takes a second to import

    try:
        draw_plan(plan, path)
    except OSError as error:
        raise unwritable(path, "--picture", error) from None
    print(f"{path}: {len(plan.layers)} rows.")


def _align(chosen: argparse.Namespace) -> int:
    """Print the dimensions and token counts that the scaling scheme takes, for the GEMMs of a rank.

    Return 2 where the check of the run finds an error, else 0.
    """
    from bridge.plan.alignment import align_report
    from bridge.report.plan_table import align_table

    run = read_run(chosen)
    this = run.report.setup.planned
    report = align_report(this.plan, this.workload)
    answer(chosen, report.to_dict(), align_table(report), run)
    return planned_code(run)
