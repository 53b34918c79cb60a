"""Mixture of experts: token counts per expert, the router's dtype, schedules and dispatchers that know less."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.rules.rule import MODEL_CHECK, PARSER, Rule, mcore, te

if TYPE_CHECKING:
    from bridge.rules.context import RuleContext

__all__ = ["RULES"]


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


_moe = partial(Rule, gate="is_moe")

RULES = (
    _moe(
        id="PB421",
        severity="warning",
        title="expert batches of any size",
        path="model.moe_router_padding_for_quantization",
        needs="target",
        predicate=lambda s: (
            s.is_low and not _pads(s) and not s.model.moe_pad_expert_input_to_capacity and not s.is_emulated
        ),
        message="the tokens of an expert are no multiple of what {s.scheme} GEMMs need, so padding kernels run, or it "
        "fails",
        remedies=("set it to True", "set moe_pad_expert_input_to_capacity=True with an aligned capacity"),
        source="NVIDIA/TransformerEngine issue 2966, 2026-05-07; NVIDIA-NeMo/RL issue 1884, 2026-02-05",
        evidence="reported",
    ),
    _moe(
        id="PB422",
        title="router padding under this dispatcher",
        path="model.moe_token_dispatcher_type",
        predicate=lambda s: _pads(s) and s.model.moe_token_dispatcher_type in ("allgather", "alltoall_seq"),
        message="router padding for quantization does not work under this dispatcher",
        remedies=("use alltoall or flex", "set moe_router_padding_for_quantization=False"),
        source=MODEL_CHECK,
    ),
    _moe(
        id="PB423",
        title="router padding without FP8 or FP4",
        path="model.moe_router_padding_for_quantization",
        predicate=lambda s: _pads(s) and not s.is_low,
        message="pads the routing map for nothing in a {s.mode} run, and Megatron refuses it",
        remedies=("set it to False", "choose a recipe with FP8 or FP4"),
        source=MODEL_CHECK,
    ),
    _moe(
        id="PB424",
        severity="info",
        title="deprecated name",
        path="model.moe_router_padding_for_fp8",
        predicate=lambda s: s.model.moe_router_padding_for_fp8,
        message="is the old name of moe_router_padding_for_quantization, which Megatron sets from it",
        remedies=("use the new name",),
        source=MODEL_CHECK,
    ),
    _moe(
        id="PB425",
        title="grouped GEMM in FP8 needs Transformer Engine 1.11",
        path="model.moe_grouped_gemm",
        needs="target",
        predicate=lambda s: s.model.moe_grouped_gemm and s.fp8 and not s.is_emulated and s.te is not None,
        message="grouped FP8 GEMMs came with Transformer Engine 1.11",
        remedies=("use Transformer Engine 1.11", "set moe_grouped_gemm=False"),
        source=MODEL_CHECK,
        versions=(te(until="1.11"),),
    ),
    _moe(
        id="PB426",
        severity="info",
        title="router below FP32",
        path="model.moe_router_dtype",
        predicate=lambda s: s.is_half and s.model.moe_router_dtype not in ("fp32", "fp64"),
        message="the router's probabilities are computed in {s.mode}; FP32 is what most large runs use",
        remedies=("set it to fp32",),
        source="megatron-core 0.16.1 transformer_config.py warns from 32 experts on; pytorch/torchtitan issue 2389, "
        "2026-02",
    ),
    _moe(
        id="PB427",
        title="expert-parallel overlap in FP32",
        path="model.overlap_moe_expert_parallel_comm",
        predicate=lambda s: s.model.overlap_moe_expert_parallel_comm and s.is_fp32,
        message="works in bf16 and fp16 runs only",
        remedies=("set it to False", "choose a half-precision recipe"),
        source=f"{MODEL_CHECK}: an assertion",
    ),
    _moe(
        id="PB428",
        severity="warning",
        title="FP4 does not reach the overlapped schedule",
        path="fp4",
        predicate=lambda s: s.fp4 and s.model.overlap_moe_expert_parallel_comm,
        message="under overlap_moe_expert_parallel_comm the schedule enters the FP8 context only, so GEMMs run in "
        "{s.mode}",
        remedies=("use megatron-core 0.19.2", "turn the overlap off", "choose an MXFP8 recipe"),
        source="megatron-core 0.16.1 models/common/model_chunk_schedule_plan.py; fixed in 0.19.2 "
        "(get_inner_quantization_context)",
        versions=(mcore(until="0.19.2"),),
    ),
    _moe(
        id="PB429",
        severity="warning",
        title="fused experts choose their own scheme",
        path="model.use_transformer_engine_op_fuser",
        needs="environment",
        predicate=lambda s: (
            s.model.use_transformer_engine_op_fuser
            and s.is_low
            and not s.is_mxfp8
            and not (s.fp4 and s.environment.get("FP4_RECIPE") == "nvfp4")
        ),
        message="the fused grouped MLP runs MXFP8 whatever fp8_recipe says, or NVFP4 with FP4_RECIPE=nvfp4 set; this "
        "run asks for {s.scheme}",
        remedies=("set it to False", "choose an MXFP8 recipe", "set FP4_RECIPE=nvfp4 for an NVFP4 run"),
        source="megatron-core 0.19.2 extensions/transformer_engine.py TEFusedMLPWithGroupedLinear",
        versions=(mcore(since="0.18"),),
    ),
    _moe(
        id="PB430",
        title="single grouped weight under this scheme",
        path="model.moe_single_grouped_weight",
        predicate=lambda s: s.model.moe_single_grouped_weight and s.is_low and s.scheme not in ("mxfp8", "nvfp4"),
        message="one tensor for all experts' weights works under mxfp8 and nvfp4 only, and this run is {s.scheme}",
        remedies=("set it to False", "choose an MXFP8 or NVFP4 recipe"),
        source="megatron-core 0.19.2 transformer_config.py __post_init__",
        versions=(mcore(since="0.18"),),
    ),
    _moe(
        id="PB431",
        title="low-precision dispatch without its conditions",
        path="model.moe_dispatch_fwd_dtype",
        predicate=_low_precision_transport,
        message="needs the flex dispatcher with ncclep, the op fuser and grouped GEMMs",
        remedies=("set it to bf16", "set these four"),
        source="Megatron-LM main of 2026-08-22 transformer_config.py __post_init__",
        versions=(mcore(since="0.20"),),
    ),
    _moe(
        id="PB432",
        title="batch-invariant experts in low precision",
        path="model.batch_invariant_mode",
        predicate=lambda s: s.model.batch_invariant_mode and s.is_low,
        message="a mixture of experts is batch-invariant without FP8 and FP4 only",
        remedies=("set it to False", "choose a recipe without FP8 and FP4"),
        source="Megatron-LM main of 2026-08-22 transformer_config.py __post_init__",
        versions=(mcore(since="0.20"),),
    ),
    _moe(
        id="PB433",
        title="grouped GEMM before Ampere",
        path="model.moe_grouped_gemm",
        needs="target",
        predicate=lambda s: s.model.moe_grouped_gemm and s.capability is not None and s.capability < (8, 0),
        message="grouped GEMM kernels need compute capability 8.0, and the target has "
        "{s.capability[0]}.{s.capability[1]}",
        remedies=("set it to False", "use newer GPUs"),
        source=PARSER,
    ),
    _moe(
        id="PB434",
        title="ncclep with a capacity factor in low precision",
        path="model.moe_expert_capacity_factor",
        needs="environment",
        predicate=_ncclep_limits,
        message="under the ncclep dispatcher and FP8 or FP4 needs compute capability 10.0 and "
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1",
        remedies=("set it to None", "use another dispatcher backend"),
        source="Megatron-LM main of 2026-08-22 transformer/moe/token_dispatcher.py",
        versions=(mcore(since="0.20"),),
    ),
)
