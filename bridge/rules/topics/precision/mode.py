"""Rules about the mode (FP32, FP16 or BF16), the dtypes that belong to it, and autocast."""

from collections.abc import Iterator

from bridge.model.layout import RESIDUAL_DTYPE_SINCE, get_sent_dtype
from bridge.rules.context import RuleContext
from bridge.rules.inert_field_violation import find_fields_without_effect
from bridge.rules.rule import (
    MODEL_CHECK_SOURCE,
    PARSER_SOURCE,
    contradiction,
    error,
    info,
    mcore,
    no_effect,
    sync_warning,
    warning,
)
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.versions import is_at_least

MODE_NAMES = ("fp32", "fp16", "bf16")


def find_conflicting_modes(context: RuleContext) -> Violation | None:
    """Return a violation if a recipe states several modes, or FP16 and BF16 are both on."""
    on = [mode for mode in MODE_NAMES if context.stated.get(mode)]
    if len(on) > 1:
        return Violation(on[-1], value=on)
    both = []
    for owner_name in ("model", "optimizer"):
        owner = context.views[owner_name]
        if owner.fp16 and owner.bf16:
            both.append(owner_name)
    if both:
        return Violation(f"{both[0]}.bf16", value=["fp16", "bf16"])
    return None


def find_only_mode_switched_off(context: RuleContext) -> Iterator[Violation]:
    """Yield the mode that is stated to be off, and the field whose dtype belongs to it."""
    if not context.is_fp32 or context.stated.get("fp32"):
        return
    for name in ("params_dtype", "pipeline_dtype"):
        dtype = context.stated.get(name, "fp32")
        if dtype != "fp32" and context.stated.get(dtype) is False:
            yield Violation(dtype, name=name, dtype=dtype)
            return


def find_dtypes_of_another_mode(context: RuleContext) -> Iterator[Violation]:
    """Yield the dtypes of weights and of pipeline buffers that do not belong to the mode."""
    if (
        has_uncast_half_precision_weights(context)
        or [*find_only_mode_switched_off(context)]
        or find_conflicting_modes(context) is not None
    ):
        return
    weight_dtypes = ["fp32"]
    if context.is_half_precision:
        weight_dtypes = [context.mode, "fp32"]
    stage_dtypes = [*weight_dtypes]
    if context.model.enable_autocast and context.model.autocast_dtype:
        stage_dtypes.append(context.model.autocast_dtype)
    legal = {"params_dtype": weight_dtypes, "pipeline_dtype": [*dict.fromkeys(stage_dtypes)]}
    for name, dtypes in legal.items():
        value = getattr(context.model, name)
        if value is not None and value not in dtypes:
            yield Violation(name, value=value, legal=" or ".join(dtypes))


def find_pipeline_dtype_mismatch(context: RunContext) -> Violation | None:
    """Return a violation if a pipeline stage receives another dtype than the stage before sends."""
    if (
        not context.has_model
        or context.model.pipeline_dtype is None
        or context.parallel.pipeline <= 1
    ):
        return None
    if (
        context.model.fp32_residual_connection
        and is_at_least(context.target.mcore, RESIDUAL_DTYPE_SINCE) is not False
    ):
        return None  # Megatron's __post_init__ sets it to FP32
    is_local = context.model.transformer_impl == "local"
    if (
        context.program.is_train_script
        and context.backend not in ("te", "te_cpu")
        and not context.has_gpu
    ):
        is_local = True
    sent = get_sent_dtype(context.views["model"].values, context.target.mcore, is_local=is_local)
    if sent is not None and sent != context.model.pipeline_dtype:
        return Violation(sent=sent)
    return None


def has_uncast_half_precision_weights(context: RuleContext) -> bool:
    """Return whether weights are in half precision and no mode is on.

    Megatron then makes neither FP32 masters nor a loss scale for them.
    """
    return (
        context.precision is None
        and context.is_fp32
        and context.model.params_dtype in ("fp16", "bf16")
    )


def find_weights_without_masters(context: RuleContext) -> Violation | None:
    """Return a violation if half-precision weights have no masters, or no loss scale.

    In every mode, the distributed optimizer and Megatron-FSDP make FP32 masters for half-precision
    weights.
    """
    if not has_uncast_half_precision_weights(context):
        return None
    has_masters = context.has_optimizer and (context.is_sharded or context.has_megatron_fsdp)
    dtype = context.model.params_dtype
    if not has_masters:
        missing = "or the optimizer steps on them without FP32 masters"
        return Violation(missing=missing, dtype=dtype)
    if dtype == "fp16" and not context.optimizer.loss_scale:
        return Violation(missing="or FP16 gradients have no loss scale", dtype=dtype)
    return None


def find_low_precision_without_mode(context: RuleContext) -> Violation | None:
    """Return a violation if a run has an FP8 or FP4 format and no stated mode."""
    if not context.is_low_precision or not context.is_fp32:
        return None
    family = "fp4"
    if context.is_fp8:
        family = "fp8"
    value = context.get_format(family)
    if context.precision is not None:
        if not context.stated.get("fp32"):
            confirm = "state fp32=True, if that is meant"
            return Violation(family, value=value, state="state bf16=True", confirm=confirm)
        return None
    if not isinstance(context, RunContext) or not context.has_model:
        return None
    if context.sections["model"].stated.isdisjoint(("bf16", "fp16")):
        state = "set model.bf16=True and optimizer.bf16=True (--bf16 of Megatron-LM)"
        confirm = "silence this if FP32 is meant"
        return Violation(f"model.{family}", value=value, state=state, confirm=confirm)
    return None


def find_inert_autocast_dtype(context: RuleContext) -> Iterator[Violation]:
    """Yield the autocast dtype if autocast is off."""
    return find_fields_without_effect(context, ["autocast_dtype"])


RULES = (
    contradiction(
        id="PB101",
        title="more than one mode",
        setting="bf16",
        sync="refused",
        when=find_conflicting_modes,
        message="only one of fp32, fp16 and bf16 can be on",
        remedies=("keep one and set the others to False",),
        source=f"{MODEL_CHECK_SOURCE}; Megatron Bridge training/config.py, 2026-08-22",
        explanation="Megatron's model config refuses fp16 with bf16. Its optimizer config does "
        "not, and would pick FP16.",
    ),
    contradiction(
        id="PB102",
        title="dtype of another mode",
        setting="params_dtype",
        when=find_dtypes_of_another_mode,
        message="must be {legal} in a run whose mode is {run.mode}",
        remedies=("drop it: it follows the mode", "switch the mode on that it belongs to"),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2 (nothing checks it for "
        "configs built in Python)",
        explanation="Megatron-LM's argument parser derives the dtype of weights and of pipeline "
        "buffers from --bf16 and --fp16. Configs built in Python can disagree: weights of one "
        "dtype then meet norms and embeddings of another, which fails in a matrix multiplication "
        "or trains in a dtype that no setting states.",
    ),
    error(
        id="PB103",
        title="no FP32 master weights and no loss scale",
        setting="model.params_dtype",
        when=find_weights_without_masters,
        message="half-precision weights need the mode switched on, {missing}",
        remedies=("set model.{dtype} and optimizer.{dtype} to True", "choose a recipe"),
        source="megatron-core 0.16.1 and Megatron-LM main of 2026-08-22, optimizer/__init__.py: "
        "FP32Optimizer is chosen by optimizer.fp16 and optimizer.bf16, "
        "DistributedOptimizer before them",
        explanation="An update of the size lr x gradient is often smaller than half an ulp of a "
        "BF16 weight (one part in 256 or less), so that it rounds away and the weight never "
        "moves. FP32 master weights keep the sum.",
    ),
    contradiction(
        id="PB104",
        title="autocast to FP32",
        setting="autocast_enabled",
        sync="reported",
        when=lambda context: (
            context.model.enable_autocast
            and (context.model.autocast_dtype or context.model.params_dtype) == "fp32"
        ),
        message="autocast needs a half-precision dtype to cast to, and would cast to fp32",
        remedies=("state autocast_dtype='bf16'", "set autocast_enabled=False"),
        source="megatron-core 0.16.1 model_parallel_config.py __post_init__, "
        "pipeline_parallel/schedules.py",
    ),
    no_effect(
        id="PB105",
        title="autocast dtype without autocast",
        setting="autocast_dtype",
        when=find_inert_autocast_dtype,
        message="has no effect: {why}",
        remedies=("state autocast_enabled=True", "drop it"),
        source="megatron-core 0.16.1 pipeline_parallel/schedules.py",
    ),
    error(
        id="PB106",
        title="FP32 residual in an FP32 run",
        setting="model.fp32_residual_connection",
        when=lambda context: context.model.fp32_residual_connection and context.is_fp32,
        message="an FP32 residual stream means something in fp16 and bf16 runs only",
        remedies=("set fp32_residual_connection=False", "choose a half-precision recipe"),
        source=PARSER_SOURCE,
    ),
    error(
        id="PB107",
        title="FP16 cross entropy outside FP16",
        setting="model.fp16_lm_cross_entropy",
        when=lambda context: context.model.fp16_lm_cross_entropy and not context.is_fp16,
        message="cross entropy in FP16 works in an fp16 run only",
        remedies=("set fp16_lm_cross_entropy=False", "choose an fp16 recipe"),
        source=PARSER_SOURCE,
    ),
    error(
        id="PB108",
        title="pipeline without a dtype",
        setting="model.pipeline_dtype",
        when=lambda context: (
            context.has_model
            and context.parallel.pipeline > 1
            and context.model.pipeline_dtype is None
        ),
        message="pipeline stages need the dtype of what they receive",
        remedies=(
            "set it to the dtype of the activations ({run.mode})",
            "choose a recipe, which does",
        ),
        source="megatron-core 0.16.1 model_parallel_config.py __post_init__, "
        "pipeline_parallel/p2p_communication.py",
    ),
    error(
        id="PB109",
        title="stage that receives another dtype than was sent",
        setting="pipeline_dtype",
        when=find_pipeline_dtype_mismatch,
        message="a pipeline stage receives its input in this dtype, and the "
        "stage before it sends {sent}",
        remedies=("state pipeline_dtype='{sent}'",),
        source="megatron-core 0.16.1, 0.17.0 and 0.19.2 pipeline_parallel/p2p_communication.py and "
        "fusions/fused_bias_dropout.py; dtypes of stages of both backends on 0.16.1 and 0.19.2",
        explanation="No message says its dtype: over gloo the run goes on with other numbers, "
        "over NCCL it can hang. With FP32 weights under autocast a stage sends autocast's dtype "
        "before megatron-core 0.17 (FP32 where a local layer adds a bias), and FP32 since. "
        "fp32_residual_connection reaches the next stage since 0.17, where Megatron "
        "corrects the dtype itself.",
    ),
    warning(
        id="PB110",
        title="autocast under expert-parallel overlap",
        setting="model.enable_autocast",
        when=lambda context: (
            context.model.enable_autocast
            and context.model.overlap_moe_expert_parallel_comm
            and context.shape.is_moe
        ),
        message="has no effect under model.overlap_moe_expert_parallel_comm: the schedule enters "
        "another context instead",
        remedies=("turn the overlap off", "use a recipe without autocast"),
        source="megatron-core 0.16.1 and 0.19.2 pipeline_parallel/combined_1f1b.py",
    ),
    info(
        id="PB111",
        title="a switch of the whole process",
        setting="model.disable_bf16_reduced_precision_matmul",
        when=lambda context: (
            context.is_bf16 and context.model.disable_bf16_reduced_precision_matmul
        ),
        message="is set for the whole process when the config is made, and never set back",
        remedies=("make no other model in the same process that relies on it being on",),
        source=MODEL_CHECK_SOURCE,
    ),
    warning(
        id="PB112",
        title="batch-invariant mode outside BF16",
        setting="model.batch_invariant_mode",
        when=lambda context: (
            context.model.batch_invariant_mode and context.model.params_dtype != "bf16"
        ),
        message="batch-invariant kernels are made for BF16 weights, which "
        "Megatron asserts from 0.20 on",
        remedies=("choose a bf16 recipe", "turn it off"),
        source="Megatron-LM main of 2026-08-22 transformer_config.py __post_init__",
    ),
    contradiction(
        id="PB113",
        title="autocast dtype that autocast does not take",
        setting="autocast_dtype",
        when=lambda context: context.model.autocast_dtype not in (None, "bf16", "fp16", "fp32"),
        message="must be bf16, fp16 or fp32",
        remedies=("use one of these", "drop it"),
        source="PyTorch 2.13 torch/amp/autocast_mode.py",
    ),
    no_effect(
        id="PB114",
        title="BF16 sums outside BF16",
        setting="disable_bf16_reduced_precision_matmul",
        when=lambda context: (
            context.differs_from_default("disable_bf16_reduced_precision_matmul")
            and not context.is_bf16
        ),
        message="has no effect: Megatron sets the switch in bf16 runs only, "
        "and this one is {run.mode}",
        remedies=("drop it", "choose a bf16 recipe"),
        source="megatron-core 0.16.1 transformer/transformer_config.py:921",
    ),
    warning(
        id="PB115",
        title="dtype of Mamba's states without Mamba",
        setting="mamba_training_ssm_states_dtype",
        versions=(mcore(since="0.19"),),
        when=lambda context: (
            context.differs_from_default("mamba_training_ssm_states_dtype")
            and context.has_model
            and not context.shape.is_hybrid
        ),
        message="has no effect: the model has no Mamba layers",
        remedies=("drop it", "set model.hybrid_layer_pattern"),
        source="megatron-core 0.19.2 ssm/mamba_mixer.py:227",
    ),
    sync_warning(
        id="PB116",
        title="FP8 or FP4 without a mode",
        setting="fp8",
        sync="reported",
        when=find_low_precision_without_mode,
        message="no mode is stated, so that everything around the low-precision GEMMs is FP32, "
        "weights and activations too",
        remedies=("{state}", "{confirm}"),
        source="megatron-core 0.16.1 transformer_config.py: without bf16 and fp16 "
        "params_dtype is torch.float32",
    ),
    contradiction(
        id="PB117",
        title="the only mode is off",
        setting="bf16",
        when=find_only_mode_switched_off,
        message="is off, and {name} is {dtype}: without a mode a run is in fp32",
        remedies=("state {dtype}=True", "drop params_dtype and pipeline_dtype for a run in fp32"),
        source="megatron-core 0.16.1 transformer_config.py: without bf16 and fp16 "
        "params_dtype is torch.float32",
    ),
)
