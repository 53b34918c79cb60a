"""`read_debug_log`: the statistics that Transformer Engine's debugger logged, as rows of a run's own.

    2026-11-29 22:04:01,123 - INFO - model.module.module.decoder.layers.2.mlp.linear_fc1_activation_underflows%
        iteration=000100        value=0.4213

Each line is one statistic of one tensor of one layer at one step, in a file per rank. Values have
four decimals, so that an amax, a scale or a squared error below `MIN_KNOWN_PERCENTAGE` is known to no
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
from bridge.precision.debug_features import DEBUGGER_TENSOR_NAMES
from bridge.runtime.audit.quantisation import OPERANDS, QuantisationRow

if TYPE_CHECKING:
    from bridge.plan.plan_rows import PlanRow
    from bridge.plan.precision_plan import PrecisionPlan

STATISTICS_FOLDER = "nvdlfw_inspect_statistics_logs"
LOG_FILE_GLOB = "*_globalrank-*.log"
MAX_BYTES = 256 * 2**20
LOG_LINE_PATTERN = re.compile(r" - INFO - (\S+)\s+iteration=(\d+)\s+value=(\S+)$")
STATISTIC_NAME_PATTERN = re.compile(
    r"(?P<layer>.+)_(?P<tensor>activation|weight|gradient)_(?P<stat>[^.]+)$"
)
LAYER_PATTERN = re.compile(
    r"(?P<mtp>\bmtp\.)?\blayers\.(?P<number>\d+)\.(?P<path>.+?)(\.gemm_\d+)?$"
)
MTP_LAYER_PATTERN = re.compile(r"^(mtp_model_layer|transformer_layer)\.")
PARENT_MODULE_PATTERN = re.compile(r"^(self_attention|mlp|mixer)\.")
"""Modules around the linear layers of a layer, which the plan leaves out of their names."""
OPERAND_BY_TENSOR = {theirs: operand for operand, theirs in DEBUGGER_TENSOR_NAMES.items()}
NVFP4_PREFIX = "nvfp4_"
"""Beginning of the statistics of NVFP4; those of the other schemes have the plain name."""
MIN_KNOWN_PERCENTAGE = 0.0005
MINIMUM_STATISTICS = frozenset({"scale_inv_min"})


class _OperandKey(NamedTuple):
    """The operand that a statistic is about."""

    step: int
    layer: int
    module: str
    operand: str


@dataclass(kw_only=True)
class _OperandStatistics:
    """The statistics of one operand of one layer at one step."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, stat: str, value: float) -> None:
        known = self.values.get(stat)
        if known is None:
            self.values[stat] = value
        elif stat in MINIMUM_STATISTICS:
            self.values[stat] = min(known, value)
        else:
            self.values[stat] = max(known, value)

    def share(self, stat: str) -> float:
        """Return a percentage as a share; NaN where it was not logged."""
        return self.values.get(stat, math.nan) / 100

    def positive(self, stat: str) -> float:
        """Return a value above zero; NaN where it is not known."""
        value = self.values.get(stat, math.nan)
        if value < MIN_KNOWN_PERCENTAGE:
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
    operands: dict[_OperandKey, _OperandStatistics] = {}
    prediction: dict[_OperandKey, _OperandStatistics] = {}
    for path in _list_log_files(folder):
        content = strict_yaml.read_bytes(path, error=RunConfigError, limit=MAX_BYTES)
        for line in content.decode(errors="replace").splitlines():
            _add_statistic(line, operands, prediction)
    last_layer = max((key.layer for key in operands), default=0)
    for key, statistics in prediction.items():
        operands[key._replace(layer=last_layer + key.layer)] = statistics
    if not operands:
        rule = "has no statistics of quantised tensors"
        remedy = "Log LogFp8TensorStats or LogNvfp4TensorStats, and call debug_api.step()."
        raise RunConfigError.of("--debug-log", rule, str(folder), remedy)
    rows = [
        _make_row(key, statistics, _find_planned_row(plan, key))
        for key, statistics in operands.items()
    ]
    rows.sort(key=lambda row: (row.step, row.layer, row.module, OPERANDS.index(row.operand)))
    return rows


def is_debug_log(path: Path) -> bool:
    """Return whether a path is a folder of logs of the debugger."""
    return path.is_dir() and any(_list_log_files(path))


def _list_log_files(folder: Path) -> Iterator[Path]:
    if (folder / STATISTICS_FOLDER).is_dir():
        folder = folder / STATISTICS_FOLDER
    yield from sorted(folder.glob(LOG_FILE_GLOB))


def _add_statistic(
    line: str,
    operands: dict[_OperandKey, _OperandStatistics],
    prediction: dict[_OperandKey, _OperandStatistics],
) -> None:
    """Add the statistic of a line, if it has one of a linear layer's operand."""
    logged = LOG_LINE_PATTERN.search(line)
    if logged is None:
        return
    named = STATISTIC_NAME_PATTERN.fullmatch(logged[1])
    if named is None:
        return
    layer_match = LAYER_PATTERN.search(named["layer"])
    if layer_match is None:
        return
    key = _OperandKey(
        step=int(logged[2]),
        layer=int(layer_match["number"]),
        module=MTP_LAYER_PATTERN.sub("", layer_match["path"]),
        operand=OPERAND_BY_TENSOR[named["tensor"]],
    )
    kept = operands
    if layer_match["mtp"] is not None:
        kept = prediction
    try:
        value = float(logged[3])
    except ValueError:
        return
    kept.setdefault(key, _OperandStatistics()).add(named["stat"].removeprefix(NVFP4_PREFIX), value)


def _make_row(
    key: _OperandKey, statistics: _OperandStatistics, planned: PlanRow | None
) -> QuantisationRow:
    format_, scale = "", None
    if planned is not None:
        format_ = planned.format.partition(" / ")[0]
        if planned.scale.partition(",")[0] == "tensor":
            scale = statistics.scale
    return QuantisationRow(
        **key._asdict(),
        format=format_,
        amax=statistics.positive("cur_amax"),
        scale=scale,
        underflow=statistics.share("underflows%"),
        saturated=statistics.share("overflows%"),
        sqnr_db=statistics.sqnr_db,
    )


def _find_planned_row(plan: PrecisionPlan | None, key: _OperandKey) -> PlanRow | None:
    """Return the row of an operand in the plan; None without a plan, or where it has no such."""
    layer = None
    if plan is not None:
        layer = plan.by_label.get(str(key.layer))
    if layer is None:
        return None
    name = PARENT_MODULE_PATTERN.sub("", key.module)
    for module in layer.modules:
        if module.name == name:
            return module.row(key.operand)
    return None
