"""FP16's loss scale: numbers the grad scaler can work with, and checks that would end the run at its first overflow."""

from bridge.rules.context import RuleContext
from bridge.rules.inert import SCALER_SCHEDULE
from bridge.rules.rule import PARSER, contradiction, error, no_effect, warning
from bridge.rules.violation import Violation, all_of, violations, without_effect
from bridge.target.versions import at_least

LARGEST = 2**128 - 2**104
"""Of FP32, in which the grad scaler keeps the scale."""


def _bad(value: float | None) -> bool:
    # `math.isfinite` raises on an integer of hundreds of digits.
    return value is None or not abs(value) <= LARGEST or value <= 0


def _no_number(run: RuleContext) -> list[Violation]:
    optimizer = run.optimizer
    scale, least, initial = optimizer.loss_scale, optimizer.min_loss_scale, optimizer.initial_loss_scale
    positive, begins = "above 0 and finite in FP32", "a number: a dynamic scale has to begin somewhere"
    unset = "use a number above 0, or None: dynamic under FP16, no scale otherwise"
    first = "use 4294967296, Megatron's default"
    is_unset = scale == 0 and "loss_scale" not in run.stated  # an owner's 0 is none to Megatron's optimizer
    is_missing, is_bad = initial is None and run.has_dynamic_scale, initial is not None and _bad(initial)
    rows = (
        (
            scale is not None and _bad(scale) and not is_unset,
            "loss_scale",
            f"{positive}; Megatron takes 0 for unset",
            unset,
        ),
        (_bad(least), "min_loss_scale", positive, "use 1.0, Megatron's default"),
        (is_missing or is_bad, "initial_loss_scale", begins if is_missing else positive, first),
    )
    return [Violation(path, what=what, hint=hint) for holds, path, what, hint in rows if holds]


def _starts_below_floor(run: RuleContext) -> bool:
    initial, least = run.optimizer.initial_loss_scale, run.optimizer.min_loss_scale
    return not _bad(initial) and not _bad(least) and initial < least


def _fatal_checks(run: RuleContext) -> list[Violation]:
    stops_at_loss = run.sections["train"].is_given and run.train.check_for_nan_in_loss
    checks = {"ddp.check_for_nan_in_grad": run.ddp.check_for_nan_in_grad, "train.check_for_nan_in_loss": stops_at_loss}
    return violations(checks)


def _window(run: RuleContext) -> bool:
    window = run.optimizer.loss_scale_window
    return _bad(window) or window < 1 or window != int(window)


def _optimizers_of_experts(run: RuleContext) -> list[Violation]:
    """Return the violation of experts that are spread over other ranks than the layers, which parts their optimizers.

    Before megatron-core 0.19 expert parallelism alone counts.
    """
    if run.parallel.expert > 1:
        return [Violation(same="expert_model_parallel_size=1")]
    is_split_otherwise = run.parallel.expert_tensor != run.parallel.tensor
    if is_split_otherwise and at_least(run.mcore, "0.19"):
        return [Violation(same=f"expert_tensor_parallel_size={run.parallel.tensor}")]
    return []


RULES = (
    contradiction(
        id="PB141",
        title="loss scale is no usable number",
        setting="loss_scale",
        when=_no_number,
        message="must be {what}",
        remedies=("{hint}",),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py, optimizer/__init__.py",
    ),
    contradiction(
        id="PB142",
        title="loss scale begins below its floor",
        setting="initial_loss_scale",
        when=all_of(_starts_below_floor),
        message="must not be below min_loss_scale, which is {run.optimizer.min_loss_scale!r}",
        remedies=("raise it", "lower min_loss_scale"),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py DynamicGradScaler",
    ),
    contradiction(
        id="PB143",
        title="loss-scale window is no whole number",
        setting="loss_scale_window",
        when=all_of(_window),
        message="must be a whole number of steps, at least 1: the scaler compares it with a step count by ==, and a "
        "fraction never grows",
        remedies=("use 1000, Megatron's default",),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py DynamicGradScaler.update",
    ),
    no_effect(
        id="PB144",
        title="loss-scale schedule without effect",
        setting="initial_loss_scale",
        when=lambda run: without_effect(run, SCALER_SCHEDULE),
        message="has no effect: {why}",
        remedies=("drop it", "choose an fp16 recipe without loss_scale"),
        source="megatron-core 0.16.1 optimizer/__init__.py",
    ),
    no_effect(
        id="PB145",
        title="loss scale without effect",
        setting="loss_scale",
        when=all_of(
            *("is_fp32", "has_optimizer", "optimizer.loss_scale", "not is_sharded"),
            "optimizer.use_distributed_optimizer is False",
        ),
        message="has no effect: Megatron's FP32 optimizer has no loss scale unless it is distributed",
        remedies=("drop it", "set optimizer.use_distributed_optimizer=True"),
        source="megatron-core 0.16.1 optimizer/__init__.py",
    ),
    error(
        id="PB146",
        title="NaN check ends the run at the first overflow",
        setting="ddp.check_for_nan_in_grad",
        when=all_of("has_dynamic_scale", find=_fatal_checks),
        message="a dynamic loss scale overflows by design, from 2**32 down, and this check is fatal",
        remedies=("set it to False, as Megatron-LM's argument parser does", "choose a recipe, which does"),
        source=f"{PARSER}; megatron-core 0.19.2 distributed/param_and_grad_buffer.py",
    ),
    error(
        id="PB147",
        title="no FP16 for this optimizer",
        setting="optimizer.optimizer",
        when=all_of("is_fp16", "has_emerging_optimizer"),
        message="emerging optimizers cannot train in FP16",
        remedies=("choose a bf16 recipe", "use optimizer.optimizer=adam"),
        source="megatron-core 0.16.1 optimizer/muon.py, 0.19.2 optimizer/__init__.py",
    ),
    warning(
        id="PB148",
        title="loss scale reaches only part of the optimizer",
        setting="loss_scale",
        when=all_of("is_bf16", "optimizer.loss_scale", "has_emerging_optimizer"),
        message="the emerging optimizer's part has no scaler while its Adam companion has, so they unscale differently",
        remedies=("drop it: BF16 needs no loss scale",),
        source="Megatron-LM main of 2026-08-22 optimizer/__init__.py",
    ),
    warning(
        id="PB149",
        title="one loss scale per optimizer",
        setting="optimizer.optimizer",
        when=all_of(
            *("has_dynamic_scale", "has_optimizer", "model.num_moe_experts", "shape.is_moe"),
            find=_optimizers_of_experts,
        ),
        message="dense and expert parameters have optimizers of their own, each with its own dynamic loss scale, and "
        "only the first scales the loss: after an overflow that only one of them sees, the gradients of the experts "
        "are unscaled by another number",
        remedies=(
            "choose a bf16 recipe, which has none",
            "set optimizer.loss_scale=1024, for example",
            "set model.{same}, which makes one optimizer of both",
        ),
        source="megatron-core 0.16.1 and 0.19.2 optimizer/optimizer.py MixedPrecisionOptimizer.prepare_grads and "
        "ChainedOptimizer, optimizer/__init__.py, extensions/transformer_engine.py:644",
        explanation="Each optimizer looks for inf in its own gradients and backs its own scale off. The step is "
        "skipped for both, but the two scales differ from then on, by a factor of two at each such overflow.",
    ),
)
