"""torchtitan: the TOML of 0.2 and earlier, and the config classes of 0.3 as data.

    {"training": {"dtype": ..., "mixed_precision_param": ..., "mixed_precision_reduce": "float32"}}        all
    {"quantize": {"linear": {"float8": {...}, "mx": {...}}}}                     TOML until 0.2, reported and not read
    {"training": {...}, "converters": [{"MXFP8LinearConverter": {"fqns": []}}]}         0.3, written and not read

Parameters are FP32 shards that are gathered in BF16, unless `training.dtype` makes everything BF16.
A name that torchtitan does not know belongs to a fork, or to a module named in `job.custom_config_module`: 0.1 ignores
it without a word, 0.2 refuses the file unless that module declares it, and 0.3 reads no files.
Its settings and sentences, with their sources, are `rows/torchtitan.yaml`.
"""

from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, System, as_json
from bridge.interop.module_lists import NUM_LAYERS, name_lists, schemes_for
from bridge.interop.pytorch.amp import amp_fields, export_as_cast
from bridge.interop.reading.settings import Settings
from bridge.interop.table import table
from bridge.precision.foreign_names import TORCHTITAN
from bridge.precision.mode import mode_of, scheme_of
from bridge.pytorch.loop import compute_dtype
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("torchtitan")
SHARDS = "data_parallel_shard_degree"
BLOCKS = ("float8", "mx", "quantize")
"""Blocks of quantisation, which count where `model.converters` names them, or does not stand in the file."""
CONVERTERS = {"mxfp8": "MXFP8LinearConverter", "nvfp4": "NVFP4LinearConverter"}
"""Scheme -> the converter of torchtitan 0.3."""
LINEAR = ("attention.", "feed_forward.", "shared_experts.")
"""Parts of the names of every linear layer that Megatron runs in a scheme, and of no router or output layer."""


def import_(payload: object, *, sharded: object = True) -> ImportReport:
    """Return what a torchtitan configuration asks for."""
    top = Settings(payload, TABLE.title)
    parallelism, training = top.section("parallelism"), top.section("training")
    degrees = {name: parallelism.whole(f"{name}_parallel_degree") or 1 for name in ("tensor", "pipeline", "context")}
    is_whole = parallelism.whole(SHARDS) == 1 and degrees.pop("context") == 1  # context parallelism shards as well
    fsdp = Settings({"sharded": sharded}, TABLE.title, lenient=True).switch("sharded") is not False and not is_whole
    builder = ImportBuilder(TABLE.title)
    whole = training.word("dtype", ("bfloat16", "float32"))
    compute = training.word("mixed_precision_param", ("bfloat16", "float32"))
    is_split = max(degrees["tensor"], degrees["pipeline"]) > 1
    if not fsdp and is_split and whole != "bfloat16" and compute != "float32":
        builder.record("torchtitan.without-fsdp-tensor", training.name("mixed_precision_param"), compute)
        compute = "float32"
    semantics = _mode(builder, training, whole, compute, fsdp=fsdp)
    converts = bool(top.section("model").values.get("converters", [name for name in BLOCKS if top.given(name)]))
    is_read = semantics != "fp32" or training.values.get("mixed_precision_reduce") == "float32"
    TABLE.read(builder, top, fsdp=fsdp, half=is_read, converts=converts)
    return builder.finish(semantics, is_whole=not (converts or top.given("converters")))


def export(config: MixedPrecisionConfig, *, num_layers: int | None = None) -> ExportReport:
    """Return the training section, and converters for MXFP8 or NVFP4."""
    builder = ExportBuilder(config, TABLE.title)
    mode, setting = mode_of(config), "training.mixed_precision_param"
    if compute_dtype(config) == "fp16":
        compute = "bf16"
        builder.record_if_stated("torchtitan.there-is-no-fp16-bf16-was", mode, "params_dtype", "autocast_dtype")
    else:
        compute = export_as_cast(builder, "torchtitan.fp32-weights-are-gathered", setting, "training.dtype")
    builder.exported_mode = compute
    param = "float32" if compute == "fp32" else "bfloat16"
    training = {"dtype": "float32", "mixed_precision_param": param, "mixed_precision_reduce": "float32"}
    payload: dict[str, Any] = {"training": training}
    if mode != "fp32" and config.grad_reduce_in_fp32:
        builder.map("grad_reduce_in_fp32", "training.mixed_precision_reduce")
    scheme = scheme_of(config)
    if (scheme in CONVERTERS and mode == "bf16") or (scheme is None and builder.values["modules"]):
        payload["converters"] = _exported_converters(builder, num_layers)
    return builder.finish(payload, TABLE.unwritten)


def _exported_converters(builder: ExportBuilder, num_layers: int | None) -> list[dict[str, Any]]:
    """Return a converter for each scheme, with the modules that run in it: an empty list means the output layer too."""
    config = builder.config
    for family in ("fp8", "fp4"):
        if builder.values[family] is not None:
            for field in (family, f"{family}_recipe"):
                builder.map(field, f"converters.{CONVERTERS[str(scheme_of(config))]}")
    schemes = schemes_for(builder, num_layers, available=CONVERTERS, setting="converters.fqns")
    if schemes is None or not schemes.chooses:
        return [{CONVERTERS[str(scheme_of(config))]: {"fqns": list(LINEAR)}}] if scheme_of(config) is not None else []
    return [
        {CONVERTERS[chosen.scheme]: {"fqns": names}}
        for chosen, names in name_lists(schemes, TORCHTITAN).items()
        if chosen is not None and chosen.scheme in CONVERTERS
    ]


def _mode(builder: ImportBuilder, training: Settings, whole: str | None, compute: str | None, *, fsdp: bool) -> str:
    name, param = training.name("dtype"), training.name("mixed_precision_param")
    if whole is not None:
        builder.map(name)
    if whole == "bfloat16":
        builder.map(name, bf16=True, params_dtype="bf16", grad_reduce_in_fp32=fsdp)
        builder.record("torchtitan.without-masters", name, whole)
        builder.map(param) if compute is not None else None
        return "true"
    semantics = "fsdp_policy" if fsdp else "amp_o1"
    fields = {"bf16": True, "params_dtype": "bf16"} if fsdp else amp_fields("bf16")
    if compute == "float32":
        semantics, fields = "fp32", {"fp32": True}
    if compute is None:
        builder.record("torchtitan.bfloat16-by-default", param, "bfloat16", fields)
    else:
        builder.map(param, **fields)
    return semantics


CONTEXT = (ContextKey("sharded", "false without FSDP, where torchtitan uses autocast"), NUM_LAYERS)
SYSTEM = System("torchtitan", TABLE.title, TABLE.version, export, import_, TABLE.recognise, as_json, context=CONTEXT)
