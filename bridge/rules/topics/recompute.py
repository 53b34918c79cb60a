"""Recomputation, CUDA graphs and torch.compile together with FP8."""

from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, PARSER, error, mcore, te, warning
from bridge.rules.violation import all_of


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
)
