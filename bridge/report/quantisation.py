"""Quantisation of a run's operands: a table, and a heat map over layers and steps."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType

from bridge.precision.formats import FORMATS
from bridge.precision.schemes import WHAT_IF
from bridge.report.curves import figure_of
from bridge.report.table import NUMBERED, table
from bridge.runtime.audit.quantisation import QuantisationRow, by_operand, last_measured

WORST_DB = 12.0
"""Distance below the healthy ratio at which a heat map has its strongest colour: two bits of mantissa."""


def quantisation_table(rows: Sequence[QuantisationRow], *, title: str) -> RenderableType:
    """Return every row of the last measured step as a table for the terminal."""
    last = last_measured(rows)
    lines = [
        {
            "layer": str(row.layer),
            "module": _short(row.module),
            "operand": row.operand,
            "format": row.format,
            "amax": f"{row.amax:.3g}",
            "scale": "tiles" if row.scale is None else f"{row.scale:.4g}",
            "to zero": _percent(row.underflow),
            "saturated": _percent(row.saturated),
            "SQNR dB": f"{row.sqnr_db:.1f}",
            **{f"if {scheme}": f"{getattr(row, f'{scheme}_db'):.1f}" for scheme in WHAT_IF},
        }
        for row in last
    ]
    numbers = {*lines[0]} - {"module", "operand", "format"}
    return table(lines, title=f"{title}, step {last[0].step}{NUMBERED}", numbers=numbers)


def worst_table(rows: Sequence[QuantisationRow]) -> RenderableType:
    """Return, per operand and over all measured steps, the mean and the worst layer, for the end of a run."""
    lines = []
    for operand, own in by_operand(row for row in rows if math.isfinite(row.sqnr_db)).items():
        lowest = min(own, key=lambda row: row.sqnr_db)
        lines.append(
            {
                "operand": f"{operand} ({lowest.format})",
                "dB, mean": _mean(own, "sqnr_db"),
                **{f"if {scheme}": _mean(own, f"{scheme}_db") for scheme in WHAT_IF},
                "lowest": f"{lowest.sqnr_db:.1f}",
                "where": f"{lowest.layer} {_short(lowest.module)}, step {lowest.step}",
                "to zero": _percent(max(row.underflow for row in own)),
                "saturated": _percent(max(row.saturated for row in own)),
            }
        )
    title = f"Signal to quantisation noise; the most that went to zero or saturated{NUMBERED}"
    return table(
        lines, title=title, numbers={name for row in lines for name in row} - {"operand", "where"}
    )


def _mean(rows: Sequence[QuantisationRow], name: str) -> str:
    values = [getattr(row, name) for row in rows if math.isfinite(getattr(row, name))]
    return f"{sum(values) / len(values):.1f}" if values else "-"


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.2g} %"


def plot_quantisation(path: Path, rows: Sequence[QuantisationRow], *, title: str) -> None:
    """Draw the SQNR of each operand as a heat map, layers and modules down and measured steps across, into a PNG.

    The colour is the distance below what the format should have, so that formats look alike where they are healthy.
    """
    steps = sorted({row.step for row in rows})
    places = sorted({(row.layer, row.module) for row in rows})
    present = by_operand(rows)
    figure = figure_of(3 + 3 * len(present), max(3.0, 1.4 + 0.2 * len(places)))
    subject = "signal to quantisation noise, against that of a healthy tensor in the same format"
    figure.suptitle(f"{title}\n{subject}", fontsize=11)
    axes = figure.subplots(1, len(present), sharey=True, squeeze=False)[0]
    for panel, (operand, own) in zip(axes, present.items(), strict=True):
        grid = [[math.nan] * len(steps) for _ in places]
        for row in own:
            if row.format in FORMATS:
                healthy = FORMATS[row.format].healthy_db
                grid[places.index((row.layer, row.module))][steps.index(row.step)] = (
                    row.sqnr_db - healthy
                )
        image = panel.imshow(
            grid, aspect="auto", vmin=-WORST_DB, vmax=0, cmap="cividis", interpolation="nearest"
        )
        formats = ", ".join(dict.fromkeys(row.format for row in own))
        panel.set_title(f"{operand} ({formats})", fontsize=10)
        every = max(1, len(steps) // 6)
        panel.set_xticks(range(0, len(steps), every), [str(step) for step in steps[::every]])
        panel.set_xlabel("step")
    axes[0].set_yticks(
        range(len(places)), [f"{layer} {_short(module)}" for layer, module in places], fontsize=7
    )
    axes[0].set_ylabel("layer and module")
    figure.colorbar(image, ax=list(axes), label="dB, 0 is healthy")
    figure.savefig(path, dpi=120)


def _short(module: str) -> str:
    return module.rsplit(".", maxsplit=1)[-1].removeprefix("linear_")
