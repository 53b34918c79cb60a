"""Hugging Face Accelerate: its YAML and its environment variables, read as one mapping.

`mixed_precision: bf16` is autocast over FP32 weights; under FSDP it becomes a policy that gathers, computes *and
reduces* in BF16, and under DeepSpeed the engine's own BF16 mode. `accelerate launch` goes by `distributed_type` alone:
a block of another kind stays unread, and the empty blocks that earlier releases wrote mean nothing.
Settings of FP8 are not always what runs: accelerate hands on only values that differ from its own defaults, so its
default `amax_compute_algo="most_recent"` never reaches Transformer Engine, whose own default is "max". Of the back ends
for FP8 that of Transformer Engine is read; torchao's is written too.
Its settings and sentences, with their sources, are `rows/accelerate.yaml`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_yaml
from bridge.interop.module_lists import NUM_LAYERS, schemes_for
from bridge.interop.pytorch.amp import amp_fields, assume_torch_scaler, export_as_amp, export_scaler, report_scaler
from bridge.interop.pytorch.torchao import FILTER, export_gather, export_layers, left_out
from bridge.interop.reading.document import Document
from bridge.interop.reading.settings import Settings
from bridge.interop.table import at, table
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("accelerate")
HANDLERS = {"TE": "TERecipeKwargs", "AO": "AORecipeKwargs"}
FUNCTION = "module_filter_func"
GATHER = "enable_fsdp_float8_all_gather"
PREFIX = "ACCELERATE_"
DEEPSPEED_FILES = ("deepspeed_config.hf_ds_config", "deepspeed_config.deepspeed_config_file")


def import_(payload: object) -> ImportReport:
    """Return what an Accelerate configuration, its parsed YAML or ``ACCELERATE_*`` variables by name, asks for."""
    top = Settings(_flattened(payload), TABLE.title, lenient=True)
    builder = ImportBuilder(TABLE.title)
    compute = _precision(builder, top)
    sharding = _sharding(builder, top, compute)
    base = {"no": "fp32", "fp8": "bf16"}.get(compute, compute)
    fields = amp_fields(base) if sharding is None else {base: True, "params_dtype": base}
    builder.fields |= fields if base != "fp32" else {}
    if compute == (top.values.get("mixed_precision") or "no") and top.given("mixed_precision"):
        builder.map("mixed_precision", **builder.fields)
    _float8(builder, top.section("fp8_config"), on=compute == "fp8")
    if base == "fp16" and sharding not in ("deepspeed", "megatron"):
        assume_torch_scaler(builder, TABLE.title)
    files = [name for name in DEEPSPEED_FILES if sharding == "deepspeed" and at(top.values, name) is not None]
    for name in files[:1]:
        builder.record("accelerate.this-file-decides-about", name, at(top.values, name), base=base)
    reduced, scale = {"grad_reduce_in_fp32": False}, TABLE.data["scale of DeepSpeed"]
    if base == "fp32":
        source = "model" if top.given("mixed_precision") else "program"
        builder.leave_mode(TABLE.data["decides"]["deepspeed" if files else source])
    elif sharding == "fsdp":
        builder.record("accelerate.accelerate-fsdp-policy", "fsdp_config.mixed_precision_policy", base, reduced)
    elif sharding == "deepspeed" and not files:
        builder.record("accelerate.deepspeed-accumulates-and-reduces", "deepspeed_config", base, reduced)
        if base == "fp16":
            builder.record("accelerate.no-loss-scale-for-deepspeed", "deepspeed_config.fp16.loss_scale", None, scale)
    facts = {"fp16": compute == "fp16", "fsdp": sharding == "fsdp", "deepspeed": sharding == "deepspeed"}
    TABLE.read(builder, top, no_mixed_precision="mixed_precision" not in top, **facts)
    semantics = {"fsdp": "fsdp_policy", None: "amp_o1"}.get(sharding, "megatron_o2")
    is_lost = compute == "fp8" and "fp8" not in builder.fields
    return builder.finish(semantics, is_whole=not (files or is_lost))


def export(config: MixedPrecisionConfig, *, form: str = "yaml", num_layers: int | None = None) -> ExportReport:
    """Return an Accelerate configuration; the form "arguments" says more of FP16's scale, and can choose modules."""
    shape = Settings({"form": form}, TABLE.title).word("form", ("yaml", "arguments"))
    builder = ExportBuilder(config, TABLE.title)
    compute = export_as_amp(builder, "mixed_precision")
    if compute == "fp32":
        builder.record_if_stated("accelerate.no-setting-states-fp32", "fp32")
    payload: dict[str, Any] = {"mixed_precision": {"fp32": "no"}.get(compute, compute)}
    if shape == "yaml":
        payload = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"} | payload
    block = _exported_float8(builder) if config.fp8 is not None and compute == "bf16" else {}
    if block.get("backend") == "AO" and shape == "arguments":
        schemes = schemes_for(builder, num_layers, available=("tensorwise",), setting=FUNCTION)
        block[FILTER] = left_out(schemes, schemes.run if schemes is not None else None)
    elif block.get("backend") == "AO":
        export_layers(builder, "Pass a module_filter_func to choose them: --context form=arguments.")
    if block:
        payload["mixed_precision"] = "fp8"
        payload["fp8_config" if shape == "yaml" else HANDLERS[block.pop("backend")]] = block
    if shape == "arguments" and config.fp16 and config.loss_scale is None:
        payload["GradScalerKwargs"] = export_scaler(builder, TABLE.title, "GradScalerKwargs")
    else:
        report_scaler(builder, TABLE.title)
    return builder.finish(payload, TABLE.unwritten, compute=compute, written=bool(block))


def _flattened(payload: object) -> object:
    """Return the payload with environment variables under the names of the YAML."""
    if not isinstance(payload, Mapping):
        return payload
    names = {key: key.removeprefix(PREFIX).lower() for key in payload if str(key).startswith(PREFIX)}
    found = {names.get(key, key): value for key, value in payload.items()}
    fp8 = {name.removeprefix("fp8_"): found.pop(name) for name in names.values() if name.startswith("fp8_")}
    held = found.get("fp8_config", {})
    return found | {"fp8_config": {**held, **fp8}} if fp8 and isinstance(held, dict) else found


def _precision(builder: ImportBuilder, top: Settings) -> str:
    value = top.values.get("mixed_precision")
    if value is False:
        builder.record("accelerate.yaml-reads-a-bare", "mixed_precision", False)
        return "no"
    if "mixed_precision" not in top and top.values.get("fp16"):  # whatever it is: the loader asks no more than that
        builder.map("fp16", fp16=True)
        return "fp16"
    word = top.text("mixed_precision") or "no"
    return word if word == "no" else str(top.word("mixed_precision", ("no", "fp16", "bf16", "fp8")))


def _sharding(builder: ImportBuilder, top: Settings, compute: str) -> str | None:
    """Return what `accelerate launch` shards with: "fsdp", "deepspeed", "megatron" or None."""
    kind = "NO" if top.values.get("distributed_type") is False else (top.text("distributed_type") or "").upper()
    flags = {one: top.switch(f"use_{one}") for one in ("fsdp", "deepspeed")}  # the environment has no such word
    acting = kind.lower() or next((one for one in flags if top.values.get(f"{one}_config") or flags[one]), None)
    if kind == "MEGATRON_LM" and compute in ("bf16", "fp16"):
        builder.record("accelerate.no-autocast-megatron-lm", "distributed_type", kind, compute=compute)
        return "megatron"
    return acting if acting in flags else None


def _float8(builder: ImportBuilder, block: Settings, *, on: bool) -> None:
    """Map the settings of FP8 in Transformer Engine's layers, and report those of another back end."""
    is_block = on and bool(block.switch("use_mxfp8_block_scaling"))
    if on and block.given("backend"):
        block.values["backend"] = str(block["backend"]).upper().replace("TORCHAO", "AO")
        block.word("backend", ("TE", "AO", "MSAMP"))
    elif on:
        builder.record("accelerate.accelerate-takes-the-first", "fp8_config.backend", None)
    engine = on and block.values.get("backend") == "TE"
    if engine:
        fields = {"fp8": _format(builder, block, is_block=is_block), "fp8_recipe": "mxfp8" if is_block else "delayed"}
        for key in filter(block.given, ("backend", "use_mxfp8_block_scaling")):
            builder.map(block.name(key), **fields)
    TABLE.read(builder, block, "fp8", fp8=on, TE=engine, delayed=not is_block)


def _format(builder: ImportBuilder, block: Settings, *, is_block: bool) -> str:
    """Return the format that Transformer Engine runs, and map or report the setting of it."""
    name = "fp8_format" if block.given("fp8_format") or not block.given("format") else "format"
    written = (block.text(name) or "HYBRID").upper()
    if written not in ("HYBRID", "E4M3"):
        raise TABLE.wrong("te-formats", block, name)
    runs = "e4m3" if is_block else written.lower()
    if not block.given(name):
        sentence = "accelerate.hybrid-over-mxfp8" if is_block else "accelerate.hybrid-by-default"
        builder.record(sentence, block.name(name), written)
    elif runs != written.lower():
        builder.record("accelerate.accelerate-own-default", block.name(name), written)
    else:
        builder.map(block.name(name), fp8=runs)
    return runs


def _exported_float8(builder: ExportBuilder) -> dict[str, Any]:
    """Return the block of FP8 with its back end, and map the fields to it; empty where no back end has the scheme."""
    config = builder.config
    block: dict[str, Any] = {"backend": "TE", "fp8_format": str(config.fp8).upper()}
    mapped = {"fp8": "fp8_format", "fp8_recipe": "backend"}
    if config.fp8 == "hybrid" and config.fp8_recipe == "tensorwise":
        block = {"backend": "AO", GATHER: bool(config.fp8_param_gather), "pad_inner_dim": True}
        mapped |= {"fp8": "backend", "fp8_param_gather": GATHER, "fp8_param": GATHER}
        export_gather(builder)
    elif config.fp8_recipe == "mxfp8":
        block["use_mxfp8_block_scaling"] = True
        mapped["fp8_recipe"] = "use_mxfp8_block_scaling"
    elif config.fp8_recipe == "delayed":
        block |= TABLE.write(builder, "fp8", "fp8_config") | {"amax_compute_algo": "max"}
        if config.fp8_amax_compute_algo != "max":
            builder.record("accelerate.accelerate-never-hands", "fp8_amax_compute_algo")
    else:
        return {}
    for field, setting in mapped.items():
        builder.map(field, f"fp8_config.{setting}")
    return block


def _recognise(document: Document) -> Recognised | None:
    if document.kind == "env":
        names = [name for name in _read(document) if name.startswith((PREFIX + "MIXED_PRECISION", PREFIX + "FP8_"))]
        return Recognised(certainty=0.9, evidence=f"sets `{names[0]}`, which accelerate reads") if names else None
    return TABLE.recognise(document)


def _read(document: Document) -> Any:
    """Return accelerate's variables of an environment file, and the content of any other."""
    if document.kind != "env":
        return document.content
    return {name: value for name, value in document.variables.items() if name.startswith(PREFIX)}


CONTEXT = (ContextKey("form", "yaml, or arguments for those of Accelerator (export)", use=("export",)), NUM_LAYERS)
SYSTEM = System("accelerate", TABLE.title, TABLE.version, export, import_, _recognise, as_yaml, _read, CONTEXT)
