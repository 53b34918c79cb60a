"""Early warnings: signs of trouble in the records of a run, each with its threshold.

The run logs a warning when it begins to stand; `watch` and `report` ask the files of the run. ``silence.NAME=REASON``
in the config silences one everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from bridge.precision.formats import FORMATS
from bridge.precision.grouping import grouped
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
        is_dynamic = optimizer.get("fp16") and not optimizer.get("loss_scale")
        return cls(
            train=run.metrics("train"),
            quantisation=run.quantisation,
            health=run.record.health if run.record is not None else (),
            smallest_scale=optimizer.get("min_loss_scale") if is_dynamic else None,
            silenced={*silenced, *(run.config.get("silence") or ())},
        )


def _loss_not_finite(signs: Signs) -> str | None:
    first = next((one["step"] for one in signs.train if one["loss"] is None), None)
    return f"the loss is not finite since step {first}." if first is not None else None


def _gradients_not_finite(signs: Signs) -> str | None:
    healthy = [index for index, one in enumerate(signs.train) if not one["skipped"]]
    if signs.smallest_scale is not None and not healthy:
        return None  # a dynamic loss scale is still falling to its level
    recent = signs.train[healthy[0] if healthy else 0 :][-RECENT:]
    places = [one["not_finite"] for one in recent if one.get("not_finite")]
    if len(places) < (1 if signs.smallest_scale is None else 3):
        return None
    return f"gradients were not finite in {len(places)} of the last {len(recent)} records; the last time {places[-1]}."


def _spike(signs: Signs, *, column: str, factor: float, noun: str, digits: str) -> str | None:
    recent = [one[column] for one in signs.train[-RECENT - 1 :] if one[column] is not None]
    if len(recent) < RECENT // 2 or recent[-1] <= factor * (usual := median(recent[:-1])):
        return None
    rule = f"more than {factor:g} times the median of the records before"
    return f"the {noun} is {recent[-1]:{digits}}, {rule}, {usual:{digits}}."


_loss_spike = partial(_spike, column="loss", factor=1.2, noun="loss", digits=".4f")
_gradient_spike = partial(_spike, column="grad_norm", factor=10, noun="gradient norm", digits=".3g")


def _skipped(signs: Signs) -> str | None:
    first = next((one for one in signs.train if not one["skipped"]), None)
    if first is None:
        return None  # `gradients-not-finite` and the run's own limit say so
    last = signs.train[-1]
    skipped, steps = last["skipped_steps"] - first["skipped_steps"], last["step"] - first["step"]
    if 10 * skipped <= max(10, steps):  # a single step of a few is no share yet
        return None
    return f"{skipped} of {steps} steps since the first update were skipped, more than a tenth."


def _scale_floor(signs: Signs) -> str | None:
    floor = signs.smallest_scale
    if floor is None or not signs.train or signs.train[-1]["loss_scale"] > floor:
        return None
    return f"the loss scale is at its floor, {floor:g}: the next overflow cannot lower it."


def _spike_after_change(signs: Signs) -> str | None:
    recent = [one for one in signs.train[-RECENT:] if one["loss"] is not None]
    scales = [one["loss_scale"] for one in recent]
    changes = [index for index in range(1, len(recent)) if scales[index] != scales[index - 1]]
    if not changes or changes[-1] < len(recent) - AFTER_CHANGE:
        return None
    change = changes[-1]
    usual, loss = median(one["loss"] for one in recent[:change]), recent[-1]["loss"]
    if loss <= 1.1 * usual:
        return None
    moved = f"from {scales[change - 1]:g} to {scales[change]:g} by step {recent[change]['step']}"
    return f"the loss is {loss:.4f}, more than 1.1 times that before the loss scale went {moved}, {usual:.4f}."


def _amax_history(signs: Signs) -> str | None:
    ratios = {
        row: row.amax * row.scale / FORMATS[row.format].max
        for row in last_measured(signs.quantisation)
        if row.scale is not None and row.format in FORMATS
    }
    beyond = {row: ratio for row, ratio in ratios.items() if ratio > 4}
    if not beyond:
        return None
    row = max(beyond, key=lambda one: beyond[one])
    rest = f", and {len(beyond) - 1} other operands exceed theirs" if len(beyond) > 1 else ""
    return f"at step {row.step} the amax of {row.place} is {beyond[row]:.3g} times what its scale can represent{rest}."


def _underflow_rising(signs: Signs) -> str | None:
    last = last_measured(signs.quantisation)
    recent = signs.quantisation[-(RECENT + 1) * len(last) :]
    earlier = grouped((row.place, row.underflow) for row in recent if row.step != last[0].step)
    usual = {row: median(earlier[row.place]) for row in last if row.place in earlier}
    rising = [
        row
        for row in last
        if row.underflow > min(0.5, max(2 * usual.get(row, 1), usual.get(row, 1) + 0.02))
    ]
    if not rising:
        return None
    row = max(rising, key=lambda one: one.underflow)
    rest = f"; too much of {len(rising) - 1} other operands, too" if len(rising) > 1 else ""
    share = f"{100 * row.underflow:.3g} % of {row.place} became zero at step {row.step}"
    before = (
        f", {100 * usual[row]:.3g} % in the median of the measurements before"
        if row in usual
        else ""
    )
    return f"{share}{before}{rest}."


def _stale_weights(signs: Signs) -> str | None:
    stale = [row for row in signs.health if not row.is_fresh]
    if not stale:
        return None
    rest = f" and {len(stale) - 1} others" if len(stale) > 1 else ""
    return f"layer {stale[0].layer}, {stale[0].module}{rest} multiplied an older weight than that of the audited step."


class EarlyWarning(NamedTuple):
    """One row: a sign of trouble."""

    threshold: str
    """When it stands."""
    look: Callable[[Signs], str | None]
    """Return the sentence on a run in which it stands, None in others."""


WARNINGS = {
    "loss-not-finite": EarlyWarning("a loss is NaN or Inf", _loss_not_finite),
    "gradients-not-finite": EarlyWarning(
        f"a gradient was NaN or Inf in one of the last {RECENT} records; three under a dynamic loss scale",
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
        f"loss above 1.1 times its median, at most {AFTER_CHANGE} records after the loss scale changed",
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
    found = (
        (name, row.look(signs)) for name, row in WARNINGS.items() if name not in signs.silenced
    )
    return [(name, sentence) for name, sentence in found if sentence is not None]
