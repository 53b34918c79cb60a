"""The memory of a rank, and the changes with which a run fits, as tables and sentences.

Equal stages share a line.
"""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.fit import FitOption, FitReport
from bridge.plan.memory_report import MEMORY_KINDS, MemoryReport, RankMemory
from bridge.plan.planned_run import WORKSPACE_BYTES
from bridge.plan.precision_plan import format_ranges
from bridge.report.table import Cell, Row, make_table

HOST_HEADING = "on the host"
BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def make_memory_table(
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
    rows, columns = _make_memory_rows(report)
    title = f"{report.label}, a rank of {report.layout}"
    parts = [make_table(rows, title=title, numbers=columns)]
    for line in _describe_counts(report):
        parts.append(Text(f"  {line}"))
    stage = report.largest.stage
    if report.largest.host:
        on_host = []
        for kind, count in report.largest.host_bytes_of.items():
            if count:
                on_host.append(f"{kind} {format_bytes(count)}")
        text = f"  On the host for a rank of stage {stage}: {', '.join(on_host)}, all in FP32."
        parts.append(Text(text))
    if activations:
        each = []
        for name, counts in activations.items():
            each.append(f"{name} {format_bytes(counts[stage])}")
        recomputed = ", ".join(each)
        parts.append(Text(f"  Activations of stage {stage} by what is recomputed: {recomputed}."))
    if memory_bytes is not None:
        parts.append(_format_fit_line(report.largest, gpu, memory_bytes, missing, unread))
    elif missing:
        parts.append(Text(f"  Not counted: {', '.join(missing)}."))
    notes = list(report.notes)
    if uncounted:
        settings = " and ".join(uncounted)
        notes.insert(0, f"{settings} may keep less on the GPU than is counted.")
    for note in notes:
        parts.append(Text(f"  note: {note}", style="yellow"))
    return Group(*parts)


def _make_memory_rows(report: MemoryReport) -> tuple[list[Row], list[str]]:
    """Return a row per pipeline stage, equal stages as one, and the columns that hold bytes."""
    ranks_of: dict[tuple[float, ...], list[RankMemory]] = {}
    for rank in report.ranks:
        counts = (*rank.bytes_of.values(), rank.total, rank.host)
        ranks_of.setdefault(counts, []).append(rank)
    kinds = []
    for kind in MEMORY_KINDS:
        if any(rank.bytes_of[kind] for rank in report.ranks):
            kinds.append(kind)
    rows: list[Row] = []
    for ranks in ranks_of.values():
        rank = ranks[0]
        stages = []
        for each in ranks:
            stages.append(str(each.stage))
        row: dict[str, Cell] = {"stage": format_ranges(stages)}
        for kind in kinds:
            row[kind] = format_bytes(rank.bytes_of[kind])
        row["total"] = Text(format_bytes(rank.total), style="bold")
        if report.largest.host:
            row[HOST_HEADING] = format_bytes(rank.host)
        rows.append(row)
    return rows, [*kinds, "total", HOST_HEADING]


def describe_fit(
    rank: RankMemory, memory_bytes: int | None, missing: Sequence[str], unread: Sequence[str]
) -> str:
    """Return the bytes of the fullest rank and whether they fit, in a few words.

    The arguments are those of `make_memory_table`.
    """
    if memory_bytes is None:
        needed = f"{format_bytes(rank.total)} on stage {rank.stage}, no memory of a GPU is known"
    else:
        needed = f"{format_bytes(rank.total)} of {format_bytes(memory_bytes)} on stage {rank.stage}"
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
    if left < max(WORKSPACE_BYTES):
        return f"{needed}: may not fit, with {format_bytes(left)} left for what is not counted"
    return f"{needed}: fits"


def _format_fit_line(
    rank: RankMemory, gpu: str, memory_bytes: int, missing: Sequence[str], unread: Sequence[str]
) -> Text:
    least = ""
    if missing and not unread:
        least = "at least "
    available = f"the {format_bytes(memory_bytes)} of one {gpu}"
    needed = f"  {least}{format_bytes(rank.total)} of {available} on stage {rank.stage}"
    if unread:
        options = ", ".join(unread)
        text = f"{needed}: no verdict, since {options} may change what is counted."
        return Text(text, style="yellow")
    if rank.total > memory_bytes:
        return Text(f"{needed}: does not fit.", style="red")
    if missing:
        return Text(f"{needed}; not counted: {', '.join(missing)}.", style="yellow")
    left = memory_bytes - rank.total
    smallest, largest = WORKSPACE_BYTES
    if left < largest:
        text = (
            f"{needed}: may not fit. {format_bytes(left)} are left for what is not counted, of which "
            f"workspaces alone take {format_bytes(smallest)} to {format_bytes(largest)}."
        )
        return Text(text, style="yellow")
    return Text(f"{needed}: {format_bytes(left)} are left for what is not counted.")


def make_fit_table(report: FitReport, missing: Sequence[str] = ()) -> RenderableType:
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
                "change": Text(_format_changes(option)),
                "GPUs": str(option.ranks),
                "fullest rank": format_bytes(option.needed_bytes),
                "largest micro-batch": str(option.micro_batch_size),
            }
        )
    numbers = {*rows[0]} - {"change"}
    parts = [
        make_table(rows, title="Fits with, cheapest first", numbers=numbers, wraps=("change",))
    ]
    if report.declared_ranks is not None:
        declared = f"{report.declared_ranks} GPU"
        if report.declared_ranks > 1:
            declared += "s"
        parts.append(Text(f"  No layout of {declared} that was tried fits.", style="yellow"))
    usable = (
        f"It may fill {format_bytes(report.usable_bytes)} of {format_bytes(report.memory_bytes)}"
    )
    parts.append(Text(f"  {usable}; the rest is for what is not counted."))
    sizes = "Micro-batches are tried in powers of two."
    if report.global_batch_size is not None:
        batch = f"the global batch of {report.global_batch_size}"
        sizes = f"A micro-batch divides the samples that a replica has of {batch}."
    parts.append(Text(f"  {sizes}"))
    return Group(*parts, *notes)


def _format_changes(option: FitOption) -> str:
    if not option.changes:
        return "nothing: it fits as it is"
    words = []
    for name, value in option.changes:
        words.append(f"{name}={_format_value(value)}")
    return " ".join(words)


def _format_value(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def format_bytes(count: float) -> str:
    """Return bytes with three digits: "37.9 GiB"."""
    for unit, name in BYTE_UNITS:
        if count >= unit:
            amount = count / unit
            if amount >= 100:
                return f"{amount:.0f} {name}"
            if amount >= 10:
                return f"{amount:.1f} {name}"
            return f"{amount:.2f} {name}"
    return f"{count:.0f} B"


def _describe_counts(report: MemoryReport) -> list[str]:
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
            f"The optimizer's step makes {format_bytes(largest.step_bytes)} of FP32 gradients, "
            "after the activations"
        )
        counted = "the total counts the activations, which are more"
        if largest.step_bytes > largest.bytes_of["activations"]:
            counted = "the total counts them instead of the activations"
        lines.append(f"{step}: {counted}.")
    return lines
