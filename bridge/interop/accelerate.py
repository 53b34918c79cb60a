"""Hugging Face Accelerate: its YAML and its environment variables, read as one mapping.

`mixed_precision: bf16` is autocast over FP32 weights; under FSDP it becomes a policy that gathers, computes *and
reduces* in BF16, and under DeepSpeed the engine's own BF16 mode. `accelerate launch` goes by `distributed_type` alone:
a block of another kind stays unread, and the empty blocks that earlier releases wrote mean nothing.

Settings of FP8 are not always what runs: accelerate hands on only values that differ from its own defaults, so its
default `amax_compute_algo="most_recent"` never reaches Transformer Engine, whose own default is "max".
Source: accelerate 1.15.0 commands/launch.py, utils/dataclasses.py, utils/transformer_engine.py, utils/ao.py.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_yaml
from bridge.interop.deepspeed import LOOKS_LIKE_PRECISION
from bridge.interop.module_lists import NUM_LAYERS, schemes_for
from bridge.interop.pytorch.amp import amp_fields, assume_torch_scaler, export_as_amp, export_scaler, report_scaler
from bridge.interop.pytorch.torchao import (
    FILTER,
    MODULES,
    export_gather,
    export_layers,
    import_gather,
    left_out,
    module_filter,
    report_gather,
)
from bridge.interop.reading.settings import Settings
from bridge.interop.unsupported import report_rows, rows
from bridge.registry.config import MixedPrecisionConfig

TITLE = "Accelerate"
VERSION = "accelerate 1.15.0"
PRECISIONS = ("no", "fp16", "bf16", "fp8")
HANDLERS = {"TE": "TERecipeKwargs", "AO": "AORecipeKwargs"}
SHARDED = ("fsdp_config", "deepspeed_config", "megatron_lm_config")
"""Blocks of its YAML, one of which `distributed_type` chooses."""
PREFIX = "ACCELERATE_"
ENVIRONMENT_LINE = re.compile(r"""\s*(?:export\s+)?(\w+)=(?:"([^"]*)"|'([^']*)'|([^\s#]*))""")
OWN = ("compute_environment", "distributed_type", "mixed_precision", "num_processes", "main_training_function")
AMAX = {"margin": ("fp8_margin", 0, 0), "amax_history_len": ("fp8_amax_history_len", 1, 1024)}
"""Setting of delayed scaling -> our field, the least value, the default."""
ALGORITHM = "amax_compute_algo"
GATHER, FUNCTION = "enable_fsdp_float8_all_gather", "module_filter_func"
OVERRIDES = "override_linear_precision"
READ = {
    "TE": (
        *AMAX,
        ALGORITHM,
        OVERRIDES,
        "fp8_format",
        "format",
        "override_fprop",
        "override_dgrad",
        "override_wgrad",
        "use_autocast_during_eval",
        "use_mxfp8_block_scaling",
    ),
    "AO": (GATHER, "pad_inner_dim", "config", FUNCTION),
    "MSAMP": ("opt_level",),
}
"""Back end of FP8 -> the settings that it reads."""
OFF = "the dtype that the model is loaded in, since mixed_precision no only means no autocast,"
UNSAID = f"the program that is launched ({VERSION} takes no where that says nothing)"
DEEPSPEED_SCALE = {"initial_loss_scale": 65536, "loss_scale_window": 1000, "min_loss_scale": 1, "hysteresis": 2}
"""The loss scale of DeepSpeed 0.19.8 by itself: accelerate writes none for it."""


def import_(payload: object, *, fp8_backend: str | None = None) -> ImportReport:
    """Return what an Accelerate configuration, its parsed YAML or ``ACCELERATE_*`` variables by name, asks for."""
    top = Settings(_flattened(payload), TITLE, lenient=True)
    assumed = Settings({"fp8_backend": fp8_backend}, TITLE).word("fp8_backend", tuple(READ)) or "AO"
    builder = ImportBuilder(TITLE)
    compute = _precision(builder, top)
    sharding = _sharding(builder, top, compute)
    base = {"no": "fp32", "fp8": "bf16"}.get(compute, compute)
    fields: dict[str, Any] = {}
    if base != "fp32":
        fields = amp_fields(base) if sharding is None else {base: True, "params_dtype": base}
    builder.fields |= fields
    if top.given("mixed_precision") and compute == (top["mixed_precision"] or "no"):
        builder.map("mixed_precision", **fields)
    _fp8(builder, top.section("fp8_config"), assumed, on=compute == "fp8")
    if base == "fp16" and sharding not in ("deepspeed", "megatron"):
        assume_torch_scaler(builder, TITLE)
    if sharding == "fsdp":
        _fsdp(builder, top.section("fsdp_config"), base)
    decided_elsewhere = sharding == "deepspeed" and _deepspeed(builder, top, base)
    if base == "fp32":
        decided_by = OFF if top.given("mixed_precision") else UNSAID
        builder.leave_mode("DeepSpeed's own configuration" if decided_elsewhere else decided_by)
    _report_others(builder, top, compute)
    semantics = {"fsdp": "fsdp_policy", None: "amp_o1"}.get(sharding, "megatron_o2")
    imported = builder.finish("fp32" if base == "fp32" else semantics)
    is_lost = compute == "fp8" and "fp8" not in builder.fields
    return replace(imported, recipe=None) if decided_elsewhere or is_lost else imported


def export(config: MixedPrecisionConfig, *, form: str = "yaml", num_layers: int | None = None) -> ExportReport:
    """Return an Accelerate configuration; the form "arguments" says more of FP16's scale, and can choose modules."""
    shape = Settings({"form": form}, TITLE).word("form", ("yaml", "arguments"))
    builder = ExportBuilder(config, TITLE)
    compute = export_as_amp(builder, "mixed_precision")
    if compute == "fp32":
        builder.record_if_stated("accelerate.no-setting-states-fp32", "fp32")
    payload: dict[str, Any] = {"mixed_precision": {"fp32": "no"}.get(compute, compute)}
    if shape == "yaml":
        payload = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"} | payload
    is_fp8 = config.fp8 is not None and compute == "bf16"
    block = _export_fp8(builder) if is_fp8 else None
    if block is not None and block["backend"] == "AO":
        if shape == "arguments":
            schemes = schemes_for(builder, num_layers, available=("tensorwise",), setting=FUNCTION)
            block[FILTER] = left_out(schemes, schemes.run if schemes is not None else None)
        else:
            export_layers(builder, "Pass a module_filter_func to choose them: --context form=arguments.")
    if config.fp8 is not None and compute != "bf16":
        builder.record("accelerate.fp8-runs-under", "fp8", compute=compute)
    if block is not None:
        payload["mixed_precision"] = "fp8"
        payload["fp8_config" if shape == "yaml" else HANDLERS[block.pop("backend")]] = block
    if shape == "arguments" and config.fp16 and config.loss_scale is None:
        payload["GradScalerKwargs"] = export_scaler(builder, TITLE, "GradScalerKwargs")
    else:
        report_scaler(builder, TITLE)
    return builder.finish(payload)


def accelerator_arguments(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Accelerator` for an export of the form "arguments". Imports accelerate."""
    from accelerate import utils

    names = [name for name in (*HANDLERS.values(), "GradScalerKwargs") if name in payload]
    given = {name: dict(payload[name]) for name in names}
    for arguments in given.values():
        if FILTER in arguments:
            arguments[FUNCTION] = module_filter(arguments.pop(FILTER))
    handlers = [getattr(utils, name)(**arguments) for name, arguments in given.items()]
    return {"mixed_precision": payload["mixed_precision"], "kwargs_handlers": handlers}


def _flattened(payload: object) -> object:
    """Return the payload with environment variables under the names of the YAML."""
    if not isinstance(payload, Mapping):
        return payload
    found: dict[str, Any] = {}
    fp8: dict[str, Any] = {}
    for key, value in payload.items():
        if isinstance(key, str) and key.startswith(PREFIX + "FP8_"):
            fp8[key.removeprefix(PREFIX + "FP8_").lower()] = value
        elif isinstance(key, str):
            found[key.removeprefix(PREFIX).lower() if key.startswith(PREFIX) else key] = value
    if fp8 and isinstance(found.get("fp8_config", {}), dict):
        found["fp8_config"] = {**found.get("fp8_config", {}), **fp8}
    return found


def _precision(builder: ImportBuilder, top: Settings) -> str:
    value = top.values.get("mixed_precision")
    if value is False:
        builder.record("accelerate.yaml-reads-a-bare", "mixed_precision", False)
        return "no"
    if value is True:
        rule = "must be a word: YAML reads a bare yes or on as true"
        raise top.wrong("mixed_precision", rule, True, "Write bf16, fp16, fp8 or 'no'")
    if "mixed_precision" not in top and top.values.get("fp16"):  # whatever it is: the loader asks no more than that
        builder.map("fp16", fp16=True)
        return "fp16"
    if top.values.get("fp16"):
        builder.dead(top, ["fp16"], "the name of earlier releases, not read where mixed_precision is written")
    elif "fp16" in top:
        builder.map("fp16")
    if value is None:
        return "no"
    word = top.text("mixed_precision") or "no"
    if word.lower() in PRECISIONS and word not in PRECISIONS:
        detail = "`accelerate launch` folds the case, and Accelerator(mixed_precision=) raises"
        builder.report("mixed_precision", word, "approximated", detail, f"Write {word.lower()}.")
        return word.lower()
    return word if word == "no" else str(top.word("mixed_precision", PRECISIONS))


def _sharding(builder: ImportBuilder, top: Settings, compute: str) -> str | None:
    """Return "fsdp", "deepspeed", "megatron" or None, and report the settings of the one that does not act."""
    kind = "NO" if top.values.get("distributed_type") is False else (top.text("distributed_type") or "").upper()
    given = {what: bool(top.values.get(f"{what}_config")) for what in ("fsdp", "deepspeed")}
    flags = {what: top.switch(f"use_{what}") for what in given}  # of the environment, which has no such word
    acting = kind.lower() if kind else next((what for what in given if given[what] or flags[what]), None)
    for what, is_given in given.items():
        if is_given and what != acting:
            detail = f"read under distributed_type: {what.upper()} only"
            builder.dead(top, [f"{what}_config"], detail, "Drop it, or set distributed_type.")
    if kind == "MEGATRON_LM" and compute in ("bf16", "fp16"):
        builder.record("accelerate.no-autocast-megatron-lm", "distributed_type", kind, compute=compute)
        return "megatron"
    if kind == "XLA" and compute == "bf16":
        builder.record("accelerate.accelerate-sets-xla_use_bf16", "distributed_type", kind)
    return acting if acting in given else None


def _fsdp(builder: ImportBuilder, block: Settings, base: str) -> None:
    """Report the policy that runs, and a policy in the file, which does not."""
    report_rows(builder, block, "accelerate_fsdp")
    for loading in ("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading"):
        if builder.fields.get("fp8_recipe") == "tensorwise" and str(block.values.get(loading)).lower() == "true":
            builder.record("accelerate.accelerate-raises-on-it-together", block.name(loading), block[loading])
    if base != "fp32":
        builder.fields["grad_reduce_in_fp32"] = False
        builder.record("accelerate.accelerate-fsdp-policy", "fsdp_config.mixed_precision_policy", base, base=base)


def _deepspeed(builder: ImportBuilder, top: Settings, base: str) -> bool:
    """Report what DeepSpeed decides by itself; return whether a configuration of its own decides the dtype too."""
    block = top.section("deepspeed_config")
    key = "hf_ds_config" if block.given("hf_ds_config") else "deepspeed_config_file"
    if not block.given(key):
        if base != "fp32":
            builder.fields["grad_reduce_in_fp32"] = False
            builder.record("accelerate.deepspeed-accumulates-and-reduces", block.path, base, base=base)
        if base == "fp16":
            detail = f"{VERSION} writes no loss scale, so DeepSpeed's own is dynamic from 65536 (DeepSpeed 0.19.8)"
            builder.implied(f"{block.path}.fp16.loss_scale", None, detail, **DEEPSPEED_SCALE)
            builder.record("accelerate.accelerate-writes-it-inputs", f"{block.path}.fp16.auto_cast", True)
        return False
    builder.record("accelerate.this-file-decides-about", block.name(key), block[key], base=base)
    if top.given("mixed_precision"):
        builder.record("accelerate.it-fills-what-the-file", "mixed_precision", top["mixed_precision"])
    return True


def _fp8(builder: ImportBuilder, block: Settings, assumed: str, *, on: bool) -> None:
    if not on:
        remedy = "Drop it, or set mixed_precision to fp8."
        builder.dead(block, block.values, "read under mixed_precision: fp8 only", remedy)
        return
    backend = assumed
    if block.given("backend"):
        backend = str(block["backend"]).upper().replace("TORCHAO", "AO")
        if backend not in READ:
            raise block.wrong("backend", "must be AO, TE or MSAMP", block["backend"], "Use TE or AO")
        builder.map(block.name("backend"))
    else:
        builder.record("accelerate.accelerate-takes-the-first", "fp8_config.backend", backend)
    report_rows(builder, block, "accelerate_unread")
    for key in block.values:
        if key not in ("backend", *READ[backend], *rows("accelerate_unread")):
            other = next((name for name in READ if key in READ[name]), None)
            detail = f"a setting of the {other} back end" if other else f"not a setting of {VERSION}"
            builder.dead(block, [key], detail, "Drop it, or change the back end.")
    {"TE": _transformer_engine, "AO": _torchao, "MSAMP": _ms_amp}[backend](builder, block)


def _transformer_engine(builder: ImportBuilder, fp8: Settings) -> None:
    name = "fp8_format" if fp8.given("fp8_format") else "format"
    format_ = (fp8.text(name) or "HYBRID").upper()
    if format_ not in ("HYBRID", "E4M3"):
        rule = "must be HYBRID or E4M3 (accelerate takes E5M2, and Transformer Engine refuses it)"
        raise fp8.wrong(name, rule, fp8.values.get(name), "Use HYBRID, whose gradients are E5M2")
    block = bool(fp8.switch("use_mxfp8_block_scaling"))
    fields = {"fp8": "e4m3" if block else format_.lower(), "fp8_recipe": "mxfp8" if block else "delayed"}
    builder.fields |= fields
    if not fp8.given(name):
        detail = "HYBRID in accelerate; Transformer Engine's MXFP8 class has E4M3" if block else f"HYBRID in {VERSION}"
        builder.implied(fp8.name("fp8_format"), format_, detail)
    else:
        builder.map(fp8.name(name), fp8=fields["fp8"])
        if fields["fp8"] != format_.lower():
            builder.record("accelerate.accelerate-own-default", fp8.name(name), format_)
    for key, reading in (("backend", "delayed"), ("use_mxfp8_block_scaling", "mxfp8")):
        if fp8.given(key):
            builder.map(fp8.name(key), **({"fp8_recipe": reading} if reading == fields["fp8_recipe"] else {}))
    if block:
        detail = "MXFP8 keeps no history; accelerate raises where it differs from the default"
        builder.dead(fp8, (*AMAX, ALGORITHM), detail)
    else:
        _amax(builder, fp8)
    report_rows(builder, fp8, "accelerate_te")
    for key in (OVERRIDES, "override_fprop", "override_dgrad", "override_wgrad"):
        if "true" in str(fp8.values.get(key)).lower():
            detail = "Transformer Engine 2.0 and later has no such argument and swallows it: every GEMM runs in FP8"
            builder.dead(fp8, [key], detail)
        elif fp8.given(key):
            builder.map(fp8.name(key))


def _amax(builder: ImportBuilder, fp8: Settings) -> None:
    for key, (field, least, default) in AMAX.items():
        builder.take(fp8.name(key), field, fp8.whole(key, least=least), default, f"{default} in {VERSION}")
    algorithm = fp8.word(ALGORITHM, ("max", "most_recent"))
    builder.fields["fp8_amax_compute_algo"] = "max"
    if algorithm == "max":
        builder.map(fp8.name(ALGORITHM), fp8_amax_compute_algo="max")
        return
    detail = f"most_recent is {VERSION}'s default and is never handed on, so Transformer Engine takes max"
    reason = "implied default" if algorithm is None else "semantics"
    builder.report(fp8.name(ALGORITHM), algorithm, reason, detail, "Write max, which is what runs.")


def _torchao(builder: ImportBuilder, fp8: Settings) -> None:
    builder.fields |= {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    if fp8.given("backend"):
        builder.map(fp8.name("backend"), fp8_recipe="tensorwise")
    gather = fp8.switch(GATHER)
    if gather is None:
        builder.implied(fp8.name(GATHER), True, f"on in {VERSION}, off in torchao itself", fp8_param_gather=True)
        report_gather(builder, fp8.name(GATHER))
    else:
        import_gather(builder, fp8.name(GATHER), gather)
    report_rows(builder, fp8, "accelerate_ao")
    detail = "the first and the last nn.Linear stay in high precision: modules, not layers"
    if fp8.given(FUNCTION):
        detail = "a function that chooses modules cannot be converted"
    builder.report(fp8.name(FUNCTION), fp8.values.get(FUNCTION), "approximated", detail, MODULES)


def _ms_amp(builder: ImportBuilder, fp8: Settings) -> None:
    builder.record("accelerate.ms-amp-keeps", fp8.name("opt_level"), fp8.values.get("opt_level", "O2"))


def _export_fp8(builder: ExportBuilder) -> dict[str, Any] | None:
    config = builder.config
    block: dict[str, Any] = {"backend": "TE", "fp8_format": str(config.fp8).upper()}
    mapped = {"fp8": "fp8_format", "fp8_recipe": "backend"}
    if config.fp8 == "hybrid" and config.fp8_recipe == "tensorwise":
        block = {"backend": "AO", GATHER: config.fp8_param_gather, "pad_inner_dim": True}
        mapped = {"fp8": "backend", "fp8_recipe": "backend"}
        if not config.fp8_param_gather:
            mapped |= dict.fromkeys(("fp8_param_gather", "fp8_param"), GATHER)
        export_gather(builder)
    elif config.fp8_recipe == "mxfp8":
        block["use_mxfp8_block_scaling"] = True
        mapped["fp8_recipe"] = "use_mxfp8_block_scaling"
    elif config.fp8_recipe == "delayed":
        block |= {key: builder.values[field] for key, (field, *_) in AMAX.items()} | {ALGORITHM: "max"}
        mapped |= {field: key for key, (field, *_) in AMAX.items()}
        if config.fp8_amax_compute_algo == "max":
            mapped["fp8_amax_compute_algo"] = ALGORITHM
        else:
            builder.record("accelerate.accelerate-never-hands", "fp8_amax_compute_algo")
        if not config.fp8_wgrad:
            builder.record("accelerate.transformer-engine-and-later", "fp8_wgrad")
    else:
        detail = f"no back end of {VERSION} has {config.fp8_recipe} scaling in {config.fp8}, so no FP8 was written"
        fields = ("fp8", "fp8_recipe", "fp8_param_gather")
        builder.report_if_on(fields, detail, "Use delayed, MXFP8 or tensorwise hybrid scaling.")
        return None
    for field, setting in mapped.items():
        builder.map(field, f"fp8_config.{setting}")
    if block["backend"] == "TE" and config.fp8_param_gather:
        builder.record_if_stated("accelerate.accelerate-replaces-modules", ("fp8_param_gather", "fp8_param"))
    return block


def _report_others(builder: ImportBuilder, top: Settings, compute: str) -> None:
    report_rows(builder, top, "accelerate")
    if compute == "fp16" and top.switch("use_cpu"):
        builder.record("accelerate.on-a-cpu-accelerate-turns", "use_cpu", True)
    inner = top.values.get("dynamo_config")
    backend = inner.get("dynamo_backend") if isinstance(inner, Mapping) else top.values.get("dynamo_backend")
    if backend not in (None, "NO", "no") and compute == "no":
        detail = f"with a compile back end and mixed_precision no, {VERSION} turns TF32 on"
        builder.implied("dynamo_backend", backend, detail, tf32=True)
    elif backend not in (None, "NO", "no"):
        builder.record("accelerate.compiled-kernels-may", "dynamo_backend", backend)
    known = ("mixed_precision", "fp16", "fp8_config", *rows("accelerate"))
    unknown = [key for key in top.values if key not in known and LOOKS_LIKE_PRECISION.search(key.lower())]
    detail = f"no key of {VERSION}, which refuses a file that holds it"
    builder.dead(top, unknown, detail, "Drop it; mixed_precision is what is read.")


def _recognise(document: Any) -> Recognised | None:
    if document.kind == "env":
        names = [name for name in _read(document) if name.startswith((PREFIX + "MIXED_PRECISION", PREFIX + "FP8_"))]
        return Recognised(certainty=0.9, evidence=f"sets `{names[0]}`, which accelerate reads") if names else None
    content = document.mapping
    if "compute_environment" in content or ("distributed_type" in content and "mixed_precision" in content):
        found = [key for key in OWN if key in content]
        return Recognised(certainty=0.95, evidence=f"has `{found[0]}`, which `accelerate config` writes")
    blocks = [key for key in SHARDED if isinstance(content.get(key), dict)]
    if "distributed_type" in content and blocks:
        evidence = f"has `distributed_type` and `{blocks[0]}`, which `accelerate launch` reads"
        return Recognised(certainty=0.95, evidence=evidence)
    if content.get("mixed_precision") in PRECISIONS:
        return Recognised(certainty=0.6, evidence=f"has `mixed_precision: {content['mixed_precision']}`")
    return None


def _read(document: Any) -> Any:
    """Return accelerate's variables of an environment file, and the content of any other."""
    if document.kind != "env":
        return document.content
    found = [match for line in document.text.splitlines() if (match := ENVIRONMENT_LINE.match(line))]
    values = {match[1]: next((part for part in match.groups()[1:] if part is not None), "") for match in found}
    return {name: value for name, value in values.items() if name.startswith(PREFIX)}


CONTEXT = (
    ContextKey("fp8_backend", "AO, TE or MSAMP where the file does not say"),
    ContextKey("form", "yaml, or arguments for those of Accelerator (export)", default="yaml", use=("export",)),
    NUM_LAYERS,
)
SYSTEM = System("accelerate", TITLE, VERSION, import_, export, _recognise, as_yaml, read=_read, context=CONTEXT)
