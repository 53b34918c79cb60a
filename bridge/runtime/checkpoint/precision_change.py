"""Resuming in another precision: differences from the checkpoint, and their meaning.

A checkpoint has weights in the dtype of the mode, FP32 master
weights where the mode is half precision, the moments of the optimizer and the scales of delayed
scaling. A change that touches none of them takes effect in the next step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bridge.precision import subjects
from bridge.precision.config import FIELDS, FIELDS_BY_SUBJECT
from bridge.precision.fields import StatedField
from bridge.precision.subjects import IMPOSSIBLE, NEEDS_PERMISSION, OUTCOMES
from bridge.sync.routes import ROUTES, Route

MODE_PATH = "mixed_precision mode"
"""Path of a change of mode, which is no field."""
_STORED_WEIGHTS_MEANING = (
    "weights are saved in the dtype of the mode and quantised again from the FP32 master weights"
)
_SCALES_BEGIN_MEANING = (
    "scales and amax histories begin again: a scale is 1 until the first amax is known"
)
_SCALES_UNUSED_MEANING = "the checkpoint's scales and amax histories are not used"
MODULES_PATH = "mixed_precision.modules"
"""Path of the rows of modules."""
AMAX_HISTORY_FIELDS = tuple(name for name in FIELDS if name.startswith("fp8_amax"))
"""Fields that are compared only if both runs use delayed scaling."""
DTYPE_FIELDS = tuple(dict.fromkeys(route.field for route in ROUTES if route.rule.endswith("dtype")))
"""Fields that follow from the mode."""
_ROUTES_OF_FIELD: dict[str, list[Route]] = {}
for _names in FIELDS_BY_SUBJECT.values():
    for _name in _names:
        _ROUTES_OF_FIELD[_name] = [route for route in ROUTES if route.field == _name]
"""Field -> its routes, in the order in which changes are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionChange:
    """A difference between the precision of a checkpoint and that of the run that resumes it."""

    path: str
    before: str
    now: str
    outcome: str
    """One of `OUTCOMES`."""
    meaning: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.before} in the checkpoint, {self.now} in this run "
            f"({self.outcome}: {self.meaning})"
        )


def find_precision_changes(
    before: Mapping[str, str], now: Mapping[str, str]
) -> list[PrecisionChange]:
    """Return the differences in precision between two runs, the gravest first."""
    if not before:
        return []
    return sorted(_list_changes(before, now), key=lambda change: -OUTCOMES.index(change.outcome))


def _list_changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[PrecisionChange]:
    """Yield the change of mode, and the first change of each other field of the precision."""
    mode_before = _get_mode(before)
    mode_now = _get_mode(now)
    if mode_before != mode_now:
        outcome, meaning = _describe_mode_change(mode_before, mode_now)
        yield PrecisionChange(
            path=MODE_PATH, before=mode_before, now=mode_now, outcome=outcome, meaning=meaning
        )
    for name, routes in _ROUTES_OF_FIELD.items():
        if FIELDS[name].subject is subjects.MODE or name in DTYPE_FIELDS:
            continue
        for route in routes:
            change = _find_field_change(route, before, now)
            if change is not None:
                yield change
                break


def _find_field_change(
    route: Route, before: Mapping[str, str], now: Mapping[str, str]
) -> PrecisionChange | None:
    """Return the change of a field in an owner, None if the field acts in neither run."""
    field = FIELDS[route.field]
    path = f"{route.owner}.{route.attribute}"
    if route.field == "modules":
        path = MODULES_PATH
    value_before = before.get(path)
    value_now = now.get(path)
    if value_before is None or value_now is None or value_before == value_now:
        return None
    acted_before = _has_effect(field, before)
    acts_now = _has_effect(field, now)
    if route.field in AMAX_HISTORY_FIELDS and not (acted_before and acts_now):
        return None
    if not (acted_before or acts_now) or (route.field == "fp8_recipe" and not acts_now):
        return None
    subject = field.subject or subjects.COMPUTE
    meaning = subject.meaning
    if field.twin is not None:
        meaning = _STORED_WEIGHTS_MEANING
    is_scheme = route.field == "fp8_recipe"
    if route.field == "fp8_amax_history_len" or (is_scheme and value_now == "delayed"):
        meaning = _SCALES_BEGIN_MEANING
    elif is_scheme and value_before == "delayed":
        meaning = _SCALES_UNUSED_MEANING
    return PrecisionChange(
        path=path,
        before=str(value_before),
        now=str(value_now),
        outcome=subject.outcome,
        meaning=meaning,
    )


def _has_effect(field: StatedField, settings: Mapping[str, str]) -> bool:
    """Return whether a field has an effect under the settings of a run."""
    fp8 = settings.get("model.fp8", "None") != "None"
    fp4 = settings.get("model.fp4", "None") != "None"
    if field.name in AMAX_HISTORY_FIELDS:
        return fp8 and settings.get("model.fp8_recipe") in field.schemes
    if field.subject is subjects.SCALER:
        return settings.get("model.fp16") == "True"
    return {None: True, "fp8": fp8, "fp4": fp4, "low": fp8 or fp4}[field.family]


def _get_mode(settings: Mapping[str, str]) -> str:
    """Return the mode of a run: fp16, bf16 or fp32."""
    for name in ("fp16", "bf16"):
        if settings.get(f"model.{name}") == "True":
            return name
    return "fp32"


def _describe_mode_change(before: str, now: str) -> tuple[str, str]:
    """Return outcome and meaning of a change of the mode."""
    if "fp32" in (before, now):
        return (
            IMPOSSIBLE,
            "an FP32 run has no master weights, so the optimizer's states have other entries",
        )
    if now == "fp16":
        scale = "the loss scale begins at initial_loss_scale"
    else:
        scale = "the loss scale is not used"
    return NEEDS_PERMISSION, f"weights are rounded again from the FP32 master weights, and {scale}"
