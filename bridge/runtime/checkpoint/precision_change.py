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
    if not before:
        return []
    return sorted(_changes(before, now), key=lambda change: -OUTCOMES.index(change.outcome))


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    mode_before, mode_now = _mode(before), _mode(now)
    if mode_before != mode_now:
        outcome, meaning = _of_mode(mode_before, mode_now)
        yield Change(path=MODE, before=mode_before, now=mode_now, outcome=outcome, meaning=meaning)
    for name, routes in _ROUTES.items():
        if FIELDS[name].subject is subjects.MODE or name in DERIVED:
            continue
        for route in routes:
            change = _of_field(route, before, now)
            if change is not None:
                yield change
                break


def _of_field(route: Route, before: Mapping[str, str], now: Mapping[str, str]) -> Change | None:
    """Return the change of one home of a field, None without one that has an effect in either run."""
    field = FIELDS[route.field]
    path = f"{route.owner}.{route.attribute}"
    if route.field == "modules":
        path = MODULES
    one, two = before.get(path), now.get(path)
    if one is None or two is None or one == two:
        return None
    acted, acts = _acts(field, before), _acts(field, now)
    if route.field in HISTORY and not (acted and acts):
        return None
    if not (acted or acts) or (route.field == "fp8_recipe" and not acts):
        return None
    subject = field.subject or subjects.COMPUTE
    meaning = subject.meaning
    if field.twin is not None:
        meaning = _STORED
    if route.field == "fp8_amax_history_len" or (route.field == "fp8_recipe" and two == "delayed"):
        meaning = _BEGINS
    elif route.field == "fp8_recipe" and one == "delayed":
        meaning = _UNUSED
    return Change(
        path=path, before=str(one), now=str(two), outcome=subject.outcome, meaning=meaning
    )


def _acts(field: StatedField, settings: Mapping[str, str]) -> bool:
    fp8 = settings.get("model.fp8", "None") != "None"
    fp4 = settings.get("model.fp4", "None") != "None"
    if field.name in HISTORY:
        return fp8 and settings.get("model.fp8_recipe") in field.schemes
    if field.subject is subjects.SCALER:
        return settings.get("model.fp16") == "True"
    return {None: True, "fp8": fp8, "fp4": fp4, "low": fp8 or fp4}[field.family]


def _mode(settings: Mapping[str, str]) -> str:
    for name in ("fp16", "bf16"):
        if settings.get(f"model.{name}") == "True":
            return name
    return "fp32"


def _of_mode(before: str, now: str) -> tuple[str, str]:
    if "fp32" in (before, now):
        return (
            IMPOSSIBLE,
            "an FP32 run has no master weights, so the optimizer's states have other entries",
        )
    if now == "fp16":
        scale = "the loss scale begins at initial_loss_scale"
    else:
        scale = "the loss scale is not used"
    return ASKED, f"weights are rounded again from the FP32 master weights, and {scale}"
