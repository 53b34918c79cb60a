"""FP16's loss scale: numbers the grad scaler can work with, and checks that would end the run at its first overflow."""

import sys
from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.inert import SCALER_SCHEDULE
from bridge.rules.rule import PARSER, Rule, each, owners_rule, precision_rule, sync_rule


def _bad(value: float | None) -> bool:
    # `math.isfinite` raises on an integer of hundreds of digits.
    return value is None or not abs(value) <= sys.float_info.max or value <= 0


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
        heading="PB141: loss scale is no usable number",
        predicate=_no_number,
        error="loss_scale: must be {what}",
        remedies=("{hint}",),
        verified="megatron-core 0.16.1 optimizer/grad_scaler.py, optimizer/__init__.py",
    ),
    precision_rule(
        heading="PB142: loss scale begins below its floor",
        predicate=_starts_below_floor,
        error="initial_loss_scale: must not be below min_loss_scale, which is {s.optimizer.min_loss_scale!r}",
        remedies=("raise it", "lower min_loss_scale"),
        verified="megatron-core 0.16.1 optimizer/grad_scaler.py DynamicGradScaler",
    ),
    precision_rule(
        heading="PB143: loss-scale window is no whole number",
        predicate=_window,
        error="loss_scale_window: must be a whole number of steps, at least 1: the scaler compares it with a step "
        "count by ==, and a fraction never grows",
        remedies=("use 1000, Megatron's default",),
        verified="megatron-core 0.16.1 optimizer/grad_scaler.py DynamicGradScaler.update",
    ),
    sync_rule(
        heading="PB144: loss-scale schedule without effect",
        warning="initial_loss_scale: has no effect: {why}",
        predicate=lambda s: s.inert_and_stated(SCALER_SCHEDULE),
        remedies=("drop it", "choose an fp16 recipe without loss_scale"),
        verified="megatron-core 0.16.1 optimizer/__init__.py",
    ),
    sync_rule(
        heading="PB145: loss scale without effect",
        predicate=lambda s: (
            s.has_optimizer
            and s.optimizer.loss_scale
            and s.optimizer.use_distributed_optimizer is False
            and not s.is_sharded
        ),
        warning="loss_scale: has no effect: Megatron's FP32 optimizer has no loss scale unless it is distributed",
        remedies=("drop it", "set optimizer.use_distributed_optimizer=True"),
        verified="megatron-core 0.16.1 optimizer/__init__.py",
        gate="is_fp32",
    ),
    Rule(
        heading="PB146: NaN check ends the run at the first overflow",
        predicate=lambda s: each(
            ("ddp.check_for_nan_in_grad", s.ddp.check_for_nan_in_grad),
            ("train.check_for_nan_in_loss", s.sections["train"].is_given and s.train.check_for_nan_in_loss),
        ),
        error="ddp.check_for_nan_in_grad: a dynamic loss scale overflows by design, from 2**32 down, and this check is "
        "fatal",
        remedies=("set it to False, as Megatron-LM's argument parser does", "choose a recipe, which does"),
        verified=f"{PARSER}; megatron-core 0.19.2 distributed/param_and_grad_buffer.py",
        gate="has_dynamic_scale",
    ),
    owners_rule(
        heading="PB147: no FP16 for this optimizer",
        predicate=lambda s: s.has_optimizer and s.optimizer.optimizer not in ("adam", "sgd"),
        error="optimizer.optimizer: emerging optimizers cannot train in FP16",
        remedies=("choose a bf16 recipe", "use optimizer.optimizer=adam"),
        verified="megatron-core 0.16.1 optimizer/muon.py, 0.19.2 optimizer/__init__.py",
        gate="is_fp16",
    ),
    owners_rule(
        heading="PB148: loss scale reaches only part of the optimizer",
        predicate=lambda s: (
            s.is_bf16 and s.optimizer.loss_scale and s.has_optimizer and s.optimizer.optimizer not in ("adam", "sgd")
        ),
        warning="loss_scale: the emerging optimizer's part has no scaler while its Adam companion has, so they unscale "
        "differently",
        remedies=("drop it: BF16 needs no loss scale",),
        verified="Megatron-LM main of 2026-08-22 optimizer/__init__.py",
    ),
    Rule(
        heading="PB149: one loss scale per optimizer",
        predicate=lambda s: s.is_moe and s.has_optimizer,
        info="optimizer.optimizer: dense and expert parameters have optimizers of their own, each with its own dynamic "
        "loss scale, and only the first scales the loss",
        remedies=("watch the two scales", "choose a bf16 recipe, which has none"),
        verified="Megatron-LM main of 2026-08-22 optimizer/optimizer.py ChainedOptimizer",
        gate="has_dynamic_scale",
    ),
)
