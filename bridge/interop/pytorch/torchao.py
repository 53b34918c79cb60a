"""torchao's FP8 and MXFP8 training configs.

    {"float8": {"recipe_name": "tensorwise", "enable_fsdp_float8_all_gather": true}}      Float8LinearConfig
    {"mxfp8": {"recipe": "mxfp8_rceil"}}                                                  MXFP8TrainingOpConfig

The objects themselves are read too. torchao converts modules of a finished model, so it decides about linear layers and
nothing else: mode, masters and reduction are the trainer's. Of the casts per operand three facts are read: whether rows
are scaled by themselves, the format of output gradients, and whether the weight gradient is in high precision.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.module_lists import NUM_LAYERS, name_lists, read_list, rows_of, schemes_for
from bridge.interop.reading.settings import Settings
from bridge.interop.unsupported import Row, report_row, rows
from bridge.precision.foreign_names import HEADS, LLAMA
from bridge.precision.matchers import HIGH
from bridge.pytorch.float8 import float8_settings, with_one_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from bridge.precision.matchers import Chosen
    from bridge.precision.module_schemes import ModuleSchemes
    from bridge.registry.config import MixedPrecisionConfig

TITLE = "torchao"
VERSION = "torchao 0.18.0"
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MX_RECIPES = ("mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp", "mxfp8_emulated_rceil")
HIGH_WGRAD = "Transformer Engine 2.0 and later cannot run the weight gradient in BF16"
HIGH_WGRAD_REMEDY = "Expect FP8 weight gradients in Megatron."
CHOICE = Row("a choice of kernels or shapes", "Check it by hand.")
MX = {
    "scale_calculation_mode": CHOICE._replace(harmless=("rceil",)),
    "out_dtype": CHOICE._replace(harmless=("bfloat16",)),
    "kernel_preference": CHOICE._replace(harmless=("auto",)),
}
ACCUMULATION = Row("Megatron accumulates the forward GEMM fast and both others fully", "Accept it.")
FLOAT8 = {
    "gemm_config_output": ACCUMULATION._replace(harmless=({"use_fast_accum": True},)),
    "gemm_config_grad_input": ACCUMULATION._replace(harmless=({"use_fast_accum": False},)),
    "gemm_config_grad_weight": ACCUMULATION._replace(harmless=({"use_fast_accum": False},)),
    "module_filter_fn": Row("a function that chooses modules cannot be converted", "State first_last_layers_bf16.", ()),
}
UNKNOWN = Row(f"not a setting of {VERSION}'s Float8LinearConfig", "Check its spelling, or drop it.", ())
GATHER = "enable_fsdp_float8_all_gather"
FILTER = "filter_fqns"
"""Names of modules that are left out, as torchao's own filter functions take them."""
ROWWISE = "torchao scales each row by itself, with powers of two; Megatron has no such scheme, so no FP8 was written"
ROWWISE_REMEDY = "Choose tensorwise or blockwise scaling by hand."
MODULES = "State first_last_layers_bf16 if you want whole layers."


def import_(payload: object, *, mode: str | None = None) -> ImportReport:
    """Return what torchao's config, a recipe's name, or a mapping with `float8` or `mxfp8` asks for."""
    kind, given = _kind(payload)
    around = Settings({"mode": mode}, TITLE).word("mode", ("bf16", "fp16", "fp32"))
    builder = ImportBuilder(TITLE)
    builder.fields[around or "bf16"] = True
    if around is None:
        detail = "torchao converts linear layers and leaves the rest to the trainer; BF16 was assumed"
        builder.report("mode", None, "implied default", detail, "Say mode=bf16 to be sure.")
    if kind == "mxfp8":
        _import_mx(builder, given)
    elif payload:
        _import_float8(builder, given)
    _filter(builder, given)
    is_open = bool(payload) and "fp8" not in builder.fields
    for name, block in payload.items() if isinstance(payload, Mapping) else ():
        if name != kind and block is not None:
            is_open = True
            detail = f"{kind} was read, and nothing else"
            builder.report(str(name), block, "unsupported", detail, "Convert it by itself.")
    imported = builder.finish("fp32" if around == "fp32" else "megatron_o2")
    return dataclasses.replace(imported, recipe=None) if is_open else imported


def export(config: MixedPrecisionConfig, *, num_layers: int | None = None) -> ExportReport:
    """Return the config as data, empty where torchao has nothing for it; `convert_linears` applies it."""
    builder = ExportBuilder(config, TITLE)
    payload = float8_settings(config)
    trainer = "is the trainer's business: torchao converts linear layers only"
    others = ("fp32", "fp16", "bf16", "params_dtype", "grad_reduce_in_fp32", "autocast_enabled", "autocast_dtype")
    builder.report_if_stated(others, "unsupported", trainer, "Convert it for the trainer as well.")
    if "mxfp8" in payload:
        for field in ("fp8", "fp8_recipe", "fp8_wgrad"):
            builder.map(field, "mxfp8.recipe")
    elif "float8" in payload:
        builder.map("fp8", "float8")
        builder.map("fp8_recipe", "float8.recipe_name")
        export_gather(builder)
        if not config.fp8_wgrad:
            builder.map("fp8_wgrad", "float8.cast_config_input_for_grad_weight")
    elif config.fp8 is not None:
        detail = f"{VERSION} has no {config.fp8_recipe} scaling, so no FP8 was written"
        fields = ("fp8", "fp8_recipe", "fp8_param_gather", "fp8_wgrad")
        builder.report_if_on(fields, detail, "Use tensorwise or MXFP8 scaling.")
    if payload or (config.scheme is None and builder.values["modules"]):
        schemes = schemes_for(builder, num_layers, available=("tensorwise", "mxfp8"), setting=FILTER)
        written: dict[str, Chosen] = {}
        for chosen, block in _blocks(config, schemes).items():
            ((kind, settings),) = block.items()
            if written.setdefault(kind, chosen) == chosen:
                payload[kind] = {**settings, FILTER: left_out(schemes, chosen)}
                continue
            detail = (
                f"rows ask for {chosen.scheme} in {chosen.format} too, and one config has one format; it is in BF16"
            )
            builder.report("modules", "semantics", detail, f"BF16 there; state {written[kind].format} in these rows.")
    return builder.finish(payload)


def _blocks(config: MixedPrecisionConfig, schemes: ModuleSchemes | None) -> dict[Chosen, dict[str, Any]]:
    """Return torchao's settings of each scheme that some linear layer runs in."""
    if schemes is None:
        return {}
    lists = name_lists(schemes, LLAMA)
    found = [one for one in dict.fromkeys((schemes.run, *lists)) if one is not None and one in lists]
    return {one: settings for one in found if (settings := float8_settings(with_one_scheme(config, one)))}


def left_out(schemes: ModuleSchemes | None, chosen: Chosen | None) -> list[str]:
    """Return the names of a dense Llama model's modules that do not run in a scheme; the output layer always."""
    lists = name_lists(schemes, LLAMA) if schemes is not None else {}
    return [*(name for other, names in lists.items() if other != chosen for name in names), HEADS[0]]


def module_filter(left_out: Collection[str]) -> Callable[[torch.nn.Module, str], bool]:
    """Return the `module_filter_fn` that leaves modules out whose names contain one of some names."""

    def takes(module: torch.nn.Module, name: str) -> bool:
        sizes = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return not any(size % 16 for size in sizes) and not any(one in name for one in left_out)

    return takes


def import_gather(builder: ImportBuilder, setting: str, gather: bool) -> None:
    """Map the gather of weights in FP8, and report what Megatron does more."""
    builder.map(setting, fp8_param_gather=gather)
    if gather:
        report_gather(builder, setting)


def report_gather(builder: ImportBuilder, setting: str) -> None:
    """Report what Megatron does more than gather weights in FP8."""
    detail = "weights are gathered as FP8 and stored in high precision; Megatron stores them in FP8 too"
    builder.report(setting, True, "approximated", detail, "Turn fp8_param_gather off if that is not meant.")


def export_gather(builder: ExportBuilder) -> None:
    """Report FP8 weights, which torchao has between ranks only."""
    if builder.config.fp8_param_gather:
        detail = "weights are gathered as FP8 under FSDP2 and stored in high precision"
        remedy = "Nothing to do; it acts under FSDP2 only."
        builder.report_if_stated(("fp8_param_gather", "fp8_param"), "approximated", detail, remedy)


def export_layers(builder: ExportBuilder, remedy: str) -> None:
    """Report a choice of modules, for which torchao's own stands."""
    detail = "torchao leaves the first and the last nn.Linear out, not whole layers"
    if builder.config.first_last_layers_bf16:
        builder.report("first_last_layers_bf16", "approximated", detail, remedy)
    if builder.values["modules"]:
        builder.report("modules", "semantics", f"{detail}, and no others", remedy)


def _kind(payload: object) -> tuple[str, Settings]:
    name = type(payload).__name__
    if dataclasses.is_dataclass(payload) and not isinstance(payload, type):
        return ("mxfp8" if name.startswith("MX") else "float8"), Settings(plain(payload), TITLE, name)
    if isinstance(payload, str):
        kind = "mxfp8" if payload.startswith("mx") else "float8"
        return kind, Settings({"recipe" if kind == "mxfp8" else "recipe_name": payload}, TITLE, kind)
    top = Settings(payload, TITLE)
    kinds = [kind for kind in ("float8", "mxfp8") if kind in top]
    if top.values and not kinds:
        raise top.wrong("", "must have float8 or mxfp8", payload, "Give torchao's fields under one of them")
    kind = kinds[0] if kinds else "float8"
    return kind, top.section(kind)


def plain(value: Any) -> Any:
    """Return a config object as plain data: enums by value, dtypes by torch's names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


def _import_mx(builder: ImportBuilder, given: Settings) -> None:
    recipe = given.word("recipe", MX_RECIPES)
    high = bool(given.switch("wgrad_with_hp")) or recipe == MX_RECIPES[1]
    name = given.name("recipe" if recipe else "wgrad_with_hp")
    builder.map(name, fp8="e4m3", fp8_recipe="mxfp8", fp8_wgrad=not high)
    if high:
        builder.report(name, recipe or True, "dead knob", HIGH_WGRAD, HIGH_WGRAD_REMEDY)
    if recipe == MX_RECIPES[2]:
        detail = "the same rounding without MXFP8 hardware"
        builder.report(name, recipe, "unsupported", detail, "Choose the emulated backend of a run instead.")
    for key, value in given.values.items():
        if key not in ("recipe", "wgrad_with_hp", FILTER) and value is not None:
            report_row(builder, given.name(key), value, MX.get(key, CHOICE))


def _import_float8(builder: ImportBuilder, given: Settings) -> None:
    recipe = given.word("recipe_name", FLOAT8_RECIPES)
    names = [key for key in given.values if key == "recipe_name" or key.startswith("cast_config_")]
    casts = {key: given.section(key) for key in names if key != "recipe_name"}
    kinds = {key: cast.word("scaling_type", ("dynamic", "disabled")) for key, cast in casts.items()}
    sizes = {cast.word("scaling_granularity", ("tensorwise", "axiswise")) for cast in casts.values()}
    by_row = "axiswise" in sizes or recipe in FLOAT8_RECIPES[1:]
    formats = {key: _format(cast, is_gradient="grad_output" in key) for key, cast in casts.items()}
    is_off = kinds.get("cast_config_input") == "disabled"
    gather = given.switch(GATHER)
    if gather and by_row:
        raise given.wrong(GATHER, "needs tensorwise scaling of weights", True, "Turn it off")
    if by_row or is_off:
        detail = "no GEMM runs in FP8" if is_off else ROWWISE
        for name in names or ["recipe_name"]:
            builder.report(given.name(name), given.values.get(name), "unsupported", detail, ROWWISE_REMEDY)
    else:
        fields = {"fp8": formats.get("cast_config_grad_output") or "hybrid", "fp8_recipe": "tensorwise"}
        for name in names:
            builder.map(given.name(name), **fields)
        if not names:
            builder.implied(given.name("recipe_name"), "tensorwise", f"in {VERSION}", **fields)
        if kinds.get("cast_config_input_for_grad_weight") == "disabled":
            builder.fields["fp8_wgrad"] = False
            name = given.name("cast_config_input_for_grad_weight")
            builder.report(name, "disabled", "dead knob", HIGH_WGRAD, HIGH_WGRAD_REMEDY)
    if gather is not None and (by_row or is_off):
        builder.map(given.name(GATHER))
    elif gather is not None:
        import_gather(builder, given.name(GATHER), gather)
    known = {**rows("torchao"), **FLOAT8}
    for key, value in given.values.items():
        if value is not None and key not in (*names, GATHER, FILTER):
            report_row(builder, given.name(key), value, known.get(key, UNKNOWN))


def _filter(builder: ImportBuilder, given: Settings) -> None:
    listed, run = given.values.get(FILTER), builder.fields.get("fp8_recipe")
    if listed is None or run is None:
        return
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise given.wrong(FILTER, "must be a list of names", listed, "List parts of the names of modules")
    reading = read_list(builder, given.name(FILTER), listed, LLAMA, HEADS[:1], taken_in=HIGH)
    found = rows_of(reading, taken=HIGH, left=run, run=run)
    builder.map(given.name(FILTER), **({"modules": found} if found else {}))
    if not reading.has_head:
        detail = f"{HEADS[0]} runs in {run} there, and Megatron's output layer in the dtype of the run"
        builder.report(given.name(FILTER), listed, "semantics", detail, f"BF16 there with {HEADS[0]} in the list.")


def _format(cast: Settings, *, is_gradient: bool) -> str | None:
    """Return "e4m3" for a cast to it; None for the default, and for E5M2 where that is of the gradient."""
    written = cast.text("target_dtype") or ""
    if "e4m3" in written:
        return "e4m3"
    if written and not (is_gradient and "e5m2" in written):
        rule = "must be e4m3, or e5m2 for the gradient of the output"
        raise cast.wrong("target_dtype", rule, written, "Use e4m3 for input and weight")
    return None


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    for key, inner in (("float8", "recipe_name"), ("mxfp8", "recipe")):
        block = content.get(key)
        if isinstance(block, Mapping) and len(content) <= 2 and (inner in block or "cast_config_input" in block):
            return Recognised(certainty=0.8, evidence=f"has `{key}.{inner}` and nothing about training")
    return None


CONTEXT = (ContextKey("mode", "bf16, fp16 or fp32: what the trainer runs outside the linear layers"), NUM_LAYERS)
SYSTEM = System("torchao", TITLE, VERSION, import_, export, _recognise, as_json, context=CONTEXT)
