"""Rules about the loss scale of FP16: its settings, and NaN checks that an overflow triggers."""

from collections.abc import Iterator
from typing import TypeGuard

from bridge.rules.context import RuleContext
from bridge.rules.inert_field_violation import find_fields_without_effect
from bridge.rules.inert_fields import LOSS_SCALER_FIELDS
from bridge.rules.rule import PARSER_SOURCE, contradiction, error, no_effect, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.versions import is_at_least

LARGEST_FP32 = 2**128 - 2**104
"""The largest FP32 number. The grad scaler stores the scale in FP32."""
POSITIVE_FINITE = "above 0 and finite in FP32"


def _is_valid_scale(value: float | None) -> TypeGuard[float]:
    # `math.isfinite` raises on an integer of hundreds of digits.
    return value is not None and abs(value) <= LARGEST_FP32 and value > 0


def find_unusable_scales(context: RuleContext) -> Iterator[Violation]:
    """Yield the numbers of the loss scale that the grad scaler cannot work with."""
    optimizer = context.optimizer
    scale, initial = optimizer.loss_scale, optimizer.initial_loss_scale
    # In the config of Megatron's optimizer, 0 means that the loss scale is not set.
    is_unset = scale == 0 and "loss_scale" not in context.stated
    if scale is not None and not _is_valid_scale(scale) and not is_unset:
        what = f"{POSITIVE_FINITE}; Megatron takes 0 for unset"
        hint = "use a number above 0, or None: dynamic under FP16, no scale otherwise"
        yield Violation("loss_scale", what=what, hint=hint)
    if not _is_valid_scale(optimizer.min_loss_scale):
        yield Violation("min_loss_scale", what=POSITIVE_FINITE, hint="use 1.0, Megatron's default")
    hint = "use 4294967296, Megatron's default"
    if initial is None and context.has_dynamic_loss_scale:
        what = "a number: a dynamic scale has to begin somewhere"
        yield Violation("initial_loss_scale", what=what, hint=hint)
    elif initial is not None and not _is_valid_scale(initial):
        yield Violation("initial_loss_scale", what=POSITIVE_FINITE, hint=hint)


def is_initial_scale_below_minimum(context: RuleContext) -> bool:
    """Return whether the initial loss scale is below the minimum."""
    initial, least = context.optimizer.initial_loss_scale, context.optimizer.min_loss_scale
    return _is_valid_scale(initial) and _is_valid_scale(least) and initial < least


def has_fractional_window(context: RuleContext) -> bool:
    """Return whether the window of the loss scale is not a whole number of steps."""
    window = context.optimizer.loss_scale_window
    return not _is_valid_scale(window) or window < 1 or window != int(window)


def find_scale_settings_without_effect(context: RuleContext) -> Iterator[Violation]:
    """Yield the settings of a dynamic loss scale in a run without a dynamic loss scale."""
    return find_fields_without_effect(context, LOSS_SCALER_FIELDS)


def find_fatal_nan_checks(context: RunContext) -> Iterator[Violation]:
    """Yield the NaN checks that end a run at an overflow of a dynamic loss scale."""
    if not context.has_dynamic_loss_scale:
        return
    stops_at_loss = context.sections["train"].is_given and context.train.check_for_nan_in_loss
    if context.ddp.check_for_nan_in_grad:
        yield Violation("ddp.check_for_nan_in_grad")
    if stops_at_loss:
        yield Violation("train.check_for_nan_in_loss")


def find_separate_expert_optimizer(context: RunContext) -> Violation | None:
    """Return a violation if the experts have a separate optimizer.

    Megatron makes a separate optimizer if the experts are on other ranks than the other layers.
    Before megatron-core 0.19, only expert parallelism decides that.
    """
    if not context.has_dynamic_loss_scale or not context.has_optimizer or not context.has_experts:
        return None
    parallel = context.parallel
    if parallel.expert > 1:
        return Violation(same="expert_model_parallel_size=1")
    if parallel.expert_tensor != parallel.tensor and is_at_least(context.target.mcore, "0.19"):
        return Violation(same=f"expert_tensor_parallel_size={parallel.tensor}")
    return None


RULES = (
    contradiction(
        id="PB141",
        title="loss scale is no usable number",
        setting="loss_scale",
        when=find_unusable_scales,
        message="must be {what}",
        remedies=("{hint}",),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py, optimizer/__init__.py",
    ),
    contradiction(
        id="PB142",
        title="loss scale begins below its floor",
        setting="initial_loss_scale",
        when=is_initial_scale_below_minimum,
        message="must not be below min_loss_scale, which is {run.optimizer.min_loss_scale!r}",
        remedies=("raise it", "lower min_loss_scale"),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py DynamicGradScaler",
    ),
    contradiction(
        id="PB143",
        title="loss-scale window is no whole number",
        setting="loss_scale_window",
        when=has_fractional_window,
        message="must be a whole number of steps, at least 1: the scaler compares it with a step "
        "count by ==, and a fraction never grows",
        remedies=("use 1000, Megatron's default",),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py DynamicGradScaler.update",
    ),
    no_effect(
        id="PB144",
        title="loss-scale schedule without effect",
        setting="initial_loss_scale",
        when=find_scale_settings_without_effect,
        message="has no effect: {why}",
        remedies=("drop it", "choose an fp16 recipe without loss_scale"),
        source="megatron-core 0.16.1 optimizer/__init__.py",
    ),
    no_effect(
        id="PB145",
        title="loss scale without effect",
        setting="loss_scale",
        when=lambda context: (
            context.is_fp32
            and context.has_optimizer
            and bool(context.optimizer.loss_scale)
            and not context.is_sharded
            and context.optimizer.use_distributed_optimizer is False
        ),
        message="has no effect: Megatron's FP32 optimizer has no loss scale "
        "unless it is distributed",
        remedies=("drop it", "set optimizer.use_distributed_optimizer=True"),
        source="megatron-core 0.16.1 optimizer/__init__.py",
    ),
    error(
        id="PB146",
        title="NaN check ends the run at the first overflow",
        setting="ddp.check_for_nan_in_grad",
        when=find_fatal_nan_checks,
        message="a dynamic loss scale overflows by design, from 2**32 "
        "down, and this check is fatal",
        remedies=(
            "set it to False, as Megatron-LM's argument parser does",
            "choose a recipe, which does",
        ),
        source=f"{PARSER_SOURCE}; megatron-core 0.19.2 distributed/param_and_grad_buffer.py",
    ),
    error(
        id="PB147",
        title="no FP16 for this optimizer",
        setting="optimizer.optimizer",
        when=lambda context: context.is_fp16 and context.has_emerging_optimizer,
        message="emerging optimizers cannot train in FP16",
        remedies=("choose a bf16 recipe", "use optimizer.optimizer=adam"),
        source="megatron-core 0.16.1 optimizer/muon.py, 0.19.2 optimizer/__init__.py",
    ),
    warning(
        id="PB148",
        title="loss scale reaches only part of the optimizer",
        setting="loss_scale",
        when=lambda context: (
            context.is_bf16
            and bool(context.optimizer.loss_scale)
            and context.has_emerging_optimizer
        ),
        message="the emerging optimizer's part has no scaler while its Adam companion has, so "
        "they unscale differently",
        remedies=("drop it: BF16 needs no loss scale",),
        source="Megatron-LM main of 2026-08-22 optimizer/__init__.py",
    ),
    warning(
        id="PB149",
        title="one loss scale per optimizer",
        setting="optimizer.optimizer",
        when=find_separate_expert_optimizer,
        message="dense and expert parameters have optimizers of their own, each with its own "
        "dynamic loss scale, and only the first scales the loss: after an overflow that only one "
        "of them sees, the gradients of the experts are unscaled by another number",
        remedies=(
            "choose a bf16 recipe, which has none",
            "set optimizer.loss_scale=1024, for example",
            "set model.{same}, which makes one optimizer of both",
        ),
        source="megatron-core 0.16.1 and 0.19.2 optimizer/optimizer.py "
        "MixedPrecisionOptimizer.prepare_grads and ChainedOptimizer, optimizer/__init__.py, "
        "extensions/transformer_engine.py:644",
        explanation="Each optimizer looks for inf in its own gradients and backs its own scale "
        "off. The step is skipped for both, but the two scales differ from then on, by a factor "
        "of two at each such overflow.",
    ),
)
