"""`read_debug_log`: the statistics that Transformer Engine's debugger logged, as `QuantisationRow`s.

    2026-11-29 22:04:01,123 - INFO - model.module.module.decoder.layers.2.mlp.linear_fc1_activation_underflows%
        iteration=000100        value=0.4213

There is a file for each rank. A line is one statistic of one tensor of one layer at one step. The
rows are those that a run of Precision Bridge writes itself.

Values have four decimals. An amax, a scale or a squared error below `MIN_KNOWN_VALUE` has lost more
than a tenth of itself, and counts as unknown. The inverse scales of MXFP8 are logged as the codes
of their exponents. The experts of a grouped layer are one row, with the worst value of any expert.

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
    r"(?P<layer>.+)_(?P<tensor>activation|weight|gradient)_(?P<statistic>[^.]+)$"
)
LAYER_PATTERN = re.compile(
    r"(?P<mtp>\bmtp\.)?\blayers\.(?P<number>\d+)\.(?P<path>.+?)(\.gemm_\d+)?$"
)
MTP_LAYER_PATTERN = re.compile(r"^(mtp_model_layer|transformer_layer)\.")
PARENT_MODULE_PATTERN = re.compile(r"^(self_attention|mlp|mixer)\.")
"""A module around the linear layers of a layer. The plan has their names without it."""
OPERAND_BY_TENSOR = {tensor: operand for operand, tensor in DEBUGGER_TENSOR_NAMES.items()}
NVFP4_PREFIX = "nvfp4_"
"""Beginning of the names of NVFP4's statistics. Those of the other schemes have no such beginning."""
MIN_KNOWN_VALUE = 0.0005
"""Values below it are rounded to less than one significant digit, since four decimals are logged."""
MINIMUM_STATISTICS = frozenset({"scale_inv_min"})
"""Statistics of which the smallest value over ranks and experts counts. Of others the largest does."""


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
    """Name of a statistic -> its worst value over ranks and experts."""

    def add(self, statistic: str, value: float) -> None:
        """Add a value of a rank or an expert."""
        other = self.values.get(statistic)
        if other is None:
            self.values[statistic] = value
        elif statistic in MINIMUM_STATISTICS:
            self.values[statistic] = min(other, value)
        else:
            self.values[statistic] = max(other, value)

    def share(self, statistic: str) -> float:
        """Return a logged percentage as a share, 0 to 1; NaN if it was not logged."""
        return self.values.get(statistic, math.nan) / 100

    def positive(self, statistic: str) -> float:
        """Return a value that is above zero; NaN if it was not logged, or is too small to be known."""
        value = self.values.get(statistic, math.nan)
        if value < MIN_KNOWN_VALUE:
            return math.nan
        return value

    @property
    def scale(self) -> float | None:
        """The scale of the tensor; None if it is not known, or if blocks have scales of their own."""
        smallest = self.positive("scale_inv_min")
        largest = self.positive("scale_inv_max")
        if smallest == largest:
            return 1 / largest
        return None

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise in dB: mean square of the tensor by that of the error.

        It is NaN if a statistic was not logged, or if the error is too small to be known.
        """
        mean = self.values.get("mean", math.nan)
        deviation = self.values.get("std", math.nan)
        mean_square = mean**2 + deviation**2
        ratio = mean_square / self.positive("mse")
        if not ratio > 0:  # True for NaN too
            return math.nan
        return 10 * math.log10(ratio)


def read_debug_log(folder: Path, plan: PrecisionPlan | None = None) -> list[QuantisationRow]:
    """Return the rows of a folder of logs, in the order of steps and layers.

    The layers of multi-token prediction are numbered after those of the decoder.

    Args:
        folder: The debugger's log folder, or the folder of statistics in it.
        plan: The plan of the run, which has the formats of the operands; None: formats are empty.

    Raises:
        RunConfigError: The folder has no statistics.
    """
    operands: dict[_OperandKey, _OperandStatistics] = {}
    mtp_operands: dict[_OperandKey, _OperandStatistics] = {}
    for path in _list_log_files(folder):
        content = strict_yaml.read_bytes(path, error=RunConfigError, limit=MAX_BYTES)
        for line in content.decode(errors="replace").splitlines():
            logged = _parse_line(line)
            if logged is None:
                continue
            kept = operands
            if logged.is_mtp:
                kept = mtp_operands
            kept.setdefault(logged.key, _OperandStatistics()).add(logged.statistic, logged.value)
    last_layer = max((key.layer for key in operands), default=0)
    for key, statistics in mtp_operands.items():
        operands[key._replace(layer=last_layer + key.layer)] = statistics
    if not operands:
        rule = "has no statistics of quantised tensors"
        remedy = "Log LogFp8TensorStats or LogNvfp4TensorStats, and call debug_api.step()."
        raise RunConfigError.of("--debug-log", rule, str(folder), remedy)
    rows: list[QuantisationRow] = []
    for key, statistics in operands.items():
        rows.append(_make_row(key, statistics, _find_planned_row(plan, key)))
    rows.sort(key=lambda row: (row.step, row.layer, row.module, OPERANDS.index(row.operand)))
    return rows


def is_debug_log(path: Path) -> bool:
    """Return whether a path is a folder of logs of the debugger."""
    return path.is_dir() and any(_list_log_files(path))


def _list_log_files(folder: Path) -> Iterator[Path]:
    """Yield the log of each rank."""
    if (folder / STATISTICS_FOLDER).is_dir():
        folder = folder / STATISTICS_FOLDER
    yield from sorted(folder.glob(LOG_FILE_GLOB))


class _LoggedStatistic(NamedTuple):
    """One line of a log."""

    key: _OperandKey
    is_mtp: bool
    """Whether the layer is one of multi-token prediction, which has a numbering of its own."""
    statistic: str
    value: float


def _parse_line(line: str) -> _LoggedStatistic | None:
    """Return the statistic of a line; None if it has none of a linear layer's operand."""
    line_match = LOG_LINE_PATTERN.search(line)
    if line_match is None:
        return None
    name, step, value_text = line_match.groups()
    name_match = STATISTIC_NAME_PATTERN.fullmatch(name)
    if name_match is None:
        return None
    layer_match = LAYER_PATTERN.search(name_match["layer"])
    if layer_match is None:
        return None
    try:
        value = float(value_text)
    except ValueError:
        return None
    key = _OperandKey(
        step=int(step),
        layer=int(layer_match["number"]),
        module=MTP_LAYER_PATTERN.sub("", layer_match["path"]),
        operand=OPERAND_BY_TENSOR[name_match["tensor"]],
    )
    return _LoggedStatistic(
        key=key,
        is_mtp=layer_match["mtp"] is not None,
        statistic=name_match["statistic"].removeprefix(NVFP4_PREFIX),
        value=value,
    )


def _make_row(
    key: _OperandKey, statistics: _OperandStatistics, planned: PlanRow | None
) -> QuantisationRow:
    """Return the row of an operand.

    Args:
        planned: Its row in the plan, which has the format and shows whether it has one scale.
    """
    format_ = ""
    scale = None
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
    """Return the row of an operand in the plan; None without a plan, or if the plan has no such row."""
    if plan is None:
        return None
    layer = plan.by_label.get(str(key.layer))
    if layer is None:
        return None
    name = PARENT_MODULE_PATTERN.sub("", key.module)
    for module in layer.modules:
        if module.name == name:
            return module.row(key.operand)
    return None
