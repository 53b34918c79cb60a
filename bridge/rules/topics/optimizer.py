"""The optimizer's own dtypes, and what it can be combined with."""

from functools import partial
from typing import Any

from bridge.precision.config import CHOICES
from bridge.rules.context import RuleContext
from bridge.rules.rule import OPTIMIZER_CHECK, PARSER, Rule, owners_rule, sync_rule, target_rule, te

_STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _states_in_fp32(s: RuleContext) -> list[dict[str, Any]]:
    return [{"path": f"optimizer.{name}"} for name in _STATES if getattr(s.optimizer, name) not in ("fp32", None)]


def _impossible_states(s: RuleContext) -> list[dict[str, Any]]:
    return [
        {"path": f"optimizer.{name}", "legal": ", ".join(CHOICES[name]).replace("uint8", "fp8")}
        for name in _STATES
        if name not in s.stated and getattr(s.optimizer, name) not in (*CHOICES[name], None)
    ]


def _leaves_the_fused_path(s: RuleContext) -> bool:
    return (
        s.optimizer.fp8_recipe not in (None, "delayed")
        and s.optimizer.main_params_dtype == "fp32"
        and not s.optimizer.optimizer_cpu_offload
    )


def _unread_remainders(s: RuleContext) -> Any:
    if not s.stands_out("store_param_remainders") or not s.has_optimizer:
        return None
    if not s.has_precision_aware:
        return {"why": "the optimizer is not precision-aware"}
    if s.optimizer.main_params_dtype != "fp32":
        return {"why": f"the master weights are {s.optimizer.main_params_dtype}, not fp32"}
    return None if s.is_bf16 else {"why": f"the weights are {s.mode}, not bf16"}


def _unread_matmuls(s: RuleContext) -> bool:
    is_muon = "muon" in str(s.optimizer.optimizer)
    return s.stands_out("muon_fp32_matmul_prec") and s.has_optimizer and not is_muon


_precision_aware = partial(owners_rule, gate="has_precision_aware")

RULES = (
    owners_rule(
        heading="PB341: offloaded optimizer that is not precision-aware",
        predicate=lambda s: s.optimizer.optimizer_cpu_offload and not s.has_precision_aware,
        error="optimizer.optimizer_cpu_offload: an offloaded optimizer reuses the code of the precision-aware one",
        remedies=("set optimizer.use_precision_aware_optimizer=True", "keep the optimizer on the GPU"),
        verified=PARSER,
        gate="has_optimizer",
    ),
    owners_rule(
        heading="PB342: offloaded optimizer with FP8 weights",
        predicate=lambda s: s.optimizer.optimizer_cpu_offload and not s.is_delayed,
        error="optimizer.optimizer_cpu_offload: an offloaded optimizer updates FP8 weights under delayed scaling only",
        remedies=("set fp8_param_gather=False", "use fp8_recipe='delayed'", "keep the optimizer on the GPU"),
        verified=f"{PARSER}; NVIDIA/Megatron-LM issue 2582, 2025-12-07, for the two messages that contradict each "
        "other",
        gate="gathers_fp8",
    ),
    owners_rule(
        heading="PB343: optimizer state dtype without the precision-aware optimizer",
        predicate=_states_in_fp32,
        error="optimizer.exp_avg_dtype: must be fp32 unless optimizer.use_precision_aware_optimizer is on",
        remedies=("set use_precision_aware_optimizer=True", "leave it at fp32"),
        verified=OPTIMIZER_CHECK,
        gate="is_plain_optimizer",
    ),
    _precision_aware(
        heading="PB344: impossible optimizer state dtype",
        predicate=_impossible_states,
        error="optimizer.exp_avg_dtype: must be one of {legal}",
        remedies=("use one of them",),
        verified="Megatron-LM training/arguments.py, 0.19.2: choices of the argument parser",
    ),
    _precision_aware(
        heading="PB345: precision-aware optimizer that is not Adam",
        predicate=lambda s: s.optimizer.optimizer != "adam",
        error="optimizer.optimizer: only Adam is precision-aware",
        remedies=("use adam", "set use_precision_aware_optimizer=False"),
        verified=OPTIMIZER_CHECK,
    ),
    _precision_aware(
        heading="PB346: precision-aware optimizer that is not distributed",
        predicate=lambda s: not s.optimizer.use_distributed_optimizer and not s.has_megatron_fsdp,
        error="optimizer.use_distributed_optimizer: the precision-aware optimizer works as a distributed optimizer "
        "only",
        remedies=("set use_distributed_optimizer=True", "set use_precision_aware_optimizer=False"),
        verified=f"{OPTIMIZER_CHECK}; from 0.20 on refused when the optimizer is built",
    ),
    _precision_aware(
        heading="PB347: FP8 branch in a run without FP8",
        predicate=lambda s: not s.fp8 and _leaves_the_fused_path(s),
        warning="optimizer.fp8_recipe: sends the precision-aware optimizer down its FP8 branch although fp8 is off: "
        "masters stay in Megatron and nothing is saved",
        remedies=("set it to None", "choose a recipe, which does"),
        verified="megatron-core 0.16.1 and 0.19.2 optimizer_config.py __post_init__; Megatron Bridge's bf16_mixed "
        "writes 'tensorwise' here, 2026-08-22",
    ),
    _precision_aware(
        heading="PB348: precision-aware optimizer together with FP8 scaling",
        predicate=lambda s: s.fp8 and _leaves_the_fused_path(s),
        info="optimizer.use_precision_aware_optimizer: under {s.scheme} scaling Megatron keeps the FP32 masters itself "
        "and casts gradients to FP32, so BF16 main gradients and param remainders save nothing; the moments' dtypes "
        "still do",
        remedies=("keep it for exp_avg_dtype and exp_avg_sq_dtype", "use fp8_recipe='delayed' for the fused path"),
        verified="megatron-core 0.16.1 and 0.19.2 optimizer_config.py __post_init__, distrib_optimizer.py",
    ),
    _precision_aware(
        heading="PB349: param remainders turned off",
        predicate=lambda s: s.optimizer.store_param_remainders,
        warning="optimizer.store_param_remainders: Megatron sets it to False before Transformer Engine 2.1",
        remedies=("use Transformer Engine 2.1", "set it to False, as it will be"),
        verified=OPTIMIZER_CHECK,
        versions=(te(until="2.1"),),
    ),
    target_rule(
        heading="PB350: precision-aware optimizer without Transformer Engine",
        predicate=lambda s: s.target.has_te is False and not s.optimizer.optimizer_cpu_offload,
        error="optimizer.use_precision_aware_optimizer: needs Transformer Engine's FusedAdam, and the target has no "
        "Transformer Engine",
        remedies=("install Transformer Engine", "set use_precision_aware_optimizer=False"),
        verified=OPTIMIZER_CHECK,
        gate="has_precision_aware",
    ),
    Rule(
        heading="PB351: gathering inside the step without its conditions",
        predicate=lambda s: (
            s.optimizer.overlap_param_gather_with_optimizer_step
            and not (s.is_sharded and s.optimizer.overlap_param_gather and s.model.virtual_pipeline_model_parallel_size)
        ),
        error="optimizer.overlap_param_gather_with_optimizer_step: needs the distributed optimizer, "
        "overlap_param_gather and interleaved pipeline stages",
        remedies=("set it to False", "set these three"),
        verified=PARSER,
        gate="has_optimizer",
    ),
    _precision_aware(
        heading="PB352: precision-aware optimizer by layers",
        predicate=lambda s: s.optimizer.use_layer_wise_distributed_optimizer,
        error="optimizer.use_layer_wise_distributed_optimizer: the layer-wise distributed optimizer cannot be "
        "precision-aware",
        remedies=("set one of the two to False",),
        verified="Megatron-LM main of 2026-08-22 optimizer/__init__.py",
    ),
    sync_rule(
        heading="PB353: param remainders without effect",
        predicate=_unread_remainders,
        warning="store_param_remainders: has no effect: {why}",
        remedies=("drop it", "state use_precision_aware_optimizer=True in a bf16 run"),
        verified="megatron-core 0.16.1 optimizer/__init__.py:387; Transformer Engine 2.20 "
        "pytorch/optimizers/fused_adam.py",
    ),
    sync_rule(
        heading="PB354: precision of Muon without Muon",
        predicate=_unread_matmuls,
        warning="muon_fp32_matmul_prec: has no effect: the optimizer is {s.optimizer.optimizer}",
        remedies=("drop it", "use muon"),
        verified="megatron-core 0.16.1 optimizer/muon.py:265",
    ),
)
