"""Rules about mixtures of experts: token counts, the router's dtype, schedules and dispatchers."""

from collections.abc import Iterator

from bridge.precision.precision_config import MEGATRON_FIELDS
from bridge.rules.context import RuleContext
from bridge.rules.rule import (
    MODEL_CHECK_SOURCE,
    PARSER_SOURCE,
    error,
    info,
    mcore,
    sync_info,
    te,
    warning,
)
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation

_EXPERT_FIELDS = tuple(name for name in MEGATRON_FIELDS if name.startswith("moe_"))
LARGEST_FP16 = 65_504
EXACT_BF16 = 256
"""The largest N such that BF16 represents every whole number from 0 to N."""
WRONG_SIGN = "the sign of an update is wrong near balance"
_UNKNOWN_COUNT_EFFECTS = {
    "bf16": f"{WRONG_SIGN}: at 40,000 tokens, for example, two counts are 256 apart",
    "fp16": "their sum is inf where the tokens of a step x top-k are above "
    f"{LARGEST_FP16:,}, and nothing is balanced",
}
"""Mode -> the effect if the number of tokens of a step is not known."""


def _pads_routing_map(context: RuleContext) -> bool:
    """Return whether the router pads its map to sizes that FP8 and FP4 GEMMs accept."""
    return (
        context.model.moe_router_padding_for_quantization
        or context.model.moe_router_padding_for_fp8
    )


def find_fused_experts_scheme_mismatch(context: RunContext) -> Violation | None:
    """Return a violation if the fused grouped MLP does not run the scheme.

    It runs MXFP8, or NVFP4 if an environment variable turns that on.
    """
    if not context.has_experts or not context.model.use_transformer_engine_op_fuser:
        return None
    if not context.is_low_precision or context.is_mxfp8:
        return None
    if context.is_fp4 and context.environment.get("FP4_RECIPE") == "nvfp4":
        return None
    if context.is_nvfp4:
        return Violation(variable="set FP4_RECIPE=nvfp4")
    return Violation(variable="")


def find_unsupported_dispatch_dtypes(context: RunContext) -> Iterator[Violation]:
    """Yield the dtypes of dispatch and combine for which the run has no dispatcher or kernel."""
    if not context.has_experts:
        return
    model = context.model
    if context.has_ncclep and model.use_transformer_engine_op_fuser and model.moe_grouped_gemm:
        return
    if model.moe_dispatch_fwd_dtype not in ("bf16", None):
        yield Violation("model.moe_dispatch_fwd_dtype")
    if model.moe_combine_bwd_dtype not in ("bf16", None):
        yield Violation("model.moe_combine_bwd_dtype")


def _lacks_fused_mlp(context: RuleContext) -> bool:
    variable = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
    is_off = context.has_environment and context.environment.get(variable) != "1"
    return context.target.is_before(10) or is_off


def find_settings_of_absent_experts(context: RuleContext) -> Iterator[Violation]:
    """Yield the stated settings of experts in a model without experts."""
    if not context.has_model or context.model.num_moe_experts:
        return
    for name in _EXPERT_FIELDS:
        if context.differs_from_default(name):
            yield Violation(name)


def has_conflicting_num_sms(context: RunContext) -> bool:
    """Return whether Megatron Bridge's two names of one setting have different values."""
    if (
        not context.program.is_megatron_bridge
        or context.model.moe_flex_dispatcher_num_sms is not None
    ):
        return False
    deepep, hybridep = context.model.moe_deepep_num_sms, context.model.moe_hybridep_num_sms
    return deepep is not None and hybridep is not None and deepep != hybridep


def find_inexact_token_counts(context: RunContext) -> Violation | None:
    """Return a violation if the dtype of the model cannot represent the token counts.

    It is an info if the number of tokens is not known.
    """
    if not context.has_experts or not context.is_half_precision or not context.has_optimizer:
        return None
    model = context.model
    if not model.moe_router_enable_expert_bias or not model.moe_router_bias_update_rate:
        return None
    length = model.seq_length or context.data.seq_length
    batch = context.train.global_batch_size
    balanced = _format_aux_loss_setting(context)
    if not length or not batch:
        return Violation(
            effect=_UNKNOWN_COUNT_EFFECTS[context.mode], balanced=balanced, severity="info"
        )
    routed = length * batch * model.moe_router_topk
    if context.is_bf16:
        mean = routed // (model.num_moe_experts or 1)
        if mean > EXACT_BF16:
            spacing = _compute_bf16_spacing(mean)
            effect = f"{WRONG_SIGN}: at {mean:,} tokens two counts are {spacing:,} apart"
            return Violation(effect=effect, balanced=balanced)
    elif routed > LARGEST_FP16:
        effect = (
            f"their sum, {routed:,} in a step, is inf above {LARGEST_FP16:,}: no bias goes down, "
            "and nothing is balanced"
        )
        return Violation(effect=effect, balanced=balanced, severity="error")
    return None


def _compute_bf16_spacing(number: int) -> int:
    """Return the distance of two neighbours in BF16: 2 above 256, 4 above 512, and so on."""
    return 1 << (number.bit_length() - 8)


def _format_aux_loss_setting(context: RuleContext) -> str:
    """Return the part of a remedy that balances the experts by a loss. Empty if a loss does so."""
    if context.model.moe_router_load_balancing_type in ("none", ["none"], None):
        return " and model.moe_router_load_balancing_type=aux_loss"
    return ""


RULES = (
    info(
        id="PB421",
        title="expert batches of any size",
        setting="model.moe_router_padding_for_quantization",
        when=lambda context: (
            context.has_experts
            and context.is_low_precision
            and not context.is_emulated
            and not context.model.moe_pad_expert_input_to_capacity
            and not _pads_routing_map(context)
        ),
        message="the tokens of an expert are not a multiple of what {run.scheme} GEMMs need, so "
        "every layer with experts runs kernels that pad them",
        remedies=(
            "set it to True",
            "set moe_pad_expert_input_to_capacity=True with an aligned capacity",
        ),
        source="megatron-core 0.16.1 transformer/moe/experts.py:605 and :863; "
        "NVIDIA/TransformerEngine issue 2966, 2026-05-07",
    ),
    error(
        id="PB422",
        title="router padding under this dispatcher",
        setting="model.moe_token_dispatcher_type",
        when=lambda context: (
            context.has_experts
            and _pads_routing_map(context)
            and context.model.moe_token_dispatcher_type in ("allgather", "alltoall_seq")
        ),
        message="router padding for quantization does not work under this dispatcher",
        remedies=("use alltoall or flex", "set moe_router_padding_for_quantization=False"),
        source=MODEL_CHECK_SOURCE,
    ),
    error(
        id="PB423",
        title="router padding without FP8 or FP4",
        setting="model.moe_router_padding_for_quantization",
        when=lambda context: (
            context.has_experts and _pads_routing_map(context) and not context.is_low_precision
        ),
        message="pads the routing map for nothing in a {run.mode} run, and Megatron refuses it",
        remedies=("set it to False", "choose a recipe with FP8 or FP4"),
        source=MODEL_CHECK_SOURCE,
    ),
    info(
        id="PB424",
        title="deprecated name",
        setting="model.moe_router_padding_for_fp8",
        when=lambda context: context.has_experts and context.model.moe_router_padding_for_fp8,
        message="is the old name of moe_router_padding_for_quantization, "
        "which Megatron sets from it",
        remedies=("use the new name",),
        source=MODEL_CHECK_SOURCE,
    ),
    info(
        id="PB426",
        title="router below FP32",
        setting="model.moe_router_dtype",
        when=lambda context: (
            context.has_experts
            and context.is_half_precision
            and context.model.moe_router_dtype not in ("fp32", "fp64")
        ),
        message="the router's probabilities are computed in {run.mode}; FP32 is "
        "what most large runs use",
        remedies=("set it to fp32",),
        source="megatron-core 0.16.1 transformer_config.py warns from 32 experts on; "
        "pytorch/torchtitan issue 2389, 2026-02",
    ),
    error(
        id="PB427",
        title="expert-parallel overlap in FP32",
        setting="model.overlap_moe_expert_parallel_comm",
        when=lambda context: (
            context.has_experts
            and context.model.overlap_moe_expert_parallel_comm
            and context.is_fp32
        ),
        message="works in bf16 and fp16 runs only",
        remedies=("set it to False", "choose a half-precision recipe"),
        source=f"{MODEL_CHECK_SOURCE}: an assertion",
    ),
    warning(
        id="PB428",
        title="FP4 does not reach the overlapped schedule",
        setting="fp4",
        versions=(mcore(until="0.19.2"),),
        when=lambda context: (
            context.has_experts
            and context.is_fp4
            and context.model.overlap_moe_expert_parallel_comm
        ),
        message="under overlap_moe_expert_parallel_comm the schedule enters the FP8 context only, "
        "so GEMMs run in {run.mode}",
        remedies=("use megatron-core 0.19.2", "turn the overlap off", "choose an MXFP8 recipe"),
        source="megatron-core 0.16.1 models/common/model_chunk_schedule_plan.py; fixed in 0.19.2 "
        "(get_inner_quantization_context)",
    ),
    warning(
        id="PB429",
        title="fused experts choose their own scheme",
        setting="model.use_transformer_engine_op_fuser",
        versions=(mcore(since="0.18"),),
        when=find_fused_experts_scheme_mismatch,
        message="the fused grouped MLP runs MXFP8 whatever fp8_recipe says, or NVFP4 with "
        "FP4_RECIPE=nvfp4 set; this run asks for {run.scheme}",
        remedies=("set it to False", "choose an MXFP8 recipe", "{variable}"),
        source="megatron-core 0.19.2 extensions/transformer_engine.py TEFusedMLPWithGroupedLinear",
    ),
    error(
        id="PB430",
        title="single grouped weight under this scheme",
        setting="model.moe_single_grouped_weight",
        versions=(mcore(since="0.18"),),
        when=lambda context: (
            context.has_experts
            and context.model.moe_single_grouped_weight
            and context.is_low_precision
            and context.scheme not in ("mxfp8", "nvfp4")
        ),
        message="one tensor for all experts' weights works under mxfp8 and nvfp4 only, and this "
        "run is {run.scheme}",
        remedies=("set it to False", "choose an MXFP8 or NVFP4 recipe"),
        source="megatron-core 0.19.2 transformer_config.py __post_init__",
    ),
    error(
        id="PB431",
        title="low-precision dispatch without its conditions",
        setting="model.moe_dispatch_fwd_dtype",
        versions=(mcore(since="0.20"),),
        when=find_unsupported_dispatch_dtypes,
        message="needs the flex dispatcher with ncclep, the op fuser and grouped GEMMs",
        remedies=("set it to bf16", "set these four"),
        source="Megatron-LM main of 2026-08-22 transformer_config.py __post_init__",
    ),
    error(
        id="PB432",
        title="batch-invariant experts in low precision",
        setting="model.batch_invariant_mode",
        versions=(mcore(since="0.20"),),
        when=lambda context: (
            context.has_experts and context.model.batch_invariant_mode and context.is_low_precision
        ),
        message="a mixture of experts is batch-invariant without FP8 and FP4 only",
        remedies=("set it to False", "choose a recipe without FP8 and FP4"),
        source="Megatron-LM main of 2026-08-22 transformer_config.py __post_init__",
    ),
    error(
        id="PB433",
        title="grouped GEMM before Ampere",
        setting="model.moe_grouped_gemm",
        when=lambda context: (
            context.has_experts and context.model.moe_grouped_gemm and context.target.is_before(8)
        ),
        message="grouped GEMM kernels need compute capability 8.0, and the target has "
        "{run.target.capability[0]}.{run.target.capability[1]}",
        remedies=("set it to False", "use newer GPUs"),
        source=PARSER_SOURCE,
    ),
    error(
        id="PB434",
        title="ncclep with a capacity factor in low precision",
        setting="model.moe_expert_capacity_factor",
        versions=(mcore(since="0.20"),),
        when=lambda context: (
            context.has_experts
            and context.is_low_precision
            and context.has_ncclep
            and _lacks_fused_mlp(context)
            and context.model.moe_expert_capacity_factor is not None
        ),
        message="under the ncclep dispatcher and FP8 or FP4 needs compute capability 10.0 and "
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1",
        remedies=("set it to None", "use another dispatcher backend"),
        source="Megatron-LM main of 2026-08-22 transformer/moe/token_dispatcher.py",
    ),
    sync_info(
        id="PB435",
        title="setting of experts in a model without",
        setting="moe_router_dtype",
        sync="reported",
        when=find_settings_of_absent_experts,
        message="has no effect: the model has no experts",
        remedies=("drop it", "set model.num_moe_experts"),
        source="megatron-core 0.16.1 transformer/moe/router.py:96, "
        "transformer/moe/token_dispatcher.py:617",
    ),
    error(
        id="PB436",
        title="checkpoint of grouped experts without a state",
        setting="model.moe_grouped_gemm",
        versions=(mcore(until="0.19"), te(since="2.18")),
        when=lambda context: (
            context.has_experts
            and context.model.moe_grouped_gemm
            and context.is_low_precision
            and not context.is_delayed
            and not context.is_emulated
            and context.target.te is not None
            and context.target.mcore is not None
        ),
        message="saving a checkpoint ends in a TypeError: from Transformer Engine 2.18 on the "
        "extra state of {run.scheme} scaling is empty, and this Megatron Core splits it "
        "by expert without looking",
        remedies=(
            "use megatron-core 0.19",
            "use Transformer Engine 2.17",
            "set moe_grouped_gemm=False",
        ),
        source="a rehearsal; megatron-core 0.16.1 extensions/transformer_engine.py:1705 "
        "_split_extra_state, Transformer Engine 2.18 pytorch/module/base.py get_extra_state (pull "
        "request 3123); fixed in megatron-core 0.19.0",
    ),
    error(
        id="PB437",
        title="two numbers of processors for the dispatcher",
        setting="model.moe_hybridep_num_sms",
        versions=(mcore(since="0.19"),),
        when=has_conflicting_num_sms,
        message="must be moe_deepep_num_sms, which is {run.model.moe_deepep_num_sms}: Megatron "
        "takes one of them for the moe_flex_dispatcher_num_sms that is not set",
        remedies=("set moe_flex_dispatcher_num_sms alone",),
        source="megatron-core main of 2026-08-22 "
        "transformer/transformer_config.py:1806 __post_init__",
    ),
    error(
        id="PB438",
        title="gradients of experts that tensor-parallel ranks do not add",
        setting="model.expert_tensor_parallel_size",
        versions=(mcore(until="0.19"),),
        when=lambda context: (
            context.has_experts
            and context.parallel.expert == 1
            and context.parallel.expert_tensor != context.parallel.tensor
        ),
        message="must be tensor_model_parallel_size, which is {run.parallel.tensor}, without "
        "expert parallelism: each tensor-parallel rank updates its copy of the experts with the "
        "gradients of its own tokens alone",
        remedies=(
            "leave it at None",
            "set expert_model_parallel_size above 1",
            "use megatron-core 0.19",
        ),
        source="megatron-core 0.16.1 tensor_parallel/layers.py:886, "
        "extensions/transformer_engine.py:644; fixed in 0.19.0 (pull request 5916); a run of TP 2 "
        "over gloo, whose first gradient norm was 8.143, and 8.276 in one process",
        explanation="Without expert parallelism Megatron reduces the experts' gradients with "
        "those of the dense layers, over the data-parallel ranks. Experts that tensor parallelism "
        "does not split have copies on the tensor-parallel ranks too, which see other "
        "tokens each and drift apart.",
    ),
    warning(
        id="PB439",
        title="token counts of experts in half precision",
        setting="model.moe_router_enable_expert_bias",
        versions=(mcore(until="0.20"),),
        when=find_inexact_token_counts,
        message="the token counts of the experts are kept in {run.mode} (Float16Module casts the "
        "buffer local_tokens_per_expert), so that {effect}",
        remedies=(
            "use a Megatron Core with pull request 7081 (2026-09-04)",
            "set model.moe_router_enable_expert_bias=False{balanced}",
        ),
        source="megatron-core 0.16.1 and 0.19.2 transformer/moe/router.py, "
        "transformer/moe/moe_utils.py get_updated_expert_bias, transformer/module.py "
        "Float16Module; executed with 0.16.1; NVIDIA/Megatron-LM pull request 7081, 2026-09-04",
        explanation="Counts are added up over micro-batches and ranks, and only the sign of their "
        "distance from the mean moves a bias. In BF16 counts near the mean are rounded to it or "
        "beyond it. In FP16 the mean is inf, so that every expert seems to have too few tokens.",
    ),
)
