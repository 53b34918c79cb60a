"""The memory of a rank as a table and sentences. Equal pipeline stages share a line."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.memory_report import MEMORY_KINDS, MemoryReport, RankMemory
from bridge.plan.planned_run import WORKSPACE_BYTES
from bridge.plan.precision_plan import format_ranges
from bridge.report.table import Cell, Row, format_bytes, make_table

HOST_HEADING = "on the host"


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
    """Return the memory of a rank of each pipeline stage, with sentences about it below.

    Args:
        report: The counted bytes.
        activations: Recomputed parts -> the bytes of activations of each stage.
        gpu: The name of the GPU.
        memory_bytes: The memory of the GPU; None: not known.
        uncounted: Settings with which the GPU stores fewer bytes than are counted.
        missing: Parts of the run that are not counted.
        unread: Options that may change the count and are not read.
    """
    rows, byte_columns = _make_memory_rows(report)
    title = f"{report.label}, a rank of {report.layout}"
    sentences = _describe_counts(report)
    if report.largest.host:
        sentences.append(_describe_host_memory(report.largest))
    if activations:
        sentences.append(_describe_activations(activations, report.largest.stage))
    parts = [make_table(rows, title=title, numbers=byte_columns)]
    for sentence in sentences:
        parts.append(Text(f"  {sentence}"))
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
    """Return a row for each kind of pipeline stage, and the headings of the columns with bytes."""
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
        stages = [str(equal_rank.stage) for equal_rank in ranks]
        row: dict[str, Cell] = {"stage": format_ranges(stages)}
        for kind in kinds:
            row[kind] = format_bytes(rank.bytes_of[kind])
        row["total"] = Text(format_bytes(rank.total), style="bold")
        if report.largest.host:
            row[HOST_HEADING] = format_bytes(rank.host)
        rows.append(row)
    return rows, [*kinds, "total", HOST_HEADING]


def _describe_counts(report: MemoryReport) -> list[str]:
    """Return sentences about the parameters, the activations and the optimizer's step."""
    largest, workload = report.largest, report.workload
    lines = [
        f"{report.parameters:,} parameters, {largest.parameters:,} on the largest rank: "
        f"{largest.static / max(1, largest.parameters):.2f} bytes each without activations."
    ]
    if workload.seq_length:
        recompute = workload.recompute
        if workload.modules:
            recompute = f"{workload.recompute} ({', '.join(workload.modules)})"
        batch = f"{workload.micro_batch_size} x {workload.seq_length} tokens a micro-batch"
        lines.append(f"Activations: {batch}, recompute {recompute}.")
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


def _describe_host_memory(rank: RankMemory) -> str:
    """Return the bytes of each kind of tensor that a rank keeps on the host."""
    on_host = []
    for kind, count in rank.host_bytes_of.items():
        if count:
            on_host.append(f"{kind} {format_bytes(count)}")
    return f"On the host for a rank of stage {rank.stage}: {', '.join(on_host)}, all in FP32."


def _describe_activations(activations: Mapping[str, tuple[int, ...]], stage: int) -> str:
    """Return the bytes of a stage's activations for each choice of recomputed parts."""
    choices = []
    for name, counts in activations.items():
        choices.append(f"{name} {format_bytes(counts[stage])}")
    return f"Activations of stage {stage} by what is recomputed: {', '.join(choices)}."


def _format_fit_line(
    rank: RankMemory, gpu: str, memory_bytes: int, missing: Sequence[str], unread: Sequence[str]
) -> Text:
    """Return the line about the fullest rank and whether it fits, in the colour of the verdict."""
    least = ""
    if missing and not unread:
        least = "at least "
    available = f"the {format_bytes(memory_bytes)} of one {gpu}"
    needed = f"  {least}{format_bytes(rank.total)} of {available} on stage {rank.stage}"
    if unread:
        options = ", ".join(unread)
        sentence = f"{needed}: no verdict, since {options} may change what is counted."
        return Text(sentence, style="yellow")
    if rank.total > memory_bytes:
        return Text(f"{needed}: does not fit.", style="red")
    if missing:
        return Text(f"{needed}; not counted: {', '.join(missing)}.", style="yellow")
    free_bytes = memory_bytes - rank.total
    smallest, largest = WORKSPACE_BYTES
    if free_bytes < largest:
        sentence = (
            f"{needed}: may not fit. {format_bytes(free_bytes)} are left for what is not counted, "
            f"of which workspaces alone take {format_bytes(smallest)} to {format_bytes(largest)}."
        )
        return Text(sentence, style="yellow")
    return Text(f"{needed}: {format_bytes(free_bytes)} are left for what is not counted.")


def describe_fit(
    rank: RankMemory, memory_bytes: int | None, missing: Sequence[str], unread: Sequence[str]
) -> str:
    """Return the bytes of the fullest rank and whether they fit, as a short text.

    Args:
        rank: The fullest rank.
        memory_bytes: The memory of the GPU; None: not known.
        missing: Parts of the run that are not counted.
        unread: Options that may change the count and are not read.
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
    free_bytes = memory_bytes - rank.total
    if free_bytes < max(WORKSPACE_BYTES):
        return (
            f"{needed}: may not fit, with {format_bytes(free_bytes)} left for what is not counted"
        )
    return f"{needed}: fits"
