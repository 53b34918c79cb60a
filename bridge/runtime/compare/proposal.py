"""Rows of `modules` that follow from the quantisation error of a run's operands.

A scale that fits leaves an operand near the signal-to-noise ratio of its format. One that lost a bit more than that
(6 dB) has outliers that its tile cannot take. Its module gets the first finer scheme under which every operand is near
the ratio of its format again and the worst one gains a bit, or else the dtype of the run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge.precision.formats import BIT_DB, FORMATS
from bridge.precision.grouping import grouped
from bridge.precision.matchers import Effect
from bridge.precision.schemes import OPERAND_FORMATS
from bridge.runtime.audit.quantisation import last_measured

FINER = ("tensorwise", "blockwise", "mxfp8")
"""Schemes that a row can choose, from the coarsest tile to the finest."""
HIGH = "bf16"
"""A row's word for the dtype of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """One module that another precision suits better."""

    layer: int
    """Number of the transformer layer in the whole model, from 0 on, as in a row."""
    module: str
    operand: str
    """The operand that lost most, against its format."""
    sqnr_db: float
    healthy_db: float
    """The ratio of its format under a scale that fits."""
    precision: str
    """The proposed scheme, or the dtype of the run."""
    gained_db: float | None
    """By that operand; None for the dtype of the run."""

    def __str__(self) -> str:
        gain = "" if self.gained_db is None else f", where it loses {self.gained_db:.0f} dB less"
        return (
            f"layer {self.layer}, {self.module}: {self.operand} has {self.sqnr_db:.1f} dB of {self.healthy_db:.1f}; "
            f"{self.precision}{gain}"
        )


def propose(
    rows: Sequence[Any],
    *,
    scheme: str | None,
    fp8_format: str | None,
    num_layers: int,
    schemes: Sequence[str] = FINER,
) -> list[Proposal]:
    """Return a proposal for each module with an operand that lost more than a bit.

    Of several measured steps the last counts. `scheme` and `fp8_format` are the run's; prediction layers behind its
    `num_layers` have no number in a row. `schemes` are those of `FINER` that the target runs.
    """
    known = [
        row for row in last_measured(rows) if row.layer <= num_layers and math.isfinite(row.sqnr_db)
    ]
    modules = grouped(((row.layer, row.module), row) for row in known)
    finer = [
        name for name in schemes if scheme not in FINER or FINER.index(name) > FINER.index(scheme)
    ]
    found = (_proposal(operands, finer, fp8_format) for operands in modules.values())
    return [proposal for proposal in found if proposal is not None]


def _proposal(
    operands: Sequence[Any], finer: Sequence[str], fp8_format: str | None
) -> Proposal | None:
    worst = min(operands, key=lambda row: row.sqnr_db - FORMATS[row.format].healthy_db)
    if worst.sqnr_db >= FORMATS[worst.format].healthy_db - BIT_DB:
        return None
    chosen = next((name for name in finer if _suits(name, operands, worst, fp8_format)), HIGH)
    return Proposal(
        layer=worst.layer - 1,
        module=worst.module,
        operand=worst.operand,
        sqnr_db=worst.sqnr_db,
        healthy_db=FORMATS[worst.format].healthy_db,
        precision=chosen,
        gained_db=None if chosen == HIGH else _under(worst, chosen) - worst.sqnr_db,
    )


def _suits(scheme: str, operands: Sequence[Any], worst: Any, fp8_format: str | None) -> bool:
    """Return whether every operand is near its format's ratio under a scheme, and the worst gains a bit."""
    forward, backward = OPERAND_FORMATS[
        str(Effect(family="fp8", scheme=scheme).in_run(fp8_format).format)
    ]
    formats = dict.fromkeys(("input", "weight"), FORMATS[forward]) | {
        "grad_output": FORMATS[backward]
    }
    near = all(_under(one, scheme) >= formats[one.operand].healthy_db - BIT_DB for one in operands)
    return near and _under(worst, scheme) >= worst.sqnr_db + BIT_DB


def _under(row: Any, scheme: str) -> float:
    return float(getattr(row, f"{scheme}_db"))


def module_rows_of(proposals: Sequence[Proposal]) -> list[dict[str, Any]]:
    """Return the proposals as rows of `modules`: the layers of one module and precision are one row."""
    layers = grouped(((one.module, one.precision), one.layer) for one in proposals)
    return [
        {"select": {"layers": sorted(numbers), "module": module}, "precision": precision}
        for (module, precision), numbers in layers.items()
    ]
