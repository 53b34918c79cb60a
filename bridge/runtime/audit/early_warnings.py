"""Early warnings: signs of trouble in the records of a run, each with its threshold.

A run logs a warning in the step in which its sign begins. `watch` and `report` find the same
warnings in the files of the run. ``silence.NAME=REASON`` in the config silences the warning NAME in
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from bridge.precision.formats import FORMATS
from bridge.runtime.audit.quantisation import QuantisationRow, select_last_step
from bridge.runtime.audit.record import HealthRow
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.audit.run_log import describe_lost_steps

RECENT_RECORDS = 20
"""The largest number of earlier records or measurements with which the last is compared."""
MIN_RECENT_RECORDS = RECENT_RECORDS // 2
"""The smallest number of records in which a spike is looked for."""
NOT_FINITE_RECORDS = 1
"""The number of recent records with a NaN or Inf gradient at which the warning is given."""
NOT_FINITE_RECORDS_DYNAMIC = 3
"""The same number under a dynamic loss scale, which sometimes overflows by design."""
LOSS_SPIKE_FACTOR = 1.2
"""A loss above this multiple of the median is a spike."""
GRADIENT_SPIKE_FACTOR = 10
"""A gradient norm above this multiple of the median is a spike."""
SKIPPED_ONE_IN = 10
"""One of this many steps may be skipped."""
RECORDS_AFTER_SCALE_CHANGE = 5
"""A spike in this many records after a change of the loss scale is attributed to the change."""
SCALE_CHANGE_SPIKE_FACTOR = 1.1
"""After a change of the loss scale, a loss above this multiple of the earlier median is a spike."""
AMAX_OVERFLOW_FACTOR = 4
"""Largest accepted amax, as a multiple of the largest value that the operand's scale represents."""
UNDERFLOW_SHARE = 0.5
"""Largest accepted share of an operand that becomes zero, whatever its median is."""
UNDERFLOW_FACTOR = 2
"""Largest accepted share that becomes zero, as a multiple of the operand's median."""
UNDERFLOW_RISE = 0.02
"""A share that is less than this above the median is accepted, whatever its multiple is."""


@dataclass(kw_only=True)
class WarningInputs:
    """The values of a run so far, from which the warnings are computed."""

    train: Sequence[dict[str, Any]]
    """Records of steps in their order, as in ``metrics.jsonl``."""
    quantisation: Sequence[QuantisationRow] = ()
    """Errors of the quantisers, in the order of the measured steps."""
    health: Sequence[HealthRow] = ()
    """Health of the low-precision modules in the last audited step."""
    smallest_scale: float | None = None
    """Floor of a dynamic loss scale. None: no dynamic loss scale."""
    silenced: Collection[str] = field(default_factory=tuple)
    """Names of the warnings that are not given."""

    @classmethod
    def from_run_folder(cls, folder: RunFolder, *, silenced: Collection[str] = ()) -> WarningInputs:
        """Return the values in the files of a run.

        Args:
            silenced: Names of warnings to silence in addition to those that the config silences.
        """
        optimizer = folder.config.get("optimizer", {})
        smallest_scale = None
        if optimizer.get("fp16") and not optimizer.get("loss_scale"):
            smallest_scale = optimizer.get("min_loss_scale")
        health: Sequence[HealthRow] = ()
        record = folder.record
        if record is not None:
            health = record.health
        silenced_by_config = folder.config.get("silence") or ()
        return cls(
            train=folder.read_metrics("train"),
            quantisation=folder.quantisation,
            health=health,
            smallest_scale=smallest_scale,
            silenced={*silenced, *silenced_by_config},
        )


def _check_loss_finite(inputs: WarningInputs) -> str | None:
    """Return the sentence about losses that are not finite, or None without such a loss."""
    finite_at = {}
    for record in inputs.train:
        finite_at[record["step"]] = record["loss"] is not None
    steps = describe_lost_steps(finite_at)
    if steps is None:
        return None
    return f"the loss is not finite {steps}."


def _check_gradients_finite(inputs: WarningInputs) -> str | None:
    """Return the sentence about recent gradients that were not finite, or None without them."""
    is_dynamic = inputs.smallest_scale is not None
    first = _find_first_update(inputs.train)
    if first is None and is_dynamic:
        return None  # a dynamic loss scale is still falling to its level
    recent = inputs.train[first or 0 :][-RECENT_RECORDS:]
    locations = []
    for record in recent:
        if record.get("not_finite"):
            locations.append(record["not_finite"])
    limit = NOT_FINITE_RECORDS
    if is_dynamic:
        limit = NOT_FINITE_RECORDS_DYNAMIC
    if len(locations) < limit:
        return None
    return (
        f"gradients were not finite in {len(locations)} of the last {len(recent)} records; "
        f"the last time {locations[-1]}."
    )


def _select_finite(records: Sequence[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    """Return the records in which the value of a column is finite."""
    finite = []
    for record in records:
        if record[column] is not None:  # a value that is not finite is stored as None
            finite.append(record)
    return finite


def _find_first_update(train: Sequence[dict[str, Any]]) -> int | None:
    """Return the index of the first record whose step was not skipped, or None without it."""
    for index, record in enumerate(train):
        if not record["skipped"]:
            return index
    return None


def _check_spike(
    inputs: WarningInputs, *, column: str, factor: float, noun: str, digits: str
) -> str | None:
    """Return the sentence about a last value far above the median of recent records.

    The result is None without such a value.

    Args:
        inputs: The values of the run.
        column: Column of the records.
        factor: Largest multiple of the median that is not a spike.
        noun: The column in a sentence.
        digits: Format of the values in the sentence.
    """
    recent = []
    for record in _select_finite(inputs.train[-RECENT_RECORDS - 1 :], column):
        recent.append(record[column])
    if len(recent) < MIN_RECENT_RECORDS:
        return None
    last = recent[-1]
    earlier_median = median(recent[:-1])
    if last <= factor * earlier_median:
        return None
    return (
        f"the {noun} is {last:{digits}}, more than {factor:g} times the median of the records "
        f"before, {earlier_median:{digits}}."
    )


_check_loss_spike = partial(
    _check_spike, column="loss", factor=LOSS_SPIKE_FACTOR, noun="loss", digits=".4f"
)
_check_gradient_spike = partial(
    _check_spike,
    column="grad_norm",
    factor=GRADIENT_SPIKE_FACTOR,
    noun="gradient norm",
    digits=".3g",
)


def _check_skipped_steps(inputs: WarningInputs) -> str | None:
    """Return the sentence about many skipped steps after the first update, or None without them."""
    index = _find_first_update(inputs.train)
    if index is None:
        return None  # `gradients-not-finite`, and the run's limit of skipped steps, report this
    first, last = inputs.train[index], inputs.train[-1]
    skipped = last["skipped_steps"] - first["skipped_steps"]
    steps = last["step"] - first["step"]
    # One skipped step among fewer than SKIPPED_ONE_IN steps does not show the share.
    if SKIPPED_ONE_IN * skipped <= max(SKIPPED_ONE_IN, steps):
        return None
    return (
        f"{skipped} of {steps} steps since the first update were skipped, more than one in "
        f"{SKIPPED_ONE_IN}."
    )


def _check_scale_floor(inputs: WarningInputs) -> str | None:
    """Return the sentence about a dynamic loss scale that is at its floor, or None without it."""
    floor = inputs.smallest_scale
    if floor is None or not inputs.train or inputs.train[-1]["loss_scale"] > floor:
        return None
    return f"the loss scale is at its floor, {floor:g}: the next overflow cannot lower it."


def _check_spike_after_scale_change(inputs: WarningInputs) -> str | None:
    """Return the sentence about a loss that rose after a change of the loss scale.

    The result is None without such a rise.
    """
    recent = _select_finite(inputs.train[-RECENT_RECORDS:], "loss")
    change = None
    for index in range(1, len(recent)):
        if recent[index]["loss_scale"] != recent[index - 1]["loss_scale"]:
            change = index
    if change is None or change < len(recent) - RECORDS_AFTER_SCALE_CHANGE:
        return None
    earlier_median = median(record["loss"] for record in recent[:change])
    loss = recent[-1]["loss"]
    if loss <= SCALE_CHANGE_SPIKE_FACTOR * earlier_median:
        return None
    before, after = recent[change - 1], recent[change]
    return (
        f"the loss is {loss:.4f}, more than {SCALE_CHANGE_SPIKE_FACTOR:g} times that before the "
        f"loss scale went from {before['loss_scale']:g} to {after['loss_scale']:g} by step "
        f"{after['step']}, {earlier_median:.4f}."
    )


def _check_amax_history(inputs: WarningInputs) -> str | None:
    """Return the sentence about operands whose amax is far beyond their scale.

    The result is None without such operands.

    Only delayed scaling can miss an amax by so much, because its scale is from earlier steps.
    """
    ratios: dict[QuantisationRow, float] = {}
    for row in select_last_step(inputs.quantisation):
        if row.scale is None or row.format not in FORMATS:
            continue
        ratio = row.amax * row.scale / FORMATS[row.format].max
        if ratio > AMAX_OVERFLOW_FACTOR:
            ratios[row] = ratio
    if not ratios:
        return None
    worst = max(ratios, key=lambda row: ratios[row])
    sentence = (
        f"at step {worst.step} the amax of {worst.location} is {ratios[worst]:.3g} times what its "
        "scale can represent"
    )
    if len(ratios) > 1:
        sentence += f", and {len(ratios) - 1} other operands exceed theirs"
    return f"{sentence}."


def _check_underflow(inputs: WarningInputs) -> str | None:
    """Return the sentence about operands of which an unusual share became zero.

    The result is None without such operands.
    """
    last_rows = select_last_step(inputs.quantisation)
    medians = _compute_underflow_medians(inputs.quantisation, last_rows)
    rising = []
    for row in last_rows:
        limit = UNDERFLOW_SHARE
        if row.location in medians:
            usual = medians[row.location]
            limit = min(limit, max(UNDERFLOW_FACTOR * usual, usual + UNDERFLOW_RISE))
        if row.underflow > limit:
            rising.append(row)
    if not rising:
        return None
    worst = max(rising, key=lambda row: row.underflow)
    sentence = f"{100 * worst.underflow:.3g} % of {worst.location} became zero at step {worst.step}"
    if worst.location in medians:
        usual = medians[worst.location]
        sentence += f", {100 * usual:.3g} % in the median of the measurements before"
    if len(rising) > 1:
        sentence += f"; too much of {len(rising) - 1} other operands, too"
    return f"{sentence}."


def _compute_underflow_medians(
    rows: Sequence[QuantisationRow], last_rows: Sequence[QuantisationRow]
) -> dict[str, float]:
    """Return location of an operand -> median share that became zero, before the last step.

    Args:
        rows: All rows, in the order of the measured steps.
        last_rows: The rows of the last measured step.
    """
    earlier: dict[str, list[float]] = {}
    for row in rows[-(RECENT_RECORDS + 1) * len(last_rows) :]:
        if row.step != last_rows[0].step:
            earlier.setdefault(row.location, []).append(row.underflow)
    medians = {}
    for location, shares in earlier.items():
        medians[location] = median(shares)
    return medians


def _check_stale_weights(inputs: WarningInputs) -> str | None:
    """Return the sentence about modules that multiplied an older weight, or None without them."""
    stale = []
    for row in inputs.health:
        if not row.is_fresh:
            stale.append(row)
    if not stale:
        return None
    modules = f"layer {stale[0].layer}, {stale[0].module}"
    if len(stale) > 1:
        modules += f" and {len(stale) - 1} others"
    return f"{modules} multiplied an older weight than that of the audited step."


class EarlyWarning(NamedTuple):
    """One row: a sign of trouble."""

    threshold: str
    """The condition of the warning, for the documentation."""
    check: Callable[[WarningInputs], str | None]
    """Returns the sentence of the warning about a run, or None for a run without the sign."""


EARLY_WARNINGS = {
    "loss-not-finite": EarlyWarning("a loss is NaN or Inf", _check_loss_finite),
    "gradients-not-finite": EarlyWarning(
        f"a gradient was NaN or Inf in at least {NOT_FINITE_RECORDS} of the last {RECENT_RECORDS} records, "
        f"in at least {NOT_FINITE_RECORDS_DYNAMIC} under a dynamic loss scale",
        _check_gradients_finite,
    ),
    "loss-spike": EarlyWarning(
        f"loss above {LOSS_SPIKE_FACTOR:g} times the median of up to {RECENT_RECORDS} records",
        _check_loss_spike,
    ),
    "gradient-spike": EarlyWarning(
        f"gradient norm above {GRADIENT_SPIKE_FACTOR:g} times the median of up to {RECENT_RECORDS} records",
        _check_gradient_spike,
    ),
    "skipped-steps": EarlyWarning(
        f"more than one in {SKIPPED_ONE_IN} of the steps since the first update was skipped",
        _check_skipped_steps,
    ),
    "loss-scale-floor": EarlyWarning(
        "the dynamic loss scale is at min_loss_scale", _check_scale_floor
    ),
    "spike-after-scale-change": EarlyWarning(
        f"loss above {SCALE_CHANGE_SPIKE_FACTOR:g} times its median, at most {RECORDS_AFTER_SCALE_CHANGE} records "
        "after the loss scale changed",
        _check_spike_after_scale_change,
    ),
    "amax-history": EarlyWarning(
        f"an amax is above {AMAX_OVERFLOW_FACTOR} times what the operand's scale can represent",
        _check_amax_history,
    ),
    "underflow-rising": EarlyWarning(
        f"the share that becomes zero is above {100 * UNDERFLOW_SHARE:g} %, or above "
        f"{UNDERFLOW_FACTOR} times its median and {100 * UNDERFLOW_RISE:g} points above it",
        _check_underflow,
    ),
    "stale-weights": EarlyWarning(
        "a GEMM of the last audited step multiplied an older weight", _check_stale_weights
    ),
}
"""Name -> early warning."""


def find_early_warnings(inputs: WarningInputs) -> list[tuple[str, str]]:
    """Return (name, sentence) of each warning on a run that is not silenced."""
    warnings = []
    for name, row in EARLY_WARNINGS.items():
        if name in inputs.silenced:
            continue
        sentence = row.check(inputs)
        if sentence is not None:
            warnings.append((name, sentence))
    return warnings
