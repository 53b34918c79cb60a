"""torchao's FP8 and MXFP8 training configs.

    {"float8": {"recipe_name": "tensorwise", "enable_fsdp_float8_all_gather": true}}      Float8LinearConfig
    {"mxfp8": {"recipe": "mxfp8_rceil"}}                                                  MXFP8TrainingOpConfig

The objects themselves are read too. torchao converts modules of a finished model, so it decides about linear layers and
nothing else: mode, masters and reduction are the trainer's.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.float8 import ROWWISE, ROWWISE_REMEDY, export_gather, import_gather
from bridge.interop.settings import Settings
from bridge.interop.unsupported import report_row, rows
from bridge.pytorch.float8 import float8_settings

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["SYSTEM", "export", "import_"]

TITLE = "torchao"
VERSION = "torchao 0.18.0"
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MX_RECIPES = ("mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp", "mxfp8_emulated_rceil")
MX_USUAL = {"scale_calculation_mode": "rceil", "out_dtype": "bfloat16", "kernel_preference": "auto"}
PAIRS = {
    "input": "input_for_grad_weight",
    "weight": "weight_for_grad_input",
    "grad_output": "grad_output_for_grad_weight",
}
TORCH_NAMES = {"float8_e4m3fn": "e4m3", "float8_e4m3fnuz": "e4m3", "float8_e5m2": "e5m2", "float8_e5m2fnuz": "e5m2"}
FAST = {"gemm_config_output": True, "gemm_config_grad_input": False, "gemm_config_grad_weight": False}
"""Fast accumulation per GEMM in the tensorwise recipe, the same as Transformer Engine's."""


def import_(payload: object, *, mode: str | None = None) -> ImportReport:
    """Return what the config asks for.

    Args:
        payload: A `Float8LinearConfig` or `MXFP8TrainingOpConfig`, its fields as a mapping, a recipe's name, or a
            mapping with `float8` or `mxfp8`.
        mode: bf16, fp16 or fp32: what the trainer runs outside these layers. None: BF16, and reported.
    """
    kind, given = _kind(payload)
    around = Settings({"mode": mode}, TITLE).word("mode", ("bf16", "fp16", "fp32"))
    builder = ImportBuilder(TITLE)
    builder.fields[around or "bf16"] = True
    if around is None:
        detail = "torchao converts linear layers and leaves the rest to the trainer; BF16 was assumed"
        builder.report("mode", None, "implied default", detail, "Say mode=bf16 to be sure.")
    is_open = False
    for name, block in payload.items() if isinstance(payload, Mapping) and given.path == kind else ():
        if name != kind and block is not None:
            is_open = True
            detail = f"{kind} was read, and nothing else"
            builder.report(str(name), block, "unsupported", detail, "Convert it by itself.")
    if payload and kind == "mxfp8":
        _import_mx(builder, given)
    elif payload:
        is_open |= _import_float8(builder, given)
    imported = builder.finish("fp32" if around == "fp32" else "megatron_o2")
    return dataclasses.replace(imported, recipe=None) if is_open else imported


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the config as data, empty where torchao has nothing for it; `bridge.pytorch` makes the object."""
    builder = ExportBuilder(config, TITLE)
    payload = float8_settings(config)
    trainer = "is the trainer's business: torchao converts linear layers only"
    others = ("fp32", "fp16", "bf16", "params_dtype", "grad_reduce_in_fp32", "autocast_enabled", "autocast_dtype")
    builder.report_if_stated(others, "unsupported", trainer, "Convert it for the trainer as well.")
    if config.fp8_recipe == "mxfp8" and config.fp8 is not None:
        for field in ("fp8", "fp8_recipe", "fp8_wgrad"):
            builder.map(field, "mxfp8.recipe")
    elif config.fp8_recipe == "tensorwise" and config.fp8 is not None:
        builder.map("fp8", "float8")
        builder.map("fp8_recipe", "float8.recipe_name")
        export_gather(builder)
        if not config.fp8_wgrad:
            builder.map("fp8_wgrad", "float8.cast_config_input_for_grad_weight")
    elif config.fp8 is not None:
        detail = f"{VERSION} has no {config.fp8_recipe} scaling, so no FP8 was written"
        fields = ("fp8", "fp8_recipe", "fp8_param_gather", "fp8_wgrad")
        builder.report_if_on(fields, detail, "Use tensorwise or MXFP8 scaling.")
    if config.first_last_layers_bf16 and payload:
        detail = "which modules are converted is a function of their names, given to the conversion"
        builder.report("first_last_layers_bf16", "unsupported", detail, "Pass a module_filter_fn that leaves them out.")
    return builder.finish(payload)


def _kind(payload: object) -> tuple[str, Settings]:
    """Return "float8" or "mxfp8", and its settings."""
    name = type(payload).__name__
    if dataclasses.is_dataclass(payload) and not isinstance(payload, type):
        return ("mxfp8" if name.startswith("MX") else "float8"), Settings(_plain(payload), TITLE, name)
    if isinstance(payload, str):
        kind = "mxfp8" if payload.startswith("mx") else "float8"
        return kind, Settings({"recipe" if kind == "mxfp8" else "recipe_name": payload}, TITLE, kind)
    top = Settings(payload, TITLE)
    for kind in ("float8", "mxfp8"):
        if kind in top:
            return kind, top.section(kind)
    mx = any(key in top for key in ("recipe", "wgrad_with_hp", "scale_calculation_mode"))
    return ("mxfp8" if mx else "float8"), top


def _plain(value: Any) -> Any:
    """Return a config object as plain data: enums by value, dtypes by our names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return str(value.value)
    if type(value).__name__ == "dtype":
        text = str(value).removeprefix("torch.")
        return next((short for short in ("e4m3", "e5m2") if short in text), text)
    return value


def _import_mx(builder: ImportBuilder, given: Settings) -> None:
    recipe = given.word("recipe", MX_RECIPES)
    high = bool(given.switch("wgrad_with_hp")) or recipe == MX_RECIPES[1]
    name = given.name("recipe" if recipe else "wgrad_with_hp")
    builder.map(name, fp8="e4m3", fp8_recipe="mxfp8", fp8_wgrad=not high)
    if high:
        detail = "Transformer Engine 2.0 and later cannot run the weight gradient in BF16"
        builder.report(name, recipe or True, "dead knob", detail, "Expect FP8 weight gradients in Megatron.")
    if recipe == MX_RECIPES[2]:
        detail = "the same rounding without MXFP8 hardware"
        builder.report(name, recipe, "unsupported", detail, "Choose the emulated backend of a run instead.")
    for key, value in given.values.items():
        usual = MX_USUAL.get(key, False)
        if key in ("recipe", "wgrad_with_hp") or value is None:
            continue
        if str(value).lower() == str(usual).lower():
            builder.map(given.name(key))
        else:
            builder.report(given.name(key), value, "unsupported", "a choice of kernels or shapes", "Check it by hand.")


def _import_float8(builder: ImportBuilder, given: Settings) -> bool:
    """Map the config; return whether its FP8 has no form here, so that no recipe may be named."""
    recipe = given.word("recipe_name", FLOAT8_RECIPES)
    casts = _casts(given, recipe)
    high_wgrad = casts["grad_weight"] == "disabled" or recipe == FLOAT8_RECIPES[2]
    row = casts["granularity"] != "tensorwise"
    off = casts["output"] == "disabled"
    names = [key for key in given.values if key.startswith("cast_config") or key == "recipe_name"]
    gather = given.switch("enable_fsdp_float8_all_gather")
    if gather and row:
        raise given.wrong("enable_fsdp_float8_all_gather", "needs tensorwise scaling of weights", True, "Turn it off")
    if row or off:
        detail = "no GEMM runs in FP8" if off else ROWWISE
        for name in names or ["recipe_name"]:
            builder.report(given.name(name), given.values.get(name), "unsupported", detail, ROWWISE_REMEDY)
        if gather is not None:
            builder.map(given.name("enable_fsdp_float8_all_gather"))
    else:
        fields: dict[str, Any] = {"fp8": "e4m3" if casts["gradient"] == "e4m3" else "hybrid"}
        fields["fp8_recipe"] = "tensorwise"
        for name in names:
            builder.map(given.name(name), **fields)
        if not names:
            builder.implied(given.name("recipe_name"), "tensorwise", f"in {VERSION}", **fields)
        if high_wgrad:
            builder.fields["fp8_wgrad"] = False
            detail = "Transformer Engine 2.0 and later cannot run the weight gradient in BF16"
            name = given.name("cast_config_input_for_grad_weight")
            builder.report(name, "disabled", "dead knob", detail, "Expect FP8 weight gradients in Megatron.")
        if gather is not None:
            import_gather(builder, given.name("enable_fsdp_float8_all_gather"), gather)
    _details(builder, given, power_of_two=row)
    return row


def _casts(given: Settings, recipe: str | None) -> dict[str, str]:
    """Return granularity, gradient format, and whether each GEMM runs in FP8; what torchao asserts is checked."""
    rows: dict[str, Settings] = {}
    for operand, second in PAIRS.items():
        rows[operand] = given.section(f"cast_config_{operand}")
        written = given.values.get(f"cast_config_{second}") is not None
        rows[second] = given.section(f"cast_config_{second}") if written else rows[operand]
    kinds = {name: row.word("scaling_type", ("dynamic", "disabled")) or "dynamic" for name, row in rows.items()}
    sizes = {
        name: row.word("scaling_granularity", ("tensorwise", "axiswise")) or "tensorwise" for name, row in rows.items()
    }
    types = {name: _format(row) for name, row in rows.items()}
    gemms = {"output": ("input", "weight"), "grad_input": ("grad_output", "weight_for_grad_input")}
    gemms["grad_weight"] = ("input_for_grad_weight", "grad_output_for_grad_weight")
    found = {}
    for gemm, (left, right) in gemms.items():
        if kinds[left] != kinds[right]:
            rule = f"must be switched off for both operands of {gemm} or for neither"
            raise given.wrong(f"cast_config_{left}", rule, kinds[left], "Use one scaling_type for both")
        found[gemm] = kinds[left]
    whole = all(size == "tensorwise" for name, size in sizes.items() if kinds[name] == "dynamic")
    row_recipe = recipe in FLOAT8_RECIPES[1:]
    found["granularity"] = "tensorwise" if whole and not row_recipe else "axiswise"
    found["gradient"] = types["grad_output"] or "e5m2"
    if "e5m2" in (types["input"], types["weight"]):
        rule = "E5M2 in the forward pass trains nothing"
        raise given.wrong("cast_config_input", rule, "e5m2", "Use e4m3 for input and weight")
    return found


def _format(cast: Settings) -> str | None:
    """Return the FP8 format of a cast, by our name or torch's own."""
    value = cast.values.get("target_dtype")
    short = TORCH_NAMES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    return short or cast.word("target_dtype", ("e4m3", "e5m2"))


def _details(builder: ImportBuilder, given: Settings, *, power_of_two: bool) -> None:
    for key, row in rows("torchao").items():
        value = given.switch(key)
        if value is not None and key == "round_scales_to_power_of_2" and power_of_two:
            builder.map(given.name(key))
        elif value is not None:
            report_row(builder, given.name(key), value, row)
    for key, fast in FAST.items():
        written = given.section(key).switch("use_fast_accum")
        if written is None or written == fast:
            if written is not None:
                builder.map(given.name(key))
            continue
        detail = "Megatron accumulates the forward GEMM fast and both others fully"
        builder.report(given.name(key), written, "unsupported", detail, "Accept it.")
    known = {"recipe_name", "enable_fsdp_float8_all_gather", "module_filter_fn", *rows("torchao"), *FAST}
    known |= {f"cast_config_{name}" for pair in PAIRS.items() for name in pair}
    for key, value in given.values.items():
        if key not in known and value is not None:
            detail = f"not a setting of {VERSION}'s Float8LinearConfig"
            builder.report(given.name(key), value, "unsupported", detail, "Check its spelling, or drop it.")
    if given.given("module_filter_fn"):
        detail = "a function that chooses modules cannot be converted"
        shown = "a function" if callable(given["module_filter_fn"]) else given["module_filter_fn"]
        builder.report(given.name("module_filter_fn"), shown, "unsupported", detail, "State first_last_layers_bf16.")


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    for key, inner in (("float8", "recipe_name"), ("mxfp8", "recipe")):
        block = content.get(key)
        if isinstance(block, Mapping) and len(content) <= 2 and (inner in block or "cast_config_input" in block):
            return Recognised(certainty=0.8, evidence=f"has `{key}.{inner}` and nothing about training")
    if any(key.startswith("cast_config_") for key in content if isinstance(key, str)):
        return Recognised(certainty=0.9, evidence="has `cast_config_*`, fields of torchao's Float8LinearConfig")
    return None


SYSTEM = System(
    name="torchao",
    title=TITLE,
    version=VERSION,
    import_=import_,
    export=export,
    recognise=_recognise,
    write=as_json,
    context=(ContextKey(name="mode", meaning="bf16, fp16 or fp32: what the trainer runs outside the linear layers"),),
)
