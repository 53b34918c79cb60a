"""Recomputation, CUDA graphs and torch.compile together with FP8."""

from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, PARSER, error, mcore, te, warning
from bridge.rules.violation import Violation, all_of
from bridge.target.versions import at_least


def _recomputes_attention(run: RuleContext) -> bool:
    """Return whether the attention core is recomputed by itself, as it is where nothing says which modules are.

    An empty list says that none is.
    """
    is_selective = run.model.recompute_granularity == "selective"
    return is_selective and (run.model.recompute_modules is None or "core_attn" in run.recomputed)


def _captured_experts(run: RuleContext) -> list[Violation]:
    """Return the violation of experts inside the layers, or parts of layers, that Transformer Engine captures.

    Layers are captured as a whole where no part is named.
    """
    field = "cuda_graph_modules" if at_least(run.mcore, "0.18") is not False else "cuda_graph_scope"
    parts: set[str] = set()
    for given in (run.model.cuda_graph_modules, run.model.cuda_graph_scope):
        named = [given] if isinstance(given, str) else given or []
        parts |= {str(getattr(one, "name", one)).rpartition(".")[2] for one in named} - {"full", "none"}
    if run.model.cuda_graph_impl != "transformer_engine" or (parts and "moe" not in parts):
        return []
    return [Violation(f"model.{field}", field=field)]


def _checks_for_nan(run: RuleContext) -> object:
    return run.train.check_for_nan_in_loss if run.sections["train"].is_given else run.ddp.check_for_nan_in_grad


RULES = (
    error(
        id="PB461",
        title="recomputed norm or activation under delayed scaling",
        setting="model.recompute_modules",
        when=all_of("scheme is delayed", lambda run: {"moe_act", "layernorm"} & {*run.recomputed}),
        message="moe_act and layernorm cannot be recomputed under delayed scaling",
        remedies=("take them out", "use fp8_recipe='tensorwise'"),
        source=MODEL_CHECK,
    ),
    warning(
        id="PB464",
        title="CUDA graphs together with FP8",
        setting="model.cuda_graph_impl",
        versions=(te(until="2.8"),),
        when=all_of(
            *("fp8", "not is_emulated"),
            lambda run: run.model.cuda_graph_impl not in ("none", None) or run.model.enable_cuda_graph,
        ),
        message="captured FP8 layers gave NaN or stale weights in several reports",
        remedies=("compare the first steps with a run without graphs", "use Transformer Engine 2.8"),
        source="NVIDIA-NeMo/Megatron-Bridge issues 1707 (2025-12-13) and 3801 (2026-05-12)",
        evidence="weak",
    ),
    error(
        id="PB465",
        title="NaN check inside a captured step",
        setting="train.check_for_nan_in_loss",
        when=all_of(
            *("has_model", _checks_for_nan),
            lambda run: "full_iteration" in f"{run.model.cuda_graph_impl} {run.model.cuda_graph_scope}",
        ),
        message="a step captured as one CUDA graph cannot stop for a NaN check",
        remedies=("set check_for_nan_in_loss=False", "capture layers instead of the step"),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2; Megatron Bridge training/config.py, "
        "2026-08-22",
    ),
    error(
        id="PB466",
        title="inference graphs of blocks in FP8",
        setting="model.inference_cuda_graph_scope",
        versions=(mcore(since="0.18"),),
        when=all_of(
            "fp8",
            lambda run: str(run.model.inference_cuda_graph_scope).rpartition(".")[2] == "block",
            lambda run: not (run.model.transformer_impl == "inference_optimized" and run.scheme == "mxfp8"),
        ),
        message="FP8 blocks are captured for inference with transformer_impl=inference_optimized and mxfp8 only",
        remedies=("use another scope", "use both"),
        source=PARSER,
    ),
    warning(
        id="PB467",
        title="inference-optimised MXFP8 needs FlashInfer",
        setting="model.transformer_impl",
        when=all_of("scheme is mxfp8", "model.transformer_impl is inference_optimized"),
        message="inference-optimised layers under MXFP8 need FlashInfer 0.6.4, which this check does not know of",
        remedies=("make sure that FlashInfer is 0.6.4 or later", "use transformer_impl='transformer_engine'"),
        source=PARSER,
    ),
    error(
        id="PB468",
        title="shared experts recomputed inside local graphs",
        setting="model.recompute_modules",
        versions=(mcore(since="0.19"),),
        when=all_of(
            *("is_low", "model.cuda_graph_impl is local", lambda run: "shared_experts" in run.recomputed),
            lambda run: (run.model.gtp_weight_remat_size or 1) > 1,
        ),
        message="shared_experts cannot be recomputed in FP8 or FP4 under local CUDA graphs with sharded weights",
        remedies=("take it out", "set cuda_graph_impl=none"),
        source="megatron-core 0.19.2 transformer_config.py __post_init__: an assertion",
    ),
    warning(
        id="PB469",
        title="FP8 attention that is recomputed in high precision",
        setting="fp8_dot_product_attention",
        when=all_of("fp8", "model.fp8_dot_product_attention", _recomputes_attention, "not is_emulated"),
        message="recomputing core_attn runs outside of the FP8 context, so that the backward pass is of attention in "
        "{run.mode} where the forward pass was in FP8",
        remedies=("set model.recompute_granularity=None", "set fp8_dot_product_attention=False"),
        source="megatron-core 0.16.1 to 0.19.2 tensor_parallel/random.py CheckpointFunction, transformer/attention.py "
        "_checkpointed_attention_forward; NVIDIA/Megatron-LM pull request 7538, 2026-09-21",
    ),
    error(
        id="PB471",
        title="recomputed prediction layers without gradients",
        setting="model.recompute_granularity",
        versions=(mcore(until="0.18"),),
        when=all_of(
            *("fp8", "shape.has_mtp", "model.recompute_granularity is full", "model.recompute_method is not block"),
            "not is_emulated",
        ),
        message="under FP8 full recomputation hands the inputs of a prediction layer to Transformer Engine by keyword, "
        "which it does not differentiate, so that the layer gets no gradients",
        remedies=("use megatron-core 0.18", "set model.recompute_granularity=selective", "set mtp_num_layers=None"),
        source="megatron-core 0.16.1 and 0.17.1 transformer/multi_token_prediction.py _checkpointed_forward; executed "
        "with Transformer Engine 2.20.2 on a CPU; fixed in 0.18.0 (NVIDIA/Megatron-LM pull request 4593, 2026-05-02)",
    ),
    error(
        id="PB473",
        title="captured layers outside BF16",
        setting="model.cuda_graph_impl",
        when=all_of("is_fp16", "model.cuda_graph_impl is transformer_engine", "not is_emulated"),
        message="Transformer Engine captures layers with BF16 inputs, whatever the mode, and layers with {run.mode} "
        "weights refuse them",
        remedies=("set model.cuda_graph_impl=none", "choose a bf16 recipe"),
        source="megatron-core 0.16.1 to 0.19.2 transformer/module.py get_layer_static_inputs; Transformer Engine 2.20 "
        "pytorch/module/base.py set_activation_dtype",
    ),
    warning(
        id="PB475",
        title="captured experts that cast their weights in each micro-batch",
        setting="model.cuda_graph_modules",
        versions=(te(until="2.17"),),
        when=all_of("fp8", "shape.is_moe", "model.moe_grouped_gemm", "not is_emulated", find=_captured_experts),
        message="captured grouped experts do not know in which micro-batches to keep their FP8 weights, and much "
        "smaller gradients of experts and router were reported",
        remedies=("use Transformer Engine 2.17", "set model.{field}=[attn]"),
        source="NVIDIA/TransformerEngine issue 3051, 2026-05-28; Transformer Engine 2.12 to 2.17 "
        "pytorch/module/grouped_linear.py: skip_fp8_weight_update is None before 2.17",
        evidence="reported",
    ),
)
