"""`propose_precisions`: rows of `modules` that follow from a run's quantisation errors.

Under a scale that fits, an operand has nearly the signal-to-noise ratio of its format. An operand
that is more than a bit (6 dB) below it has outliers that are too large for its tile. Its module
gets the first finer scheme under which every operand is near the ratio of its format and the worst
operand gains at least a bit. If there is no such scheme, the module gets the dtype of the run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge.precision.formats import BIT_DB, FORMATS
from bridge.precision.matchers import ModulePrecision
from bridge.precision.schemes import OPERAND_FORMATS
from bridge.runtime.audit.quantisation import QuantisationRow, select_last_step

SCHEMES_BY_FINENESS = ("tensorwise", "blockwise", "mxfp8")
"""Schemes that a row can choose, from the coarsest tile to the finest."""
HIGH_PRECISION = "bf16"
"""The value of a row of `modules` for the dtype of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A module that another precision suits better."""

    layer: int
    """Number of the transformer layer in the whole model, from 0 on, as in a row of `modules`."""
    module: str
    """Name of the linear layer in its transformer layer."""
    operand: str
    """The operand whose ratio is furthest below the ratio of its format."""
    sqnr_db: float
    """Signal-to-quantisation-noise ratio of this operand."""
    healthy_db: float
    """The ratio of its format under a scale that fits."""
    precision: str
    """The proposed scheme, or the dtype of the run."""
    gained_db: float | None
    """Increase of this operand's ratio. None: the dtype of the run."""

    def __str__(self) -> str:
        sentence = (
            f"layer {self.layer}, {self.module}: {self.operand} has {self.sqnr_db:.1f} dB of "
            f"{self.healthy_db:.1f}; {self.precision}"
        )
        if self.gained_db is None:
            return sentence
        return f"{sentence}, where it loses {self.gained_db:.0f} dB less"


def propose_precisions(
    rows: Sequence[QuantisationRow],
    *,
    scheme: str | None,
    fp8_format: str | None,
    num_layers: int,
    schemes: Sequence[str] = SCHEMES_BY_FINENESS,
) -> list[Proposal]:
    """Return a proposal for each module with an operand that lost more than a bit.

    Args:
        rows: Errors of the quantisers. Of several measured steps only the last counts.
        scheme: Scaling scheme of the run. None: high precision.
        fp8_format: The run's `fp8`. None: no FP8.
        num_layers: Layers of the model. Prediction layers have larger numbers, and rows of
            `modules` cannot select them.
        schemes: The schemes of `SCHEMES_BY_FINENESS` that the target can run.
    """
    operands_of: dict[tuple[int, str], list[QuantisationRow]] = {}
    for row in select_last_step(rows):
        if row.layer <= num_layers and math.isfinite(row.sqnr_db):
            operands_of.setdefault((row.layer, row.module), []).append(row)
    finer = list(schemes)
    if scheme in SCHEMES_BY_FINENESS:
        coarsest = SCHEMES_BY_FINENESS.index(scheme)
        finer = [name for name in schemes if SCHEMES_BY_FINENESS.index(name) > coarsest]
    proposals = []
    for operands in operands_of.values():
        proposal = _propose_module(operands, finer, fp8_format)
        if proposal is not None:
            proposals.append(proposal)
    return proposals


def _propose_module(
    operands: Sequence[QuantisationRow], finer: Sequence[str], fp8_format: str | None
) -> Proposal | None:
    """Return the precision that suits a module, or None if its worst operand is healthy.

    Args:
        operands: The rows of the module's operands.
        finer: Schemes that are finer than the run's scheme, the coarsest first.
        fp8_format: As for `propose_precisions`.
    """
    worst = min(operands, key=lambda row: row.sqnr_db - FORMATS[row.format].healthy_db)
    healthy_db = FORMATS[worst.format].healthy_db
    if worst.sqnr_db >= healthy_db - BIT_DB:
        return None
    precision, gained_db = HIGH_PRECISION, None
    for name in finer:
        if _is_suitable(name, operands, worst, fp8_format):
            precision, gained_db = name, _get_scheme_sqnr(worst, name) - worst.sqnr_db
            break
    return Proposal(
        layer=worst.layer - 1,
        module=worst.module,
        operand=worst.operand,
        sqnr_db=worst.sqnr_db,
        healthy_db=healthy_db,
        precision=precision,
        gained_db=gained_db,
    )


def _is_suitable(
    scheme: str,
    operands: Sequence[QuantisationRow],
    worst: QuantisationRow,
    fp8_format: str | None,
) -> bool:
    """Return whether every operand is near its format's ratio, and the worst operand gains a bit."""
    effect = ModulePrecision(family="fp8", scheme=scheme).resolve_in_run(fp8_format)
    forward, backward = OPERAND_FORMATS[str(effect.format)]
    format_of = {"input": forward, "weight": forward, "grad_output": backward}
    for row in operands:
        healthy_db = FORMATS[format_of[row.operand]].healthy_db
        if not _get_scheme_sqnr(row, scheme) >= healthy_db - BIT_DB:  # also true for NaN
            return False
    return _get_scheme_sqnr(worst, scheme) >= worst.sqnr_db + BIT_DB


def _get_scheme_sqnr(row: QuantisationRow, scheme: str) -> float:
    """Return the ratio that an operand would have under a scheme, in dB."""
    return float(getattr(row, f"{scheme}_db"))


def make_module_rows(proposals: Sequence[Proposal]) -> list[dict[str, Any]]:
    """Return the proposals as rows of `modules`. Layers of a module and precision share a row."""
    layers_of: dict[tuple[str, str], list[int]] = {}
    for proposal in proposals:
        layers_of.setdefault((proposal.module, proposal.precision), []).append(proposal.layer)
    rows = []
    for (module, precision), layers in layers_of.items():
        select = {"layers": sorted(layers), "module": module}
        rows.append({"select": select, "precision": precision})
    return rows
