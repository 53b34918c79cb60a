"""A precision plan and what follows from it, for people.

The formats per layer, the GEMMs of a rank, and its memory are tables. Equal layers, modules and
stages share a line, and columns that are equal everywhere are named below the table.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.alignment import SMALL_SOURCE, AlignmentReport, GemmShape
from bridge.plan.fit import FitOption, FitReport
from bridge.plan.memory import KINDS, MemoryReport, RankMemory
from bridge.plan.precision_plan import (
    COLUMNS,
    LOW,
    PlanDifference,
    PlanModule,
    PrecisionPlan,
    compact,
)
from bridge.plan.rows import PlanRow
from bridge.plan.run import WORKSPACES
from bridge.report.table import NUMBERED, Cell, Row, table

HOST = "on the host"
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
COMMON = HEADINGS[5:]
"""Columns that are named below the table where they are the same everywhere."""
BROKEN = ("layers", "modules", "scales x, w, dy")
"""Columns that may be broken over lines."""
FORWARD = ("fprop", "forward", "lookup", "qk")
Line = dict[str, str]
"""Heading -> value, for all of `HEADINGS`."""


def plan_table(plan: PrecisionPlan) -> RenderableType:
    """Return the plan as something rich can print."""
    groups: list[tuple[str, list[tuple[str, Line]]]] = []
    lines: list[Line] = []
    for layers, modules in plan.folded():
        labels = [layer.label for layer in layers]
        named = []
        for module in modules:
            line = line_of(module)
            named.append((module.name, line))
            lines.append(line)
        groups.append((compact(labels), named))
    shown = []
    everywhere = []
    for heading in HEADINGS:
        shared = None
        if heading in COMMON:
            shared = _same(lines, heading)
        if shared is None:
            shown.append(heading)
        elif shared:
            everywhere.append(f"{heading} {shared}")
    sections = []
    for layers_text, named in groups:
        sections.append(_section(layers_text, named, shown))
    parts = [table(*sections, title=plan.label + NUMBERED, keys=2, wraps=BROKEN)]
    if everywhere:
        parts.append(Text(f"  Everywhere: {', '.join(everywhere)}."))
    parts.append(Text(f"  {_summary(plan)}"))
    for note in plan.settings.notes:
        parts.append(Text(f"  note: {note}", style="yellow"))
    return Group(*parts)


def _section(layers: str, named: Sequence[tuple[str, Line]], headings: Sequence[str]) -> list[Row]:
    """Return the rows of some equal layers; modules with equal lines share a row."""
    names_of: dict[tuple[str, ...], list[str]] = {}
    for name, line in named:
        names_of.setdefault(tuple(line.values()), []).append(name)
    rows: list[Row] = []
    for values, names in names_of.items():
        line = dict(zip(HEADINGS, values, strict=True))
        row: dict[str, Cell] = {"layers": layers, "modules": _modules(names)}
        if rows:
            row["layers"] = ""
        for heading in headings:
            row[heading] = _coloured(line[heading])
        rows.append(row)
    return rows


def difference_table(
    before: str, after: str, differences: Sequence[PlanDifference]
) -> RenderableType:
    """Return the cells in which two plans differ, equal ones folded."""
    if not differences:
        return Text(f"The plans of {before} and {after} are the same.")
    rows: list[Row] = []
    last = ("", "")
    for difference, items in _folded(differences).items():
        place = compact(difference.layers), difference.module
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
                "before": _coloured(difference.before or "-"),
                "after": _coloured(difference.after or "-"),
            }
        )
        last = place
    return table(rows, title=f"{before} -> {after}{NUMBERED}", wraps=[*rows[0]])


def _folded(differences: Sequence[PlanDifference]) -> dict[PlanDifference, list[str]]:
    """Return differences without an item -> the items that differ so, equal modules as one."""
    modules_of: dict[PlanDifference, list[str]] = {}
    for difference in differences:
        modules_of.setdefault(replace(difference, module=""), []).append(difference.module)
    items_of: dict[PlanDifference, list[str]] = {}
    for difference, modules in modules_of.items():
        without_item = replace(difference, module=_modules(modules), item="")
        items_of.setdefault(without_item, []).append(difference.item)
    return items_of


def plan_csv(plan: PrecisionPlan) -> str:
    """Return every row of the plan as CSV, one line per layer, module and GEMM or tensor."""
    out = io.StringIO()
    columns = ["layer", "stage", "chunk", "kind", "module", *COLUMNS]
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plan.rows())
    return out.getvalue()


def _summary(plan: PrecisionPlan) -> str:
    low, linears = plan.linears()
    schemes, settings = plan.schemes(), plan.settings
    if schemes and set(schemes) != {settings.scheme}:
        each = ", ".join(f"{count} in {scheme}" for scheme, count in schemes.items())
        return (
            f"{low} of {linears} linear layers compute in FP8 or FP4, chosen per module: "
            f"{each} scaling."
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


def line_of(module: PlanModule) -> Line:
    """Return a module's formats; empty where it has none."""
    formats, scales = {}, {}
    for row in module.rows:
        formats[row.item] = row.format
        scales[row.item] = row.scale
    forward = ""
    for item in FORWARD:
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


def _same(lines: Sequence[Line], heading: str) -> str | None:
    """Return the value that all lines with a weight have in a column; None where they differ."""
    values = {line[heading] for line in lines if line["weight"]}
    if len(values) != 1:
        return None
    return values.pop()


def _modules(names: Sequence[str]) -> str:
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


def _coloured(value: str) -> Text:
    if LOW & set(value.replace(",", " ").split()):
        return Text(value, style="green")
    if value.startswith(("fp32", "fp64")):
        return Text(value, style="yellow")
    return Text(value)


def align_table(report: AlignmentReport) -> RenderableType:
    """Return the report as something rich can print."""
    wrong = {(misfit.layers, misfit.module) for misfit in report.misfits}
    low = {(gemm.module, gemm.outputs, gemm.inputs) for gemm in report.gemms if gemm.low}
    rows = []
    for gemm in report.gemms:
        # Of a layer that stays in high precision in some places, the low ones are shown alone.
        if gemm.low or (gemm.module, gemm.outputs, gemm.inputs) not in low:
            rows.append(_gemm_row(gemm, is_misfit=(gemm.layers, gemm.module) in wrong))
    title = f"{report.label}: linear layers on a rank, M tokens x N outputs x K inputs{NUMBERED}"
    parts = [table(rows, title=title, keys=2, numbers=("M", "N", "K"), wraps=("layers",))]
    for misfit in report.misfits:
        parts.append(Text(f"  does not fit: {misfit}", style="red"))
    if report.small:
        rules = "; ".join(report.small_rules)
        parts.append(Text(f"  small: {rules}; a rule of thumb ({SMALL_SOURCE})."))
    multiple = report.pad.per_expert
    if multiple > 1 and any(gemm.expert for gemm in report.gemms):
        text = f"  Tokens of an expert come in multiples of {multiple} (~: under an even load)."
        parts.append(Text(text))
    parts.append(Text(f"  Padding: {' '.join(report.pad.derivation)}"))
    return Group(*parts)


def _gemm_row(gemm: GemmShape, *, is_misfit: bool) -> Row:
    fits = Text("")
    if is_misfit:
        fits = Text("no", style="red")
    elif gemm.small:
        fits = Text("yes, small", style="yellow")
    elif gemm.low:
        fits = Text("yes", style="green")
    tokens = outputs = "-"
    if gemm.tokens:
        tokens = f"{gemm.tokens:.0f}"
    if gemm.tokens and gemm.expert:
        tokens = f"~{tokens}"
    if gemm.outputs:
        outputs = str(gemm.outputs)
    return {
        "layers": gemm.layers,
        "module": gemm.module,
        "M": tokens,
        "N": outputs,
        "K": str(gemm.inputs),
        "runs in": gemm.scheme or "high precision",
        "fits": fits,
    }


UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def memory_table(
    report: MemoryReport,
    activations: Mapping[str, tuple[int, ...]],
    *,
    gpu: str = "",
    memory_bytes: int | None = None,
    uncounted: Sequence[str] = (),
    missing: Sequence[str] = (),
    unread: Sequence[str] = (),
) -> RenderableType:
    """Return the report as something rich can print.

    `uncounted` are settings that keep less on the GPU than is counted, `missing` parts that are
    counted nowhere, `unread` options that may change the count.
    """
    rows, columns = _memory_rows(report)
    title = f"{report.label}, a rank of {report.layout}"
    parts = [table(rows, title=title, numbers=columns)]
    for line in _lines(report):
        parts.append(Text(f"  {line}"))
    stage = report.largest.stage
    if report.largest.host:
        on_host = []
        for kind, count in report.largest.host_bytes_of.items():
            if count:
                on_host.append(f"{kind} {size(count)}")
        text = f"  On the host for a rank of stage {stage}: {', '.join(on_host)}, all in FP32."
        parts.append(Text(text))
    if activations:
        each = ", ".join(f"{name} {size(counts[stage])}" for name, counts in activations.items())
        parts.append(Text(f"  Activations of stage {stage} by what is recomputed: {each}."))
    if memory_bytes is not None:
        parts.append(_fits(report.largest, gpu, memory_bytes, missing, unread))
    elif missing:
        parts.append(Text(f"  Not counted: {', '.join(missing)}."))
    notes = list(report.notes)
    if uncounted:
        settings = " and ".join(uncounted)
        notes.insert(0, f"{settings} may keep less on the GPU than is counted.")
    for note in notes:
        parts.append(Text(f"  note: {note}", style="yellow"))
    return Group(*parts)


def _memory_rows(report: MemoryReport) -> tuple[list[Row], list[str]]:
    """Return a row per pipeline stage, equal stages as one, and the columns that hold bytes."""
    ranks_of: dict[tuple[float, ...], list[RankMemory]] = {}
    for rank in report.ranks:
        counts = (*rank.bytes_of.values(), rank.total, rank.host)
        ranks_of.setdefault(counts, []).append(rank)
    kinds = []
    for kind in KINDS:
        if any(rank.bytes_of[kind] for rank in report.ranks):
            kinds.append(kind)
    rows: list[Row] = []
    for ranks in ranks_of.values():
        rank = ranks[0]
        stages = [str(each.stage) for each in ranks]
        row: dict[str, Cell] = {"stage": compact(stages)}
        for kind in kinds:
            row[kind] = size(rank.bytes_of[kind])
        row["total"] = Text(size(rank.total), style="bold")
        if report.largest.host:
            row[HOST] = size(rank.host)
        rows.append(row)
    return rows, [*kinds, "total", HOST]


def fit_sentence(
    rank: RankMemory, memory_bytes: int | None, missing: Sequence[str], unread: Sequence[str]
) -> str:
    """Return the bytes of the fullest rank and whether they fit, in a few words.

    The arguments are those of `memory_table`.
    """
    if memory_bytes is None:
        needed = f"{size(rank.total)} on stage {rank.stage}, no memory of a GPU is known"
    else:
        needed = f"{size(rank.total)} of {size(memory_bytes)} on stage {rank.stage}"
    if unread:
        options = ", ".join(unread)
        return f"{needed}: cannot be judged, since {options} may change what is counted"
    if memory_bytes is not None and rank.total > memory_bytes:
        return f"{needed}: does not fit"
    if missing:
        return f"{needed}; not counted: {', '.join(missing)}"
    if memory_bytes is None:
        return needed
    left = memory_bytes - rank.total
    if left < max(WORKSPACES):
        return f"{needed}: may not fit, with {size(left)} left for what is not counted"
    return f"{needed}: fits"


def _fits(
    rank: RankMemory, gpu: str, memory_bytes: int, missing: Sequence[str], unread: Sequence[str]
) -> Text:
    least = ""
    if missing and not unread:
        least = "at least "
    available = f"the {size(memory_bytes)} of one {gpu}"
    needed = f"  {least}{size(rank.total)} of {available} on stage {rank.stage}"
    if unread:
        options = ", ".join(unread)
        text = f"{needed}: no verdict, since {options} may change what is counted."
        return Text(text, style="yellow")
    if rank.total > memory_bytes:
        return Text(f"{needed}: does not fit.", style="red")
    if missing:
        return Text(f"{needed}; not counted: {', '.join(missing)}.", style="yellow")
    left = memory_bytes - rank.total
    smallest, largest = WORKSPACES
    if left < largest:
        text = (
            f"{needed}: may not fit. {size(left)} are left for what is not counted, of which "
            f"workspaces alone take {size(smallest)} to {size(largest)}."
        )
        return Text(text, style="yellow")
    return Text(f"{needed}: {size(left)} are left for what is not counted.")


def fit_table(report: FitReport, missing: Sequence[str] = ()) -> RenderableType:
    """Return the changes with which a run fits, but for `missing` parts, as a table."""
    notes = []
    if report.untried:
        ended = (
            f"  {report.untried} layouts were not tried: "
            "the search over a model of so many layers ends early."
        )
        notes.append(Text(ended, style="yellow"))
    if missing:
        text = f"  Not counted, so that it may not fit: {', '.join(missing)}."
        notes.append(Text(text, style="yellow"))
    if not report.options:
        return Group(Text("  No layout that was tried fits.", style="red"), *notes)
    rows: list[Row] = []
    for option in report.options:
        rows.append(
            {
                "change": Text(_changes(option)),
                "GPUs": str(option.ranks),
                "fullest rank": size(option.needed_bytes),
                "largest micro-batch": str(option.micro_batch_size),
            }
        )
    numbers = {*rows[0]} - {"change"}
    parts = [table(rows, title="Fits with, cheapest first", numbers=numbers, wraps=("change",))]
    if report.declared_ranks is not None:
        declared = f"{report.declared_ranks} GPU"
        if report.declared_ranks > 1:
            declared += "s"
        parts.append(Text(f"  No layout of {declared} that was tried fits.", style="yellow"))
    usable = f"It may fill {size(report.usable_bytes)} of {size(report.memory_bytes)}"
    parts.append(Text(f"  {usable}; the rest is for what is not counted."))
    sizes = "Micro-batches are tried in powers of two."
    if report.global_batch_size is not None:
        batch = f"the global batch of {report.global_batch_size}"
        sizes = f"A micro-batch divides the samples that a replica has of {batch}."
    parts.append(Text(f"  {sizes}"))
    return Group(*parts, *notes)


def _changes(option: FitOption) -> str:
    if not option.changes:
        return "nothing: it fits as it is"
    return " ".join(f"{name}={_value(value)}" for name, value in option.changes)


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def size(count: float) -> str:
    """Return bytes with three digits: "37.9 GiB"."""
    for unit, name in UNITS:
        if count >= unit:
            amount = count / unit
            if amount >= 100:
                return f"{amount:.0f} {name}"
            if amount >= 10:
                return f"{amount:.1f} {name}"
            return f"{amount:.2f} {name}"
    return f"{count:.0f} B"


def _lines(report: MemoryReport) -> list[str]:
    largest, load = report.largest, report.workload
    lines = [
        f"{report.parameters:,} parameters, {largest.parameters:,} on the largest rank: "
        f"{largest.static / max(1, largest.parameters):.2f} bytes each without activations."
    ]
    if load.seq_length:
        again = load.recompute
        if load.modules:
            again = f"{load.recompute} ({', '.join(load.modules)})"
        batch = f"{load.micro_batch_size} x {load.seq_length} tokens a micro-batch"
        lines.append(f"Activations: {batch}, recompute {again}.")
    if largest.step_bytes:
        step = (
            f"The optimizer's step makes {size(largest.step_bytes)} of FP32 gradients, "
            "after the activations"
        )
        counted = "the total counts the activations, which are more"
        if largest.step_bytes > largest.bytes_of["activations"]:
            counted = "the total counts them instead of the activations"
        lines.append(f"{step}: {counted}.")
    return lines
