"""A precision plan and what follows from it, for people: the formats per layer, the GEMMs of a rank, its memory.

Equal layers, modules and stages share a line, and columns that are equal everywhere are named below the table.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.alignment import SMALL_SOURCE, AlignmentReport
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
from bridge.precision.grouping import grouped
from bridge.report.table import NUMBERED, Row, table

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
    groups = [
        (layers, [(module.name, line_of(module)) for module in modules])
        for layers, modules in plan.folded()
    ]
    lines = [line for _, named in groups for _, line in named]
    shared = {heading: _same(lines, heading) for heading in COMMON}
    kept = [heading for heading in HEADINGS if shared.get(heading) is None]
    sections: list[list[Row]] = []
    for layers, named in groups:
        rows: list[Row] = []
        for values, names in grouped((tuple(line.values()), name) for name, line in named).items():
            label = "" if rows else compact([layer.label for layer in layers])
            cells = {
                heading: _coloured(value) for heading, value in zip(HEADINGS, values, strict=True)
            }
            rows.append(
                {"layers": label, "modules": _modules(names)}
                | {heading: cells[heading] for heading in kept}
            )
        sections.append(rows)
    parts = [table(*sections, title=plan.label + NUMBERED, keys=2, wraps=BROKEN)]
    everywhere = [f"{heading} {value}" for heading, value in shared.items() if value]
    if everywhere:
        parts.append(Text(f"  Everywhere: {', '.join(everywhere)}."))
    parts.append(Text(f"  {_summary(plan)}"))
    parts.extend(Text(f"  note: {note}", style="yellow") for note in plan.settings.notes)
    return Group(*parts)


def difference_table(
    before: str, after: str, differences: Sequence[PlanDifference]
) -> RenderableType:
    """Return the cells in which two plans differ, equal ones folded."""
    if not differences:
        return Text(f"The plans of {before} and {after} are the same.")
    modules_of = grouped((replace(one, module=""), one.module) for one in differences)
    items_of = grouped(
        (replace(one, module=_modules(modules), item=""), one.item)
        for one, modules in modules_of.items()
    )
    rows: list[Row] = []
    last = ("", "")
    for one, items in items_of.items():
        place = compact(one.layers), one.module
        named = dict(zip(("layers", "modules"), place if place != last else ("", ""), strict=True))
        what = ", ".join(items) + ("" if one.column == "format" else f": {one.column}")
        rows.append(
            {
                **named,
                "what": what,
                "before": _coloured(one.before or "-"),
                "after": _coloured(one.after or "-"),
            }
        )
        last = place
    return table(rows, title=f"{before} -> {after}{NUMBERED}", wraps=[*rows[0]])


def plan_csv(plan: PrecisionPlan) -> str:
    """Return every row of the plan as CSV, one line per layer, module and GEMM or tensor."""
    out = io.StringIO()
    writer = csv.DictWriter(
        out, ["layer", "stage", "chunk", "kind", "module", *COLUMNS], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(plan.rows())
    return out.getvalue()


def _summary(plan: PrecisionPlan) -> str:
    low, linears = plan.linears()
    schemes = plan.schemes()
    if schemes and set(schemes) != {plan.settings.scheme}:
        each = ", ".join(f"{count} in {scheme}" for scheme, count in schemes.items())
        return f"{low} of {linears} linear layers compute in FP8 or FP4, chosen per module: {each} scaling."
    if plan.settings.family is None:
        return f"None of the {linears} linear layers computes in FP8 or FP4: the precision is {plan.settings.mode}."
    name = (plan.settings.family or "").upper()
    if not low:
        end = ": a run refuses this" if plan.settings.reaches_layers else ""
        return f"NONE of the {linears} linear layers computes in {name}, which the recipe asks for{end}."
    return f"{low} of {linears} linear layers compute in {name} ({plan.settings.scheme} scaling)."


def line_of(module: PlanModule) -> Line:
    """Return a module's formats; empty where it has none."""
    formats = {row.item: row.format for row in module.rows}
    scales = {row.item: row.scale for row in module.rows}
    forward = next((formats[item] for item in FORWARD if item in formats), "")
    backward = formats.get("backward", "")
    tiles = [scales.get(name, "") for name in ("input", "weight", "grad_output")]
    scale = tiles[0] if len(set(tiles)) == 1 else ", ".join(tiles)
    weight = module.row("weight") or PlanRow(item="weight")
    kept = (weight.storage, weight.master, weight.gradient, weight.reduction, weight.checkpoint)
    values = (forward, formats.get("dgrad", backward), formats.get("wgrad", ""), scale, *kept)
    return dict(zip(HEADINGS, values, strict=True))


def _same(lines: Sequence[Line], heading: str) -> str | None:
    values = {line[heading] for line in lines if line["weight"]}
    return values.pop() if len(values) == 1 else None


def _modules(names: Sequence[str]) -> str:
    """Return names with what they share written once: "experts.linear_fc1, linear_fc2"."""
    short: list[str] = []
    before = ""
    for name in names:
        prefix, _, last = name.rpartition(".")
        short.append(last if prefix and prefix == before else name)
        before = prefix
    return ", ".join(short)


def _coloured(value: str) -> Text:
    if LOW & set(value.replace(",", " ").split()):
        return Text(value, style="green")
    return Text(value, style="yellow" if value.startswith(("fp32", "fp64")) else "")


def align_table(report: AlignmentReport) -> RenderableType:
    """Return the report as something rich can print."""
    wrong = {(misfit.layers, misfit.module) for misfit in report.misfits}
    low = {(gemm.module, gemm.outputs, gemm.inputs) for gemm in report.gemms if gemm.low}
    rows: list[Row] = []
    for gemm in report.gemms:
        if not gemm.low and (gemm.module, gemm.outputs, gemm.inputs) in low:
            continue  # the same layer where it stays in high precision
        verdict = Text("yes" if gemm.low else "", style="green")
        if (gemm.layers, gemm.module) in wrong:
            verdict = Text("no", style="red")
        elif gemm.small:
            verdict = Text("yes, small", style="yellow")
        rows.append(
            {
                "layers": gemm.layers,
                "module": gemm.module,
                "M": f"{'~' * gemm.expert}{gemm.tokens:.0f}" if gemm.tokens else "-",
                "N": str(gemm.outputs) if gemm.outputs else "-",
                "K": str(gemm.inputs),
                "runs in": gemm.scheme or "high precision",
                "fits": verdict,
            }
        )
    title = f"{report.label}: linear layers on a rank, M tokens x N outputs x K inputs{NUMBERED}"
    parts = [table(rows, title=title, keys=2, numbers=("M", "N", "K"), wraps=("layers",))]
    parts += [Text(f"  does not fit: {misfit}", style="red") for misfit in report.misfits]
    if report.small:
        parts.append(
            Text(f"  small: {'; '.join(report.small_rules)}; a rule of thumb ({SMALL_SOURCE}).")
        )
    if report.pad.per_expert > 1 and any(gemm.expert for gemm in report.gemms):
        text = f"  Tokens of an expert come in multiples of {report.pad.per_expert} (~: under an even load)."
        parts.append(Text(text))
    parts.append(Text(f"  Padding: {' '.join(report.pad.derivation)}"))
    return Group(*parts)


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
    stages = grouped(
        ((*rank.bytes_of.values(), rank.total, rank.host), rank) for rank in report.ranks
    ).values()
    kinds = [kind for kind in KINDS if any(ranks[0].bytes_of[kind] for ranks in stages)]
    rows: list[Row] = [
        {
            "stage": compact([str(rank.stage) for rank in ranks]),
            **{kind: size(ranks[0].bytes_of[kind]) for kind in kinds},
            "total": Text(size(ranks[0].total), style="bold"),
            **({HOST: size(ranks[0].host)} if report.largest.host else {}),
        }
        for ranks in stages
    ]
    title = f"{report.label}, a rank of {report.layout}"
    parts = [table(rows, title=title, numbers=(*kinds, "total", HOST))]
    parts += [Text(f"  {line}") for line in _lines(report)]
    stage = report.largest.stage
    if report.largest.host:
        on_host = ", ".join(
            f"{kind} {size(count)}" for kind, count in report.largest.host_bytes_of.items() if count
        )
        parts.append(Text(f"  On the host for a rank of stage {stage}: {on_host}, all in FP32."))
    if activations:
        each_kind = ", ".join(f"{name} {size(each[stage])}" for name, each in activations.items())
        parts.append(Text(f"  Activations of stage {stage} by what is recomputed: {each_kind}."))
    if memory_bytes is not None:
        parts.append(_fits(report.largest, gpu, memory_bytes, missing, unread))
    elif missing:
        parts.append(Text(f"  Not counted: {', '.join(missing)}."))
    notes = (
        [f"{' and '.join(uncounted)} may keep less on the GPU than is counted."]
        if uncounted
        else []
    )
    return Group(
        *parts, *(Text(f"  note: {note}", style="yellow") for note in [*notes, *report.notes])
    )


def fit_sentence(
    rank: RankMemory, memory_bytes: int | None, missing: Sequence[str], unread: Sequence[str]
) -> str:
    """Return the bytes of the fullest rank and whether they fit, in a few words; arguments as of `memory_table`."""
    needed = f"{size(rank.total)} on stage {rank.stage}"
    if memory_bytes is None:
        needed += ", no memory of a GPU is known"
    else:
        needed = f"{size(rank.total)} of {size(memory_bytes)} on stage {rank.stage}"
    if unread:
        return f"{needed}: cannot be judged, since {', '.join(unread)} may change what is counted"
    if memory_bytes is not None and rank.total > memory_bytes:
        return f"{needed}: does not fit"
    if missing:
        return f"{needed}; not counted: {', '.join(missing)}"
    return needed if memory_bytes is None else f"{needed}: fits"


def _fits(
    rank: RankMemory, gpu: str, memory_bytes: int, missing: Sequence[str], unread: Sequence[str]
) -> Text:
    least = "at least " if missing and not unread else ""
    needed = f"  {least}{size(rank.total)} of the {size(memory_bytes)} of one {gpu} on stage {rank.stage}"
    if unread:
        return Text(
            f"{needed}: no verdict, since {', '.join(unread)} may change what is counted.",
            style="yellow",
        )
    if rank.total > memory_bytes:
        return Text(f"{needed}: does not fit.", style="red")
    if missing:
        return Text(f"{needed}; not counted: {', '.join(missing)}.", style="yellow")
    return Text(f"{needed}: {size(memory_bytes - rank.total)} are left for what is not counted.")


def fit_table(report: FitReport, missing: Sequence[str] = ()) -> RenderableType:
    """Return the changes with which a run fits, but for `missing` parts, as something rich can print."""
    ended = f"  {report.untried} layouts were not tried: the search over a model of so many layers ends early."
    notes = [Text(ended, style="yellow")] if report.untried else []
    if missing:
        notes.append(
            Text(f"  Not counted, so that it may not fit: {', '.join(missing)}.", style="yellow")
        )
    if not report.options:
        return Group(Text("  No layout that was tried fits.", style="red"), *notes)
    rows: list[Row] = [
        {
            "change": Text(_changes(option)),
            "GPUs": str(option.ranks),
            "fullest rank": size(option.needed_bytes),
            "largest micro-batch": str(option.micro_batch_size),
        }
        for option in report.options
    ]
    usable = f"It may fill {size(report.usable_bytes)} of {size(report.memory_bytes)}"
    parts = [
        table(
            rows,
            title="Fits with, cheapest first",
            numbers={*rows[0]} - {"change"},
            wraps=("change",),
        )
    ]
    if report.declared_ranks is not None:
        declared = f"{report.declared_ranks} GPU{'s' * (report.declared_ranks > 1)}"
        parts.append(Text(f"  No layout of {declared} that was tried fits.", style="yellow"))
    sizes = "Micro-batches are tried in powers of two."
    if report.global_batch_size is not None:
        batch = f"the global batch of {report.global_batch_size}"
        sizes = f"A micro-batch divides the samples that a replica has of {batch}."
    return Group(
        *parts,
        Text(f"  {usable}; the rest is for what is not counted."),
        Text(f"  {sizes}"),
        *notes,
    )


def _changes(option: FitOption) -> str:
    return (
        " ".join(f"{name}={_value(value)}" for name, value in option.changes)
        or "nothing: it fits as it is"
    )


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def size(count: float) -> str:
    """Return bytes with three digits: "37.9 GiB"."""
    for unit, name in UNITS:
        if count >= unit:
            digits = sum(count / unit < limit for limit in (100, 10))
            return f"{count / unit:.{digits}f} {name}"
    return f"{count:.0f} B"


def _lines(report: MemoryReport) -> list[str]:
    largest, load = report.largest, report.workload
    lines = [
        f"{report.parameters:,} parameters, {largest.parameters:,} on the largest rank: "
        f"{largest.static / max(1, largest.parameters):.2f} bytes each without activations."
    ]
    if load.seq_length:
        again = f"{load.recompute} ({', '.join(load.modules)})" if load.modules else load.recompute
        batch = f"{load.micro_batch_size} x {load.seq_length} tokens a micro-batch"
        lines.append(f"Activations: {batch}, recompute {again}.")
    if largest.step_bytes:
        step = f"The optimizer's step makes {size(largest.step_bytes)} of FP32 gradients, after the activations"
        counted = "the total counts the activations, which are more"
        if largest.step_bytes > largest.bytes_of["activations"]:
            counted = "the total counts them instead of the activations"
        lines.append(f"{step}: {counted}.")
    return lines
