"""`read_debug_log`: the statistics that Transformer Engine's debugger logged, as rows of a run's own.

    2026-11-29 22:04:01,123 - INFO - model.module.module.decoder.layers.2.mlp.linear_fc1_activation_underflows%
        iteration=000100        value=0.4213

Each line is one statistic of one tensor of one layer at one step, in a file per rank. Values have
four decimals, so that an amax, a scale or a squared error below `SMALLEST_KNOWN` is known to no
better than a tenth, and counts as unknown. The inverse scales of MXFP8 are the codes of their
exponents. Experts of a grouped layer are one row, of the worst of them.

Source: nvdlfw-inspect 0.2.2 logging.py, FileLogger.log_scalar; Transformer Engine 2.20.2
debug/features/utils/stats_buffer.py and stats_computation.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import RunConfigError
from bridge.precision import strict_yaml
from bridge.precision.debug_features import TENSORS
from bridge.runtime.audit.quantisation import OPERANDS, QuantisationRow

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.plan.rows import PlanRow

FOLDER = "nvdlfw_inspect_statistics_logs"
FILES = "*_globalrank-*.log"
MAX_BYTES = 256 * 2**20
LINE = re.compile(r" - INFO - (\S+)\s+iteration=(\d+)\s+value=(\S+)$")
NAME = re.compile(r"(?P<layer>.+)_(?P<tensor>activation|weight|gradient)_(?P<stat>[^.]+)$")
LAYER = re.compile(r"(?P<mtp>\bmtp\.)?\blayers\.(?P<number>\d+)\.(?P<path>.+?)(\.gemm_\d+)?$")
PREDICTION_LAYER = re.compile(r"^(mtp_model_layer|transformer_layer)\.")
PARENTS = re.compile(r"^(self_attention|mlp|mixer)\.")
"""Modules around the linear layers of a layer, which the plan leaves out of their names."""
OPERAND_OF = {theirs: operand for operand, theirs in TENSORS.items()}
NVFP4_PREFIX = "nvfp4_"
"""Beginning of the statistics of NVFP4; those of the other schemes have the plain name."""
SMALLEST_KNOWN = 0.0005
WORST_IS_SMALL = frozenset({"scale_inv_min"})


class _Place(NamedTuple):
    """The operand that a statistic is about."""

    step: int
    layer: int
    module: str
    operand: str


@dataclass(kw_only=True)
class _Operand:
    """The statistics of one operand of one layer at one step."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, stat: str, value: float) -> None:
        known = self.values.get(stat)
        if known is None:
            self.values[stat] = value
        elif stat in WORST_IS_SMALL:
            self.values[stat] = min(known, value)
        else:
            self.values[stat] = max(known, value)

    def share(self, stat: str) -> float:
        """Return a percentage as a share; NaN where it was not logged."""
        return self.values.get(stat, math.nan) / 100

    def positive(self, stat: str) -> float:
        """Return a value above zero; NaN where it is not known."""
        value = self.values.get(stat, math.nan)
        if value < SMALLEST_KNOWN:
            return math.nan
        return value

    @property
    def scale(self) -> float | None:
        """The factor of the whole tensor; None where it is not known."""
        smallest, largest = self.positive("scale_inv_min"), self.positive("scale_inv_max")
        if smallest == largest:
            return 1 / largest
        return None

    @property
    def sqnr_db(self) -> float:
        """Ratio of the mean square of the tensor to that of the error; NaN where not known."""
        mean = self.values.get("mean", math.nan)
        deviation = self.values.get("std", math.nan)
        ratio = (mean**2 + deviation**2) / self.positive("mse")
        if not ratio > 0:
            return math.nan
        return 10 * math.log10(ratio)


def read_debug_log(folder: Path, plan: PrecisionPlan | None = None) -> list[QuantisationRow]:
    """Return the rows of a folder of logs, in the order of steps and layers.

    Args:
        folder: The debugger's log folder, or the folder of statistics in it.
        plan: The plan of the run, which knows the formats of the operands; None: formats are empty.

    Raises:
        RunConfigError: The folder has no statistics.
    """
    operands: dict[_Place, _Operand] = {}
    prediction: dict[_Place, _Operand] = {}
    for path in _files(folder):
        content = strict_yaml.read_bytes(path, error=RunConfigError, limit=MAX_BYTES)
        for line in content.decode(errors="replace").splitlines():
            _add(line, operands, prediction)
    last_layer = max((place.layer for place in operands), default=0)
    for place, found in prediction.items():
        operands[place._replace(layer=last_layer + place.layer)] = found
    if not operands:
        rule = "has no statistics of quantised tensors"
        remedy = "Log LogFp8TensorStats or LogNvfp4TensorStats, and call debug_api.step()."
        raise RunConfigError.of("--debug-log", rule, str(folder), remedy)
    rows = [_row(place, found, _planned(plan, place)) for place, found in operands.items()]
    rows.sort(key=lambda row: (row.step, row.layer, row.module, OPERANDS.index(row.operand)))
    return rows


def is_debug_log(path: Path) -> bool:
    """Return whether a path is a folder of logs of the debugger."""
    return path.is_dir() and any(_files(path))


def _files(folder: Path) -> Iterator[Path]:
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    yield from sorted(folder.glob(FILES))


def _add(
    line: str,
    operands: dict[_Place, _Operand],
    prediction: dict[_Place, _Operand],
) -> None:
    """Add the statistic of a line, if it has one of a linear layer's operand."""
    logged = LINE.search(line)
    if logged is None:
        return
    named = NAME.fullmatch(logged[1])
    if named is None:
        return
    found = LAYER.search(named["layer"])
    if found is None:
        return
    place = _Place(
        step=int(logged[2]),
        layer=int(found["number"]),
        module=PREDICTION_LAYER.sub("", found["path"]),
        operand=OPERAND_OF[named["tensor"]],
    )
    kept = operands
    if found["mtp"] is not None:
        kept = prediction
    try:
        value = float(logged[3])
    except ValueError:
        return
    kept.setdefault(place, _Operand()).add(named["stat"].removeprefix(NVFP4_PREFIX), value)


def _row(place: _Place, found: _Operand, planned: PlanRow | None) -> QuantisationRow:
    format_, scale = "", None
    if planned is not None:
        format_ = planned.format.partition(" / ")[0]
        if planned.scale.partition(",")[0] == "tensor":
            scale = found.scale
    return QuantisationRow(
        **place._asdict(),
        format=format_,
        amax=found.positive("cur_amax"),
        scale=scale,
        underflow=found.share("underflows%"),
        saturated=found.share("overflows%"),
        sqnr_db=found.sqnr_db,
    )


def _planned(plan: PrecisionPlan | None, place: _Place) -> PlanRow | None:
    """Return the row of an operand in the plan; None without a plan, or where it has no such."""
    layer = None
    if plan is not None:
        layer = plan.by_label.get(str(place.layer))
    if layer is None:
        return None
    name = PARENTS.sub("", place.module)
    for module in layer.modules:
        if module.name == name:
            return module.row(place.operand)
    return None
