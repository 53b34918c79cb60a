"""The dimensions of a rank's GEMMs as a table. Dimensions that the scheme refuses are marked."""

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.alignment import SMALL_GEMM_SOURCE, AlignmentReport, GemmShape
from bridge.report.table import LAYER_COUNT_NOTE, Row, make_table


def make_alignment_table(report: AlignmentReport) -> RenderableType:
    """Return a row for each GEMM, and sentences about misfits, small GEMMs and padding."""
    rows = _make_gemm_rows(report)
    title = f"{report.label}: linear layers on a rank, M tokens x N outputs x K inputs{LAYER_COUNT_NOTE}"
    parts = [make_table(rows, title=title, keys=2, numbers=("M", "N", "K"), wraps=("layers",))]
    for misfit in report.misfits:
        parts.append(Text(f"  does not fit: {misfit}", style="red"))
    if report.small:
        rules = "; ".join(report.small_rules)
        parts.append(Text(f"  small: {rules}; a rule of thumb ({SMALL_GEMM_SOURCE})."))
    multiple = report.pad.per_expert
    if multiple > 1 and any(gemm.expert for gemm in report.gemms):
        sentence = f"  Tokens of an expert come in multiples of {multiple} (~: under an even load)."
        parts.append(Text(sentence))
    parts.append(Text(f"  Padding: {' '.join(report.pad.derivation)}"))
    return Group(*parts)


def _make_gemm_rows(report: AlignmentReport) -> list[Row]:
    """Return the rows of the table.

    A module may compute in low precision in some layers and in high precision in other layers. Then
    only the low-precision rows are shown, since the scheme has no rule for high precision.
    """
    misfits = {(misfit.layers, misfit.module) for misfit in report.misfits}
    low_shapes = set()
    for gemm in report.gemms:
        if gemm.low:
            low_shapes.add((gemm.module, gemm.outputs, gemm.inputs))
    rows = []
    for gemm in report.gemms:
        is_shown_in_low = (gemm.module, gemm.outputs, gemm.inputs) in low_shapes
        if gemm.low or not is_shown_in_low:
            is_misfit = (gemm.layers, gemm.module) in misfits
            rows.append(_make_gemm_row(gemm, is_misfit=is_misfit))
    return rows


def _make_gemm_row(gemm: GemmShape, *, is_misfit: bool) -> Row:
    """Return the row of a GEMM. A token count with "~" is the mean of an expert."""
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
