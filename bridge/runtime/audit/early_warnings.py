"""Early warnings: signs of trouble in the records of a run, each with its threshold.

The run logs a warning when it begins to stand; `watch` and `report` ask the files of the run.
``silence.NAME=REASON`` in the config silences one everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from bridge.precision.formats import FORMATS
from bridge.runtime.audit.quantisation import QuantisationRow, last_measured
from bridge.runtime.audit.record import HealthRow
from bridge.runtime.audit.run_folder import RunFolder

RECENT = 20
"""Records, or measurements of the quantisers, that are compared with the last one."""
AFTER_CHANGE = 5
"""Records after a change of the loss scale in which a spike is put down to it."""


@dataclass(kw_only=True)
class Signs:
    """The values of a run so far that the warnings look at."""

    train: Sequence[dict[str, Any]]
    """Records of steps, as in ``metrics.jsonl``."""
    quantisation: Sequence[QuantisationRow] = ()
    health: Sequence[HealthRow] = ()
    """Of the last audited step."""
    smallest_scale: float | None = None
    """Floor of a dynamic loss scale; None without one."""
    silenced: Collection[str] = field(default_factory=tuple)
    """Names of warnings."""

    @classmethod
    def of(cls, run: RunFolder, *, silenced: Collection[str] = ()) -> Signs:
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


def _loss_not_finite(signs: Signs) -> str | None:
    for record in signs.train:
        if record["loss"] is None:
            return f"the loss is not finite since step {record['step']}."
    return None


def _gradients_not_finite(signs: Signs) -> str | None:
    is_dynamic = signs.smallest_scale is not None
    first = _first_update(signs.train)
    if first is None and is_dynamic:
        return None  # a dynamic loss scale is still falling to its level
    recent = signs.train[first or 0 :][-RECENT:]
    places = []
    for record in recent:
        if record.get("not_finite"):
            places.append(record["not_finite"])
    least = 1
    if is_dynamic:
        least = 3
    if len(places) < least:
        return None
    return (
        f"gradients were not finite in {len(places)} of the last {len(recent)} records; "
        f"the last time {places[-1]}."
    )


def _known(records: Sequence[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    """Return the records in which a value is finite."""
    known = []
    for record in records:
        if record[column] is not None:
            known.append(record)
    return known


def _first_update(train: Sequence[dict[str, Any]]) -> int | None:
    """Return the index of the first record whose step was not skipped."""
    for index, record in enumerate(train):
        if not record["skipped"]:
            return index
    return None


def _spike(signs: Signs, *, column: str, factor: float, noun: str, digits: str) -> str | None:
    recent = []
    for record in _known(signs.train[-RECENT - 1 :], column):
        recent.append(record[column])
    if len(recent) < RECENT // 2:
        return None
    last, usual = recent[-1], median(recent[:-1])
    if last <= factor * usual:
        return None
    rule = f"more than {factor:g} times the median of the records before"
    return f"the {noun} is {last:{digits}}, {rule}, {usual:{digits}}."


_loss_spike = partial(_spike, column="loss", factor=1.2, noun="loss", digits=".4f")
_gradient_spike = partial(_spike, column="grad_norm", factor=10, noun="gradient norm", digits=".3g")


def _skipped(signs: Signs) -> str | None:
    index = _first_update(signs.train)
    if index is None:
        return None  # `gradients-not-finite` and the run's own limit say so
    first, last = signs.train[index], signs.train[-1]
    skipped = last["skipped_steps"] - first["skipped_steps"]
    steps = last["step"] - first["step"]
    if 10 * skipped <= max(10, steps):  # a single step of a few is no share yet
        return None
    return f"{skipped} of {steps} steps since the first update were skipped, more than a tenth."


def _scale_floor(signs: Signs) -> str | None:
    floor = signs.smallest_scale
    if floor is None or not signs.train or signs.train[-1]["loss_scale"] > floor:
        return None
    return f"the loss scale is at its floor, {floor:g}: the next overflow cannot lower it."


def _spike_after_change(signs: Signs) -> str | None:
    recent = _known(signs.train[-RECENT:], "loss")
    change = None
    for index in range(1, len(recent)):
        if recent[index]["loss_scale"] != recent[index - 1]["loss_scale"]:
            change = index
    if change is None or change < len(recent) - AFTER_CHANGE:
        return None
    usual = median(record["loss"] for record in recent[:change])
    loss = recent[-1]["loss"]
    if loss <= 1.1 * usual:
        return None
    before, after = recent[change - 1], recent[change]
    scales = f"from {before['loss_scale']:g} to {after['loss_scale']:g}"
    rule = f"more than 1.1 times that before the loss scale went {scales} by step {after['step']}"
    return f"the loss is {loss:.4f}, {rule}, {usual:.4f}."


def _amax_history(signs: Signs) -> str | None:
    ratios: dict[QuantisationRow, float] = {}
    for row in last_measured(signs.quantisation):
        if row.scale is None or row.format not in FORMATS:
            continue
        ratio = row.amax * row.scale / FORMATS[row.format].max
        if ratio > 4:
            ratios[row] = ratio
    if not ratios:
        return None
    worst = max(ratios, key=lambda row: ratios[row])
    rest = ""
    if len(ratios) > 1:
        rest = f", and {len(ratios) - 1} other operands exceed theirs"
    rule = f"{ratios[worst]:.3g} times what its scale can represent"
    return f"at step {worst.step} the amax of {worst.place} is {rule}{rest}."


def _underflow_rising(signs: Signs) -> str | None:
    last = last_measured(signs.quantisation)
    earlier: dict[str, list[float]] = {}
    for row in signs.quantisation[-(RECENT + 1) * len(last) :]:
        if row.step != last[0].step:
            earlier.setdefault(row.place, []).append(row.underflow)
    usual: dict[QuantisationRow, float] = {}
    rising = []
    for row in last:
        limit = 0.5
        if row.place in earlier:
            usual[row] = median(earlier[row.place])
            limit = min(0.5, max(2 * usual[row], usual[row] + 0.02))
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


def _stale_weights(signs: Signs) -> str | None:
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
    """When it stands."""
    look: Callable[[Signs], str | None]
    """Return the sentence on a run in which it stands, None in others."""


WARNINGS = {
    "loss-not-finite": EarlyWarning("a loss is NaN or Inf", _loss_not_finite),
    "gradients-not-finite": EarlyWarning(
        f"a gradient was NaN or Inf in one of the last {RECENT} records; "
        "three under a dynamic loss scale",
        _gradients_not_finite,
    ),
    "loss-spike": EarlyWarning(f"loss above 1.2 times the median of {RECENT} records", _loss_spike),
    "gradient-spike": EarlyWarning(
        f"gradient norm above 10 times the median of {RECENT} records", _gradient_spike
    ),
    "skipped-steps": EarlyWarning(
        "more than a tenth of the steps since the first update were skipped", _skipped
    ),
    "loss-scale-floor": EarlyWarning("the dynamic loss scale is at min_loss_scale", _scale_floor),
    "spike-after-scale-change": EarlyWarning(
        f"loss above 1.1 times its median, at most {AFTER_CHANGE} records after "
        "the loss scale changed",
        _spike_after_change,
    ),
    "amax-history": EarlyWarning(
        "an amax is above four times what the operand's scale can represent", _amax_history
    ),
    "underflow-rising": EarlyWarning(
        "the share that becomes zero is above half, or twice its median and 2 points above it",
        _underflow_rising,
    ),
    "stale-weights": EarlyWarning(
        "a GEMM of the last audited step multiplied an older weight", _stale_weights
    ),
}
"""All early warnings by name."""


def early_warnings(signs: Signs) -> list[tuple[str, str]]:
    """Return (name, sentence) of each warning that stands."""
    warnings = []
    for name, row in WARNINGS.items():
        if name in signs.silenced:
            continue
        sentence = row.look(signs)
        if sentence is not None:
            warnings.append((name, sentence))
    return warnings
