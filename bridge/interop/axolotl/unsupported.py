"""Settings of Axolotl that bear on precision and have no field: all are reported.

Three kinds: settings of Axolotl itself, settings of its kernels plugin, which act only where `plugins` names it, and
names that look like precision and that nothing reads.
Source: Axolotl 0.19.0 utils/schemas, loaders/model.py, integrations/kernels/args.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bridge.interop.optimizers import low_precision_optimizer

if TYPE_CHECKING:
    from collections.abc import Collection

    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["LOOKS_LIKE_PRECISION", "report_unsupported"]

VERSION = "Axolotl 0.19.0"
BY_HAND = "Set it up by hand where you train next."
UNSUPPORTED = {
    "load_in_4bit": "the frozen weights are stored in 4 bits (bitsandbytes)",
    "load_in_8bit": "the frozen weights are stored in 8 bits (bitsandbytes), and loaded in FP16 unless bf16 is on",
    "gptq": "the frozen weights are a GPTQ checkpoint",
    "gptq_disable_exllama": "which kernel runs the GPTQ weights",
    "bnb_config_kwargs": "options of bitsandbytes",
    "model_quantization_config": "the weights are loaded through a quantised format",
    "model_quantization_config_kwargs": "the weights are loaded through a quantised format",
    "quantize_moe_experts": "expert weights are quantised while they load",
    "qat": "fake quantisation in training, so that the model can be quantised afterwards",
    "quantization": "quantisation after training",
    "llmcompressor": "sparsity or quantisation of the finished model",
    "loftq_config": "adapters initialised against a quantised base",
    "peft": "options of adapters, LoftQ bits among them",
    "use_onebitllms": "weights of 1.58 bits (BitNet)",
    "fp32_norms": "norms are sharded under a policy of their own, in FP32",
    "fp32_norm_classes": "which norms are kept in FP32",
    "embeddings_skip_upcast": "embeddings are not upcast to FP32 under an adapter",
    "cut_cross_entropy": "embeddings and norms are cast back to the compute dtype",
    "peft_autocast_adapter_dtype": "whether adapter weights are upcast to FP32",
    "qgalore_proj_quant": "the projection of Q-GaLore is quantised",
    "qgalore_proj_bits": "the projection of Q-GaLore is quantised",
    "overrides_of_model_kwargs": "arguments of from_pretrained, a dtype perhaps",
    "overrides_of_model_config": "changes to the model's own config, a dtype perhaps",
    "accelerator_config": "arguments of the Accelerator",
    "sage_attention": "SageAttention quantises queries and keys to 8 bits or fewer",
}
"""Settings that bear on precision and have no field, with what they do."""
KERNELS = {
    "nonexpert_quantization": "weights outside the experts are quantised when they are loaded",
    "dsv4_fp8_nonexpert_mode": "whether weights outside the experts stay FP8 or become BF16 when they are loaded",
    "dsv4_fp8_lora_kernel": "attention projections run in blockwise FP8 under their adapters",
    "dsv4_bf16_all": "weights that the model keeps in FP32 are cast to the compute dtype as well",
    "dsv4_fp4_grouped_mode": "GEMMs of the frozen experts run on FP4 weights, with FP4 or FP8 activations",
    "gemma4_fp8_nonexpert": "weights outside the experts are stored in FP8",
    "gemma4_nf4_nonexpert": "weights outside the experts are stored in NF4",
    "moe_grouped_backend": "which kernel runs the GEMMs of NVFP4 experts",
    "nvfp4_merge_aware": "expert weights are fake-quantised to NVFP4 in training, as the merge will write them",
    "nvfp4_merge_aware_start_step": "from which step on expert weights are fake-quantised to NVFP4",
}
"""Settings of `axolotl.integrations.kernels.KernelsPlugin`, with what they do."""
COMPILE = (
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "torch_compile_options",
    "flex_attn_compile_kwargs",
    "deepcompile",
)
LOOKS_LIKE_PRECISION = re.compile(
    r"(^|_)(bf16|fp16|fp8|fp4|fp32|tf32|amp|nvfp4|mxfp8)(_|$)|float\d|bfloat|precision|dtype|quantiz|loss_scale|autocast|\dbit"
)


def report_unsupported(builder: ImportBuilder, top: Settings, done: Collection[str]) -> None:
    """Report whatever else than `done` bears on precision, and what looks as if it did and is ignored."""
    for key, detail in UNSUPPORTED.items():
        if top.given(key):
            _report_if_on(builder, key, top[key], detail)
    for key in COMPILE:
        if top.given(key):
            detail = "compiled kernels may round elsewhere; a recipe does not say whether to compile"
            builder.report(key, top[key], "unsupported", detail, "Choose it where you train next.")
    _kernels(builder, top)
    _attention(builder, top)
    _optimizer(builder, top)
    _inference(builder, top)
    known = {*done, *UNSUPPORTED, *KERNELS, *COMPILE}
    for key in top.values:
        if key not in known and LOOKS_LIKE_PRECISION.search(key):
            detail = f"not a setting of {VERSION}, which ignores unknown names without a word"
            builder.report(key, top[key], "dead knob", detail, "Check its spelling, or drop it.")
        elif key != key.lower() and (key.lower() in known or LOOKS_LIKE_PRECISION.search(key.lower())):
            detail = "another letter case, which is not read"
            builder.report(key, top[key], "dead knob", detail, f"Write {key.lower()} if it is meant.")


def _report_if_on(builder: ImportBuilder, name: str, value: Any, detail: str) -> None:
    if value is False:
        builder.map(name)
    else:
        builder.report(name, value, "unsupported", detail, BY_HAND)


def _kernels(builder: ImportBuilder, top: Settings) -> None:
    plugins = top.values.get("plugins")
    named = isinstance(plugins, list) and any("kernelsplugin" in str(plugin).lower() for plugin in plugins)
    for key, detail in KERNELS.items():
        if not top.given(key):
            continue
        if named or top[key] is False:
            _report_if_on(builder, key, top[key], detail)
        else:
            unread = "a setting of the kernels plugin, which `plugins` does not name"
            builder.report(key, top[key], "dead knob", unread, "Drop it, or name the plugin.")


def _attention(builder: ImportBuilder, top: Settings) -> None:
    chosen = top.values.get("attn_implementation")
    if chosen == "sage":
        builder.report("attn_implementation", chosen, "unsupported", UNSUPPORTED["sage_attention"], BY_HAND)
    elif chosen == "fp8":
        builder.map("attn_implementation")
        detail = "attention through torchao's FP8 kernels (SM 9.0, PyTorch 2.11)"
        if "fp8" in builder.fields:
            builder.map("attn_implementation", fp8_dot_product_attention=True)
        remedy = "Use fp8_dot_product_attention with an FP8 recipe."
        builder.report("attn_implementation", "fp8", "approximated", detail, remedy)


def _optimizer(builder: ImportBuilder, top: Settings) -> None:
    name = top.values.get("optimizer")
    detail = low_precision_optimizer(name)
    if detail is not None:
        builder.report("optimizer", name, "unsupported", detail, "Megatron keeps it in FP32 by default.")
    arguments = top.values.get("optim_args")
    detail = "an argument of the optimizer that decides how its state or the weights are rounded"
    if isinstance(arguments, dict):
        for key, value in arguments.items():
            if LOOKS_LIKE_PRECISION.search(str(key)):
                _report_if_on(builder, f"optim_args.{key}", value, detail)
    elif isinstance(arguments, str) and LOOKS_LIKE_PRECISION.search(arguments):
        builder.report("optim_args", arguments, "unsupported", detail, BY_HAND)


def _inference(builder: ImportBuilder, top: Settings) -> None:
    """Report the dtype in which the engine next to the trainer generates."""
    block = top.values.get("vllm")
    for key, value in block.items() if isinstance(block, dict) else ():
        if value is not None and LOOKS_LIKE_PRECISION.search(str(key)):
            detail = "the dtype in which vLLM generates; a recipe is about training"
            builder.report(f"vllm.{key}", value, "unsupported", detail, BY_HAND)
