"""The modules that each row of `modules`, or each matcher of a foreign recipe, takes, as a table and as plain data."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.precision_plan import compact
from bridge.precision.grouping import grouped
from bridge.precision.matchers import HIGH, Matcher
from bridge.report.findings import STYLES
from bridge.report.table import NUMBERED, table
from bridge.rules.module_selection import ModuleSelection, Selected, Taken
from bridge.rules.rule import RuleFinding


def module_table(
    selection: ModuleSelection, findings: Sequence[RuleFinding], *, layout: str, run: str, mode: str
) -> RenderableType:
    """Return the selection as something rich can print."""
    high = f"{mode} (the run's dtype)"
    rows = [
        {
            "": row.matcher.name,
            "select": row.matcher.select,
            "precision": _precision(row.matcher, high),
            "takes": _reach(row.taken, mode, is_low=row.matcher.precision != HIGH),
            "linears": str(len(row.taken)),
        }
        for row in selection.rows
    ]
    left = {
        "takes": _reach(selection.left, mode, is_low=run != mode),
        "linears": str(len(selection.left)),
    }
    rows.append({"": "", "select": "the rest", "precision": f"{run} (the run)", **left})
    what = (
        "matchers of model.quant_recipe"
        if selection.is_foreign
        else "rows of mixed_precision.modules"
    )
    shown = table(
        rows, title=f"{what}, {layout}{NUMBERED}", numbers=("linears",), wraps=("select", "takes")
    )
    return Group(
        shown, *(Text(f"{one.severity}: {one}", style=STYLES[one.severity]) for one in findings)
    )


def selection_dict(selection: ModuleSelection, findings: Sequence[RuleFinding]) -> dict[str, Any]:
    """Return the selection as plain data."""
    return {
        "is_foreign": selection.is_foreign,
        "rows": [_row_dict(row) for row in selection.rows],
        "left": [module.path for module in selection.left],
        "layers_elsewhere": [
            {
                "row": one.row.matcher.name,
                "pipeline": one.stages,
                "layers": list(one.row.numbers),
                "layers_there": list(one.there),
            }
            for one in selection.elsewhere
        ],
        "findings": findings_of(findings),
    }


def findings_of(findings: Sequence[RuleFinding]) -> list[dict[str, Any]]:
    """Return findings about a selection as plain data."""
    return [
        {key: asdict(one)[key] for key in ("id", "severity", "path", "rule", "remedy")}
        for one in findings
    ]


def _row_dict(row: Selected) -> dict[str, Any]:
    return {
        "name": row.matcher.name,
        "select": row.matcher.select,
        "precision": row.matcher.precision,
        "evaluation": row.matcher.outside,
        "takes": [module.path for module in row.taken],
        "in_low_precision": [module.path for module in row.taken if module.scheme is not None],
        "taken_before": [module.path for module in row.shadowed],
        "before_by": list(row.by),
        "read_no_recipe": [module.path for module in row.unread],
        "nearest": list(row.nearest),
    }


def _precision(matcher: Matcher, high: str) -> str:
    training, evaluation = (
        high if one == HIGH else one for one in (matcher.precision, matcher.outside)
    )
    return f"{training}; evaluation in {evaluation}" if evaluation is not None else str(training)


def _reach(modules: Sequence[Taken], mode: str, *, is_low: bool) -> str:
    """Return the modules by layer, those that stay in the run's dtype under a choice of FP8 or FP4 apart."""
    kept = _places([module for module in modules if is_low and module.scheme is None])
    acting = _places([module for module in modules if not is_low or module.scheme is not None])
    return (
        "; ".join(filter(None, (acting, kept and f"in {mode} all the same: {kept}"))) or "nothing"
    )


def _places(modules: Sequence[Taken]) -> str:
    """Return modules by layer: "linear_qkv of 1-24; mtp.layers.0.eh_proj"."""
    layers = grouped((one.module, str(one.number + 1)) for one in modules if one.number is not None)
    names = grouped((compact(numbers), name) for name, numbers in layers.items())
    others = grouped((one.layer, one.module) for one in modules if one.number is None)
    return "; ".join(
        f"{', '.join(held)} of {where}" for where, held in [*names.items(), *others.items()]
    )
