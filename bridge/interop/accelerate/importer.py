"""Hugging Face Accelerate: its YAML, the arguments and handlers of `Accelerator`, and its environment variables.

All three are one mapping here. `Accelerator(mixed_precision="bf16")` is autocast over FP32 weights; under FSDP it
becomes a policy that gathers, computes *and reduces* in BF16, and under DeepSpeed the engine's own BF16 mode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.interop.accelerate.fp8 import BACKENDS, export_fp8, import_fp8
from bridge.interop.accelerate.sharding import import_deepspeed, import_fsdp, plain_fields, sharding_of
from bridge.interop.amp import amp_fields, export_as_amp
from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_yaml
from bridge.interop.deepspeed.unsupported import LOOKS_LIKE_PRECISION
from bridge.interop.gpu import capability
from bridge.interop.scaler import export_scaler, import_scaler, report_scaler
from bridge.interop.settings import Settings

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["SYSTEM", "accelerator_arguments", "export", "import_"]

TITLE = "Accelerate"
VERSION = "accelerate 1.15.0"
PRECISIONS = ("no", "fp16", "bf16", "fp8")
HANDLERS = {"TERecipeKwargs": "TE", "AORecipeKwargs": "AO", "MSAMPRecipeKwargs": "MSAMP"}
OLD_HANDLER = "FP8RecipeKwargs"
"""The handler of earlier releases, still taken: it names its back end itself, Transformer Engine by default."""
PLUGINS = {"fsdp_plugin": "FullyShardedDataParallelPlugin", "deepspeed_plugin": "DeepSpeedPlugin"}
"""Argument of `Accelerator` -> the class that it is of, the name that it has here."""
SHARDED = ("fsdp_config", "deepspeed_config", "megatron_lm_config")
"""Blocks of its YAML, one of which `distributed_type` chooses."""
PREFIX = "ACCELERATE_"
ENVIRONMENT_LINE = re.compile(r"""\s*(?:export\s+)?(\w+)=(?:"([^"]*)"|'([^']*)'|([^\s#]*))""")
KNOWN = ("mixed_precision", "downcast_bf16", "fp16", "fp8_config")
"""Names at the top that look like precision and are read."""
OWN = ("compute_environment", "distributed_type", "mixed_precision", "num_processes", "main_training_function")


def import_(payload: object, *, gpu: object = None, fp8_backend: str | None = None) -> ImportReport:
    """Return what an Accelerate configuration asks for.

    Args:
        payload: The parsed YAML; or ``ACCELERATE_*`` variables by name; or the arguments of `Accelerator`, where
            handlers stand in ``kwargs_handlers`` as objects or by class name as mappings.
        gpu: The card it will run on; below compute capability 8.9 accelerate turns FP8 into FP16.
        fp8_backend: AO, TE or MSAMP, where the configuration does not say; None: torchao, which it tries first.
    """
    top = Settings(_flattened(payload), TITLE, lenient=True)
    assumed = Settings({"fp8_backend": fp8_backend}, TITLE).word("fp8_backend", BACKENDS)
    builder = ImportBuilder(TITLE)
    compute = _precision(builder, top)
    if compute == "fp8" and gpu is not None and (capability(gpu) or (0, 0)) < (8, 9):
        detail = f"{VERSION} falls back to FP16, not BF16, below compute capability 8.9"
        builder.report("mixed_precision", "fp8", "semantics", detail, "Write bf16.")
        compute = "fp16"
    sharding = sharding_of(builder, top, compute)
    base = {"no": "fp32", "fp8": "bf16"}.get(compute, compute)
    owns_weights = base != "fp32" and sharding is not None
    fields = {base: True, "params_dtype": base} if owns_weights else amp_fields(base)
    builder.fields |= {} if builder.decided_by else fields
    if top.given("mixed_precision") and compute == (top["mixed_precision"] or "no"):
        builder.map("mixed_precision", **fields)
    _fp8(builder, top, assumed, on=compute == "fp8")
    _scaler(builder, top, used=base == "fp16" and sharding not in ("deepspeed", "megatron"))
    if sharding == "fsdp":
        import_fsdp(builder, top, base)
    decided_elsewhere = sharding == "deepspeed" and import_deepspeed(builder, top, base)
    if decided_elsewhere and base == "fp32":
        builder.fields.pop("fp32", None)
        builder.leave_mode("DeepSpeed's own configuration")
    _report_others(builder, top, compute)
    _unknown(builder, top)
    semantics = {"fsdp": "fsdp_policy", "deepspeed": "megatron_o2", "megatron": "megatron_o2"}.get(
        sharding or "", "amp_o1"
    )
    imported = builder.finish("fp32" if base == "fp32" else semantics)
    is_lost = compute == "fp8" and "fp8" not in builder.fields
    return replace(imported, recipe=None) if decided_elsewhere or is_lost else imported


def export(config: MixedPrecisionConfig, *, form: str = "yaml") -> ExportReport:
    """Return an Accelerate configuration.

    Args:
        config: What to write.
        form: "yaml": what `accelerate launch --config_file` reads. "arguments": a mapping that `import_` reads and
            `accelerator_arguments` makes the real objects of; it can say more of FP16's scale.
    """
    shape = Settings({"form": form}, TITLE).word("form", ("yaml", "arguments"))
    builder = ExportBuilder(config, TITLE)
    compute = export_as_amp(builder, "mixed_precision")
    payload: dict[str, Any] = {"mixed_precision": {"fp32": "no"}.get(compute, compute)}
    if shape == "yaml":
        payload = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"} | payload
    block = export_fp8(builder) if config.fp8 is not None and compute == "bf16" else None
    if config.fp8 is not None and compute != "bf16":
        detail = f"FP8 runs under BF16 autocast in {VERSION}, so none was written over {compute}"
        builder.report("fp8", "unsupported", detail, "Use a BF16 recipe with FP8.")
    if block is not None:
        payload["mixed_precision"] = "fp8"
        if shape == "yaml":
            payload["fp8_config"] = block
        else:
            handler = {backend: name for name, backend in HANDLERS.items()}[block.pop("backend")]
            payload[handler] = block
    if shape == "arguments" and config.fp16 and config.loss_scale is None:
        payload["GradScalerKwargs"] = export_scaler(builder, TITLE, "GradScalerKwargs")
    else:
        report_scaler(builder, TITLE)
    return builder.finish(payload)


def accelerator_arguments(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Accelerator` for an export of the form "arguments". Imports accelerate."""
    from accelerate import utils

    names = [name for name in (*HANDLERS, "GradScalerKwargs") if name in payload]
    handlers = [getattr(utils, name)(**payload[name]) for name in names]
    return {"mixed_precision": payload["mixed_precision"], "kwargs_handlers": handlers}


def _flattened(payload: object) -> object:
    """Return the payload with environment variables and handler objects under the names of the YAML."""
    if not isinstance(payload, Mapping):
        return payload
    found: dict[str, Any] = {}
    fp8: dict[str, Any] = {}
    for key, value in payload.items():
        if not isinstance(key, str):
            continue
        if key == "kwargs_handlers" and isinstance(value, list | tuple):
            found |= {type(handler).__name__: plain_fields(handler) for handler in value}
        elif key in PLUGINS and value is not None:
            found[PLUGINS[key]] = plain_fields(value)
        elif key.startswith(PREFIX + "FP8_"):
            fp8[key.removeprefix(PREFIX + "FP8_").lower()] = value
        elif key.startswith(PREFIX):
            found[key.removeprefix(PREFIX).lower()] = value
        else:
            found[key] = value
    names = ("override_fprop", "override_dgrad", "override_wgrad")
    if any(name in fp8 for name in names):
        parts = [str(fp8.pop(name, "false")).lower() in ("1", "true", "yes", "y", "t", "on") for name in names]
        fp8["override_linear_precision"] = parts
    if fp8 and isinstance(found.get("fp8_config", {}), dict):
        found["fp8_config"] = {**found.get("fp8_config", {}), **fp8}
    return found


def _precision(builder: ImportBuilder, top: Settings) -> str:
    if top.values.get("mixed_precision") is False:
        detail = f"YAML reads a bare no as false, and {VERSION} fails on it; it was taken for 'no'"
        builder.report("mixed_precision", False, "approximated", detail, "Write mixed_precision: 'no', in quotes.")
        value: str | None = "no"
    elif isinstance(top.values.get("mixed_precision"), bool):
        rule = "must be a word: YAML reads a bare yes or on as true"
        raise top.wrong("mixed_precision", rule, True, "Write bf16, fp16, fp8 or 'no'")
    else:
        value = top.text("mixed_precision")
    old = top.values.get("fp16")
    if "mixed_precision" not in top and old:  # whatever it is: the loader asks no more than that
        builder.map("fp16", fp16=True)
        return "fp16"
    if old is not None:
        if old:
            detail = "the name of earlier releases, not read where mixed_precision is written"
            builder.report("fp16", old, "dead knob", detail, "Drop it.")
        else:
            builder.map("fp16")
    if value is None:
        builder.leave_mode(f"the program that is launched ({VERSION} takes no where that says nothing)")
        return "no"
    if value.lower() in PRECISIONS and value not in PRECISIONS:
        detail = "`accelerate launch` folds the case, and Accelerator(mixed_precision=) raises"
        builder.report("mixed_precision", value, "approximated", detail, f"Write {value.lower()}.")
        return value.lower()
    return value if value == "no" else str(top.word("mixed_precision", PRECISIONS))


def _fp8(builder: ImportBuilder, top: Settings, assumed: str | None, *, on: bool) -> None:
    handler = next((name for name in (*HANDLERS, OLD_HANDLER) if name in top), None)
    block = top.section(handler or "fp8_config")
    if not on:
        if block.values and handler is not None:
            raise top.wrong(handler, "needs mixed_precision=fp8", block.values, "Set it, or drop the handler")
        for key, value in block.values.items():
            detail = "read under mixed_precision: fp8 only"
            builder.report(block.name(key), value, "dead knob", detail, "Drop it, or set mixed_precision to fp8.")
        return
    backend = HANDLERS.get(handler or "")
    if backend is None and block.given("backend"):
        backend = block.text("backend")
        backend = {"TORCHAO": "AO"}.get(str(backend).upper(), str(backend).upper())
        if backend not in BACKENDS:
            raise block.wrong("backend", "must be AO, TE or MSAMP", block["backend"], "Use TE or AO")
        builder.map(block.name("backend"), fp8_recipe="tensorwise" if backend == "AO" else "delayed")
    if backend is None and handler == OLD_HANDLER:
        backend = assumed or "TE"
        detail = f"{VERSION} takes MS-AMP for this handler where it is installed, and else Transformer Engine"
        builder.report(block.name("backend"), backend, "implied default", detail, "Write the back end down.")
    if backend is None:
        backend = assumed or "AO"
        detail = f"{VERSION} takes the first that is installed of torchao, Transformer Engine and MS-AMP"
        builder.report("fp8_config.backend", backend, "implied default", detail, "Write the back end down.")
    import_fp8(builder, block, backend)
    if backend == "MSAMP":
        for field in ("fp8", "fp8_recipe"):
            builder.fields.pop(field, None)


def _scaler(builder: ImportBuilder, top: Settings, *, used: bool) -> None:
    given = top.section("GradScalerKwargs")
    if used:
        import_scaler(builder, given, TITLE)
    else:
        for key, value in given.values.items():
            builder.report(given.name(key), value, "dead knob", "only FP16 has a scaler", "Drop it, or use fp16.")


def _report_others(builder: ImportBuilder, top: Settings, compute: str) -> None:
    if compute == "fp16" and top.switch("use_cpu"):
        detail = f"on a CPU {VERSION} turns FP16 off without a word: the run is FP32"
        builder.report("use_cpu", True, "semantics", detail, "Write bf16, or no.")
    downcast = top.values.get("downcast_bf16")
    if downcast in ("no", False):
        builder.map("downcast_bf16")
    elif downcast is not None:
        detail = "for TPUs: float32 becomes BF16 everywhere"
        builder.report("downcast_bf16", downcast, "unsupported", detail, "Choose a BF16 recipe instead.")
    dynamo = top.section("dynamo_config") if isinstance(top.values.get("dynamo_config"), Mapping) else None
    backend = dynamo.values.get("dynamo_backend") if dynamo else top.values.get("dynamo_backend")
    if backend not in (None, "NO", "no"):
        if compute == "no":
            detail = f"with a compile back end and mixed_precision no, {VERSION} turns TF32 on"
            builder.implied("dynamo_backend", backend, detail, tf32=True)
        else:
            detail = "compiled kernels may round elsewhere; a recipe does not say whether to compile"
            builder.report("dynamo_backend", backend, "unsupported", detail, "Choose it where you train next.")
    if top.values.get("megatron_lm_config"):
        detail = "arguments of Megatron-LM itself"
        given = top["megatron_lm_config"]
        builder.report("megatron_lm_config", given, "unsupported", detail, "Convert those from megatron-lm.")
    hooks = top.section("DistributedDataParallelKwargs")
    for key in ("comm_hook", "comm_wrapper"):
        hook = getattr(hooks.values.get(key), "value", hooks.values.get(key))
        if hook is not None and str(hook).lower() != "no":
            detail = "gradients are compressed for DDP's all-reduce, whatever they are computed in"
            remedy = "Reduce in the dtype of the gradients instead."
            builder.report(hooks.name(key), hook, "unsupported", detail, remedy)
    autocast = top.section("AutocastKwargs")
    for key, usual in (("enabled", True), ("cache_enabled", None)):
        if key in autocast and autocast[key] not in (usual, None):
            detail = "autocast itself is switched off" if key == "enabled" else "how casts are cached, not what is cast"
            builder.report(autocast.name(key), autocast[key], "unsupported", detail, "Check it by hand.")


def _unknown(builder: ImportBuilder, top: Settings) -> None:
    """Report keys that look like precision and stop the launcher."""
    for key in top.values:
        if key not in KNOWN and LOOKS_LIKE_PRECISION.search(key.lower()):
            detail = f"no key of {VERSION}, which refuses a file that holds it"
            builder.report(key, top[key], "dead knob", detail, "Drop it; mixed_precision is what is read.")


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


SYSTEM = System(
    name="accelerate",
    title=TITLE,
    version=VERSION,
    import_=import_,
    export=export,
    recognise=_recognise,
    write=as_yaml,
    read=_read,
    context=(
        ContextKey(name="gpu", meaning="the card it will run on: h100, sm_90, 9.0; FP8 becomes FP16 below 8.9"),
        ContextKey(name="fp8_backend", meaning="AO, TE or MSAMP where the file does not say"),
        ContextKey(
            name="form", meaning="yaml, or arguments for those of Accelerator (export)", default="yaml", use=("export",)
        ),
    ),
)
