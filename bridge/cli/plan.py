"""`precision-bridge plan`: which layer computes, keeps and sends what, in which format."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.run_values import add_run_arguments, plan_of, read_run
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    import argparse

    from bridge.plan.precision_plan import PrecisionPlan

__all__ = ["add_parser"]

PICTURES = (".png", ".svg", ".pdf")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("plan", help="show what each layer computes, keeps and sends, in which format")
    add_run_arguments(parser)
    parser.add_argument("--against", metavar="NAME", help="compare with another recipe, or with a YAML file")
    parser.add_argument("--json", action="store_true", help="print JSON, equal layers folded")
    parser.add_argument("--csv", action="store_true", help="print CSV, one line per layer, module and GEMM or tensor")
    parser.add_argument("--picture", metavar="FILE", help="draw it: layers down, tensors across (png, svg or pdf)")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print the plan, or how it differs from another."""
    plan = plan_of(read_run(chosen))
    if chosen.picture:
        _draw(plan, Path(chosen.picture))
        return
    if chosen.against:
        is_file = chosen.against.endswith((".yaml", ".yml"))
        other = read_run(chosen, file=chosen.against) if is_file else read_run(chosen, recipe=chosen.against)
        _compare(plan, plan_of(other), as_json=chosen.json)
        return
    if chosen.json:
        print(json.dumps(plan.to_dict(), indent=2))
        return
    from bridge.report.plan_table import plan_csv, plan_table
    from bridge.report.table import show  # rich is heavy

    if chosen.csv:
        print(plan_csv(plan), end="")
        return
    show(plan_table(plan))


def _compare(plan: PrecisionPlan, other: PrecisionPlan, *, as_json: bool) -> None:
    differences = plan.diff(other)
    if as_json:
        rows = [asdict(row) for row in differences]
        print(json.dumps({"a": plan.label, "b": other.label, "differences": rows}, indent=2))
        return
    from bridge.report.plan_table import difference_table
    from bridge.report.table import show  # rich is heavy

    show(difference_table(plan.label, other.label, differences))


def _draw(plan: PrecisionPlan, path: Path) -> None:
    if path.suffix not in PICTURES:
        raise RunConfigError(f"--picture: must end in {', '.join(PICTURES)}, got {str(path)!r}. Choose one of them.")
    from bridge.report.plan_picture import draw_plan  # matplotlib takes a second to import

    try:
        draw_plan(plan, path)
    except OSError as error:
        why = (error.strerror or "an error").lower()
        raise RunConfigError(f"--picture: cannot be written ({why}), got {str(path)!r}. Give another file.") from None
    print(f"{path}: {len(plan.layers)} rows.")
