"""The optimizer's own dtypes, and what it can be combined with."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.rules.rule import OPTIMIZER_CHECK, PARSER, Rule, owners_rule, target_rule, te

if TYPE_CHECKING:
    from bridge.rules.context import RuleContext

__all__ = ["RULES"]

_STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_LEGAL = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "uint8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "uint8"),
}
"""The choices of Megatron-LM's argument parser; uint8 is its "fp8"."""


def _states_in_fp32(s: RuleContext) -> list[dict[str, Any]]:
    return [{"path": f"optimizer.{name}"} for name in _STATES if getattr(s.optimizer, name) not in ("fp32", None)]


def _impossible_states(s: RuleContext) -> list[dict[str, Any]]:
    return [
        {"path": f"optimizer.{name}", "legal": ", ".join(legal).replace("uint8", "fp8")}
        for name, legal in _LEGAL.items()
        if getattr(s.optimizer, name) not in (*legal, None)
    ]


def _leaves_the_fused_path(s: RuleContext) -> bool:
    return (
        s.optimizer.fp8_recipe not in (None, "delayed")
        and s.optimizer.main_params_dtype == "fp32"
        and not s.optimizer.optimizer_cpu_offload
    )


_precision_aware = partial(owners_rule, gate="has_precision_aware")

RULES = (
    owners_rule(
        id="PB341",
        title="offloaded optimizer that is not precision-aware",
        path="optimizer.optimizer_cpu_offload",
        predicate=lambda s: s.optimizer.optimizer_cpu_offload and not s.has_precision_aware,
        message="an offloaded optimizer reuses the code of the precision-aware one",
        remedies=("set optimizer.use_precision_aware_optimizer=True", "keep the optimizer on the GPU"),
        source=PARSER,
        gate="has_optimizer",
    ),
    owners_rule(
        id="PB342",
        title="offloaded optimizer with FP8 weights",
        path="optimizer.optimizer_cpu_offload",
        predicate=lambda s: s.optimizer.optimizer_cpu_offload and not s.is_delayed,
        message="an offloaded optimizer updates FP8 weights under delayed scaling only",
        remedies=("set fp8_param_gather=False", "use fp8_recipe='delayed'", "keep the optimizer on the GPU"),
        source=f"{PARSER}; NVIDIA/Megatron-LM issue 2582, 2025-12-07, for the two messages that contradict each other",
        gate="gathers_fp8",
    ),
    owners_rule(
        id="PB343",
        title="optimizer state dtype without the precision-aware optimizer",
        path="optimizer.exp_avg_dtype",
        predicate=_states_in_fp32,
        message="must be fp32 unless optimizer.use_precision_aware_optimizer is on",
        remedies=("set use_precision_aware_optimizer=True", "leave it at fp32"),
        source=OPTIMIZER_CHECK,
        gate="is_plain_optimizer",
    ),
    _precision_aware(
        id="PB344",
        title="impossible optimizer state dtype",
        path="optimizer.exp_avg_dtype",
        predicate=_impossible_states,
        message="must be one of {legal}",
        remedies=("use one of them",),
        source="Megatron-LM training/arguments.py, 0.19.2: choices of the argument parser",
    ),
    _precision_aware(
        id="PB345",
        title="precision-aware optimizer that is not Adam",
        path="optimizer.optimizer",
        predicate=lambda s: s.optimizer.optimizer != "adam",
        message="only Adam is precision-aware",
        remedies=("use adam", "set use_precision_aware_optimizer=False"),
        source=OPTIMIZER_CHECK,
    ),
    _precision_aware(
        id="PB346",
        title="precision-aware optimizer that is not distributed",
        path="optimizer.use_distributed_optimizer",
        predicate=lambda s: not s.optimizer.use_distributed_optimizer and not s.has_megatron_fsdp,
        message="the precision-aware optimizer works as a distributed optimizer only",
        remedies=("set use_distributed_optimizer=True", "set use_precision_aware_optimizer=False"),
        source=f"{OPTIMIZER_CHECK}; from 0.20 on refused when the optimizer is built",
    ),
    _precision_aware(
        id="PB347",
        severity="warning",
        title="FP8 branch in a run without FP8",
        path="optimizer.fp8_recipe",
        predicate=lambda s: not s.fp8 and _leaves_the_fused_path(s),
        message="sends the precision-aware optimizer down its FP8 branch although fp8 is off: masters stay in Megatron "
        "and nothing is saved",
        remedies=("set it to None", "choose a recipe, which does"),
        source="megatron-core 0.16.1 and 0.19.2 optimizer_config.py __post_init__; Megatron Bridge's bf16_mixed writes "
        "'tensorwise' here, 2026-08-22",
    ),
    _precision_aware(
        id="PB348",
        severity="info",
        title="precision-aware optimizer together with FP8 scaling",
        path="optimizer.use_precision_aware_optimizer",
        predicate=lambda s: s.fp8 and _leaves_the_fused_path(s),
        message="under {s.scheme} scaling Megatron keeps the FP32 masters itself and casts gradients to FP32, so BF16 "
        "main gradients and param remainders save nothing; the moments' dtypes still do",
        remedies=("keep it for exp_avg_dtype and exp_avg_sq_dtype", "use fp8_recipe='delayed' for the fused path"),
        source="megatron-core 0.16.1 and 0.19.2 optimizer_config.py __post_init__, distrib_optimizer.py",
    ),
    _precision_aware(
        id="PB349",
        severity="warning",
        title="param remainders turned off",
        path="optimizer.store_param_remainders",
        predicate=lambda s: s.optimizer.store_param_remainders,
        message="Megatron sets it to False before Transformer Engine 2.1",
        remedies=("use Transformer Engine 2.1", "set it to False, as it will be"),
        source=OPTIMIZER_CHECK,
        versions=(te(until="2.1"),),
    ),
    target_rule(
        id="PB350",
        title="precision-aware optimizer without Transformer Engine",
        path="optimizer.use_precision_aware_optimizer",
        predicate=lambda s: s.target.has_te is False and not s.optimizer.optimizer_cpu_offload,
        message="needs Transformer Engine's FusedAdam, and the target has no Transformer Engine",
        remedies=("install Transformer Engine", "set use_precision_aware_optimizer=False"),
        source=OPTIMIZER_CHECK,
        gate="has_precision_aware",
    ),
    Rule(
        id="PB351",
        title="gathering inside the step without its conditions",
        path="optimizer.overlap_param_gather_with_optimizer_step",
        predicate=lambda s: (
            s.optimizer.overlap_param_gather_with_optimizer_step
            and not (s.is_sharded and s.optimizer.overlap_param_gather and s.model.virtual_pipeline_model_parallel_size)
        ),
        message="needs the distributed optimizer, overlap_param_gather and interleaved pipeline stages",
        remedies=("set it to False", "set these three"),
        source=PARSER,
        gate="has_optimizer",
    ),
    _precision_aware(
        id="PB352",
        title="precision-aware optimizer by layers",
        path="optimizer.use_layer_wise_distributed_optimizer",
        predicate=lambda s: s.optimizer.use_layer_wise_distributed_optimizer,
        message="the layer-wise distributed optimizer cannot be precision-aware",
        remedies=("set one of the two to False",),
        source="Megatron-LM main of 2026-08-22 optimizer/__init__.py",
    ),
)
