"""Resuming in another precision: `precision_changes` says what differs from the checkpoint, and what that means.

A checkpoint holds weights in the dtype of the mode, FP32 master weights where the mode is half precision, the moments
of the optimizer and the scales of delayed scaling. A change that touches none of them takes effect in the next step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bridge.precision import subjects
from bridge.precision.config import FIELDS, GROUPS
from bridge.precision.fields import StatedField
from bridge.precision.subjects import ASKED, IMPOSSIBLE, OUTCOMES
from bridge.sync.routes import ROUTES, Route

MODE = "mixed_precision mode"
_STORED = (
    "weights are saved in the dtype of the mode and quantised again from the FP32 master weights"
)
_BEGINS = "scales and amax histories begin again: a scale is 1 until the first amax is known"
_UNUSED = "the checkpoint's scales and amax histories are not used"
MODULES = "mixed_precision.modules"
HISTORY = tuple(name for name in FIELDS if name.startswith("fp8_amax"))
"""Fields that only say something next to the same field of another run in delayed scaling."""
DERIVED = tuple(dict.fromkeys(route.field for route in ROUTES if route.rule.endswith("dtype")))
"""Fields that follow from the mode."""
_ROUTES = {
    name: [route for route in ROUTES if route.field == name]
    for names in GROUPS.values()
    for name in names
}
"""Field -> its routes, in the order in which changes are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One difference between the precision of a checkpoint and that of the run that resumes it."""

    path: str
    before: str
    now: str
    outcome: str
    """One of `OUTCOMES`."""
    meaning: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} in the checkpoint, {self.now} in this run ({self.outcome}: {self.meaning})"


def precision_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Return what differs in precision between two runs, the gravest first."""
    return sorted(
        _changes(before, now) if before else (), key=lambda change: -OUTCOMES.index(change.outcome)
    )


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    modes = _mode(before), _mode(now)
    if modes[0] != modes[1]:
        outcome, meaning = _of_mode(*modes)
        yield Change(path=MODE, before=modes[0], now=modes[1], outcome=outcome, meaning=meaning)
    for name, routes in _ROUTES.items():
        if FIELDS[name].subject is not subjects.MODE and name not in DERIVED:
            changes = (_of_field(route, before, now) for route in routes)
            yield from [change for change in changes if change is not None][:1]


def _of_field(route: Route, before: Mapping[str, str], now: Mapping[str, str]) -> Change | None:
    """Return the change of one home of a field, None without one that has an effect in either run."""
    field = FIELDS[route.field]
    path = MODULES if route.field == "modules" else f"{route.owner}.{route.attribute}"
    one, two = before.get(path), now.get(path)
    acts = _acts(field, before), _acts(field, now)
    has_effect = all(acts) if route.field in HISTORY else any(acts)
    if (
        None in (one, two)
        or one == two
        or not has_effect
        or (route.field == "fp8_recipe" and not acts[1])
    ):
        return None
    subject = field.subject or subjects.COMPUTE
    meaning = _STORED if field.twin is not None else subject.meaning
    if route.field == "fp8_amax_history_len" or (route.field == "fp8_recipe" and two == "delayed"):
        meaning = _BEGINS
    elif route.field == "fp8_recipe" and one == "delayed":
        meaning = _UNUSED
    return Change(
        path=path, before=str(one), now=str(two), outcome=subject.outcome, meaning=meaning
    )


def _acts(field: StatedField, settings: Mapping[str, str]) -> bool:
    fp8, fp4 = (settings.get(f"model.{name}", "None") != "None" for name in ("fp8", "fp4"))
    if field.name in HISTORY:
        return fp8 and settings.get("model.fp8_recipe") in field.schemes
    if field.subject is subjects.SCALER:
        return settings.get("model.fp16") == "True"
    return {None: True, "fp8": fp8, "fp4": fp4, "low": fp8 or fp4}[field.family]


def _mode(settings: Mapping[str, str]) -> str:
    on = [name for name in ("fp16", "bf16") if settings.get(f"model.{name}") == "True"]
    return on[0] if on else "fp32"


def _of_mode(before: str, now: str) -> tuple[str, str]:
    if "fp32" in (before, now):
        return (
            IMPOSSIBLE,
            "an FP32 run has no master weights, so the optimizer's states have other entries",
        )
    scale = (
        " and the loss scale begins at initial_loss_scale"
        if now == "fp16"
        else " and the loss scale is not used"
    )
    return ASKED, f"weights are rounded again from the FP32 master weights,{scale}"
