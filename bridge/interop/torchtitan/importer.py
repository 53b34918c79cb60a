"""torchtitan: the TOML of 0.2 and earlier, and the config classes of 0.3 as data.

    {"training": {"dtype": ..., "mixed_precision_param": ..., "mixed_precision_reduce": "float32"},
     "quantize": {"linear": {"float8": {...}, "mx": {...}}}}                                       TOML, until 0.2
    {"training": {...}, "converters": [{"MXFP8LinearConverter": {"fqns": []}}]}                    0.3

Parameters are FP32 shards that are gathered in BF16, unless `training.dtype` makes everything BF16.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError
from bridge.interop.builders import ExportBuilder, ImportBuilder, semantics_of
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.float8 import ROWWISE, ROWWISE_REMEDY, import_gather
from bridge.interop.scaler import report_no_scaler
from bridge.interop.settings import Settings
from bridge.interop.torchtitan.unsupported import report_unsupported
from bridge.interop.unsupported import Row, report_row, rows
from bridge.pytorch.autocast import compute_dtype

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["SYSTEM", "export", "import_"]

TITLE = "torchtitan"
VERSION = "torchtitan 0.3.0"
REDUCED = ("float32", "bfloat16", "float16")
SHARDS = "data_parallel_shard_degree"
ROW_RECIPES = ("rowwise", "rowwise_with_gw_hp")
CONVERTERS = (
    "Float8LinearConverter",
    "Float8GroupedExpertsConverter",
    "MXFP8LinearConverter",
    "MXFP8GroupedExpertsConverter",
    "NVFP4LinearConverter",
)
TOML_CONVERTERS = (
    "quantize.linear.float8",
    "quantize.linear.mx",
    "quantize.grouped_mm.float8",
    "quantize.grouped_mm.mx",
    "float8",
    "mx",
)
"""Names for `model.converters` in torchtitan 0.2, the last two in 0.1."""

SECTION = re.compile(r"^\[(?:job|training|quantize)\b", re.MULTILINE)
"""A table of TOML that torchtitan reads."""


def import_(payload: object, *, sharded: object = True) -> ImportReport:
    """Return what a torchtitan configuration asks for.

    Args:
        payload: The parsed configuration, in either shape.
        sharded: FSDP is on. False: one device or plain data parallelism, where torchtitan uses autocast instead.
    """
    top = Settings(payload, TITLE)
    fsdp = Settings({"sharded": sharded}, TITLE, lenient=True).switch("sharded")
    parallelism = top.section("parallelism")
    is_split = any((parallelism.whole(f"{name}_parallel_degree") or 1) > 1 for name in ("tensor", "pipeline"))
    is_whole = _is_whole(parallelism)
    training = top.section("training")
    builder = ImportBuilder(TITLE)
    whole = training.word("dtype", ("bfloat16", "float32"))
    compute = training.word("mixed_precision_param", ("bfloat16", "float32"))
    fsdp = fsdp is not False and not is_whole
    if not fsdp and is_split and whole != "bfloat16" and compute != "float32":
        detail = "without FSDP, tensor or pipeline parallelism disables mixed precision: the run is FP32"
        remedy = "Shard the weights with FSDP."
        builder.report(training.name("mixed_precision_param"), compute, "dead knob", detail, remedy)
        compute = "float32"
    semantics = _mode(builder, training, whole, compute, fsdp=fsdp)
    if is_whole and semantics == "amp_o1":
        detail = "without FSDP torchtitan runs autocast up to 0.2, and has none in 0.3, where the run is FP32"
        remedy = "Shard the weights with FSDP, or say which release it is."
        builder.report(parallelism.name(SHARDS), parallelism[SHARDS], "semantics", detail, remedy)
    _reduction(builder, training, semantics, fsdp=fsdp)
    blocks = _quantisers(top)
    if top.given("model"):
        blocks = _converted(builder, top, blocks)
    for name, block in blocks:
        _quantiser(builder, name, block)
    report_unsupported(builder, top)
    imported = builder.finish(semantics)
    is_rowwise = any(loss.detail == ROWWISE for loss in imported.unmapped)
    return replace(imported, recipe=None) if is_rowwise else imported


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the training section, and converters for MXFP8 or NVFP4."""
    builder = ExportBuilder(config, TITLE)
    semantics, mode = semantics_of(config), config.mode
    training = {"dtype": "float32", "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"}
    payload: dict[str, Any] = {"training": training}
    setting = "training.mixed_precision_param"
    compute = compute_dtype(config)
    builder.exported_mode = "fp32" if compute == "fp32" else "bf16"
    if compute == "fp16":
        detail = "there is no FP16; BF16 was written"
        builder.report_if_stated((mode, "params_dtype", "autocast_dtype"), "unsupported", detail, "Use a BF16 recipe.")
    elif semantics == "amp_o1":
        detail = "FP32 weights are gathered in BF16 under FSDP, and only cast per operator without it"
        fields = (mode, "autocast_enabled", "autocast_dtype", "params_dtype")
        builder.report_if_stated(fields, "approximated", detail, "Nothing to do: the matmuls are the same.")
    else:
        training["mixed_precision_param"] = "float32" if mode == "fp32" else "bfloat16"
        builder.map(mode, setting, "training.dtype")
        if builder.values["params_dtype"] in (None, mode):
            builder.map("params_dtype", setting)
    if mode != "fp32" and config.grad_reduce_in_fp32:
        builder.map("grad_reduce_in_fp32", "training.mixed_precision_reduce")
    elif mode != "fp32":
        builder.report("grad_reduce_in_fp32", "unsupported", "gradients are reduced in float32 only", "Expect FP32.")
    converter = _export_quantiser(builder)
    if converter is not None:
        payload["converters"] = [converter]
    report_no_scaler(builder, "there is no loss scale", "Use a BF16 recipe.")
    return builder.finish(payload)


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
    if compute is None:
        builder.implied(param, "bfloat16", f"bfloat16 in {VERSION}")
    if compute == "float32":
        builder.map(param, fp32=True)
        return "fp32"
    fields: dict[str, Any] = {"bf16": True, "params_dtype": "bf16"}
    if not fsdp:
        fields = {"fp32": True, "autocast_enabled": True, "autocast_dtype": "bf16"}
    builder.fields |= fields
    if compute is not None:
        builder.map(param, **fields)
    return "fsdp_policy" if fsdp else "amp_o1"


def _is_whole(parallelism: Settings) -> bool:
    """Return whether a file has the weights sharded nowhere: context parallelism shards them as well."""
    return parallelism.whole(SHARDS) == 1 and (parallelism.whole("context_parallel_degree") or 1) == 1


def _reduction(builder: ImportBuilder, training: Settings, semantics: str, *, fsdp: bool) -> None:
    """State in what FSDP reduces gradients; nothing else reads the setting."""
    name, said = training.name("mixed_precision_reduce"), training.word("mixed_precision_reduce", REDUCED)
    if not fsdp:
        if semantics == "true":
            builder.fields["grad_reduce_in_fp32"] = False
        if said == "float32" and semantics != "true":
            builder.map(name)
        elif said is not None:
            builder.report(name, said, "dead knob", "read under FSDP only: gradients keep their own dtype", "Drop it.")
        return
    if semantics != "fp32":
        builder.fields["grad_reduce_in_fp32"] = said in (None, "float32")
    if said is None and semantics != "fp32":
        builder.implied(name, "float32", f"float32 in {VERSION}, which declares nothing else")
    elif said is not None:
        builder.map(name, **({} if semantics == "fp32" else {"grad_reduce_in_fp32": said == "float32"}))
    if said in REDUCED[1:]:
        detail = (
            f"torchtitan 0.1 to 0.3 declare float32 alone and take {said} from a file all the same, with a warning "
            "of its parser; the command line refuses it"
        )
        builder.report(name, said, "semantics", detail, "Write float32 for FP32 reduction.")


def _quantisers(top: Settings) -> list[tuple[str, Settings]]:
    """Return the quantisation blocks of every era, by their name."""
    found = [(name, top.section(name)) for name in ("float8", "mx") if top.given(name)]
    quantize = top.section("quantize")
    for part in quantize.values:
        block = quantize.section(part)
        found += [(name, block.section(name)) for name in block.values if name in ("float8", "mx")]
    given = top.values.get("converters")
    if given is not None and not isinstance(given, list | tuple):
        raise top.wrong("converters", "must be a list", given, "List one mapping per converter")
    for converter in given or ():
        item = Settings(converter, TITLE, "converters")
        for name in item.values:
            if name not in CONVERTERS:
                raise item.wrong(name, "must be a quantisation converter of torchtitan's", name, f"Use {CONVERTERS[2]}")
            found.append((name, item.section(name)))
    return found


def _converted(builder: ImportBuilder, top: Settings, blocks: list[tuple[str, Settings]]) -> list[tuple[str, Settings]]:
    """Return the blocks that `model.converters` of torchtitan 0.2 names; nothing reads the others."""
    model = top.section("model")
    named = model.values.get("converters") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise model.wrong("converters", "must be a list of names", named, f"List {TOML_CONVERTERS[0]}")
    found = {block.path: (name, block) for name, block in blocks}
    for path, (_, block) in found.items():
        if path not in named and block.path.split(".")[0] in ("quantize", "float8", "mx"):
            detail = "nothing reads it: it is not in model.converters (torchtitan 0.2)"
            remedy = f"Add {path} to model.converters, or drop it."
            builder.report(path, dict(block.values), "dead knob", detail, remedy)
    chosen = []
    for path in named:
        last = path.rpartition(".")[2]
        if path in TOML_CONVERTERS:
            chosen.append(found.get(path, (last, Settings({}, TITLE, path))))
            builder.map(model.name("converters"))
        else:
            detail = "a converter that this bridge does not know"
            builder.report(model.name("converters"), path, "unsupported", detail, "Check what it does to the weights.")
    return [*chosen, *(pair for path, pair in found.items() if path.startswith("converters"))]


def _quantiser(builder: ImportBuilder, name: str, block: Settings) -> None:
    recipe = block.text("recipe_name")
    if name in ("Float8LinearConverter", "Float8GroupedExpertsConverter", "float8"):
        fields = _float8(builder, name, block, recipe)
    elif name == "NVFP4LinearConverter":
        fields = {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
    else:
        if recipe is not None and not recipe.startswith("mxfp8"):
            raise block.wrong("recipe_name", "must be an MXFP8 recipe", recipe, "Use mxfp8_rceil")
        fields = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
    low = {"fp8", "fp4"} & set(fields)
    if low and any(builder.fields.get(other) for other in {"fp8", "fp4"} - low):
        raise block.wrong("", "FP8 and FP4 cannot be combined in one recipe", name, "Keep one of the converters")
    if fields:
        experts = "grouped_mm" in block.path and name == "float8"
        builder.map(block.name("recipe_name") if recipe and not experts else block.path, **fields)
    _others(builder, name, block)


def _float8(builder: ImportBuilder, name: str, block: Settings, recipe: str | None) -> dict[str, Any]:
    """Return the fields of a converter to FP8, none where Megatron has no such scaling."""
    setting = block.name("recipe_name")
    default = "tensorwise" if name == "float8" else "rowwise"
    if "grouped_mm" in block.path:
        default = "rowwise"
        if recipe is not None:
            detail = "the experts' GEMMs are scaled by row whatever it says"
            builder.report(setting, recipe, "dead knob", detail, "Drop it.")
            recipe = default
    if recipe is None:
        builder.implied(setting, default, f"{default} in {'torchtitan 0.2' if name == 'float8' else VERSION}")
        recipe = default
    if block.switch("emulate") and name == "Float8LinearConverter":
        detail = "emulate discards recipe_name and builds torchao's tensorwise config"
        remedy = "Use the emulated backend of a run instead."
        builder.report(block.name("emulate"), True, "semantics", detail, remedy)
        recipe = "tensorwise"
    if recipe == "tensorwise":
        return {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    if recipe not in ROW_RECIPES:
        raise block.wrong("recipe_name", "must be tensorwise, rowwise or rowwise_with_gw_hp", recipe, "Use tensorwise")
    builder.report(setting, recipe, "unsupported", ROWWISE, ROWWISE_REMEDY)
    return {}


def _others(builder: ImportBuilder, name: str, block: Settings) -> None:
    """Report which modules are converted, and options of a converter."""
    if "Experts" in name or "grouped_mm" in block.path:
        detail = "experts only; a recipe covers every linear layer"
        builder.report(block.path, name, "approximated", detail, "Keep the layers you mean out by hand.")
    known = rows("torchtitan_converters")
    unknown = Row("a setting of the converter", known["fqns"].remedy, known["fqns"].harmless)
    for key, value in block.values.items():
        setting = block.name(key)
        if key == "enable_fsdp_float8_all_gather" and builder.fields.get("fp8") is not None:
            import_gather(builder, setting, bool(block.switch(key)))
        elif key not in ("recipe_name", "emulate"):
            report_row(builder, setting, value, known.get(key, unknown))
        elif key == "emulate" and (value is False or name != "Float8LinearConverter"):
            builder.map(setting)


def _export_quantiser(builder: ExportBuilder) -> dict[str, Any] | None:
    config = builder.config
    if config.fp8 is None and config.fp4 is None:
        return None
    if config.fp8 is not None and config.fp8_recipe == "mxfp8" and config.mode == "bf16":
        name, fields = "MXFP8LinearConverter", ("fp8", "fp8_recipe")
    elif config.fp4 is not None and config.fp4_recipe == "nvfp4" and config.mode == "bf16":
        name, fields = "NVFP4LinearConverter", ("fp4", "fp4_recipe")
    else:
        family = "fp8" if config.fp8 else "fp4"
        detail = (
            f"{VERSION} has rowwise FP8, MXFP8 and NVFP4 over BF16, and no {config.scheme} scaling; none was written"
        )
        for field in (family, f"{family}_recipe"):
            builder.report(field, "unsupported", detail, "Use bf16_with_mxfp8_mixed, or train in BF16.")
        return None
    for field in fields:
        builder.map(field, f"converters.{name}")
    if config.first_last_layers_bf16:
        detail = "modules are chosen by name, and an empty list means all of them"
        builder.report("first_last_layers_bf16", "unsupported", detail, "List the fqns of the layers to convert.")
    if not config.fp8_wgrad and config.fp8:
        builder.report("fp8_wgrad", "unsupported", "every GEMM runs in MXFP8", "Use torchao's own config.")
    return {name: {"fqns": []}}


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
    if str(document.path).endswith(".toml") and ("training" in content and ("job" in content or "quantize" in content)):
        return Recognised(
            certainty=0.85, evidence="is TOML with `[training]` and `[job]` or `[quantize]`, as torchtitan 0.2 reads"
        )
    training = content.get("training")
    if not isinstance(training, Mapping):
        return None
    own = [key for key in ("mixed_precision_param", "mixed_precision_reduce", "local_batch_size") if key in training]
    if own:
        return Recognised(certainty=0.9, evidence=f"has `training.{own[0]}`, which torchtitan reads")
    return None


SYSTEM = System(
    name="torchtitan",
    title=TITLE,
    version=VERSION,
    import_=import_,
    export=export,
    recognise=_recognise,
    write=as_json,
    read=_read,
    context=(ContextKey(name="sharded", meaning="false without FSDP, where torchtitan uses autocast", default=True),),
)
