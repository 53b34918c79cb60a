"""`find_precision_changes`: the changes of precision when a run resumes, and their meaning.

A checkpoint has the weights in the dtype of the mode, FP32 master weights if the mode is half
precision, the moments of the optimizer, and the scales of delayed scaling. A change of precision
that affects none of them takes effect in the next step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bridge.precision import subjects
from bridge.precision.precision_config import FIELDS, FIELDS_BY_SUBJECT
from bridge.precision.stated_field import StatedField
from bridge.precision.subjects import IMPOSSIBLE, NEEDS_PERMISSION, OUTCOMES
from bridge.sync.field_routes import ROUTES, Route

MODE_PATH = "mixed_precision mode"
"""Path of a change of mode. The mode is not a field."""
_STORED_WEIGHTS_MEANING = (
    "weights are saved in the dtype of the mode and quantised again from the FP32 master weights"
)
_SCALES_BEGIN_MEANING = (
    "scales and amax histories begin again: a scale is 1 until the first amax is known"
)
_SCALES_UNUSED_MEANING = "the checkpoint's scales and amax histories are not used"
MODULES_PATH = "mixed_precision.modules"
"""Path of a change of the rows of `modules`."""
AMAX_HISTORY_FIELDS = tuple(name for name in FIELDS if name.startswith("fp8_amax"))
"""Fields that are compared only if both runs use delayed scaling."""
DTYPE_FIELDS = tuple(dict.fromkeys(route.field for route in ROUTES if route.rule.endswith("dtype")))
"""Fields that follow from the mode."""


def _group_routes_by_field() -> dict[str, list[Route]]:
    """Return field -> its routes, in the order in which changes are listed."""
    routes_of: dict[str, list[Route]] = {}
    for names in FIELDS_BY_SUBJECT.values():
        for name in names:
            routes_of[name] = [route for route in ROUTES if route.field == name]
    return routes_of


_ROUTES_OF_FIELD = _group_routes_by_field()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionChange:
    """A difference in precision between a checkpoint and the run that resumes it."""

    path: str
    """Path of the setting, for example ``model.fp8_recipe``."""
    before: str
    """Value in the checkpoint."""
    now: str
    """Value in the run that resumes."""
    outcome: str
    """One of `OUTCOMES`."""
    meaning: str
    """A clause about the effect of the change on the state of the checkpoint."""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.before} in the checkpoint, {self.now} in this run "
            f"({self.outcome}: {self.meaning})"
        )


def find_precision_changes(
    before: Mapping[str, str], now: Mapping[str, str]
) -> list[PrecisionChange]:
    """Return the differences in precision between two runs, the most severe outcome first.

    Args:
        before: Path -> value of the settings of the run that wrote the checkpoint. They are empty
            for a checkpoint without a manifest. Then no difference is known.
        now: The settings of the run that resumes.
    """
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
    """Return the change of a field in an owner, or None without a change.

    A change is reported if the field has an effect in one of the runs. A field of the amax history
    needs an effect in both runs, and a scheme needs an effect in the run that resumes.
    """
    field = FIELDS[route.field]
    path = f"{route.owner}.{route.attribute}"
    if route.field == "modules":
        path = MODULES_PATH
    value_before = before.get(path)
    value_now = now.get(path)
    if value_before is None or value_now is None or value_before == value_now:
        return None
    had_effect = _has_effect(field, before)
    has_effect = _has_effect(field, now)
    if route.field in AMAX_HISTORY_FIELDS and not (had_effect and has_effect):
        return None
    if route.field == "fp8_recipe" and not has_effect:
        return None
    if not (had_effect or has_effect):
        return None
    subject = field.subject or subjects.COMPUTE
    return PrecisionChange(
        path=path,
        before=str(value_before),
        now=str(value_now),
        outcome=subject.outcome,
        meaning=_get_meaning(field, value_before, value_now),
    )


def _get_meaning(field: StatedField, before: str, now: str) -> str:
    """Return the meaning of a change of a field from one value to another, as a clause."""
    is_scheme = field.name == "fp8_recipe"
    if field.name == "fp8_amax_history_len" or (is_scheme and now == "delayed"):
        return _SCALES_BEGIN_MEANING
    if is_scheme and before == "delayed":
        return _SCALES_UNUSED_MEANING
    if field.twin is not None:  # fp8_param or fp4_param
        return _STORED_WEIGHTS_MEANING
    subject = field.subject or subjects.COMPUTE
    return subject.meaning


def _has_effect(field: StatedField, settings: Mapping[str, str]) -> bool:
    """Return whether a field has an effect under the settings of a run."""
    has_fp8 = settings.get("model.fp8", "None") != "None"
    has_fp4 = settings.get("model.fp4", "None") != "None"
    if field.name in AMAX_HISTORY_FIELDS:
        return has_fp8 and settings.get("model.fp8_recipe") in field.schemes
    if field.subject is subjects.SCALER:
        return settings.get("model.fp16") == "True"
    if field.family == "fp8":
        return has_fp8
    if field.family == "fp4":
        return has_fp4
    if field.family == "low":
        return has_fp8 or has_fp4
    return True


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
    meaning = (
        "weights are rounded again from the FP32 master weights, and the loss scale is not used"
    )
    if now == "fp16":
        meaning = (
            "weights are rounded again from the FP32 master weights, and the loss scale begins at "
            "initial_loss_scale"
        )
    return NEEDS_PERMISSION, meaning
