"""FP16's loss scale: numbers the grad scaler can work with, and checks that would end the run at its first overflow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from bridge.rules.inert import SCALER_SCHEDULE
from bridge.rules.rule import PARSER, Rule, each, inert_rule, owners_rule, precision_rule

if TYPE_CHECKING:
    from bridge.rules.context import RuleContext

__all__ = ["RULES"]


def _bad(value: float | None, least: float = 0.0) -> bool:
    # `math.isfinite` raises on an integer of hundreds of digits.
    return value is None or not abs(value) <= sys.float_info.max or value <= least


def _no_number(s: RuleContext) -> list[dict[str, Any]]:
    optimizer = s.optimizer
    scale, least, initial = optimizer.loss_scale, optimizer.min_loss_scale, optimizer.initial_loss_scale
    first = "use 4294967296, Megatron's default"
    found = []
    if scale is not None and _bad(scale):
        hint = "use a number above 0, or None: dynamic under FP16, no scale otherwise"
        found.append({"path": "loss_scale", "what": "above 0 and finite; Megatron takes 0 for unset", "hint": hint})
    if _bad(least):
        found.append({"path": "min_loss_scale", "what": "above 0 and finite", "hint": "use 1.0, Megatron's default"})
    if initial is None and s.has_dynamic_scale:
        what = "a number: a dynamic scale has to begin somewhere"
        found.append({"path": "initial_loss_scale", "what": what, "hint": first})
    elif initial is not None and _bad(initial):
        found.append({"path": "initial_loss_scale", "what": "above 0 and finite", "hint": first})
    return found


def _starts_below_floor(s: RuleContext) -> bool:
    initial, least = s.optimizer.initial_loss_scale, s.optimizer.min_loss_scale
    return not _bad(initial) and not _bad(least) and initial < least


def _window(s: RuleContext) -> bool:
    window = s.optimizer.loss_scale_window
    return _bad(window) or window < 1 or window != int(window)


RULES = (
    precision_rule(
        id="PB141",
        title="loss scale is no usable number",
        path="loss_scale",
        predicate=_no_number,
        message="must be {what}",
        remedies=("{hint}",),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py, optimizer/__init__.py",
    ),
    precision_rule(
        id="PB142",
        title="loss scale begins below its floor",
        path="initial_loss_scale",
        predicate=_starts_below_floor,
        message="must not be below min_loss_scale, which is {s.optimizer.min_loss_scale!r}",
        remedies=("raise it", "lower min_loss_scale"),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py DynamicGradScaler",
    ),
    precision_rule(
        id="PB143",
        title="loss-scale window is no whole number",
        path="loss_scale_window",
        predicate=_window,
        message="must be a whole number of steps, at least 1: the scaler compares it with a step count by ==, and a "
        "fraction never grows",
        remedies=("use 1000, Megatron's default",),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py DynamicGradScaler.update",
    ),
    inert_rule(
        id="PB144",
        title="loss-scale schedule without effect",
        path="initial_loss_scale",
        predicate=lambda s: s.inert_and_stated(SCALER_SCHEDULE),
        remedies=("drop it", "choose an fp16 recipe without loss_scale"),
        source="megatron-core 0.16.1 optimizer/__init__.py",
    ),
    owners_rule(
        id="PB145",
        severity="warning",
        title="loss scale without effect",
        path="loss_scale",
        sync="reported",
        predicate=lambda s: (
            s.has_optimizer
            and s.optimizer.loss_scale
            and s.optimizer.use_distributed_optimizer is False
            and not s.is_sharded
        ),
        message="has no effect: Megatron's FP32 optimizer has no loss scale unless it is distributed",
        remedies=("drop it", "set optimizer.use_distributed_optimizer=True"),
        source="megatron-core 0.16.1 optimizer/__init__.py",
        gate="is_fp32",
    ),
    Rule(
        id="PB146",
        title="NaN check ends the run at the first overflow",
        path="ddp.check_for_nan_in_grad",
        predicate=lambda s: each(
            ("ddp.check_for_nan_in_grad", s.ddp.check_for_nan_in_grad),
            ("train.check_for_nan_in_loss", s.sections["train"].is_given and s.train.check_for_nan_in_loss),
        ),
        message="a dynamic loss scale overflows by design, from 2**32 down, and this check is fatal",
        remedies=("set it to False, as Megatron-LM's argument parser does", "choose a recipe, which does"),
        source=f"{PARSER}; megatron-core 0.19.2 distributed/param_and_grad_buffer.py",
        gate="has_dynamic_scale",
    ),
    owners_rule(
        id="PB147",
        title="no FP16 for this optimizer",
        path="optimizer.optimizer",
        predicate=lambda s: s.has_optimizer and s.optimizer.optimizer not in ("adam", "sgd"),
        message="emerging optimizers cannot train in FP16",
        remedies=("choose a bf16 recipe", "use optimizer.optimizer=adam"),
        source="megatron-core 0.16.1 optimizer/muon.py, 0.19.2 optimizer/__init__.py",
        gate="is_fp16",
    ),
    owners_rule(
        id="PB148",
        severity="warning",
        title="loss scale reaches only part of the optimizer",
        path="loss_scale",
        predicate=lambda s: (
            s.is_bf16 and s.optimizer.loss_scale and s.has_optimizer and s.optimizer.optimizer not in ("adam", "sgd")
        ),
        message="the emerging optimizer's part has no scaler while its Adam companion has, so they unscale differently",
        remedies=("drop it: BF16 needs no loss scale",),
        source="Megatron-LM main of 2026-08-22 optimizer/__init__.py",
    ),
    Rule(
        id="PB149",
        severity="info",
        title="one loss scale per optimizer",
        path="optimizer.optimizer",
        predicate=lambda s: s.is_moe and s.has_optimizer,
        message="dense and expert parameters have optimizers of their own, each with its own dynamic loss scale, and "
        "only the first scales the loss",
        remedies=("watch the two scales", "choose a bf16 recipe, which has none"),
        source="Megatron-LM main of 2026-08-22 optimizer/optimizer.py ChainedOptimizer",
        gate="has_dynamic_scale",
    ),
)
