"""A precision plan as a table: the formats per layer, and the cells in which two plans differ.

Equal layers and modules share a line, and columns that are equal everywhere are named below the
table.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.plan_rows import PlanRow
from bridge.plan.precision_plan import (
    LOW_FORMATS,
    ROW_COLUMNS,
    PlanDifference,
    PlanModule,
    PrecisionPlan,
    format_ranges,
)
from bridge.report.table import LAYER_COUNT_NOTE, Cell, Row, make_table

HEADINGS = (
    "forward",
    "dgrad",
    "wgrad",
    "scales x, w, dy",
    "weight",
    "master",
    "gradient",
    "reduced",
    "checkpoint",
)
SUMMARY_HEADINGS = HEADINGS[5:]
"""Columns that are named below the table where they are the same everywhere."""
WRAPPED_HEADINGS = ("layers", "modules", "scales x, w, dy")
"""Columns that may be broken over lines."""
FORWARD_ITEMS = ("fprop", "forward", "lookup", "qk")
Line = dict[str, str]
"""Heading -> value, for all of `HEADINGS`."""


def make_plan_table(plan: PrecisionPlan) -> RenderableType:
    """Return the plan as something rich can print."""
    groups: list[tuple[str, list[tuple[str, Line]]]] = []
    lines: list[Line] = []
    for layers, modules in plan.folded():
        labels = [layer.label for layer in layers]
        named = []
        for module in modules:
            line = make_line(module)
            named.append((module.name, line))
            lines.append(line)
        groups.append((format_ranges(labels), named))
    shown = []
    everywhere = []
    for heading in HEADINGS:
        shared = None
        if heading in SUMMARY_HEADINGS:
            shared = _find_common_value(lines, heading)
        if shared is None:
            shown.append(heading)
        elif shared:
            everywhere.append(f"{heading} {shared}")
    sections = []
    for layers_text, named in groups:
        sections.append(_make_section(layers_text, named, shown))
    parts = [
        make_table(*sections, title=plan.label + LAYER_COUNT_NOTE, keys=2, wraps=WRAPPED_HEADINGS)
    ]
    if everywhere:
        parts.append(Text(f"  Everywhere: {', '.join(everywhere)}."))
    parts.append(Text(f"  {_format_summary(plan)}"))
    for note in plan.settings.notes:
        parts.append(Text(f"  note: {note}", style="yellow"))
    return Group(*parts)


def _make_section(
    layers: str, named: Sequence[tuple[str, Line]], headings: Sequence[str]
) -> list[Row]:
    """Return the rows of some equal layers; modules with equal lines share a row."""
    names_of: dict[tuple[str, ...], list[str]] = {}
    for name, line in named:
        names_of.setdefault(tuple(line.values()), []).append(name)
    rows: list[Row] = []
    for values, names in names_of.items():
        line = dict(zip(HEADINGS, values, strict=True))
        row: dict[str, Cell] = {"layers": layers, "modules": _format_names(names)}
        if rows:
            row["layers"] = ""
        for heading in headings:
            row[heading] = _colour_value(line[heading])
        rows.append(row)
    return rows


def make_difference_table(
    before: str, after: str, differences: Sequence[PlanDifference]
) -> RenderableType:
    """Return the cells in which two plans differ, equal ones folded."""
    if not differences:
        return Text(f"The plans of {before} and {after} are the same.")
    rows: list[Row] = []
    last = ("", "")
    for difference, items in _fold_differences(differences).items():
        place = format_ranges(difference.layers), difference.module
        layers, modules = place
        if place == last:
            layers, modules = "", ""
        what = ", ".join(items)
        if difference.column != "format":
            what += f": {difference.column}"
        rows.append(
            {
                "layers": layers,
                "modules": modules,
                "what": what,
                "before": _colour_value(difference.before or "-"),
                "after": _colour_value(difference.after or "-"),
            }
        )
        last = place
    return make_table(rows, title=f"{before} -> {after}{LAYER_COUNT_NOTE}", wraps=[*rows[0]])


def _fold_differences(differences: Sequence[PlanDifference]) -> dict[PlanDifference, list[str]]:
    """Return differences without an item -> the items that differ so, equal modules as one."""
    modules_of: dict[PlanDifference, list[str]] = {}
    for difference in differences:
        modules_of.setdefault(replace(difference, module=""), []).append(difference.module)
    items_of: dict[PlanDifference, list[str]] = {}
    for difference, modules in modules_of.items():
        without_item = replace(difference, module=_format_names(modules), item="")
        items_of.setdefault(without_item, []).append(difference.item)
    return items_of


def format_plan_csv(plan: PrecisionPlan) -> str:
    """Return every row of the plan as CSV, one line per layer, module and GEMM or tensor."""
    out = io.StringIO()
    columns = ["layer", "stage", "chunk", "kind", "module", *ROW_COLUMNS]
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plan.rows())
    return out.getvalue()


def _format_summary(plan: PrecisionPlan) -> str:
    low, linears = plan.linears()
    schemes, settings = plan.schemes(), plan.settings
    if schemes and set(schemes) != {settings.scheme}:
        counts = []
        for scheme, count in schemes.items():
            counts.append(f"{count} in {scheme}")
        return (
            f"{low} of {linears} linear layers compute in FP8 or FP4, chosen per module: "
            f"{', '.join(counts)} scaling."
        )
    if settings.family is None:
        return (
            f"None of the {linears} linear layers computes in FP8 or FP4: "
            f"the precision is {settings.mode}."
        )
    name = settings.family.upper()
    if low:
        return f"{low} of {linears} linear layers compute in {name} ({settings.scheme} scaling)."
    end = ""
    if settings.reaches_layers:
        end = ": a run refuses this"
    return (
        f"NONE of the {linears} linear layers computes in {name}, which the recipe asks for{end}."
    )


def make_line(module: PlanModule) -> Line:
    """Return a module's formats; empty where it has none."""
    formats, scales = {}, {}
    for row in module.rows:
        formats[row.item] = row.format
        scales[row.item] = row.scale
    forward = ""
    for item in FORWARD_ITEMS:
        if item in formats:
            forward = formats[item]
            break
    tiles = (scales.get("input", ""), scales.get("weight", ""), scales.get("grad_output", ""))
    scale = ", ".join(tiles)
    if len(set(tiles)) == 1:
        scale = tiles[0]
    weight = module.row("weight") or PlanRow(item="weight")
    return {
        "forward": forward,
        "dgrad": formats.get("dgrad", formats.get("backward", "")),
        "wgrad": formats.get("wgrad", ""),
        "scales x, w, dy": scale,
        "weight": weight.storage,
        "master": weight.master,
        "gradient": weight.gradient,
        "reduced": weight.reduction,
        "checkpoint": weight.checkpoint,
    }


def _find_common_value(lines: Sequence[Line], heading: str) -> str | None:
    """Return the value that all lines with a weight have in a column; None where they differ."""
    values = {line[heading] for line in lines if line["weight"]}
    if len(values) != 1:
        return None
    return values.pop()


def _format_names(names: Sequence[str]) -> str:
    """Return names with what they share written once: "experts.linear_fc1, linear_fc2"."""
    short: list[str] = []
    before = ""
    for name in names:
        prefix, _, last = name.rpartition(".")
        if prefix and prefix == before:
            short.append(last)
        else:
            short.append(name)
        before = prefix
    return ", ".join(short)


def _colour_value(value: str) -> Text:
    if LOW_FORMATS & set(value.replace(",", " ").split()):
        return Text(value, style="green")
    if value.startswith(("fp32", "fp64")):
        return Text(value, style="yellow")
    return Text(value)
