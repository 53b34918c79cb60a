"""Early warnings: signs of trouble in the records of a run, each with its threshold.

The run logs a warning when its sign begins; `watch` and `report` read the files of the run.
``silence.NAME=REASON`` in the config silences one everywhere.
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
"""Most records, or measurements of the quantisers, that are compared with the last one."""
MIN_RECENT_RECORDS = RECENT_RECORDS // 2
"""Fewest records in which a spike is looked for."""
NOT_FINITE_RECORDS = 1
"""Recent records with a gradient that is not finite, from which on it is a sign of trouble."""
NOT_FINITE_RECORDS_DYNAMIC = 3
"""The same under a dynamic loss scale, which overflows now and then by design."""
LOSS_SPIKE_FACTOR = 1.2
"""Loss that is a spike, as a multiple of the median."""
GRADIENT_SPIKE_FACTOR = 10
"""Gradient norm that is a spike, as a multiple of the median."""
SKIPPED_ONE_IN = 10
"""Steps of which no more than one may be skipped."""
RECORDS_AFTER_SCALE_CHANGE = 5
"""Records after a change of the loss scale in which a spike is put down to it."""
SCALE_CHANGE_SPIKE_FACTOR = 1.1
"""Loss that is a spike after a change of the loss scale, as a multiple of the median before."""
AMAX_OVERFLOW_FACTOR = 4
"""Amax that a delayed scale misses, as a multiple of the largest value the scale can represent."""
UNDERFLOW_SHARE = 0.5
"""Share of an operand that may become zero, whatever its median is."""
UNDERFLOW_FACTOR = 2
"""Share that may become zero, as a multiple of its median."""
UNDERFLOW_RISE = 0.02
"""Share above the median that may become zero in any case."""


@dataclass(kw_only=True)
class WarningInputs:
    """The values of a run so far that the warnings look at."""

    train: Sequence[dict[str, Any]]
    """Records of steps, as in ``metrics.jsonl``."""
    quantisation: Sequence[QuantisationRow] = ()
    health: Sequence[HealthRow] = ()
    """Health of the low-precision modules in the last audited step."""
    smallest_scale: float | None = None
    """Floor of a dynamic loss scale; None without one."""
    silenced: Collection[str] = field(default_factory=tuple)
    """Names of warnings."""

    @classmethod
    def from_run_folder(cls, run: RunFolder, *, silenced: Collection[str] = ()) -> WarningInputs:
        """Return what the files of a run hold; `silenced` is added to those of its config."""
        optimizer = run.config.get("optimizer", {})
        smallest_scale = None
        if optimizer.get("fp16") and not optimizer.get("loss_scale"):
            smallest_scale = optimizer.get("min_loss_scale")
        train, quantisation, record = run.metrics("train"), run.quantisation, run.record
        health: Sequence[HealthRow] = ()
        if record is not None:
            health = record.health
        of_config = run.config.get("silence") or ()
        return cls(
            train=train,
            quantisation=quantisation,
            health=health,
            smallest_scale=smallest_scale,
            silenced={*silenced, *of_config},
        )


def _check_loss_finite(signs: WarningInputs) -> str | None:
    """Return the sentence on the losses that are not finite, None without one."""
    finite_at = {}
    for record in signs.train:
        finite_at[record["step"]] = record["loss"] is not None
    steps = describe_lost_steps(finite_at)
    if steps is None:
        return None
    return f"the loss is not finite {steps}."


def _check_gradients_finite(signs: WarningInputs) -> str | None:
    """Return the sentence on gradients that were not finite in recent records, or None."""
    is_dynamic = signs.smallest_scale is not None
    first = _find_first_update(signs.train)
    if first is None and is_dynamic:
        return None  # a dynamic loss scale is still falling to its level
    recent = signs.train[first or 0 :][-RECENT_RECORDS:]
    places = []
    for record in recent:
        if record.get("not_finite"):
            places.append(record["not_finite"])
    least = NOT_FINITE_RECORDS
    if is_dynamic:
        least = NOT_FINITE_RECORDS_DYNAMIC
    if len(places) < least:
        return None
    return (
        f"gradients were not finite in {len(places)} of the last {len(recent)} records; "
        f"the last time {places[-1]}."
    )


def _select_finite(records: Sequence[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    """Return the records in which a value is finite."""
    finite = []
    for record in records:
        if record[column] is not None:
            finite.append(record)
    return finite


def _find_first_update(train: Sequence[dict[str, Any]]) -> int | None:
    """Return the index of the first record whose step was not skipped."""
    for index, record in enumerate(train):
        if not record["skipped"]:
            return index
    return None


def _check_spike(
    signs: WarningInputs, *, column: str, factor: float, noun: str, digits: str
) -> str | None:
    """Return the sentence on a last value that is far above the median of recent records, or None."""
    recent = []
    for record in _select_finite(signs.train[-RECENT_RECORDS - 1 :], column):
        recent.append(record[column])
    if len(recent) < MIN_RECENT_RECORDS:
        return None
    last, usual = recent[-1], median(recent[:-1])
    if last <= factor * usual:
        return None
    rule = f"more than {factor:g} times the median of the records before"
    return f"the {noun} is {last:{digits}}, {rule}, {usual:{digits}}."


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


def _check_skipped_steps(signs: WarningInputs) -> str | None:
    """Return the sentence on a large share of skipped steps after the first update, or None."""
    index = _find_first_update(signs.train)
    if index is None:
        return None  # `gradients-not-finite` and the limit of the run report it
    first, last = signs.train[index], signs.train[-1]
    skipped = last["skipped_steps"] - first["skipped_steps"]
    steps = last["step"] - first["step"]
    # A single step of a few is no share yet.
    if SKIPPED_ONE_IN * skipped <= max(SKIPPED_ONE_IN, steps):
        return None
    return (
        f"{skipped} of {steps} steps since the first update were skipped, more than one in "
        f"{SKIPPED_ONE_IN}."
    )


def _check_scale_floor(signs: WarningInputs) -> str | None:
    """Return the sentence on a dynamic loss scale that is at its floor, or None."""
    floor = signs.smallest_scale
    if floor is None or not signs.train or signs.train[-1]["loss_scale"] > floor:
        return None
    return f"the loss scale is at its floor, {floor:g}: the next overflow cannot lower it."


def _check_spike_after_scale_change(signs: WarningInputs) -> str | None:
    """Return the sentence on a loss that rose soon after the loss scale changed, or None."""
    recent = _select_finite(signs.train[-RECENT_RECORDS:], "loss")
    change = None
    for index in range(1, len(recent)):
        if recent[index]["loss_scale"] != recent[index - 1]["loss_scale"]:
            change = index
    if change is None or change < len(recent) - RECORDS_AFTER_SCALE_CHANGE:
        return None
    usual = median(record["loss"] for record in recent[:change])
    loss = recent[-1]["loss"]
    if loss <= SCALE_CHANGE_SPIKE_FACTOR * usual:
        return None
    before, after = recent[change - 1], recent[change]
    scales = f"from {before['loss_scale']:g} to {after['loss_scale']:g}"
    change_of_scale = f"the loss scale went {scales} by step {after['step']}"
    rule = f"more than {SCALE_CHANGE_SPIKE_FACTOR:g} times that before {change_of_scale}"
    return f"the loss is {loss:.4f}, {rule}, {usual:.4f}."


def _check_amax_history(signs: WarningInputs) -> str | None:
    """Return the sentence on operands whose amax is beyond their delayed scale, or None."""
    ratios: dict[QuantisationRow, float] = {}
    for row in select_last_step(signs.quantisation):
        if row.scale is None or row.format not in FORMATS:
            continue
        ratio = row.amax * row.scale / FORMATS[row.format].max
        if ratio > AMAX_OVERFLOW_FACTOR:
            ratios[row] = ratio
    if not ratios:
        return None
    worst = max(ratios, key=lambda row: ratios[row])
    rest = ""
    if len(ratios) > 1:
        rest = f", and {len(ratios) - 1} other operands exceed theirs"
    rule = f"{ratios[worst]:.3g} times what its scale can represent"
    return f"at step {worst.step} the amax of {worst.place} is {rule}{rest}."


def _check_underflow(signs: WarningInputs) -> str | None:
    """Return the sentence on operands of which an unusual share became zero, or None."""
    last = select_last_step(signs.quantisation)
    earlier: dict[str, list[float]] = {}
    for row in signs.quantisation[-(RECENT_RECORDS + 1) * len(last) :]:
        if row.step != last[0].step:
            earlier.setdefault(row.place, []).append(row.underflow)
    usual: dict[QuantisationRow, float] = {}
    rising = []
    for row in last:
        limit = UNDERFLOW_SHARE
        if row.place in earlier:
            usual[row] = median(earlier[row.place])
            risen = max(UNDERFLOW_FACTOR * usual[row], usual[row] + UNDERFLOW_RISE)
            limit = min(UNDERFLOW_SHARE, risen)
        if row.underflow > limit:
            rising.append(row)
    if not rising:
        return None
    worst = max(rising, key=lambda row: row.underflow)
    text = f"{100 * worst.underflow:.3g} % of {worst.place} became zero at step {worst.step}"
    if worst in usual:
        text += f", {100 * usual[worst]:.3g} % in the median of the measurements before"
    if len(rising) > 1:
        text += f"; too much of {len(rising) - 1} other operands, too"
    return f"{text}."


def _check_stale_weights(signs: WarningInputs) -> str | None:
    """Return the sentence on modules that multiplied an older weight, or None."""
    stale = []
    for row in signs.health:
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
    """The condition of the warning, for its documentation."""
    look: Callable[[WarningInputs], str | None]
    """Return the sentence of the warning on a run, None for a run without the sign."""


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
"""All early warnings by name."""


def find_early_warnings(signs: WarningInputs) -> list[tuple[str, str]]:
    """Return (name, sentence) of each warning that the signs of a run give."""
    warnings = []
    for name, row in EARLY_WARNINGS.items():
        if name in signs.silenced:
            continue
        sentence = row.look(signs)
        if sentence is not None:
            warnings.append((name, sentence))
    return warnings
