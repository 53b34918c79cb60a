"""`precision-bridge plan` and `align`: a run's formats per layer, and the dimensions of its GEMMs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.arguments import (
    add_run_command,
    later_plans,
    plan_of,
    print_json,
    print_planned,
    read_run,
    show,
    show_planned,
    unwritable,
)
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    import argparse

    from bridge.plan.precision_plan import PrecisionPlan

PICTURES = (".png", ".svg", ".pdf")


def add_parsers(commands: Any) -> None:
    """Add the commands."""
    text = "show what each layer computes, keeps and sends, in which format"
    plan = add_run_command(commands, "plan", _plan, text, json="print JSON, equal layers folded")
    plan.add_argument("--against", metavar="NAME", help="compare with another recipe, or with a YAML file")
    plan.add_argument("--csv", action="store_true", help="print CSV, one line per layer, module and GEMM or tensor")
    plan.add_argument("--picture", metavar="FILE", help="draw it: layers down, tensors across (png, svg or pdf)")
    add_run_command(commands, "align", _align, "check every GEMM's dimensions, and say what to pad tokens to")


def _plan(chosen: argparse.Namespace) -> None:
    run = read_run(chosen)
    plan, later = plan_of(run), later_plans(run)
    if later and (chosen.picture or chosen.against or chosen.csv):
        print("Phase 1 of the precision schedule.", file=sys.stderr)
    if chosen.picture:
        _draw(plan, Path(chosen.picture))
        return
    if chosen.against:
        is_file = chosen.against.endswith((".yaml", ".yml"))
        other = read_run(chosen, file=chosen.against) if is_file else read_run(chosen, recipe=chosen.against)
        _compare(plan, plan_of(other), as_json=chosen.json)
        return
    if chosen.json:
        phases = [
            {"first": phase.first, "last": phase.last, "precision": phase.precision.label, "plan": other.to_dict()}
            for phase, other in later
        ]
        print_planned(run, plan.to_dict() | ({"later_phases": phases} if later else {}))
        return
    from bridge.report.plan_table import difference_table, plan_csv, plan_table

    if chosen.csv:
        print(plan_csv(plan), end="")
    else:
        show(plan_table(plan))
        for phase, planned in later:
            show(difference_table(plan.label, str(phase), plan.diff(planned)))
        show_planned(run)


def _compare(plan: PrecisionPlan, other: PrecisionPlan, *, as_json: bool) -> None:
    differences = plan.diff(other)
    if as_json:
        print_json({"a": plan.label, "b": other.label, "differences": [asdict(row) for row in differences]})
        return
    from bridge.report.plan_table import difference_table

    show(difference_table(plan.label, other.label, differences))


def _draw(plan: PrecisionPlan, path: Path) -> None:
    if path.suffix not in PICTURES:
        raise RunConfigError(f"--picture: must end in {', '.join(PICTURES)}, got {str(path)!r}. Choose one of them.")
    from bridge.report.plan_picture import draw_plan  # matplotlib takes a second to import

    try:
        draw_plan(plan, path)
    except OSError as error:
        raise unwritable(path, "--picture", error) from None
    print(f"{path}: {len(plan.layers)} rows.")


def _align(chosen: argparse.Namespace) -> None:
    """Print the dimensions and token counts that the scaling scheme takes, for the GEMMs of a rank."""
    from bridge.plan.alignment import align_report

    run = read_run(chosen)
    this = run.report.setup.planned
    report = align_report(this.plan, this.workload)
    if chosen.json:
        print_planned(run, report.to_dict())
        return
    from bridge.report.plan_table import align_table

    show(align_table(report))
    show_planned(run)
