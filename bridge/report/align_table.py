"""Alignment report for people: the GEMMs of a rank, the dimensions that do not fit or are small, the padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from bridge.plan.alignment import SMALL, SMALL_SOURCE
from bridge.report.table import Column, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridge.plan.alignment import AlignmentReport

__all__ = ["align_table"]

COLUMNS: tuple[Column | str, ...] = (
    Column(heading="layers", wraps=True),
    "module",
    *(Column(heading=name, number=True) for name in ("M", "N", "K")),
    "runs in",
    "fits",
)


def align_table(report: AlignmentReport) -> RenderableType:
    """Return the report as something rich can print."""
    wrong = {(misfit.layers, misfit.module) for misfit in report.misfits}
    low = {(gemm.module, gemm.outputs, gemm.inputs) for gemm in report.gemms if gemm.low}
    rows: list[tuple[str | Text, ...]] = []
    for gemm in report.gemms:
        if not gemm.low and (gemm.module, gemm.outputs, gemm.inputs) in low:
            continue  # the same layer where it stays in high precision
        tokens = f"{'~' * gemm.expert}{gemm.tokens:.0f}" if gemm.tokens else "-"
        runs = report.scheme or "" if gemm.low else "high precision"
        verdict = Text("yes" if gemm.low else "", style="green")
        if (gemm.layers, gemm.module) in wrong:
            verdict = Text("no", style="red")
        elif gemm.small:
            verdict = Text("yes, small", style="yellow")
        rows.append((gemm.layers, gemm.module, tokens, str(gemm.outputs), str(gemm.inputs), runs, verdict))
    title = f"{report.label}: linear layers on a rank, M tokens x N outputs x K inputs"
    parts = [table(COLUMNS, rows, title=title)]
    parts += [Text(f"  does not fit: {misfit}", style="red") for misfit in report.misfits]
    if report.small:
        rule = SMALL["tensor" if report.scheme in ("tensorwise", "delayed") else "block"]
        parts.append(Text(f"  small: {rule}; a rule of thumb ({SMALL_SOURCE})."))
    if report.pad.per_expert > 1 and any(gemm.expert for gemm in report.gemms):
        multiple = report.pad.per_expert
        parts.append(Text(f"  Tokens of an expert come in multiples of {multiple} (~: under an even load)."))
    parts.append(Text(f"  Padding: {' '.join(report.pad.derivation)}"))
    return Group(*parts)
