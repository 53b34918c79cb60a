"""Recomputation, CUDA graphs and torch.compile together with FP8."""

from functools import partial

from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, PARSER, Rule, each, mcore, target_rule, te


def _discards_outputs(s: RuleContext) -> bool:
    return "moe_act" in s.recomputed or "layernorm" in s.recomputed


def _captures_whole_step(s: RuleContext) -> bool:
    return s.model.cuda_graph_impl == "full_iteration" or "full_iteration" in str(s.model.cuda_graph_scope)


def _captures(s: RuleContext) -> bool:
    return bool(s.model.cuda_graph_impl not in ("none", None) or s.model.enable_cuda_graph)


_fp8_run = partial(target_rule, gate="fp8")

RULES = (
    Rule(
        heading="PB461: recomputed norm or activation under delayed scaling",
        predicate=_discards_outputs,
        error="model.recompute_modules: moe_act and layernorm cannot be recomputed under delayed scaling",
        remedies=("take them out", "use fp8_recipe='tensorwise'"),
        verified=MODEL_CHECK,
        gate="is_delayed",
    ),
    _fp8_run(
        heading="PB462: recomputed norm or activation needs Transformer Engine 2.6",
        predicate=lambda s: _discards_outputs(s) and not s.is_emulated,
        error="model.recompute_modules: moe_act and layernorm can be recomputed under FP8 from Transformer Engine 2.6 "
        "on",
        remedies=("use Transformer Engine 2.6", "take them out"),
        verified=MODEL_CHECK,
        versions=(te(until="2.6"),),
    ),
    Rule(
        heading="PB463: delayed scaling under torch.compile",
        predicate=lambda s: each(
            ("train.torch_compile", s.train.torch_compile), ("model.torch_compile", s.model.torch_compile)
        ),
        error="train.torch_compile: Transformer Engine refuses delayed scaling inside a compiled graph",
        remedies=("use fp8_recipe='tensorwise'", "do not compile"),
        verified="Transformer Engine 2.20 pytorch/quantization.py check_recipe_support; NVIDIA/TransformerEngine issue "
        "2759",
        gate="is_delayed",
    ),
    _fp8_run(
        heading="PB464: CUDA graphs together with FP8",
        predicate=lambda s: _captures(s) and not s.is_emulated,
        warning="model.cuda_graph_impl: captured FP8 layers gave NaN or stale weights in several reports",
        remedies=("compare the first steps with a run without graphs", "use Transformer Engine 2.8"),
        weak="NVIDIA-NeMo/Megatron-Bridge issues 1707 (2025-12-13) and 3801 (2026-05-12)",
        versions=(te(until="2.8"),),
    ),
    Rule(
        heading="PB465: NaN check inside a captured step",
        predicate=lambda s: (
            _captures_whole_step(s)
            and (s.train.check_for_nan_in_loss if s.sections["train"].is_given else s.ddp.check_for_nan_in_grad)
        ),
        error="train.check_for_nan_in_loss: a step captured as one CUDA graph cannot stop for a NaN check",
        remedies=("set check_for_nan_in_loss=False", "capture layers instead of the step"),
        verified="Megatron-LM training/arguments.py validate_args, 0.19.2; Megatron Bridge training/config.py, "
        "2026-08-22",
        gate="has_model",
    ),
    Rule(
        heading="PB466: inference graphs of blocks in FP8",
        predicate=lambda s: (
            str(s.model.inference_cuda_graph_scope).rpartition(".")[2] == "block"
            and not (s.model.transformer_impl == "inference_optimized" and s.is_mxfp8)
        ),
        error="model.inference_cuda_graph_scope: FP8 blocks are captured for inference with "
        "transformer_impl=inference_optimized and mxfp8 only",
        remedies=("use another scope", "use both"),
        verified=PARSER,
        gate="fp8",
        versions=(mcore(since="0.18"),),
    ),
    Rule(
        heading="PB467: inference-optimised MXFP8 needs FlashInfer",
        predicate=lambda s: s.model.transformer_impl == "inference_optimized",
        warning="model.transformer_impl: inference-optimised layers under MXFP8 need FlashInfer 0.6.4, which this "
        "check does not know of",
        remedies=("make sure that FlashInfer is 0.6.4 or later", "use transformer_impl='transformer_engine'"),
        verified=PARSER,
        gate="is_mxfp8",
    ),
    Rule(
        heading="PB468: shared experts recomputed inside local graphs",
        predicate=lambda s: (
            "shared_experts" in s.recomputed
            and s.model.cuda_graph_impl == "local"
            and (s.model.gtp_weight_remat_size or 1) > 1
        ),
        error="model.recompute_modules: shared_experts cannot be recomputed in FP8 or FP4 under local CUDA graphs with "
        "sharded weights",
        remedies=("take it out", "set cuda_graph_impl=none"),
        verified="megatron-core 0.19.2 transformer_config.py __post_init__: an assertion",
        gate="is_low",
        versions=(mcore(since="0.19"),),
    ),
)
