"""An alignment report for people: the GEMMs of a rank, what does not fit, what is too small to gain, the padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bridge.plan.alignment import SMALL, SMALL_SOURCE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridge.plan.alignment import AlignmentReport, GemmShape

__all__ = ["align_table"]


def align_table(report: AlignmentReport) -> RenderableType:
    """Return the report as something rich can print."""
    title = Text(f"{report.label}: linear layers on a rank, M tokens x N outputs x K inputs")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("layers")
    table.add_column("module", no_wrap=True)
    for heading in ("M", "N", "K"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("runs in", no_wrap=True)
    table.add_column("fits")
    wrong = {(misfit.layers, misfit.module) for misfit in report.misfits}
    low = {(gemm.module, gemm.outputs, gemm.inputs) for gemm in report.gemms if gemm.low}
    for gemm in report.gemms:
        if not gemm.low and (gemm.module, gemm.outputs, gemm.inputs) in low:
            continue  # the same layer where it stays in high precision
        tokens = f"{'~' * gemm.expert}{gemm.tokens:.0f}" if gemm.tokens else "-"
        runs = report.scheme or "" if gemm.low else "high precision"
        cells = (gemm.layers, gemm.module, tokens, str(gemm.outputs), str(gemm.inputs), runs)
        table.add_row(*cells, _verdict(gemm, misfits=(gemm.layers, gemm.module) in wrong))
    parts: list[RenderableType] = [title, table]
    parts += [Text(f"  does not fit: {misfit}", style="red") for misfit in report.misfits]
    if report.small:
        rule = SMALL["tensor" if report.scheme in ("tensorwise", "delayed") else "block"]
        parts.append(Text(f"  small: {rule}; a rule of thumb ({SMALL_SOURCE})."))
    if report.pad.per_expert > 1 and any(gemm.expert for gemm in report.gemms):
        parts.append(
            Text(f"  Tokens of an expert come in multiples of {report.pad.per_expert} (~: under an even load).")
        )
    parts.append(Text(f"  Padding: {' '.join(report.pad.derivation)}"))
    return Group(*parts)


def _verdict(gemm: GemmShape, *, misfits: bool) -> Text:
    if misfits:
        return Text("no", style="red")
    if gemm.small:
        return Text("yes, small", style="yellow")
    return Text("yes" if gemm.low else "", style="green")
