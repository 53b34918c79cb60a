"""Axolotl's YAML.

`bf16: true` decides two things at once: the weights are loaded in BF16, and the trainer runs autocast over them. What
that amounts to depends on what stands around it. DeepSpeed and FSDP keep FP32 masters; an adapter is trained in FP32
over a frozen BF16 model; and without any of these there is nothing in FP32 at all.

`bf16: auto` is resolved as Axolotl does, for a stated GPU: its capabilities first (cli/config.py), then `resolve_dtype`
(utils/config), then what the builder hands to transformers (core/builders/base.py).
Source: Axolotl 0.19.0, with utils/schemas, loaders/model.py and integrations/kernels/args.py.
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.interop.builders import ExportBuilder, ImportBuilder, semantics_of
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_yaml
from bridge.interop.pytorch.amp import assume_torch_scaler, report_scaler
from bridge.interop.pytorch.torchao import (
    FLOAT8_RECIPES,
    export_gather,
    export_layers,
    import_gather,
)
from bridge.interop.reading.settings import Settings
from bridge.interop.unsupported import Row, report_optimizer, report_row, report_rows, rows
from bridge.pytorch.loop import compute_dtype
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.target import GPUS

TITLE = "Axolotl"
VERSION = "Axolotl 0.19.0"
GATHER = "fp8_enable_fsdp_float8_all_gather"
MAPPED = ("bf16", "fp16", "fp8", "fp8_config", GATHER, "bfloat16", "float16", "float32", "tf32")
AROUND = ("deepspeed", "fsdp_config", "fsdp", "adapter")
"""Settings around the mode that decide what the weights and their gradients are."""
LOOKS_LIKE_PRECISION = re.compile(
    r"(^|_)(bf16|fp16|fp8|fp4|fp32|tf32|amp|nvfp4|mxfp8)(_|$)|float\d|bfloat|precision|dtype|quantiz|loss_scale|autocast|\dbit"
)
ATTENTION = {
    "sage": "SageAttention quantises queries and keys to 8 bits or fewer",
    "fp8": "attention through torchao's FP8 kernels (SM 9.0, PyTorch 2.11)",
}
"""Value of `attn_implementation` that bears on precision -> what it does."""
FULL = (
    "Up to 0.4.0, which had no schema, it meant BF16 weights without autocast and evaluation in BF16; "
    "bf16: true is the nearest today and adds autocast"
)


class Detected(NamedTuple):
    """The dtypes that Axolotl detects."""

    bf16: bool
    fp16: bool
    """`TrainingArguments.fp16`: autocast to FP16 under a loss scale."""
    load_dtype: str
    """Dtype the weights are loaded in: bf16, fp16 or fp32."""
    tf32: bool | None
    """None: the GPU decides, and none was stated."""
    guessed: bool
    """Whether `bf16: auto` was decided without a stated GPU."""


CAPABILITIES = {
    "p100": (6, 0),
    "a40": (8, 6),
    "a6000": (8, 6),
    **{name: gpu.capability for gpu in GPUS.values() for name in (gpu.name, *gpu.aliases) if gpu.name != "mi300x"},
}
"""Name of a card -> its compute capability; None: no CUDA at all."""


def import_(payload: object, *, gpu: object = None) -> ImportReport:
    """Return what an Axolotl configuration asks for; without a GPU, "auto" is a guess that is reported."""
    top = Settings(payload, TITLE, lenient=True)
    can = capabilities(capability(gpu)) if gpu is not None else None
    if top.values.get("bf16") == "full":
        rule = "is in Axolotl's documentation, and its schema refuses it (0.18 and 0.19)"
        raise top.wrong("bf16", rule, "full", FULL)
    if top.switch("fp8") and can is not None and not can["fp8"]:
        rule = f"needs compute capability 9.0 or later in Axolotl, and gpu={gpu!r:.20} has less"
        raise top.wrong("fp8", rule, True, "Use bf16, or another trainer on Ada (8.9)")
    found = detect(top, can)
    builder = ImportBuilder(TITLE)
    mode = found.load_dtype
    state = {mode: True} if mode == "fp32" else {mode: True, "params_dtype": mode}
    builder.fields |= state
    semantics = _semantics(top, found, mode)
    _dtypes(builder, top, found, state, gpu)
    _float8(builder, top)
    _tf32(builder, top, found, gpu)
    _weights(builder, top, semantics, mode)
    if found.fp16:
        assume_torch_scaler(builder, "transformers' Trainer")
    _report_others(builder, top)
    imported = builder.finish(semantics)
    is_lost = bool(top.switch("fp8")) and "fp8" not in builder.fields
    return replace(imported, recipe=None) if is_lost or top.values.get("deepspeed") else imported


def export(config: MixedPrecisionConfig, *, sharding: str | None = None) -> ExportReport:
    """Return the precision settings of an Axolotl YAML, all of them written out: its defaults are "auto"."""
    around = Settings({"sharding": sharding}, TITLE).word("sharding", ("fsdp", "deepspeed"))
    builder = ExportBuilder(config, TITLE)
    semantics, mode, compute = semantics_of(config), config.mode, compute_dtype(config)
    payload: dict[str, Any] = {"bf16": compute == "bf16", "fp16": compute == "fp16"}
    builder.exported_mode = compute
    if semantics == "amp_o1":
        fields = ("autocast_enabled", "autocast_dtype", "params_dtype", mode)
        builder.record_if_stated("axolotl.axolotl-loads-the-weights", fields, compute=compute)
    else:
        builder.map(mode, *(("bf16", "fp16") if mode == "fp32" else (mode,)))
        builder.map("params_dtype", mode) if builder.values["params_dtype"] in (None, mode) else None
        if mode != "fp32" and around is None:
            builder.record("axolotl.weights-are-loaded-in-and-nothing", "params_dtype", mode=mode)
    _export_float8(builder, payload)
    payload["tf32"] = bool(config.tf32)
    if config.tf32 is None:
        builder.record("axolotl.auto-would-turn", "tf32")
    else:
        builder.map("tf32", "tf32")
    if compute != "fp32" and config.grad_reduce_in_fp32:
        builder.record_if_stated("axolotl.fsdp-through-accelerate", "grad_reduce_in_fp32")
    elif compute != "fp32":
        builder.map("grad_reduce_in_fp32")
    report_scaler(builder, "transformers' Trainer")
    return builder.finish(payload)


def capabilities(compute_capability: tuple[int, int] | None) -> dict[str, bool]:
    """Return what Axolotl takes a GPU of this compute capability for (None: no GPU).

    BF16 counts as supported on every CUDA card: torch.cuda.is_bf16_supported includes emulation by default.
    """
    own = compute_capability or (0, 0)
    return {"bf16": compute_capability is not None, "fp8": own >= (9, 0), "tf32": own >= (8, 0)}


def capability(gpu: object) -> tuple[int, int] | None:
    """Return the compute capability of "h100", "sm_90", "9.0" or (9, 0); None for "cpu", PayloadError for no card."""
    if isinstance(gpu, tuple | list) and len(gpu) == 2 and all(type(part) is int for part in gpu):
        return (gpu[0], gpu[1])
    name = re.sub(r"[\s_-]|nvidia|geforce", "", str(gpu).lower())
    if name in CAPABILITIES:
        return CAPABILITIES[name]
    number = re.fullmatch(r"(?:sm)?(\d{1,2})\.?(\d)a?", name)
    if number:
        return int(number[1]), int(number[2])
    remedy = did_you_mean(close_matches(name, CAPABILITIES)) or "Say h100, sm_90, 9.0 or cpu."
    raise PayloadError(f"gpu: must be a card or its compute capability, got {gpu!r:.60}. {remedy}")


def detect(settings: Settings, gpu: dict[str, bool] | None) -> Detected:
    """Return Axolotl's decision; without a stated GPU, "auto" is taken for one from Ampere on."""
    fp16, float16, bfloat16 = (settings.switch(name) for name in ("fp16", "float16", "bfloat16"))
    bf16_auto = "bf16" not in settings or settings["bf16"] == "auto"
    bf16 = None if bf16_auto else settings.switch("bf16")
    if bf16_auto and not fp16:
        bf16 = gpu["bf16"] if gpu else True
        if not bf16 and fp16 is None and not float16:
            fp16 = True
    if bf16:
        fp16 = False
    tf32_auto = "tf32" not in settings or settings["tf32"] == "auto"
    tf32 = gpu["tf32"] if gpu else None
    if not tf32_auto:
        tf32 = bool(settings.switch("tf32"))
    half = bool(bf16 or bfloat16)
    load = "fp32"
    if half:
        load = "bf16"
    elif settings.switch("load_in_8bit") or fp16 or float16:
        load = "fp16"
    guessed = bool(bf16_auto and not fp16 and gpu is None)
    return Detected(bf16=half, fp16=bool(fp16) and not half, load_dtype=load, tf32=tf32, guessed=guessed)


def _semantics(top: Settings, found: Detected, mode: str) -> str:
    if mode == "fp32":
        return "fp32"
    if top.values.get("deepspeed"):
        return "megatron_o2"
    if top.values.get("fsdp") or top.values.get("fsdp_config"):
        return "fsdp_policy"
    adapter = top.values.get("adapter") and top.values.get("peft_autocast_adapter_dtype") is not False
    return "amp_o1" if adapter and (found.bf16 or found.fp16) else "true"


def _dtypes(builder: ImportBuilder, top: Settings, found: Detected, state: dict[str, Any], gpu: object) -> None:
    mode = next(iter(state))
    automatic = "bf16" not in top or top["bf16"] == "auto"
    if "bf16" in top and not found.guessed:
        builder.map("bf16", **state)
    if found.guessed:
        builder.record("axolotl.axolotl-asks-torch", "bf16", "auto")
    elif "bf16" not in top:
        why = "fp16 is on, which turns it off" if gpu is None else f"on gpu={gpu!r:.20} it gives {mode}"
        builder.implied("bf16", "auto", f"auto is the default in {VERSION}; {why}")
    if automatic and gpu is not None and found.bf16 and (capability(gpu) or (0, 0)) < (8, 0):
        builder.record("axolotl.torch-counts-emulation", "bf16", "auto")
    for name, compute in (("fp16", "fp16"), ("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        if name in top and top.switch(name) and compute != mode:
            builder.dead(top, [name], f"another setting wins: training runs in {mode}", "Keep one of them.")
        elif name in top:
            builder.map(name, **(state if top.switch(name) else {}))
    if top.switch("bfloat16"):
        builder.record("axolotl.documented-as-no-amp-the-builder", "bfloat16", True)


def _float8(builder: ImportBuilder, top: Settings) -> None:
    gather, recipe = top.switch(GATHER), top.section("fp8_config").word("recipe", FLOAT8_RECIPES) or "tensorwise"
    if not top.switch("fp8"):
        dead = [name for name in ("fp8_config", GATHER) if top.values.get(name)]
        builder.dead(top, dead, "nothing is FP8 without fp8: true")
        for name in ("fp8", GATHER):
            builder.map(name) if name in top and name not in dead else None
        return
    if recipe != "tensorwise":
        for name, value in (("fp8_config.recipe", recipe), ("fp8", True), (GATHER, gather)):
            if value is not None:
                builder.record("axolotl.torchao-scales-each", name, value)
        return
    builder.map("fp8", fp8="hybrid", fp8_recipe="tensorwise")
    if top.given("fp8_config"):
        builder.map("fp8_config", fp8_recipe="tensorwise")
    builder.record("axolotl.torchao-leaves-the-first", "fp8.module_filter", None)
    if gather is not None:
        import_gather(builder, GATHER, gather)


def _tf32(builder: ImportBuilder, top: Settings, found: Detected, gpu: object) -> None:
    if found.tf32 is None:
        builder.record("axolotl.auto-the-default-in-axolotl", "tf32", "auto")
    elif "tf32" in top:
        builder.map("tf32", tf32=found.tf32)
    else:
        detail = f"auto, the default in {VERSION}; on gpu={gpu!r:.20} it is {str(found.tf32).lower()}"
        builder.implied("tf32", "auto", detail, tf32=found.tf32)


def _weights(builder: ImportBuilder, top: Settings, semantics: str, mode: str) -> None:
    """Report what the weights and gradients are, which no setting says, once for each setting that decides it."""
    around = [name for name in AROUND if top.values.get(name)]
    name = ""
    if semantics == "megatron_o2":
        name = "deepspeed"
        what = "this file" if isinstance(top[name], str) else "this block"
        builder.record("axolotl.deepspeed-decides-about", name, top[name], what=what, mode=mode)
    elif semantics == "fsdp_policy":
        name = "fsdp_config" if "fsdp_config" in around else "fsdp"
        builder.record("axolotl.accelerate-fsdp-policy", name, top[name], mode=mode)
        builder.fields["grad_reduce_in_fp32"] = False
    elif semantics == "true":
        names = ("bf16", "bfloat16") if mode == "bf16" else ("fp16", "float16", "load_in_8bit")
        stated = [one for one in ("adapter", *names) if top.values.get(one)]
        name = stated[0] if stated else "bf16"
        detail = f"weights are loaded in {mode} and the optimizer steps on them, without FP32 masters"
        builder.without_masters(name, top.values.get(name), detail)
        builder.fields["grad_reduce_in_fp32"] = False
    for other in around:
        if semantics == "fp32" and other == "deepspeed":
            builder.record("axolotl.its-own-file-may", other, top[other])
        elif semantics != "fp32" and other == "adapter" != name:
            under = ", in FP32 under autocast," if semantics == "amp_o1" else ","
            builder.record("axolotl.only-the-adapter-is-trained", other, top[other], under=under, mode=mode)
        elif other != name:
            builder.map(other)


def _report_others(builder: ImportBuilder, top: Settings) -> None:
    report_rows(builder, top, "axolotl")
    report_rows(builder, top, "axolotl_compile")
    plugins = top.values.get("plugins")
    named = isinstance(plugins, list) and any("kernelsplugin" in str(plugin).lower() for plugin in plugins)
    for key, row in rows("axolotl_kernels").items():
        if top.given(key) and (named or top[key] is False):
            report_row(builder, key, top[key], row)
        else:
            detail = "a setting of the kernels plugin, which `plugins` does not name"
            builder.dead(top, [key], detail, "Drop it, or name the plugin.")
    attention = top.values.get("attn_implementation")
    if str(attention) in ATTENTION:
        report_row(builder, "attn_implementation", attention, Row(ATTENTION[str(attention)]))
    report_optimizer(builder, "optimizer", top.values.get("optimizer"))
    arguments = top.values.get("optim_args")
    named_so = arguments if isinstance(arguments, dict) else [arguments]
    if any(LOOKS_LIKE_PRECISION.search(str(name)) for name in named_so):
        detail = "an argument of the optimizer that decides how its state or the weights are rounded"
        report_row(builder, "optim_args", arguments, Row(detail))
    inner = top.section("fsdp_config")
    looks = [key for key in inner.values if LOOKS_LIKE_PRECISION.search(key)]
    builder.dead(inner, looks, f"never handed on to FSDP, whatever its schema declares ({VERSION})")
    for key in ("cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading"):
        if top.switch("fp8") and inner.values.get(key) is True:
            builder.record("axolotl.accelerate-and-later-refuses", inner.name(key), True)
    known = {*MAPPED, *rows("axolotl"), *rows("axolotl_compile"), *rows("axolotl_kernels")}
    for key in top.values:
        if key not in known and LOOKS_LIKE_PRECISION.search(key):
            builder.record("axolotl.not-a-setting-of-axolotl-which", key, top[key])
        elif key != key.lower() and (key.lower() in known or LOOKS_LIKE_PRECISION.search(key.lower())):
            detail = "another letter case, which is not read"
            builder.report(key, top[key], "dead knob", detail, f"Write {key.lower()} if it is meant.")


def _export_float8(builder: ExportBuilder, payload: dict[str, Any]) -> None:
    config = builder.config
    if config.fp8 is None:
        return
    if (config.fp8, config.fp8_recipe, config.mode) != ("hybrid", "tensorwise", "bf16"):
        detail = f"{TITLE} has FP8 as torchao's tensorwise hybrid over BF16 only, so none was written"
        fields = ("fp8", "fp8_recipe", "fp8_param_gather", "first_last_layers_bf16")
        builder.report_if_on(fields, detail, "Use bf16_with_fp8_current_scaling_mixed, or train in BF16.")
        return
    payload |= {"fp8": True, "torch_compile": True}  # compiling is what makes FP8 faster than BF16 there
    for field in ("fp8", "fp8_recipe"):
        builder.map(field, "fp8")
    if config.fp8_param_gather:
        payload |= {GATHER: True, "fsdp_version": 2}
    export_gather(builder)
    export_layers(builder, "Accept it; there is no choice of layers.")


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    if "base_model" not in content:
        return None
    others = ("datasets", "micro_batch_size", "sequence_len", "adapter", "pretraining_dataset", "rl")
    found = [key for key in others if key in content]
    if not found:
        return Recognised(certainty=0.6, evidence="has `base_model`, as Axolotl does")
    return Recognised(certainty=0.95, evidence=f"has `base_model` and `{found[0]}`, which Axolotl has together")


CONTEXT = (
    ContextKey("gpu", "the card it will run on: h100, sm_90, 9.0, cpu; decides what auto becomes"),
    ContextKey("sharding", "fsdp or deepspeed where the run will use one (export)", use=("export",)),
)
SYSTEM = System("axolotl", TITLE, VERSION, import_, export, _recognise, as_yaml, context=CONTEXT)
