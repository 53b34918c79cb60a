"""torchtitan: the TOML of 0.2 and earlier, and the config classes of 0.3 as data.

    {"training": {"dtype": ..., "mixed_precision_param": ..., "mixed_precision_reduce": "float32"},
     "quantize": {"linear": {"float8": {...}, "mx": {...}}}}                                       TOML, until 0.2
    {"training": {...}, "converters": [{"MXFP8LinearConverter": {"fqns": []}}]}         0.3, written and not read

Parameters are FP32 shards that are gathered in BF16, unless `training.dtype` makes everything BF16.
A name that torchtitan does not know belongs to a fork, or to a module named in `job.custom_config_module`: 0.1 ignores
it without a word, 0.2 refuses the file unless that module declares it, and 0.3 reads no files.
Its settings and sentences, with their sources, are `rows/torchtitan.yaml`.
"""

import re
import tomllib
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.builders import ExportBuilder, ImportBuilder, semantics_of
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.module_lists import NUM_LAYERS, name_lists, schemes_for
from bridge.interop.pytorch.amp import report_no_scaler
from bridge.interop.pytorch.torchao import FLOAT8_RECIPES, import_gather
from bridge.interop.reading.settings import Settings
from bridge.interop.table import table
from bridge.precision.foreign_names import TORCHTITAN
from bridge.pytorch.loop import compute_dtype
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("torchtitan")
REDUCED = ("float32", "bfloat16", "float16")
SHARDS = "data_parallel_shard_degree"
BLOCKS = ("float8", "mx")
QUANTIZE = tuple(f"quantize.{part}.{name}" for part in ("linear", "grouped_mm") for name in BLOCKS)
"""Blocks of torchtitan 0.2; names for `model.converters`, as are those of `BLOCKS` in 0.1."""
CONVERTERS = {"mxfp8": "MXFP8LinearConverter", "nvfp4": "NVFP4LinearConverter"}
"""Scheme -> the converter of torchtitan 0.3."""
LINEAR = ("attention.", "feed_forward.", "shared_experts.")
"""Parts of the names of every linear layer that Megatron runs in a scheme, and of no router or output layer."""
HIGH_ANYWAY = ("output", "router.gate", "moe.router.gate", "router")
"""Names in a list of modules that are left out, which Megatron keeps in the dtype of the run too."""
PARTIAL = {
    TABLE.sentences[name].detail
    for name in ("torchao-scales-each", "experts-only-and-a-recipe", "modules-that-it-leaves-in-the")
}
"""Records of what the fields do not hold."""
SECTION = re.compile(r"^\[(?:job|training|quantize)\b", re.MULTILINE)


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
    if is_whole and semantics == "amp_o1":
        builder.record("torchtitan.without-fsdp-torchtitan", parallelism.name(SHARDS), parallelism[SHARDS])
    _reduction(builder, training, semantics, fsdp=fsdp)
    for path, block in _quantisers(builder, top).items():
        _quantiser(builder, path, block)
    TABLE.read(builder, top)
    is_partial = any(loss.detail in PARTIAL for loss in builder.unmapped)
    return builder.finish(semantics, is_whole=not (is_partial or top.given("converters")))


def export(config: MixedPrecisionConfig, *, num_layers: int | None = None) -> ExportReport:
    """Return the training section, and converters for MXFP8 or NVFP4."""
    builder = ExportBuilder(config, TABLE.title)
    semantics, mode = semantics_of(config), config.mode
    training = {"dtype": "float32", "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"}
    payload: dict[str, Any] = {"training": training}
    setting = "training.mixed_precision_param"
    compute = compute_dtype(config)
    builder.exported_mode = "fp32" if compute == "fp32" else "bf16"
    if compute == "fp16":
        builder.record_if_stated("torchtitan.there-is-no-fp16-bf16-was", (mode, "params_dtype", "autocast_dtype"))
    elif semantics == "amp_o1":
        fields = (mode, "autocast_enabled", "autocast_dtype", "params_dtype")
        builder.record_if_stated("torchtitan.fp32-weights-are-gathered", fields)
    else:
        training["mixed_precision_param"] = "float32" if mode == "fp32" else "bfloat16"
        builder.map(mode, setting, "training.dtype")
        builder.map_dtype("params_dtype", setting)
    if mode != "fp32" and config.grad_reduce_in_fp32:
        builder.map("grad_reduce_in_fp32", "training.mixed_precision_reduce")
    elif mode != "fp32":
        builder.record("torchtitan.gradients-are-reduced-in-float32", "grad_reduce_in_fp32")
    family = "fp8" if config.fp8 else "fp4"
    if config.scheme is not None and (config.scheme not in CONVERTERS or mode != "bf16"):
        for field in (family, f"{family}_recipe"):
            builder.record("torchtitan.torchtitan-has-rowwise", field, scheme=config.scheme)
    elif config.scheme is not None or builder.values["modules"]:
        payload["converters"] = _exported_converters(builder, num_layers)
    report_no_scaler(builder, "there is no loss scale", "Use a BF16 recipe.")
    return builder.finish(payload)


def _exported_converters(builder: ExportBuilder, num_layers: int | None) -> list[dict[str, Any]]:
    """Return a converter for each scheme, with the modules that run in it: an empty list means the output layer too."""
    config = builder.config
    for family in ("fp8", "fp4"):
        if builder.values[family] is not None:
            for field in (family, f"{family}_recipe"):
                builder.map(field, f"converters.{CONVERTERS[str(config.scheme)]}")
    if config.fp8 and not config.fp8_wgrad:
        builder.record("torchtitan.every-gemm-runs", "fp8_wgrad")
    schemes = schemes_for(builder, num_layers, available=CONVERTERS, setting="converters.fqns")
    if schemes is None or not schemes.chooses:
        return [{CONVERTERS[str(config.scheme)]: {"fqns": list(LINEAR)}}] if config.scheme is not None else []
    return [
        {CONVERTERS[chosen.scheme]: {"fqns": names}}
        for chosen, names in name_lists(schemes, TORCHTITAN).items()
        if chosen is not None and chosen.scheme in CONVERTERS
    ]


def _mode(builder: ImportBuilder, training: Settings, whole: str | None, compute: str | None, *, fsdp: bool) -> str:
    name, param = training.name("dtype"), training.name("mixed_precision_param")
    if whole == "bfloat16":
        builder.map(name, bf16=True, params_dtype="bf16")
        builder.record("torchtitan.without-masters", name, whole)
        if compute is not None:
            builder.map(param)
        return "true"
    if whole is not None:
        builder.map(name)
    fields: dict[str, Any] = {"bf16": True, "params_dtype": "bf16"}
    if compute == "float32":
        fields = {"fp32": True}
    elif not fsdp:
        fields = {"fp32": True, "autocast_enabled": True, "autocast_dtype": "bf16"}
    if compute is None:
        builder.fields |= fields
        builder.record("torchtitan.bfloat16-by-default", param, "bfloat16")
    else:
        builder.map(param, **fields)
    if compute == "float32":
        return "fp32"
    return "fsdp_policy" if fsdp else "amp_o1"


def _reduction(builder: ImportBuilder, training: Settings, semantics: str, *, fsdp: bool) -> None:
    """State in what FSDP reduces gradients; nothing else reads the setting."""
    name, reduced = training.name("mixed_precision_reduce"), training.word("mixed_precision_reduce", REDUCED)
    if not fsdp:
        if semantics == "true":
            builder.fields["grad_reduce_in_fp32"] = False
        if reduced == "float32" and semantics != "true":
            builder.map(name)
        elif reduced is not None:
            builder.record("torchtitan.read-under-fsdp", name, reduced)
        return
    fields = {} if semantics == "fp32" else {"grad_reduce_in_fp32": reduced in (None, "float32")}
    if reduced is not None:
        builder.map(name, **fields)
    elif fields:
        builder.fields |= fields
        builder.record("torchtitan.float32-by-default", name, "float32")
    if reduced in REDUCED[1:]:
        builder.record("torchtitan.torchtitan-to-declare-float32", name, reduced)


def _quantisers(builder: ImportBuilder, top: Settings) -> dict[str, Settings]:
    """Return the quantisation blocks that are read, of every release, by their path.

    Of 0.2 those that `model.converters` names; nothing reads the others.
    """
    quantize = top.section("quantize")
    parts = [top, *(quantize.section(part) for part in quantize.values)]
    blocks = {block.name(name): block.section(name) for block in parts for name in BLOCKS if block.given(name)}
    if not top.given("model"):
        return blocks
    model = top.section("model")
    setting, named = model.name("converters"), model.values.get("converters") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise TABLE.wrong("names-of-converters", model, "converters")
    for path, block in blocks.items():
        if path not in named:
            builder.record("torchtitan.nothing-reads-it-it-is-not", path, dict(block.values), path=path)
    known = [path for path in named if path in (*QUANTIZE, *BLOCKS)]
    for path in named:
        if path in known:
            builder.map(setting)
        else:
            builder.record("torchtitan.a-converter-that-this-bridge-does", setting, path)
    return {path: blocks.get(path, Settings({}, TABLE.title, path)) for path in known}


def _quantiser(builder: ImportBuilder, path: str, block: Settings) -> None:
    """Map one block, and report which modules it leaves out and its options."""
    if "grouped_mm" in path:
        builder.record("torchtitan.experts-only-and-a-recipe", path, dict(block.values))
        return
    setting, recipe = block.name("recipe_name"), block.text("recipe_name")
    fields = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
    if path.endswith("mx") and recipe is not None and not recipe.startswith("mxfp8"):
        raise TABLE.wrong("recipes-of-mx", block, "recipe_name")
    if path.endswith("float8"):
        recipe = block.word("recipe_name", FLOAT8_RECIPES)
        if recipe is None:
            builder.record("torchtitan.tensorwise-by-default", setting, "tensorwise")
        fields = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    rowwise = recipe in FLOAT8_RECIPES[1:]
    if rowwise:
        builder.record("torchtitan.torchao-scales-each", setting, recipe)
    elif builder.fields.get("fp8_recipe") not in (None, fields["fp8_recipe"]):
        raise block.wrong("", TABLE.sentences["one-converter"].detail, path, TABLE.sentences["one-converter"].remedy)
    else:
        builder.map(setting if block.given("recipe_name") else path, **fields)
        _filter(builder, block, fields["fp8_recipe"])
        gather = block.switch("enable_fsdp_float8_all_gather")
        if gather is not None:
            import_gather(builder, block.name("enable_fsdp_float8_all_gather"), gather)
    TABLE.read(builder, block, "converter", rowwise=rowwise)


def _filter(builder: ImportBuilder, block: Settings, scheme: str) -> None:
    """Map the list of the modules that a block leaves out, and report those that run in the scheme here."""
    given = block.values.get("filter_fqns")
    default = ["output"] if block.path.endswith("mx") else []
    listed = default if given is None else given
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise TABLE.wrong("names-of-modules", block, "filter_fqns")
    setting = block.name("filter_fqns")
    others = [one for one in listed if one not in HIGH_ANYWAY]
    if others:
        builder.record("torchtitan.modules-that-it-leaves-in-the", setting, others, scheme=scheme)
    if given is not None:
        builder.map(setting)
    if "output" not in listed:
        builder.record("torchtitan.output-runs-in-there-and-megatron", setting, listed, scheme=scheme)


def _read(document: Any) -> Any:
    """Return the parsed configuration, of TOML too."""
    if not str(document.path).endswith(".toml"):
        return document.mapping
    try:
        return tomllib.loads(document.text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PayloadError(f"{document.path}: must be TOML; {error}. Correct it there.") from None


def _recognise(document: Any) -> Recognised | None:
    try:
        content = _read(document)
    except PayloadError:
        if SECTION.search(document.text) is not None:
            raise
        return None
    if str(document.path).endswith(".toml") and "training" in content and ("job" in content or "quantize" in content):
        return Recognised(0.85, "is TOML with `[training]` and `[job]` or `[quantize]`, as torchtitan 0.2 reads")
    return TABLE.recognise_in(content)


CONTEXT = (ContextKey("sharded", "false without FSDP, where torchtitan uses autocast", default=True), NUM_LAYERS)
SYSTEM = System(
    "torchtitan", TABLE.title, TABLE.version, import_, export, _recognise, as_json, read=_read, context=CONTEXT
)
