"""The sharding of an accelerate run: DeepSpeed, FSDP or neither, and what it does to weights and gradients.

`accelerate launch` goes by `distributed_type` alone: a block of the other kind stays unread, and the empty blocks that
earlier releases wrote mean nothing. Arguments of `Accelerator` have no such word; there a plugin that is given acts.
Source: accelerate 1.15.0 commands/launch.py, utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bridge.precision.dtypes import SPELLINGS

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["import_deepspeed", "import_fsdp", "plain_fields", "sharding_of"]

VERSION = "accelerate 1.15.0"
BLOCKS = {
    "fsdp": ("FullyShardedDataParallelPlugin", "fsdp_config"),
    "deepspeed": ("DeepSpeedPlugin", "deepspeed_config"),
}
"""Kind of sharding -> its blocks of settings."""
TRUE = ("true", "1", "yes", "on", "y", "t")
SCALE = {
    "initial_scale_power": ("initial_loss_scale", 65536),
    "loss_scale_window": ("loss_scale_window", 1000),
    "min_loss_scale": ("min_loss_scale", 1),
    "hysteresis": ("hysteresis", 2),
}
"""Setting of DeepSpeed's `fp16` block -> our field and the default that runs."""


def sharding_of(builder: ImportBuilder, top: Settings, compute: str) -> str | None:
    """Return "fsdp", "deepspeed", "megatron" or None, and report the settings of the one that does not act."""
    kind = "NO" if top.values.get("distributed_type") is False else (top.text("distributed_type") or "").upper()
    given = {what: [name for name in names if top.values.get(name)] for what, names in BLOCKS.items()}
    if kind:
        acting = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}.get(kind)
    else:
        flags = {what: top.switch(f"use_{what}") for what in BLOCKS}  # of the environment
        acting = next((what for what in BLOCKS if given[what] or flags[what]), None)
    for what, names in given.items():
        for name in names if what != acting else ():
            detail = f"read under distributed_type: {what.upper()} only"
            builder.report(name, top[name], "dead knob", detail, "Drop it, or set distributed_type.")
    if kind == "MEGATRON_LM" and compute in ("bf16", "fp16"):
        detail = f"no autocast: Megatron-LM trains {compute} weights with FP32 masters ({VERSION})"
        builder.report("distributed_type", kind, "semantics", detail, "Convert Megatron-LM's own arguments too.")
        return "megatron"
    if kind == "XLA" and compute == "bf16":
        detail = f"{VERSION} sets XLA_USE_BF16=1 unless downcast_bf16 is on: every float32 is BF16, weights too"
        builder.report("distributed_type", kind, "semantics", detail, "Expect weights without FP32 copies there.")
    return acting


def plain_fields(value: object) -> object:
    """Return a handler or plugin as the mapping of its fields, and anything else as it is."""
    return value if isinstance(value, Mapping) else dict(vars(value)) if hasattr(value, "__dict__") else value


def import_fsdp(builder: ImportBuilder, top: Settings, base: str) -> None:
    """Map what the policy says of gradients, and report the rest of it."""
    name = "FullyShardedDataParallelPlugin" if top.given("FullyShardedDataParallelPlugin") else "fsdp_config"
    block = top.section(name)
    key = next((k for k in ("mixed_precision_policy", "fsdp_mixed_precision_policy") if block.given(k)), None)
    for loading in ("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading"):
        if builder.fields.get("fp8_recipe") == "tensorwise" and str(block.values.get(loading)).lower() in TRUE:
            detail = f"{VERSION} raises on it together with torchao's FP8"
            builder.report(block.name(loading), block[loading], "unsupported", detail, "Set it to false.")
    if key is not None and name == "fsdp_config":
        detail = f"`accelerate launch` hands no policy on; only an argument of the plugin is read ({VERSION})"
        builder.report(block.name(key), block[key], "dead knob", detail, "Pass a FullyShardedDataParallelPlugin.")
        key = None
    if base == "fp32" and key is None:
        return
    if key is None:
        builder.fields["grad_reduce_in_fp32"] = False
        detail = f"accelerate's FSDP policy computes, reduces and keeps buffers in {base} alike ({VERSION})"
        remedy = "Pass a policy to reduce in FP32."
        builder.report(f"{name}.mixed_precision_policy", base, "implied default", detail, remedy)
        return
    policy = block[key]
    values = {"param_dtype": policy, "reduce_dtype": policy} if isinstance(policy, str) else plain_fields(policy)
    if not isinstance(values, Mapping):
        raise block.wrong(key, "must be a dtype or a policy", policy, "Write bf16, or all fields of the policy")
    reduce_dtype = str(values.get("reduce_dtype") or values.get("param_dtype")).removeprefix("torch.")
    in_fp32 = reduce_dtype in ("fp32", "float32")
    builder.map(block.name(key), grad_reduce_in_fp32=in_fp32)
    computes = values.get("param_dtype")
    if computes is not None and SPELLINGS.get(str(computes).lower().removeprefix("torch.")) != base:
        detail = f"the policy computes in another dtype than mixed_precision, which is {base}"
        builder.report(f"{block.name(key)}.param_dtype", computes, "semantics", detail, "Give both the same dtype.")
    for part in ("buffer_dtype", "output_dtype", "cast_forward_inputs", "keep_low_precision_grads"):
        if values.get(part) is not None:
            detail = "no such choice in a recipe"
            builder.report(f"{block.name(key)}.{part}", values[part], "unsupported", detail, "Check it by hand.")


def import_deepspeed(builder: ImportBuilder, top: Settings, base: str) -> bool:
    """Report what DeepSpeed decides by itself; return whether a configuration of its own decides the dtype too."""
    block = top.section("DeepSpeedPlugin" if top.given("DeepSpeedPlugin") else "deepspeed_config")
    key = next((name for name in ("hf_ds_config", "deepspeed_config_file") if block.given(name)), None)
    if key is not None:
        what = "file" if key == "deepspeed_config_file" or isinstance(block[key], str) else "configuration"
        detail = (
            f"this {what} decides about the dtype, loss scale and reduction; {base} runs where it has no block for it, "
            f"or says auto ({VERSION})"
        )
        remedy = f"Convert it as well, from deepspeed, with auto={base}: that is the run's precision."
        builder.report(block.name(key), block[key], "unsupported", detail, remedy)
        if top.given("mixed_precision"):
            detail = (
                f"it fills what the {what} of DeepSpeed leaves out or at auto, and decides nothing else; `accelerate "
                f"launch` refuses a configuration that holds both ({VERSION})"
            )
            remedy = f"Write it in the {what} alone."
            builder.report("mixed_precision", top["mixed_precision"], "semantics", detail, remedy)
    elif base != "fp32":
        builder.fields["grad_reduce_in_fp32"] = False
        detail = f"DeepSpeed accumulates and reduces in {base} unless its own file says otherwise (DeepSpeed 0.19.8)"
        builder.report(block.path, base, "implied default", detail, "Use a DeepSpeed file to reduce in FP32.")
    if key is None and base == "fp16":
        for setting, (field, value) in SCALE.items():
            detail = f"{VERSION} writes no loss scale, so {field} is {value}, DeepSpeed's own (DeepSpeed 0.19.8)"
            builder.implied(f"{block.path}.fp16.{setting}", None, detail, **{field: value})
        detail = f"{VERSION} writes it: inputs of the module are cast to FP16 by the engine"
        remedy = "Cast the inputs in the data loader."
        builder.report(f"{block.path}.fp16.auto_cast", True, "implied default", detail, remedy)
    return key is not None
