"""The difference of two precision plans as a table. Equal differences share a line."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from bridge.plan.precision_plan import PlanDifference, format_ranges
from bridge.report.plan.plan_table import colour_format, format_module_names
from bridge.report.table import LAYER_COUNT_NOTE, Row, make_table


def make_difference_table(
    before: str, after: str, differences: Sequence[PlanDifference]
) -> RenderableType:
    """Return the cells in which two plans differ as a table.

    Args:
        before: The label of the first plan.
        after: The label of the second plan.
        differences: The cells in which the second differs from the first.
    """
    if not differences:
        return Text(f"The plans of {before} and {after} are the same.")
    rows: list[Row] = []
    previous_place = ("", "")
    for difference, items in _fold_differences(differences).items():
        place = format_ranges(difference.layers), difference.module
        layers, modules = place
        if place == previous_place:
            layers, modules = "", ""
        cell = ", ".join(items)
        if difference.column != "format":
            cell = f"{cell}: {difference.column}"
        rows.append(
            {
                "layers": layers,
                "modules": modules,
                "what": cell,
                "before": colour_format(difference.before or "-"),
                "after": colour_format(difference.after or "-"),
            }
        )
        previous_place = place
    return make_table(rows, title=f"{before} -> {after}{LAYER_COUNT_NOTE}", wraps=[*rows[0]])


def _fold_differences(differences: Sequence[PlanDifference]) -> dict[PlanDifference, list[str]]:
    """Return joined differences, each with its items.

    First, modules whose items differ in the same way are joined. Then the items are joined. A key
    has the names of all its modules, and an empty item.
    """
    modules_of: dict[PlanDifference, list[str]] = {}
    for difference in differences:
        modules_of.setdefault(replace(difference, module=""), []).append(difference.module)
    items_of: dict[PlanDifference, list[str]] = {}
    for difference, modules in modules_of.items():
        names = format_module_names(modules)
        without_item = replace(difference, module=names, item="")
        items_of.setdefault(without_item, []).append(difference.item)
    return items_of
