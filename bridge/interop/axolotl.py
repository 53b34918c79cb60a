"""Axolotl's YAML.

`bf16: true` decides two things at once: the weights are loaded in BF16, and the trainer runs autocast over them. What
that amounts to depends on what stands around it. DeepSpeed and FSDP keep FP32 masters; an adapter is trained in FP32
over a frozen BF16 model; and without any of these there is nothing in FP32 at all.

`bf16: auto` is resolved as Axolotl does, for a stated GPU: its capabilities first (cli/config.py), then `resolve_dtype`
(utils/config), then what the builder hands to transformers (core/builders/base.py).
Source: Axolotl 0.19.0, with utils/schemas, loaders/model.py and integrations/kernels/args.py.
"""

import re
from typing import Any, NamedTuple

from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.interop.builders import ExportBuilder, ImportBuilder, semantics_of
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, System, as_yaml
from bridge.interop.pytorch.amp import assume_torch_scaler, report_scaler
from bridge.interop.pytorch.torchao import FLOAT8_RECIPES, export_gather, export_layers, import_gather
from bridge.interop.reading.settings import Settings
from bridge.interop.table import LOOKS_LIKE_PRECISION, table
from bridge.pytorch.loop import compute_dtype
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.target import GPUS

TABLE = table("axolotl")
GATHER = "fp8_enable_fsdp_float8_all_gather"
AROUND = ("deepspeed", "fsdp_config", "fsdp", "adapter")
"""Settings around the mode that decide what the weights and their gradients are."""


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
    top = Settings(payload, TABLE.title, lenient=True)
    can = capabilities(capability(gpu)) if gpu is not None else None
    is_fp8 = bool(top.switch("fp8"))
    if top.values.get("bf16") == "full":
        raise TABLE.wrong("bf16-full", top, "bf16")
    if is_fp8 and can is not None and not can["fp8"]:
        raise TABLE.wrong("fp8-needs-hopper", top, "fp8", gpu=f"{gpu!r:.20}")
    found = detect(top, can)
    builder = ImportBuilder(TABLE.title)
    mode = found.load_dtype
    state = {mode: True} if mode == "fp32" else {mode: True, "params_dtype": mode}
    builder.fields |= state
    semantics = _semantics(top, found, mode)
    _dtypes(builder, top, found, state, gpu)
    _float8(builder, top, on=is_fp8)
    _tf32(builder, top, found, gpu)
    _weights(builder, top, semantics, mode)
    if found.fp16:
        assume_torch_scaler(builder, "transformers' Trainer")
    plugins = top.values.get("plugins")
    kernels = isinstance(plugins, list) and any("kernelsplugin" in str(plugin).lower() for plugin in plugins)
    TABLE.read(builder, top, fp8=is_fp8, kernels=kernels)
    arguments = top.values.get("optim_args")
    names = arguments if isinstance(arguments, dict) else [arguments]
    if any(LOOKS_LIKE_PRECISION.search(str(name)) for name in names):
        builder.record("axolotl.optimizer-arguments", "optim_args", arguments)
    is_whole = is_fp8 == ("fp8" in builder.fields) and not top.values.get("deepspeed")
    return builder.finish(semantics, is_whole=is_whole)


def export(config: MixedPrecisionConfig, *, sharding: str | None = None) -> ExportReport:
    """Return the precision settings of an Axolotl YAML, all of them written out: its defaults are "auto"."""
    around = Settings({"sharding": sharding}, TABLE.title).word("sharding", ("fsdp", "deepspeed"))
    builder = ExportBuilder(config, TABLE.title)
    semantics, mode, compute = semantics_of(config), config.mode, compute_dtype(config)
    payload: dict[str, Any] = {"bf16": compute == "bf16", "fp16": compute == "fp16"}
    builder.exported_mode = compute
    if semantics == "amp_o1":
        fields = ("autocast_enabled", "autocast_dtype", "params_dtype", mode)
        builder.record_if_stated("axolotl.axolotl-loads-the-weights", fields, compute=compute)
    else:
        builder.map(mode, *(("bf16", "fp16") if mode == "fp32" else (mode,)))
        builder.map_dtype("params_dtype", mode)
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
    is_auto = settings.values.get("bf16", "auto") == "auto"
    if is_auto and not fp16:
        bf16 = gpu["bf16"] if gpu else True
        fp16 = fp16 or (not bf16 and fp16 is None and not float16)
    else:
        bf16 = not is_auto and bool(settings.switch("bf16"))
    half = bool(bf16 or bfloat16)
    load = "bf16" if half else "fp32"
    if not half and (settings.switch("load_in_8bit") or fp16 or float16):
        load = "fp16"
    tf32 = gpu["tf32"] if gpu else None
    if settings.values.get("tf32", "auto") != "auto":
        tf32 = bool(settings.switch("tf32"))
    return Detected(
        bf16=half,
        fp16=bool(fp16) and not half,
        load_dtype=load,
        tf32=tf32,
        guessed=is_auto and bool(bf16) and gpu is None,
    )


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
    if found.guessed:
        builder.record("axolotl.axolotl-asks-torch", "bf16", "auto")
    elif "bf16" in top:
        builder.map("bf16", **state)
    elif gpu is None:
        builder.record("axolotl.fp16-turns-auto-off", "bf16", "auto")
    else:
        builder.record("axolotl.auto-on-this-gpu", "bf16", "auto", gpu=f"{gpu!r:.20}", mode=mode)
    automatic = top.values.get("bf16", "auto") == "auto"
    if automatic and gpu is not None and found.bf16 and (capability(gpu) or (0, 0)) < (8, 0):
        builder.record("axolotl.torch-counts-emulation", "bf16", "auto")
    for name, compute in (("fp16", "fp16"), ("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        if top.switch(name) and compute != mode:
            builder.record("axolotl.another-setting-wins", name, top[name], mode=mode)
        elif name in top:
            builder.map(name, **(state if top.switch(name) else {}))
    if top.switch("bfloat16"):
        builder.record("axolotl.documented-as-no-amp-the-builder", "bfloat16", True)


def _float8(builder: ImportBuilder, top: Settings, *, on: bool) -> None:
    gather, recipe = top.switch(GATHER), top.section("fp8_config").word("recipe", FLOAT8_RECIPES) or "tensorwise"
    if not on:
        builder.map("fp8") if "fp8" in top else None
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
        builder.record("axolotl.tf32-on-this-gpu", "tf32", "auto", gpu=f"{gpu!r:.20}", tf32=str(found.tf32).lower())
        builder.fields["tf32"] = found.tf32


def _weights(builder: ImportBuilder, top: Settings, semantics: str, mode: str) -> None:
    """Report what the weights and gradients are, which no setting says, once for each setting that decides it."""
    names = ("bf16", "bfloat16") if mode == "bf16" else ("fp16", "float16", "load_in_8bit")
    deciders = {
        "megatron_o2": ("axolotl.deepspeed-decides-about", ["deepspeed"]),
        "fsdp_policy": ("axolotl.accelerate-fsdp-policy", ["fsdp_config", "fsdp"]),
        "true": ("axolotl.without-masters", ["adapter", *names]),
    }
    decider = ""
    if semantics in deciders:
        sentence, settings = deciders[semantics]
        decider = next((name for name in settings if top.values.get(name)), "bf16")
        builder.record(sentence, decider, top.values.get(decider), mode=mode)
    if semantics in ("fsdp_policy", "true"):
        builder.fields["grad_reduce_in_fp32"] = False
    for other in (name for name in AROUND if top.values.get(name) and name != decider):
        if semantics == "fp32" and other == "deepspeed":
            builder.record("axolotl.its-own-file-may", other, top[other])
        elif semantics != "fp32" and other == "adapter":
            sentence = "axolotl.adapter-in-fp32" if semantics == "amp_o1" else "axolotl.adapter-only"
            builder.record(sentence, other, top[other], mode=mode)
        else:
            builder.map(other)


def _export_float8(builder: ExportBuilder, payload: dict[str, Any]) -> None:
    config = builder.config
    if config.fp8 is None:
        return
    if (config.fp8, config.fp8_recipe, config.mode) != ("hybrid", "tensorwise", "bf16"):
        fields = ("fp8", "fp8_recipe", "fp8_param_gather", "first_last_layers_bf16")
        builder.record_if_on("axolotl.other-schemes", fields)
        return
    payload |= {"fp8": True, "torch_compile": True}  # compiling is what makes FP8 faster than BF16 there
    for field in ("fp8", "fp8_recipe"):
        builder.map(field, "fp8")
    if config.fp8_param_gather:
        payload |= {GATHER: True, "fsdp_version": 2}
    export_gather(builder)
    export_layers(builder, "Accept it; there is no choice of layers.")


CONTEXT = (
    ContextKey("gpu", "the card it will run on: h100, sm_90, 9.0, cpu; decides what auto becomes"),
    ContextKey("sharding", "fsdp or deepspeed where the run will use one (export)", use=("export",)),
)
SYSTEM = System("axolotl", TABLE.title, TABLE.version, import_, export, TABLE.recognise, as_yaml, context=CONTEXT)
