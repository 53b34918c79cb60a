"""torchtitan: the TOML of 0.2 and earlier, and the config classes of 0.3 as data.

    {"training": {"dtype": ..., "mixed_precision_param": ..., "mixed_precision_reduce": "float32"},
     "quantize": {"linear": {"float8": {...}, "mx": {...}}}}                                       TOML, until 0.2
    {"training": {...}, "converters": [{"MXFP8LinearConverter": {"fqns": []}}]}         0.3, written and not read

Parameters are FP32 shards that are gathered in BF16, unless `training.dtype` makes everything BF16.
A name that torchtitan does not know belongs to a fork, or to a module named in `job.custom_config_module`: 0.1 ignores
it without a word, 0.2 refuses the file unless that module declares it, and 0.3 reads no files.
Source: torchtitan 0.1.0 config_manager.py, 0.2.1 config/job_config.py and config/manager.py, 0.3.0 config/configs.py,
components/optimizer/optimizer.py.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.builders import ExportBuilder, ImportBuilder, semantics_of
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.megatron_lm.flags import bears_on_precision
from bridge.interop.module_lists import NUM_LAYERS, name_lists, schemes_for
from bridge.interop.pytorch.amp import report_no_scaler
from bridge.interop.pytorch.torchao import FLOAT8_RECIPES, ROWWISE, import_gather
from bridge.interop.reading.settings import Settings
from bridge.interop.unsupported import Row, report_optimizer, report_row, rows
from bridge.precision.foreign_names import TORCHTITAN
from bridge.pytorch.loop import compute_dtype
from bridge.registry.config import MixedPrecisionConfig

TITLE = "torchtitan"
VERSION = "torchtitan 0.3.0"
REDUCED = ("float32", "bfloat16", "float16")
SHARDS = "data_parallel_shard_degree"
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
EXPERTS = "experts only, and a recipe covers every linear layer, so none was written"
BLOCKS = ("float8", "mx")
CONVERTERS = {"mxfp8": "MXFP8LinearConverter", "nvfp4": "NVFP4LinearConverter"}
"""Scheme -> the converter of torchtitan 0.3."""
LINEAR = ("attention.", "feed_forward.", "shared_experts.")
"""Parts of the names of every linear layer that Megatron runs in a scheme, and of no router or output layer."""
QUANTIZE = tuple(f"quantize.{part}.{name}" for part in ("linear", "grouped_mm") for name in BLOCKS)
"""Blocks of torchtitan 0.2; names for `model.converters`, as are those of `BLOCKS` in 0.1."""
SECTION = re.compile(r"^\[(?:job|training|quantize)\b", re.MULTILINE)
UNKNOWN = (
    "no setting of torchtitan: 0.1 ignores it, 0.2 refuses the file unless job.custom_config_module declares it, "
    "and a fork may read it"
)
MAPPED = ("training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce")
QUANTISER = re.compile(r"quantize\.\w+\.[\w-]+")
HIGH_ANYWAY = ("output", "router.gate", "moe.router.gate", "router")
"""Names in a list of modules that are left out, which Megatron keeps in the dtype of the run too."""
LEFT_OUT = "modules that it leaves in the dtype of the run; lists of names are not read"
DEEPEST = 8
TEXT = ("description", "name", "flavor")


def import_(payload: object, *, sharded: object = True) -> ImportReport:
    """Return what a torchtitan configuration asks for."""
    top = Settings(payload, TITLE)
    parallelism, training = top.section("parallelism"), top.section("training")
    degrees = {name: parallelism.whole(f"{name}_parallel_degree") or 1 for name in ("tensor", "pipeline", "context")}
    is_whole = parallelism.whole(SHARDS) == 1 and degrees.pop("context") == 1  # context parallelism shards as well
    fsdp = Settings({"sharded": sharded}, TITLE, lenient=True).switch("sharded") is not False and not is_whole
    builder = ImportBuilder(TITLE)
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
    _others(builder, top)
    imported = builder.finish(semantics)
    is_partial = any(loss.detail in (ROWWISE, EXPERTS, LEFT_OUT) for loss in imported.unmapped)
    return replace(imported, recipe=None) if is_partial or top.given("converters") else imported


def export(config: MixedPrecisionConfig, *, num_layers: int | None = None) -> ExportReport:
    """Return the training section, and converters for MXFP8 or NVFP4."""
    builder = ExportBuilder(config, TITLE)
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
        if builder.values["params_dtype"] in (None, mode):
            builder.map("params_dtype", setting)
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
        detail = "parameters, gradients and optimizer state are BF16, without FP32 masters"
        builder.without_masters(name, whole, detail)
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
        builder.implied(param, "bfloat16", f"bfloat16 in {VERSION}", **fields)
    else:
        builder.map(param, **fields)
    if compute == "float32":
        return "fp32"
    return "fsdp_policy" if fsdp else "amp_o1"


def _reduction(builder: ImportBuilder, training: Settings, semantics: str, *, fsdp: bool) -> None:
    """State in what FSDP reduces gradients; nothing else reads the setting."""
    name, said = training.name("mixed_precision_reduce"), training.word("mixed_precision_reduce", REDUCED)
    if not fsdp:
        if semantics == "true":
            builder.fields["grad_reduce_in_fp32"] = False
        if said == "float32" and semantics != "true":
            builder.map(name)
        elif said is not None:
            builder.record("torchtitan.read-under-fsdp", name, said)
        return
    fields = {} if semantics == "fp32" else {"grad_reduce_in_fp32": said in (None, "float32")}
    if said is not None:
        builder.map(name, **fields)
    elif fields:
        builder.implied(name, "float32", f"float32 in {VERSION}, which declares nothing else", **fields)
    if said in REDUCED[1:]:
        builder.record("torchtitan.torchtitan-to-declare-float32", name, said, said=said)


def _quantisers(builder: ImportBuilder, top: Settings) -> dict[str, Settings]:
    """Return the quantisation blocks that are read, of every release, by their path."""
    found = {name: top.section(name) for name in BLOCKS if top.given(name)}
    quantize = top.section("quantize")
    for part in quantize.values:
        block = quantize.section(part)
        found |= {block.name(name): block.section(name) for name in block.values if name in BLOCKS}
    if top.given("model"):
        found = _named(builder, top.section("model"), found)
    return found


def _named(builder: ImportBuilder, model: Settings, blocks: dict[str, Settings]) -> dict[str, Settings]:
    """Return the blocks that `model.converters` of torchtitan 0.2 names; nothing reads the others."""
    setting, named = model.name("converters"), model.values.get("converters") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise model.wrong("converters", "must be a list of names", named, f"List {QUANTIZE[0]}")
    for path, block in blocks.items():
        if path not in named:
            builder.record("torchtitan.nothing-reads-it-it-is-not", path, dict(block.values), path=path)
    for path in named:
        if path in (*QUANTIZE, *BLOCKS):
            builder.map(setting)
        else:
            builder.record("torchtitan.a-converter-that-this-bridge-does", setting, path)
    return {path: blocks.get(path, Settings({}, TITLE, path)) for path in named if path in (*QUANTIZE, *BLOCKS)}


def _quantiser(builder: ImportBuilder, path: str, block: Settings) -> None:
    """Map one block, and report which modules it leaves out and its options."""
    if "grouped_mm" in path:
        builder.record("torchtitan.experts-only-and-a-recipe", path, dict(block.values))
        return
    setting, recipe = block.name("recipe_name"), block.text("recipe_name")
    fields = dict(MXFP8)
    if path.endswith("mx") and recipe is not None and not recipe.startswith("mxfp8"):
        raise block.wrong("recipe_name", "must be an MXFP8 recipe", recipe, "Use mxfp8_rceil")
    if path.endswith("float8"):
        recipe = block.word("recipe_name", FLOAT8_RECIPES)
        if recipe is None:
            builder.implied(setting, "tensorwise", "tensorwise in torchtitan 0.2")
        fields = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    if recipe in FLOAT8_RECIPES[1:]:
        builder.record("torchtitan.torchao-scales-each", setting, recipe)
    elif builder.fields.get("fp8_recipe") not in (None, fields["fp8_recipe"]):
        raise block.wrong("", "must not stand together with another one", path, "Keep one of the converters")
    else:
        builder.map(setting if block.given("recipe_name") else path, **fields)
        _filter(builder, block, fields["fp8_recipe"])
    known = rows("torchtitan_converters")
    unknown = Row("a setting of the converter", known["filter_fqns"].remedy, known["filter_fqns"].harmless)
    for key, value in block.values.items():
        if key == "enable_fsdp_float8_all_gather" and builder.fields.get("fp8") is not None:
            import_gather(builder, block.name(key), bool(block.switch(key)))
        elif key != "recipe_name" and block.name(key) not in builder.mapped:
            report_row(builder, block.name(key), value, known.get(key, unknown))


def _filter(builder: ImportBuilder, block: Settings, scheme: str) -> None:
    """Map the list of the modules that a block leaves out, and report those that run in the scheme here."""
    given = block.values.get("filter_fqns")
    default = ["output"] if block.path.endswith("mx") else []
    listed = default if given is None else given
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise block.wrong("filter_fqns", "must be a list of names", given, "List parts of the names of modules")
    setting = block.name("filter_fqns")
    others = [one for one in listed if one not in HIGH_ANYWAY]
    if others:
        builder.record("torchtitan.modules-that-it-leaves-in-the", setting, others, scheme=scheme)
    if given is not None:
        builder.map(setting)
    if "output" not in listed:
        builder.record("torchtitan.output-runs-in-there-and-megatron", setting, listed, scheme=scheme)


def _others(builder: ImportBuilder, top: Settings) -> None:
    """Report whatever else bears on precision, and what looks as if it did and torchtitan does not know."""
    known = rows("torchtitan")
    for name, value in _leaves(top.values):
        last = name.rpartition(".")[2]
        if name in known and value is not None:
            report_row(builder, name, value, known[name])
        elif name in MAPPED or value is None or last in TEXT:
            continue
        elif bears_on_precision(last) or QUANTISER.fullmatch(name):
            builder.record("torchtitan.no-setting-of-torchtitan-ignores", name, value)
    optimizer = top.values.get("optimizer")
    report_optimizer(builder, "optimizer.name", optimizer.get("name") if isinstance(optimizer, Mapping) else None)


def _leaves(block: Mapping[Any, Any], under: str = "") -> list[tuple[str, Any]]:
    """Return settings by their dotted names, without what is read as converters; unknown blocks are whole."""
    found: list[tuple[str, Any]] = []
    for key, value in block.items():
        name = f"{under}{key}"
        if name in (*BLOCKS, *QUANTIZE):
            continue
        is_open = name == "quantize" or not (bears_on_precision(str(key)) or QUANTISER.fullmatch(name))
        if isinstance(value, Mapping) and is_open and under.count(".") < DEEPEST:
            found += _leaves(value, f"{name}.")
        else:
            found.append((name, value))
    return found


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
    training = content.get("training")
    own = ("mixed_precision_param", "mixed_precision_reduce", "local_batch_size")
    found = [key for key in own if isinstance(training, Mapping) and key in training]
    return Recognised(0.9, f"has `training.{found[0]}`, which torchtitan reads") if found else None


CONTEXT = (ContextKey("sharded", "false without FSDP, where torchtitan uses autocast", default=True), NUM_LAYERS)
SYSTEM = System("torchtitan", TITLE, VERSION, import_, export, _recognise, as_json, read=_read, context=CONTEXT)
