"""The comparison of one batch in two precisions: a table, sentences and plain data."""

import dataclasses
from typing import Any

from rich.console import RenderableType

from bridge.report.table import LAYER_COUNT_NOTE, make_table
from bridge.runtime.audit.quantisation import replace_non_finite
from bridge.runtime.compare.band import Band


def make_band_table(band: Band, *, title: str) -> RenderableType:
    """Return a row for each GEMM, with its error and its bound."""
    rows = []
    for row in band.rows:
        verdict = ""
        if not row.is_inside:
            verdict = "OUTSIDE"
        rows.append(
            {
                "layer": str(row.layer),
                "module": row.module,
                "GEMM": row.gemm,
                "error": f"{row.error:.2%}",
                "bound": f"{row.bound:.2%}",
                "": verdict,
                "shuffled": f"{row.control:.2%}",
            }
        )
    return make_table(
        rows, title=title + LAYER_COUNT_NOTE, numbers=("layer", "error", "bound", "shuffled")
    )


def describe_band(band: Band) -> str:
    """Return the verdict, the negative control and the routing of experts as sentences."""
    sentences = [_describe_verdict(band)]
    noticed = len(band.rows) - len(band.blind)
    sentences.append(
        f"Negative control: a shuffled batch is outside in {noticed} of {len(band.rows)} GEMMs."
    )
    if band.rerouted is not None:
        sentences.append(
            "Not compared: the choice of experts. Both runs take that of the first; by itself "
            f"the second would send {band.rerouted:.2%} of the tokens elsewhere."
        )
    return " ".join(sentences)


def _describe_verdict(band: Band) -> str:
    """Return whether roundings explain all errors, and the first error that they do not explain."""
    first = band.first_outside
    if first is not None:
        return (
            "Outside. The first result that leaves its band is the "
            f"{first.gemm} of layer {first.layer}, {first.module}: "
            f"error {first.error:.2%}, bound {first.bound:.2%}."
        )
    if band.verdict == "inside":
        return f"Inside. The errors of all {len(band.rows)} GEMMs are those of roundings."
    return (
        "Cannot tell. Every error is inside, but the bounds of formats this coarse do not "
        "notice another batch."
    )


def band_to_dict(band: Band) -> dict[str, Any]:
    """Return the check as plain data."""
    rows = []
    for row in band.rows:
        rows.append(replace_non_finite({**dataclasses.asdict(row), "inside": row.is_inside}))
    first_outside = None
    if band.first_outside is not None:
        first_outside = rows[band.rows.index(band.first_outside)]
    return {
        "verdict": band.verdict,
        "first_outside": first_outside,
        "control_outside": len(band.rows) - len(band.blind),
        "rerouted": band.rerouted,
        "rows": rows,
    }
