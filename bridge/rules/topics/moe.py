"""Mixture of experts: token counts per expert, the router's dtype, schedules and dispatchers that know less."""

from functools import partial
from typing import Any

from bridge.precision.config import MEGATRON_FIELDS
from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, PARSER, Rule, mcore, sync_rule, te


def _pads(s: RuleContext) -> bool:
    return bool(s.model.moe_router_padding_for_quantization or s.model.moe_router_padding_for_fp8)


def _low_precision_transport(s: RuleContext) -> list[dict[str, Any]]:
    model = s.model
    if s.has_ncclep and model.use_transformer_engine_op_fuser and model.moe_grouped_gemm:
        return []
    names = ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
    return [{"path": f"model.{name}"} for name in names if getattr(model, name) not in ("bf16", None)]


def _ncclep_limits(s: RuleContext) -> bool:
    model = s.model
    return (
        s.is_low
        and s.has_ncclep
        and model.moe_expert_capacity_factor is not None
        and (
            (s.capability is not None and s.capability < (10, 0))
            or (s.has_environment and s.environment.get("NVTE_CUTEDSL_FUSED_GROUPED_MLP") != "1")
        )
    )


_OF_EXPERTS = tuple(name for name in MEGATRON_FIELDS if name.startswith("moe_"))


def _without_experts(s: RuleContext) -> list[dict[str, Any]]:
    if not s.has_model or s.model.num_moe_experts:
        return []
    return [{"path": name} for name in _OF_EXPERTS if s.stands_out(name)]


_moe = partial(Rule, gate="is_moe")

RULES = (
    _moe(
        heading="PB421: expert batches of any size",
        needs="target",
        predicate=lambda s: (
            s.is_low and not _pads(s) and not s.model.moe_pad_expert_input_to_capacity and not s.is_emulated
        ),
        warning="model.moe_router_padding_for_quantization: the tokens of an expert are no multiple of what {s.scheme} "
        "GEMMs need, so padding kernels run, or it fails",
        remedies=("set it to True", "set moe_pad_expert_input_to_capacity=True with an aligned capacity"),
        reported="NVIDIA/TransformerEngine issue 2966, 2026-05-07; NVIDIA-NeMo/RL issue 1884, 2026-02-05",
    ),
    _moe(
        heading="PB422: router padding under this dispatcher",
        predicate=lambda s: _pads(s) and s.model.moe_token_dispatcher_type in ("allgather", "alltoall_seq"),
        error="model.moe_token_dispatcher_type: router padding for quantization does not work under this dispatcher",
        remedies=("use alltoall or flex", "set moe_router_padding_for_quantization=False"),
        verified=MODEL_CHECK,
    ),
    _moe(
        heading="PB423: router padding without FP8 or FP4",
        predicate=lambda s: _pads(s) and not s.is_low,
        error="model.moe_router_padding_for_quantization: pads the routing map for nothing in a {s.mode} run, and "
        "Megatron refuses it",
        remedies=("set it to False", "choose a recipe with FP8 or FP4"),
        verified=MODEL_CHECK,
    ),
    _moe(
        heading="PB424: deprecated name",
        predicate=lambda s: s.model.moe_router_padding_for_fp8,
        info="model.moe_router_padding_for_fp8: is the old name of moe_router_padding_for_quantization, which Megatron "
        "sets from it",
        remedies=("use the new name",),
        verified=MODEL_CHECK,
    ),
    _moe(
        heading="PB425: grouped GEMM in FP8 needs Transformer Engine 1.11",
        needs="target",
        predicate=lambda s: s.model.moe_grouped_gemm and s.fp8 and not s.is_emulated and s.te is not None,
        error="model.moe_grouped_gemm: grouped FP8 GEMMs came with Transformer Engine 1.11",
        remedies=("use Transformer Engine 1.11", "set moe_grouped_gemm=False"),
        verified=MODEL_CHECK,
        versions=(te(until="1.11"),),
    ),
    _moe(
        heading="PB426: router below FP32",
        predicate=lambda s: s.is_half and s.model.moe_router_dtype not in ("fp32", "fp64"),
        info="model.moe_router_dtype: the router's probabilities are computed in {s.mode}; FP32 is what most large "
        "runs use",
        remedies=("set it to fp32",),
        verified="megatron-core 0.16.1 transformer_config.py warns from 32 experts on; pytorch/torchtitan issue 2389, "
        "2026-02",
    ),
    _moe(
        heading="PB427: expert-parallel overlap in FP32",
        predicate=lambda s: s.model.overlap_moe_expert_parallel_comm and s.is_fp32,
        error="model.overlap_moe_expert_parallel_comm: works in bf16 and fp16 runs only",
        remedies=("set it to False", "choose a half-precision recipe"),
        verified=f"{MODEL_CHECK}: an assertion",
    ),
    _moe(
        heading="PB428: FP4 does not reach the overlapped schedule",
        predicate=lambda s: s.fp4 and s.model.overlap_moe_expert_parallel_comm,
        warning="fp4: under overlap_moe_expert_parallel_comm the schedule enters the FP8 context only, so GEMMs run in "
        "{s.mode}",
        remedies=("use megatron-core 0.19.2", "turn the overlap off", "choose an MXFP8 recipe"),
        verified="megatron-core 0.16.1 models/common/model_chunk_schedule_plan.py; fixed in 0.19.2 "
        "(get_inner_quantization_context)",
        versions=(mcore(until="0.19.2"),),
    ),
    _moe(
        heading="PB429: fused experts choose their own scheme",
        needs="environment",
        predicate=lambda s: (
            s.model.use_transformer_engine_op_fuser
            and s.is_low
            and not s.is_mxfp8
            and not (s.fp4 and s.environment.get("FP4_RECIPE") == "nvfp4")
        ),
        warning="model.use_transformer_engine_op_fuser: the fused grouped MLP runs MXFP8 whatever fp8_recipe says, or "
        "NVFP4 with FP4_RECIPE=nvfp4 set; this run asks for {s.scheme}",
        remedies=("set it to False", "choose an MXFP8 recipe", "set FP4_RECIPE=nvfp4 for an NVFP4 run"),
        verified="megatron-core 0.19.2 extensions/transformer_engine.py TEFusedMLPWithGroupedLinear",
        versions=(mcore(since="0.18"),),
    ),
    _moe(
        heading="PB430: single grouped weight under this scheme",
        predicate=lambda s: s.model.moe_single_grouped_weight and s.is_low and s.scheme not in ("mxfp8", "nvfp4"),
        error="model.moe_single_grouped_weight: one tensor for all experts' weights works under mxfp8 and nvfp4 only, "
        "and this run is {s.scheme}",
        remedies=("set it to False", "choose an MXFP8 or NVFP4 recipe"),
        verified="megatron-core 0.19.2 transformer_config.py __post_init__",
        versions=(mcore(since="0.18"),),
    ),
    _moe(
        heading="PB431: low-precision dispatch without its conditions",
        predicate=_low_precision_transport,
        error="model.moe_dispatch_fwd_dtype: needs the flex dispatcher with ncclep, the op fuser and grouped GEMMs",
        remedies=("set it to bf16", "set these four"),
        verified="Megatron-LM main of 2026-08-22 transformer_config.py __post_init__",
        versions=(mcore(since="0.20"),),
    ),
    _moe(
        heading="PB432: batch-invariant experts in low precision",
        predicate=lambda s: s.model.batch_invariant_mode and s.is_low,
        error="model.batch_invariant_mode: a mixture of experts is batch-invariant without FP8 and FP4 only",
        remedies=("set it to False", "choose a recipe without FP8 and FP4"),
        verified="Megatron-LM main of 2026-08-22 transformer_config.py __post_init__",
        versions=(mcore(since="0.20"),),
    ),
    _moe(
        heading="PB433: grouped GEMM before Ampere",
        needs="target",
        predicate=lambda s: s.model.moe_grouped_gemm and s.capability is not None and s.capability < (8, 0),
        error="model.moe_grouped_gemm: grouped GEMM kernels need compute capability 8.0, and the target has "
        "{s.capability[0]}.{s.capability[1]}",
        remedies=("set it to False", "use newer GPUs"),
        verified=PARSER,
    ),
    _moe(
        heading="PB434: ncclep with a capacity factor in low precision",
        needs="environment",
        predicate=_ncclep_limits,
        error="model.moe_expert_capacity_factor: under the ncclep dispatcher and FP8 or FP4 needs compute capability "
        "10.0 and NVTE_CUTEDSL_FUSED_GROUPED_MLP=1",
        remedies=("set it to None", "use another dispatcher backend"),
        verified="Megatron-LM main of 2026-08-22 transformer/moe/token_dispatcher.py",
        versions=(mcore(since="0.20"),),
    ),
    sync_rule(
        heading="PB435: setting of experts in a model without",
        predicate=_without_experts,
        warning="moe_router_dtype: has no effect: the model has no experts",
        remedies=("drop it", "set model.num_moe_experts"),
        verified="megatron-core 0.16.1 transformer/moe/router.py:96, transformer/moe/token_dispatcher.py:617",
    ),
    _moe(
        heading="PB436: checkpoint of grouped experts without a state",
        needs="target",
        predicate=lambda s: (
            s.model.moe_grouped_gemm
            and s.is_low
            and s.scheme != "delayed"
            and not s.is_emulated
            and s.te is not None
            and s.mcore is not None
        ),
        error="model.moe_grouped_gemm: saving a checkpoint ends in a TypeError: from Transformer Engine 2.18 on the "
        "extra state of {s.scheme} scaling is empty, and this Megatron Core splits it by expert without looking",
        remedies=("use megatron-core 0.19", "use Transformer Engine 2.17", "set moe_grouped_gemm=False"),
        verified="a rehearsal; megatron-core 0.16.1 extensions/transformer_engine.py:1705 _split_extra_state, "
        "Transformer Engine 2.18 pytorch/module/base.py get_extra_state (pull request 3123); fixed in megatron-core "
        "0.19.0",
        versions=(mcore(until="0.19"), te(since="2.18")),
    ),
)
