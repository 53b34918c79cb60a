"""Resuming in another precision: `precision_changes` says what differs from the checkpoint, and what that means.

A checkpoint holds weights in the dtype of the mode, FP32 master weights where the mode is half precision, the moments
of the optimizer and the scales of delayed scaling. A change that touches none of them takes effect in the next step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from bridge.precision.groups import GROUPS
from bridge.sync.routes import ROUTES, Route

REDERIVED = "re-derived"
ASKED = "needs resume.allow_precision_change=true"
IMPOSSIBLE = "impossible"
OUTCOMES = (REDERIVED, ASKED, IMPOSSIBLE)
"""Outcomes of a change, the mildest first."""
MODE = "mixed_precision mode"
_COMPUTE = "it takes effect in the next step; the checkpoint's weights and optimizer state stay as they are"
_UNSTORED = "nothing of it is in a checkpoint"
_STORED = "weights are saved in the dtype of the mode and quantised again from the FP32 master weights"
_ROUNDED = "the optimizer's state is rounded to the new dtype when it is read; digits that are gone do not come back"
_BEGINS = "scales and amax histories begin anew: a scale is 1 until the first amax is known"
_SCALE = "a dynamic loss scale goes on at the checkpoint's value, and a new one begins at initial_loss_scale"
SUBJECTS: Mapping[str, tuple[str, str]] = {
    "Compute": (REDERIVED, _COMPUTE),
    "Parameters and gradients": (REDERIVED, _UNSTORED),
    "Optimizer state": (ASKED, _ROUNDED),
    "Communication": (REDERIVED, _UNSTORED),
    "Megatron-FSDP": (ASKED, _ROUNDED),
    "Attention": (REDERIVED, _COMPUTE),
    "Mixture of experts": (REDERIVED, _COMPUTE),
    "FP8": (REDERIVED, _COMPUTE),
    "FP4": (REDERIVED, _COMPUTE),
    "Layers in BF16": (REDERIVED, _COMPUTE),
    "Single modules": (REDERIVED, _COMPUTE),
    "Loss scale": (REDERIVED, _SCALE),
}
"""Subject of a field -> the outcome and the meaning of its change; the mode is judged by `_of_mode`."""
FIELDS: Mapping[str, str] = {
    **dict.fromkeys(("fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather"), _STORED),
    "fp8_amax_history_len": _BEGINS,
}
"""Field -> its meaning, where that is not its subject's."""
HISTORY = ("fp8_amax_history_len", "fp8_amax_compute_algo")
"""Fields that only say something next to the same field of another run in delayed scaling."""
MODULES = "mixed_precision.modules"
DERIVED = ("params_dtype", "pipeline_dtype", "autocast_dtype")
"""Fields that follow from the mode."""


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

    def to_dict(self) -> dict[str, str]:
        """Return the change as plain data."""
        return asdict(self)


def precision_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Return what differs in precision between two runs, the gravest first."""
    found = list(_changes(before, now)) if before else []
    return sorted(found, key=lambda change: -OUTCOMES.index(change.outcome))


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    modes = _mode(before), _mode(now)
    if modes[0] != modes[1]:
        outcome, meaning = _of_mode(*modes)
        yield Change(path=MODE, before=modes[0], now=modes[1], outcome=outcome, meaning=meaning)
    seen = set[str]()
    for subject, names in GROUPS.items():
        for route in [route for name in names for route in ROUTES if route.field == name]:
            path = MODULES if route.field == "modules" else f"{route.owner}.{route.attribute}"
            one, two = before.get(path), now.get(path)
            acts = _acts(route, before), _acts(route, now)
            is_known = subject != "Mode" and route.field not in (*DERIVED, *seen) and None not in (one, two)
            if not is_known or one == two or not any(acts):
                continue
            seen.add(route.field)
            if route.field in HISTORY and not all(acts):
                continue
            outcome, meaning = SUBJECTS[subject]
            meaning = FIELDS.get(route.field, meaning)
            if route.field == "fp8_recipe" and "delayed" in (one, two):
                meaning = _BEGINS if two == "delayed" else "the checkpoint's scales and amax histories are not used"
            yield Change(path=path, before=str(one), now=str(two), outcome=outcome, meaning=meaning)


def _acts(route: Route, settings: Mapping[str, str]) -> bool:
    """Return whether a field has an effect in a run."""
    fp8, fp4 = (settings.get(f"model.{name}", "None") != "None" for name in ("fp8", "fp4"))
    if route.field.startswith("fp8_amax"):
        return fp8 and settings.get("model.fp8_recipe") == "delayed"
    if route.field in GROUPS["Loss scale"]:
        return settings.get("model.fp16") == "True"
    return {None: True, "fp8": fp8, "fp4": fp4, "low": fp8 or fp4}[route.family]


def _mode(settings: Mapping[str, str]) -> str:
    return next((name for name in ("fp16", "bf16") if settings.get(f"model.{name}") == "True"), "fp32")


def _of_mode(before: str, now: str) -> tuple[str, str]:
    """Return the outcome and the meaning of another mode."""
    if "fp32" in (before, now):
        return IMPOSSIBLE, "an FP32 run has no master weights, so the optimizer's states have other entries"
    scale = " and the loss scale begins at initial_loss_scale" if now == "fp16" else " and the loss scale is not used"
    return ASKED, f"weights are rounded again from the FP32 master weights,{scale}"
