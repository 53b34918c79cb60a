"""Rules about recomputation, CUDA graphs and torch.compile together with FP8."""

from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK_SOURCE, PARSER_SOURCE, error, mcore, te, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.versions import is_at_least


def recomputes_fp8_attention(context: RuleContext) -> bool:
    """Return whether FP8 attention is recomputed separately, outside of the FP8 context.

    By default, selective recomputation recomputes attention. An empty list of modules turns that
    off.
    """
    if not context.is_fp8 or not context.model.fp8_dot_product_attention:
        return False
    if context.model.recompute_granularity != "selective":
        return False
    is_recomputed = (
        context.model.recompute_modules is None or "core_attn" in context.recomputed_modules
    )
    return is_recomputed and not context.is_emulated


def find_captured_experts(context: RunContext) -> Violation | None:
    """Return a violation if Transformer Engine captures grouped experts in FP8.

    If no part of a layer is named, the whole layer is captured.
    """
    if (
        not context.is_fp8
        or not context.shape.is_moe
        or not context.model.moe_grouped_gemm
        or context.is_emulated
    ):
        return None
    field = "cuda_graph_modules"
    if is_at_least(context.target.mcore, "0.18") is False:
        field = "cuda_graph_scope"
    parts = _parse_parts(context.model.cuda_graph_modules) | _parse_parts(
        context.model.cuda_graph_scope
    )
    if context.model.cuda_graph_impl != "transformer_engine":
        return None
    if not parts or "moe" in parts:
        return Violation(f"model.{field}", field=field)
    return None


def _parse_parts(stated: object) -> set[str]:
    """Return the parts of a layer that a setting of CUDA graphs names, as text or enum members."""
    if stated is None:
        return set()
    if not isinstance(stated, list | tuple | set | frozenset):
        stated = [stated]
    parts = set()
    for part in stated:
        name = str(getattr(part, "name", part)).rpartition(".")[2]
        parts.add(name)
    return parts - {"full", "none"}


def has_nan_check_in_captured_step(context: RunContext) -> bool:
    """Return whether a check for NaN is on in a step that one CUDA graph captures."""
    if not context.has_model:
        return False
    if context.sections["train"].is_given:
        is_checked = context.train.check_for_nan_in_loss
    else:
        is_checked = context.ddp.check_for_nan_in_grad
    captured = f"{context.model.cuda_graph_impl} {context.model.cuda_graph_scope}"
    return is_checked and "full_iteration" in captured


def captures_fp8_blocks_for_inference(context: RuleContext) -> bool:
    """Return whether FP8 blocks are captured for inference without the layers or scheme for it."""
    if not context.is_fp8:
        return False
    scope = str(context.model.inference_cuda_graph_scope).rpartition(".")[2]
    if scope != "block":
        return False
    return not (context.model.transformer_impl == "inference_optimized" and context.is_mxfp8)


RULES = (
    error(
        id="PB461",
        title="recomputed norm or activation under delayed scaling",
        setting="model.recompute_modules",
        when=lambda context: (
            context.is_delayed
            and (
                "moe_act" in context.recomputed_modules or "layernorm" in context.recomputed_modules
            )
        ),
        message="moe_act and layernorm cannot be recomputed under delayed scaling",
        remedies=("take them out", "use fp8_recipe='tensorwise'"),
        source=MODEL_CHECK_SOURCE,
    ),
    warning(
        id="PB464",
        title="CUDA graphs together with FP8",
        setting="model.cuda_graph_impl",
        versions=(te(until="2.8"),),
        when=lambda context: (
            context.is_fp8
            and not context.is_emulated
            and (
                context.model.cuda_graph_impl not in ("none", None)
                or context.model.enable_cuda_graph
            )
        ),
        message="captured FP8 layers gave NaN or stale weights in several reports",
        remedies=(
            "compare the first steps with a run without graphs",
            "use Transformer Engine 2.8",
        ),
        source="NVIDIA-NeMo/Megatron-Bridge issues 1707 (2025-12-13) and 3801 (2026-05-12)",
        evidence="weak",
    ),
    error(
        id="PB465",
        title="NaN check inside a captured step",
        setting="train.check_for_nan_in_loss",
        when=has_nan_check_in_captured_step,
        message="a step captured as one CUDA graph cannot stop for a NaN check",
        remedies=("set check_for_nan_in_loss=False", "capture layers instead of the step"),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2; Megatron Bridge "
        "training/config.py, 2026-08-22",
    ),
    error(
        id="PB466",
        title="inference graphs of blocks in FP8",
        setting="model.inference_cuda_graph_scope",
        versions=(mcore(since="0.18"),),
        when=captures_fp8_blocks_for_inference,
        message="FP8 blocks are captured for inference with "
        "transformer_impl=inference_optimized and mxfp8 only",
        remedies=("use another scope", "use both"),
        source=PARSER_SOURCE,
    ),
    warning(
        id="PB467",
        title="inference-optimised MXFP8 needs FlashInfer",
        setting="model.transformer_impl",
        when=lambda context: (
            context.is_mxfp8 and context.model.transformer_impl == "inference_optimized"
        ),
        message="inference-optimised layers under MXFP8 need FlashInfer 0.6.4, which "
        "this check does not know of",
        remedies=(
            "make sure that FlashInfer is 0.6.4 or later",
            "use transformer_impl='transformer_engine'",
        ),
        source=PARSER_SOURCE,
    ),
    error(
        id="PB468",
        title="shared experts recomputed inside local graphs",
        setting="model.recompute_modules",
        versions=(mcore(since="0.19"),),
        when=lambda context: (
            context.is_low_precision
            and context.model.cuda_graph_impl == "local"
            and "shared_experts" in context.recomputed_modules
            and (context.model.gtp_weight_remat_size or 1) > 1
        ),
        message="shared_experts cannot be recomputed in FP8 or FP4 under local CUDA "
        "graphs with sharded weights",
        remedies=("take it out", "set cuda_graph_impl=none"),
        source="megatron-core 0.19.2 transformer_config.py __post_init__: an assertion",
    ),
    warning(
        id="PB469",
        title="FP8 attention that is recomputed in high precision",
        setting="fp8_dot_product_attention",
        when=recomputes_fp8_attention,
        message="recomputing core_attn runs outside of the FP8 context, so that the backward pass "
        "is of attention in {run.mode} where the forward pass was in FP8",
        remedies=("set model.recompute_granularity=None", "set fp8_dot_product_attention=False"),
        source="megatron-core 0.16.1 to 0.19.2 tensor_parallel/random.py CheckpointFunction, "
        "transformer/attention.py _checkpointed_attention_forward; NVIDIA/Megatron-LM pull "
        "request 7538, 2026-09-21",
    ),
    error(
        id="PB471",
        title="recomputed prediction layers without gradients",
        setting="model.recompute_granularity",
        versions=(mcore(until="0.18"),),
        when=lambda context: (
            context.is_fp8
            and context.shape.has_mtp
            and context.model.recompute_granularity == "full"
            and context.model.recompute_method != "block"
            and not context.is_emulated
        ),
        message="under FP8 full recomputation hands the inputs of a prediction layer to "
        "Transformer Engine by keyword, which it does not differentiate, so that "
        "the layer gets no gradients",
        remedies=(
            "use megatron-core 0.18",
            "set model.recompute_granularity=selective",
            "set mtp_num_layers=None",
        ),
        source="megatron-core 0.16.1 and 0.17.1 transformer/multi_token_prediction.py "
        "_checkpointed_forward; executed with Transformer Engine 2.20.2 on a CPU; fixed in 0.18.0 "
        "(NVIDIA/Megatron-LM pull request 4593, 2026-05-02)",
    ),
    error(
        id="PB473",
        title="captured layers outside BF16",
        setting="model.cuda_graph_impl",
        when=lambda context: (
            context.is_fp16
            and context.model.cuda_graph_impl == "transformer_engine"
            and not context.is_emulated
        ),
        message="Transformer Engine captures layers with BF16 inputs, whatever the mode, and "
        "layers with {run.mode} weights refuse them",
        remedies=("set model.cuda_graph_impl=none", "choose a bf16 recipe"),
        source="megatron-core 0.16.1 to 0.19.2 transformer/module.py get_layer_static_inputs; "
        "Transformer Engine 2.20 pytorch/module/base.py set_activation_dtype",
    ),
    warning(
        id="PB475",
        title="captured experts that cast their weights in each micro-batch",
        setting="model.cuda_graph_modules",
        versions=(te(until="2.17"),),
        when=find_captured_experts,
        message="captured grouped experts do not know in which micro-batches to keep their FP8 "
        "weights, and much smaller gradients of experts and router were reported",
        remedies=("use Transformer Engine 2.17", "set model.{field}=[attn]"),
        source="NVIDIA/TransformerEngine issue 3051, 2026-05-28; Transformer Engine 2.12 to 2.17 "
        "pytorch/module/grouped_linear.py: skip_fp8_weight_update is None before 2.17",
        evidence="reported",
    ),
)
