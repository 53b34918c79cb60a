"""The modules that each row of `modules`, or each matcher of Megatron's file, selects.

They are shown as a table or as plain data.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.precision_plan import format_ranges
from bridge.precision.matchers import HIGH_PRECISION, Matcher
from bridge.report.findings import SEVERITY_STYLES
from bridge.report.table import LAYER_COUNT_NOTE, make_table
from bridge.rules.module_selection import ModuleSelection, PlacedModule, RowSelection
from bridge.rules.rule import RuleFinding


def make_module_table(
    selection: ModuleSelection,
    findings: Sequence[RuleFinding],
    *,
    layout: str,
    scheme: str,
    mode: str,
) -> RenderableType:
    """Return a row for each row or matcher, a row for the other modules, and the findings.

    Args:
        selection: The modules that each row or matcher selects.
        findings: The findings about the selection.
        layout: The parallel sizes that module names depend on.
        scheme: The scaling scheme of the run, or its mode if it has no scheme.
        mode: The mode of the run.
    """
    high = f"{mode} (the run's dtype)"
    rows = []
    for row in selection.rows:
        is_low = row.matcher.precision != HIGH_PRECISION
        rows.append(
            {
                "": row.matcher.name,
                "select": row.matcher.select,
                "precision": _format_precision(row.matcher, high),
                "takes": _format_selected(row.taken, mode, is_low=is_low),
                "linears": str(len(row.taken)),
            }
        )
    rows.append(
        {
            "": "",
            "select": "the rest",
            "precision": f"{scheme} (the run)",
            "takes": _format_selected(selection.unselected, mode, is_low=scheme != mode),
            "linears": str(len(selection.unselected)),
        }
    )
    source = "rows of mixed_precision.modules"
    if selection.is_foreign:
        source = "matchers of model.quant_recipe"
    title = f"{source}, {layout}{LAYER_COUNT_NOTE}"
    parts = [make_table(rows, title=title, numbers=("linears",), wraps=("select", "takes"))]
    for finding in findings:
        style = SEVERITY_STYLES[finding.severity]
        parts.append(Text(f"{finding.severity}: {finding}", style=style))
    return Group(*parts)


def selection_to_dict(
    selection: ModuleSelection, findings: Sequence[RuleFinding]
) -> dict[str, Any]:
    """Return the selection as plain data."""
    other_stages = []
    for reach in selection.other_stages:
        other_stages.append(
            {
                "row": reach.row.matcher.name,
                "pipeline": reach.stages,
                "layers": list(reach.row.numbers),
                "layers_there": list(reach.numbers),
            }
        )
    return {
        "is_foreign": selection.is_foreign,
        "rows": list(map(_row_to_dict, selection.rows)),
        "left": _list_paths(selection.unselected),
        "layers_elsewhere": other_stages,
        "findings": findings_to_dicts(findings),
    }


def findings_to_dicts(findings: Sequence[RuleFinding]) -> list[dict[str, Any]]:
    """Return findings about a selection as plain data."""
    rows = []
    for finding in findings:
        rows.append(
            {
                "id": finding.id,
                "severity": finding.severity,
                "path": finding.path,
                "rule": finding.rule,
                "remedy": finding.remedy,
            }
        )
    return rows


def _row_to_dict(row: RowSelection) -> dict[str, Any]:
    low = [module for module in row.taken if module.scheme is not None]
    return {
        "name": row.matcher.name,
        "select": row.matcher.select,
        "precision": row.matcher.precision,
        "evaluation": row.matcher.evaluation_label,
        "takes": _list_paths(row.taken),
        "in_low_precision": _list_paths(low),
        "taken_before": _list_paths(row.shadowed),
        "before_by": list(row.shadowed_by),
        "read_no_recipe": _list_paths(row.unread),
        "nearest": list(row.similar_names),
    }


def _list_paths(modules: Sequence[PlacedModule]) -> list[str]:
    return [module.path for module in modules]


def _format_precision(matcher: Matcher, high: str) -> str:
    """Return the precision of a row in training, and in evaluation if it differs.

    Args:
        matcher: The row or matcher.
        high: The text for the run's dtype.
    """
    training, evaluation = matcher.precision, matcher.evaluation_label
    if training == HIGH_PRECISION:
        training = high
    if evaluation is None:
        return str(training)
    if evaluation == HIGH_PRECISION:
        evaluation = high
    return f"{training}; evaluation in {evaluation}"


def _format_selected(modules: Sequence[PlacedModule], mode: str, *, is_low: bool) -> str:
    """Return the selected modules by layer.

    A row that states FP8 or FP4 may select modules that stay in the run's dtype. Such modules are
    named separately.

    Args:
        modules: The selected modules.
        mode: The mode of the run.
        is_low: Whether the row states FP8 or FP4.
    """
    kept, acting = [], []
    for module in modules:
        if is_low and module.scheme is None:
            kept.append(module)
        else:
            acting.append(module)
    parts = []
    if acting:
        parts.append(_format_modules(acting))
    if kept:
        parts.append(f"in {mode} all the same: {_format_modules(kept)}")
    return "; ".join(parts) or "nothing"


def _format_modules(modules: Sequence[PlacedModule]) -> str:
    """Return modules by layer: "linear_qkv of 1-24; mtp.layers.0.eh_proj"."""
    layers_of: dict[str, list[str]] = {}
    unnumbered: dict[str, list[str]] = {}
    for module in modules:
        if module.number is None:
            unnumbered.setdefault(module.layer, []).append(module.module)
        else:
            layers_of.setdefault(module.module, []).append(str(module.number + 1))
    names_of: dict[str, list[str]] = {}
    for name, layers in layers_of.items():
        names_of.setdefault(format_ranges(layers), []).append(name)
    parts = []
    for place, names in [*names_of.items(), *unnumbered.items()]:
        parts.append(f"{', '.join(names)} of {place}")
    return "; ".join(parts)
