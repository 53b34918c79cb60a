"""A precision plan as a table: the formats of each layer.

Equal layers share a line, and so do modules with equal formats. A column with the same value in
every line is not printed. A sentence below the table has its value instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.plan_layers import LOW_FORMATS, PlanModule
from bridge.plan.plan_rows import PlanRow
from bridge.plan.precision_plan import PrecisionPlan, format_ranges
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
"""Columns that are not printed if all their values are equal."""
WRAPPED_HEADINGS = ("layers", "modules", "scales x, w, dy")
"""Columns whose cells may be broken over lines."""
FORWARD_ITEMS = ("fprop", "forward", "lookup", "qk")
"""Rows for the column "forward". The first of these rows that a module has is shown."""
Line = dict[str, str]
"""Heading -> value, for all of `HEADINGS`. Empty: the module does not have such a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerGroup:
    """Equal layers of a plan."""

    labels: str
    """The layers as ranges: "1-12"."""
    lines: Sequence[tuple[str, Line]]
    """Each module of the layers with its line."""


def make_plan_table(plan: PrecisionPlan) -> RenderableType:
    """Return the plan as a table, with the values that all lines share and the notes below it."""
    groups = _group_layers(plan)
    printed, shared = _split_headings(groups)
    sections = [_make_section(group, printed) for group in groups]
    title = plan.label + LAYER_COUNT_NOTE
    parts = [make_table(*sections, title=title, keys=2, wraps=WRAPPED_HEADINGS)]
    if shared:
        parts.append(Text(f"  Everywhere: {', '.join(shared)}."))
    parts.append(Text(f"  {_format_summary(plan)}"))
    for note in plan.settings.notes:
        parts.append(Text(f"  note: {note}", style="yellow"))
    return Group(*parts)


def _group_layers(plan: PrecisionPlan) -> list[_LayerGroup]:
    """Return the groups of equal layers, in the order of the forward pass."""
    groups = []
    for layers, modules in plan.folded():
        labels = format_ranges([layer.label for layer in layers])
        lines = [(module.name, make_line(module)) for module in modules]
        groups.append(_LayerGroup(labels=labels, lines=lines))
    return groups


def _split_headings(groups: Sequence[_LayerGroup]) -> tuple[list[str], list[str]]:
    """Return the headings of the printed columns, and "heading value" of each shared value.

    A shared value that is empty is in neither list.
    """
    lines: list[Line] = []
    for group in groups:
        lines.extend(line for _, line in group.lines)
    printed, shared = [], []
    for heading in HEADINGS:
        value = None
        if heading in SUMMARY_HEADINGS:
            value = _find_common_value(lines, heading)
        if value is None:
            printed.append(heading)
        elif value:
            shared.append(f"{heading} {value}")
    return printed, shared


def _make_section(group: _LayerGroup, headings: Sequence[str]) -> list[Row]:
    """Return the rows of a group of layers. Modules with equal lines share a row.

    Only the first row names the layers.
    """
    names_of: dict[tuple[str, ...], list[str]] = {}
    for name, line in group.lines:
        names_of.setdefault(tuple(line.values()), []).append(name)
    rows: list[Row] = []
    for values, names in names_of.items():
        line = dict(zip(HEADINGS, values, strict=True))
        row: dict[str, Cell] = {"layers": group.labels, "modules": format_module_names(names)}
        if rows:
            row["layers"] = ""
        for heading in headings:
            row[heading] = colour_format(line[heading])
        rows.append(row)
    return rows


def _format_summary(plan: PrecisionPlan) -> str:
    """Return the sentence that counts the linear layers in FP8 or FP4."""
    low, linears = plan.linears()
    schemes, settings = plan.schemes(), plan.settings
    is_chosen_per_module = bool(schemes) and set(schemes) != {settings.scheme}
    if is_chosen_per_module:
        counts = ", ".join(f"{count} in {scheme}" for scheme, count in schemes.items())
        return (
            f"{low} of {linears} linear layers compute in FP8 or FP4, chosen per module: "
            f"{counts} scaling."
        )
    if settings.family is None:
        return (
            f"None of the {linears} linear layers computes in FP8 or FP4: "
            f"the precision is {settings.mode}."
        )
    family = settings.family.upper()
    if low:
        return f"{low} of {linears} linear layers compute in {family} ({settings.scheme} scaling)."
    sentence = (
        f"NONE of the {linears} linear layers computes in {family}, which the recipe asks for"
    )
    if settings.reaches_layers:
        return f"{sentence}: a run refuses this."
    return f"{sentence}."


def make_line(module: PlanModule) -> Line:
    """Return the formats of a module by heading."""
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
    """Return the value of a column in all lines with a weight; None if the values differ."""
    values = {line[heading] for line in lines if line["weight"]}
    if len(values) != 1:
        return None
    return values.pop()


def format_module_names(names: Sequence[str]) -> str:
    """Return module names with a shared prefix written once: "experts.linear_fc1, linear_fc2"."""
    short: list[str] = []
    previous_prefix = ""
    for name in names:
        prefix, _, last = name.rpartition(".")
        if prefix and prefix == previous_prefix:
            short.append(last)
        else:
            short.append(name)
        previous_prefix = prefix
    return ", ".join(short)


def colour_format(value: str) -> Text:
    """Return a format in its colour: FP8 and FP4 green, FP32 and FP64 yellow."""
    if LOW_FORMATS & set(value.replace(",", " ").split()):
        return Text(value, style="green")
    if value.startswith(("fp32", "fp64")):
        return Text(value, style="yellow")
    return Text(value)
