"""Memory report for people: a line per pipeline stage, equal ones folded, and the activations under recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from bridge.plan.memory import KINDS
from bridge.plan.precision_plan import compact
from bridge.report.table import Column, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from bridge.plan.memory import MemoryReport, RankMemory

__all__ = ["memory_table", "size"]

UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def memory_table(report: MemoryReport, activations: Mapping[str, tuple[int, ...]]) -> RenderableType:
    """Return the report as something rich can print.

    Args:
        report: The memory of every stage.
        activations: Name of a kind of recomputation -> activations of each stage under it.
    """
    folded: dict[tuple[int, ...], list[RankMemory]] = {}
    for rank in report.ranks:
        folded.setdefault((*rank.bytes_of.values(), rank.total), []).append(rank)
    stages = list(folded.values())
    kinds = [kind for kind in KINDS if any(ranks[0].bytes_of[kind] for ranks in stages)]
    columns: list[Column | str] = ["stage", *(Column(heading=name, number=True) for name in (*kinds, "total"))]
    rows: list[tuple[str | Text, ...]] = []
    for ranks in stages:
        cells = [size(ranks[0].bytes_of[kind]) for kind in kinds]
        label = compact([str(rank.stage) for rank in ranks])
        rows.append((label, *cells, Text(size(ranks[0].total), style="bold")))
    parts = [table(columns, rows, title=f"{report.label}, a rank of {report.layout}")]
    parts += [Text(f"  {line}") for line in _lines(report)]
    stage = report.largest.stage
    if activations:
        each_kind = ", ".join(f"{name} {size(each[stage])}" for name, each in activations.items())
        parts.append(Text(f"  Activations of stage {stage} by what is recomputed: {each_kind}."))
    return Group(*parts, *(Text(f"  note: {note}", style="yellow") for note in report.notes))


def size(count: float) -> str:
    """Return bytes with three digits: "37.9 GiB"."""
    for unit, name in UNITS:
        if count >= unit:
            value = count / unit
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {name}"
    return f"{count:.0f} B"


def _lines(report: MemoryReport) -> list[str]:
    largest, load = report.largest, report.workload
    static = sum(count for kind, count in largest.bytes_of.items() if kind != "activations")
    lines = [
        f"{report.parameters:,} parameters, {largest.parameters:,} on the largest rank: "
        f"{static / max(1, largest.parameters):.2f} bytes each without activations."
    ]
    if load.seq_length:
        again = f"{load.recompute} ({', '.join(load.modules)})" if load.modules else load.recompute
        batch = f"{load.micro_batch_size} x {load.seq_length} tokens a micro-batch"
        lines.append(f"Activations: {batch}, recompute {again}.")
    if largest.step_bytes:
        lines.append(f"The optimizer's step makes {size(largest.step_bytes)} of FP32 gradients, after the activations.")
    return lines
