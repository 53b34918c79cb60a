"""FP32, FP16 or BF16: one mode, the dtypes that belong to it, autocast."""

from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, PARSER, Rule, mcore, owners_rule, precision_rule, sync_rule, target_rule
from bridge.rules.shape.parallel import RESIDUAL_IS_KEPT, sent_between_stages
from bridge.rules.versions import at_least


def _several_modes(s: RuleContext) -> Any:
    on = [mode for mode in ("fp32", "fp16", "bf16") if s.stated.get(mode)]
    if len(on) > 1:
        return {"path": on[-1], "value": on}
    for role, owner in (("model", s.model), ("optimizer", s.optimizer)):
        if owner.fp16 and owner.bf16:
            return {"path": f"{role}.bf16", "value": ["fp16", "bf16"]}
    return None


def _dtype_of_another_mode(s: RuleContext) -> list[dict[str, Any]]:
    if _weights_are_not_cast(s):
        return []
    legal = {"params_dtype": [s.mode, "fp32"] if s.is_half else ["fp32"]}
    autocast = [s.model.autocast_dtype] if s.model.enable_autocast and s.model.autocast_dtype else []
    legal["pipeline_dtype"] = list(dict.fromkeys(legal["params_dtype"] + autocast))
    return [
        {"path": name, "value": getattr(s.model, name), "legal": " or ".join(dtypes)}
        for name, dtypes in legal.items()
        if getattr(s.model, name) not in (*dtypes, None)
    ]


def _received_in_another_dtype(s: RuleContext) -> dict[str, str] | None:
    received = s.model.pipeline_dtype
    if s.pp < 2 or received is None:
        return None
    if s.model.fp32_residual_connection and at_least(s.mcore, RESIDUAL_IS_KEPT) is not False:
        return None  # Megatron's __post_init__ makes it FP32
    is_local = s.model.transformer_impl == "local" or (s.is_own and s.backend != "te_cpu" and not s.has_gpu)
    sent = sent_between_stages(s.model, s.mcore, is_local=is_local)
    return {"sent": sent} if sent not in (received, None) else None


def _without_mode(s: RuleContext) -> dict[str, Any] | None:
    """Return the format of an FP8 or FP4 run in FP32 that does not state fp32."""
    if s.precision is None or not s.is_low or not s.is_fp32 or s.stated.get("fp32"):
        return None
    return {"path": "fp8" if s.fp8 else "fp4", "value": s.fp8 or s.fp4}


def _weights_are_not_cast(s: RuleContext) -> bool:
    """FP32 weights under a half-precision mode are Megatron's own: created in FP32 and cast."""
    return s.precision is None and s.is_fp32 and s.model.params_dtype in ("fp16", "bf16")


RECEIVED = target_rule(
    heading="PB109: stage that receives another dtype than was sent",
    predicate=_received_in_another_dtype,
    error="pipeline_dtype: a pipeline stage receives its input in this dtype, and the stage before it sends {sent}",
    remedies=("state pipeline_dtype='{sent}'",),
    verified="megatron-core 0.16.1, 0.17.0 and 0.19.2 pipeline_parallel/p2p_communication.py and "
    "fusions/fused_bias_dropout.py; dtypes of stages of both backends on 0.16.1 and 0.19.2",
    gate="has_model",
    explanation="No message says its dtype: over gloo the run goes on with other numbers, over NCCL it can hang. With "
    "FP32 weights under autocast a stage sends autocast's dtype before megatron-core 0.17 (FP32 where a local layer "
    "adds a bias), and FP32 since. fp32_residual_connection reaches the next stage since 0.17, where Megatron corrects "
    "the dtype itself.",
)

RULES = (
    precision_rule(
        heading="PB101: more than one mode",
        sync="refused",
        predicate=_several_modes,
        error="bf16: only one of fp32, fp16 and bf16 can be on",
        remedies=("keep one and set the others to False",),
        verified=f"{MODEL_CHECK}; Megatron Bridge training/config.py, 2026-08-22",
        explanation="Megatron's model config refuses fp16 with bf16. Its optimizer config does not, and would pick "
        "FP16.",
    ),
    precision_rule(
        heading="PB102: dtype of another mode",
        predicate=_dtype_of_another_mode,
        error="params_dtype: must be {legal} in a run whose mode is {s.mode}",
        remedies=("drop it: it follows the mode", "switch the mode on that it belongs to"),
        verified="Megatron-LM training/arguments.py validate_args, 0.19.2 (nothing checks it for configs built in "
        "Python)",
        explanation="Megatron-LM's argument parser derives the dtype of weights and of pipeline buffers from --bf16 "
        "and --fp16. Configs built in Python can disagree: weights of one dtype then meet norms and embeddings of "
        "another, which fails in a matrix multiplication or trains in a dtype that no setting states.",
    ),
    owners_rule(
        heading="PB103: no FP32 master weights and no loss scale",
        predicate=_weights_are_not_cast,
        error="model.params_dtype: half-precision weights need the mode switched on, or the optimizer steps on them "
        "without FP32 masters",
        remedies=("set model.{s.model.params_dtype} and optimizer.{s.model.params_dtype} to True", "choose a recipe"),
        verified="megatron-core 0.16.1 optimizer/__init__.py: FP32Optimizer is chosen by optimizer.fp16 and "
        "optimizer.bf16",
        explanation="An update of the size lr x gradient is often smaller than half an ulp of a BF16 weight (one part "
        "in 256 or less), so that it rounds away and the weight never moves. FP32 master weights keep the sum.",
    ),
    precision_rule(
        heading="PB104: autocast to FP32",
        sync="reported",
        predicate=lambda s: s.model.enable_autocast and (s.model.autocast_dtype or s.model.params_dtype) == "fp32",
        error="autocast_enabled: autocast needs a half-precision dtype to cast to, and would cast to fp32",
        remedies=("state autocast_dtype='bf16'", "set autocast_enabled=False"),
        verified="megatron-core 0.16.1 model_parallel_config.py __post_init__, pipeline_parallel/schedules.py",
    ),
    sync_rule(
        heading="PB105: autocast dtype without autocast",
        warning="autocast_dtype: has no effect: {why}",
        predicate=lambda s: s.inert_and_stated(["autocast_dtype"]),
        remedies=("state autocast_enabled=True", "drop it"),
        verified="megatron-core 0.16.1 pipeline_parallel/schedules.py",
    ),
    Rule(
        heading="PB106: FP32 residual in an FP32 run",
        predicate=lambda s: s.model.fp32_residual_connection and s.is_fp32,
        error="model.fp32_residual_connection: an FP32 residual stream means something in fp16 and bf16 runs only",
        remedies=("set fp32_residual_connection=False", "choose a half-precision recipe"),
        verified=PARSER,
    ),
    Rule(
        heading="PB107: FP16 cross entropy outside FP16",
        predicate=lambda s: s.model.fp16_lm_cross_entropy and not s.is_fp16,
        error="model.fp16_lm_cross_entropy: cross entropy in FP16 works in an fp16 run only",
        remedies=("set fp16_lm_cross_entropy=False", "choose an fp16 recipe"),
        verified=PARSER,
    ),
    Rule(
        heading="PB108: pipeline without a dtype",
        predicate=lambda s: s.has_model and s.pp > 1 and s.model.pipeline_dtype is None,
        error="model.pipeline_dtype: pipeline stages need the dtype of what they receive",
        remedies=("set it to the dtype of the activations ({s.mode})", "choose a recipe, which does"),
        verified="megatron-core 0.16.1 model_parallel_config.py __post_init__, pipeline_parallel/p2p_communication.py",
    ),
    RECEIVED,
    Rule(
        heading="PB110: autocast under expert-parallel overlap",
        predicate=lambda s: s.model.enable_autocast and s.model.overlap_moe_expert_parallel_comm,
        warning="model.enable_autocast: has no effect under model.overlap_moe_expert_parallel_comm: the schedule "
        "enters another context instead",
        remedies=("turn the overlap off", "use a recipe without autocast"),
        verified="megatron-core 0.16.1 and 0.19.2 pipeline_parallel/combined_1f1b.py",
        gate="is_moe",
    ),
    Rule(
        heading="PB111: a switch of the whole process",
        predicate=lambda s: s.is_bf16 and s.model.disable_bf16_reduced_precision_matmul,
        info="model.disable_bf16_reduced_precision_matmul: is set for the whole process when the config is made, and "
        "never set back",
        remedies=("make no other model in the same process that relies on it being on",),
        verified=MODEL_CHECK,
    ),
    Rule(
        heading="PB112: batch-invariant mode outside BF16",
        predicate=lambda s: s.model.batch_invariant_mode and s.model.params_dtype != "bf16",
        warning="model.batch_invariant_mode: batch-invariant kernels are made for BF16 weights, which Megatron asserts "
        "from 0.20 on",
        remedies=("choose a bf16 recipe", "turn it off"),
        verified="Megatron-LM main of 2026-08-22 transformer_config.py __post_init__",
    ),
    precision_rule(
        heading="PB113: autocast dtype that autocast does not take",
        predicate=lambda s: s.model.autocast_dtype not in (None, "bf16", "fp16", "fp32"),
        error="autocast_dtype: must be bf16, fp16 or fp32",
        remedies=("use one of these", "drop it"),
        verified="PyTorch 2.13 torch/amp/autocast_mode.py",
    ),
    sync_rule(
        heading="PB114: BF16 sums outside BF16",
        predicate=lambda s: s.stands_out("disable_bf16_reduced_precision_matmul") and not s.is_bf16,
        warning="disable_bf16_reduced_precision_matmul: has no effect: Megatron sets the switch in bf16 runs only, and "
        "this one is {s.mode}",
        remedies=("drop it", "choose a bf16 recipe"),
        verified="megatron-core 0.16.1 transformer/transformer_config.py:921",
    ),
    Rule(
        heading="PB115: dtype of Mamba's states without Mamba",
        predicate=lambda s: s.stands_out("mamba_training_ssm_states_dtype") and s.has_model and not s.is_hybrid,
        warning="mamba_training_ssm_states_dtype: has no effect: the model has no Mamba layers",
        remedies=("drop it", "set model.hybrid_layer_pattern"),
        verified="megatron-core 0.19.2 ssm/mamba_mixer.py:227",
        versions=(mcore(since="0.19"),),
    ),
    precision_rule(
        heading="PB116: FP8 or FP4 without a mode",
        sync="reported",
        predicate=_without_mode,
        warning="fp8: no mode is stated, so that everything around the low-precision GEMMs is FP32, weights and "
        "activations too",
        remedies=("state bf16=True", "state fp32=True, if that is meant"),
        verified="megatron-core 0.16.1 transformer_config.py: without bf16 and fp16 params_dtype is torch.float32",
    ),
)
