"""Transformer Engine's recipe objects, as mappings: `{"_target_": "...DelayedScaling", "margin": 0, ...}`.

A recipe says how the matrix multiplications are quantised and nothing else: dtype, masters, loss scale and gradient
reduction live elsewhere. Its classes are pydantic dataclasses that swallow arguments they do not know without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError, close_matches, did_you_mean, listed
from bridge.interop.builders import DELAYED, MODES, ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.module_lists import NUM_LAYERS, schemes_for
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.schemes import SCHEMES, Scheme

if TYPE_CHECKING:
    from bridge.interop.reading.document import Document
    from bridge.precision.module_schemes import ModuleSchemes
    from bridge.registry.config import MixedPrecisionConfig

TITLE = "Transformer Engine 2.20"
MODULE = "transformer_engine.common.recipe"

ATTENTION = {"fp8_dpa": "fp8_dot_product_attention", "fp8_mha": "fp8_multi_head_attention"}
CLASSES = MappingProxyType({row.te_class: row for row in SCHEMES if row.te_class != "CustomRecipe"})
DEFAULT_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3", "nvfp4": "e2m1"}
"""Scheme -> the format that its class takes by itself."""
FACTORY = "bridge.megatron.te.layers.module_factory"
IN_FACTORY = ("fp8", "fp8_recipe", "fp4", "fp4_recipe", "modules", "first_last_layers_bf16", *LAYER_COUNTS, *DELAYED)
DEFAULTS = {"margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"}
"""Argument -> the default of the class `DelayedScaling`; Megatron's own differ."""
QUANTIZERS = {f"fp8_quant_{operand}": None for operand in ("fwd_inp", "fwd_weight", "bwd_grad")}
GEMMS = {f"fp8_gemm_{gemm}": None for gemm in ("fprop", "dgrad", "wgrad")}
UNSUPPORTED: dict[str, dict[str, object]] = {
    "delayed": {"reduce_amax": True, "scaling_factor_compute_algo": None},
    "tensorwise": {**QUANTIZERS, **GEMMS, "use_power_2_scales": False},
    "blockwise": {
        **QUANTIZERS,
        **GEMMS,
        "use_f32_scales": False,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
    },
    "mxfp8": {"margin": 0},
    "nvfp4": {
        **dict.fromkeys(("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"), False),
        **{name.replace("fp8", "fp4"): None for name in QUANTIZERS},
        "fp8_format": "E4M3",
    },
}
"""Scheme -> arguments of its class that have no field, and the value without effect.

Source: Transformer Engine 2.20 common/recipe/__init__.py."""
DEAD = {
    "interval": "ignored since Transformer Engine 1.8",
    "override_linear_precision": "gone since Transformer Engine 2.0, and swallowed without a word",
}
NAMES = ("_target_", "recipe", "class", "type", "name")
OUTSIDE = ("params_dtype", "pipeline_dtype", "autocast_enabled", "autocast_dtype", "grad_reduce_in_fp32")


def import_(payload: object, *, mode: str = "bf16") -> ImportReport:
    """Return what a Transformer Engine recipe asks for: a mapping with the class under `_target_` and its arguments."""
    if not isinstance(payload, Mapping):
        remedy = "Give class and arguments of the recipe."
        raise PayloadError(f"te-recipe: must be a mapping, got {payload!r:.60}. {remedy}")
    if mode not in MODES:
        remedy = "Say what the run around the recipe trains in."
        raise PayloadError(f"mode: must be bf16, fp16 or fp32, got {mode!r}. {remedy}")
    builder = ImportBuilder(TITLE)
    if _is_custom(payload):
        return _import_custom(builder, payload["qfactory"], mode)
    row, key = _class(payload)
    values = {str(name): value for name, value in payload.items() if name != key}
    if isinstance(values.get("kwargs"), Mapping):
        values |= {str(name): value for name, value in values.pop("kwargs").items()}
    builder.map(key, **{f"{row.family}_recipe": row.name})
    _imply_mode(builder, mode)
    _format(row, values, builder)
    for name, value in values.items():
        _argument(row, name, value, builder)
    implied = [name for name in DEFAULTS if row.name == "delayed" and name not in values]
    for name in implied:
        builder.implied(name, DEFAULTS[name], **{row.te_keywords[name]: DEFAULTS[name]})
    return builder.finish(semantics="fp32" if mode == "fp32" else "megatron_o2")


def _imply_mode(builder: ImportBuilder, mode: str) -> None:
    fields = {mode: True} | ({} if mode == "fp32" else {"params_dtype": mode, "pipeline_dtype": mode})
    builder.implied("mode", mode, "a recipe does not say what the run around it trains in", **fields)


def _is_custom(payload: Mapping[Any, Any]) -> bool:
    """Return whether a payload is a `CustomRecipe` over our own factory, as an export writes it."""
    factory = payload.get("qfactory")
    return isinstance(factory, Mapping) and factory.get("_target_") == FACTORY


def _import_custom(builder: ImportBuilder, factory: Mapping[Any, Any], mode: str) -> ImportReport:
    _imply_mode(builder, mode)
    for name, value in factory.items():
        if name in IN_FACTORY:
            builder.map(f"qfactory.{name}", **{str(name): value})
        elif name not in ("_target_", "num_layers"):
            rule = f"must be {listed(IN_FACTORY)}"
            raise PayloadError(f"qfactory: {rule}, got {name!r:.60}. Drop it.")
    return builder.finish(semantics="fp32" if mode == "fp32" else "megatron_o2")


def _class(payload: Mapping[Any, Any]) -> tuple[Scheme, str]:
    key = next((key for key in NAMES if isinstance(payload.get(key), str)), None)
    if key is None:
        rule = "must name the recipe's class, got none"
        raise PayloadError(f"te-recipe: {rule}. Add '_target_': 'DelayedScaling' or another.")
    name = str(payload[key]).rpartition(".")[2]
    if name not in CLASSES:
        hint = did_you_mean(close_matches(name, CLASSES)) or f"Classes: {', '.join(CLASSES)}."
        raise PayloadError(f"{key}: must be a recipe of Transformer Engine, got {payload[key]!r:.80}. {hint}")
    return CLASSES[name], key


def _format(row: Scheme, values: dict[str, Any], builder: ImportBuilder) -> None:
    key = f"{row.family}_format"
    said = values.pop(key, None)
    if said is None:
        default = DEFAULT_FORMATS[row.name]
        builder.implied(key, default.upper(), **{row.family: default})
        return
    text = str(said.get("_target_", said) if isinstance(said, Mapping) else said).rpartition(".")[2].upper()
    if text == "E5M2":
        raise PayloadError(f"{key}: Transformer Engine refuses E5M2 in the forward pass, got {said!r}. Use HYBRID.")
    formats = ("E2M1",) if row.family == "fp4" else ("E4M3", "HYBRID")
    if text not in formats:
        rule = f"must be {' or '.join(formats)} for {row.te_class}"
        raise PayloadError(f"{key}: {rule}, got {said!r:.40}. Use one of them.")
    builder.map(key, **{row.family: text.lower()})


def _argument(row: Scheme, name: str, value: Any, builder: ImportBuilder) -> None:
    field = {**row.te_keywords, **ATTENTION}.get(name)
    unsupported = UNSUPPORTED[row.name]
    if field is not None:
        builder.map(name, **{field: value})
        if field in ATTENTION.values() and row.name == "blockwise" and value:
            rule = f"Transformer Engine refuses it under {row.te_class}"
            raise PayloadError(f"{name}: {rule}, got {value!r}. Set it to false.")
        if name == "fp8_mha" and value and row.name != "delayed":
            detail = "Megatron Core passes it on under delayed scaling only"
            builder.report(name, value, "dead knob", detail, "Drop it.")
    elif name in DEAD:
        keeps_wgrad = isinstance(value, list | tuple) and list(value)[2:3] == [True]
        remedy = "It meant fp8_wgrad=False: drop it." if keeps_wgrad else "Drop it."
        builder.report(name, value, "dead knob", DEAD[name], remedy)
    elif name not in unsupported:
        detail = f"{row.te_class} has no such argument and swallows it without a word"
        builder.report(name, value, "dead knob", detail, "Correct the name, or drop it.")
    elif value == unsupported[name]:
        builder.map(name)
    else:
        detail = "a detail of the quantiser that Megatron Core leaves at its default"
        builder.report(name, value, "unsupported", detail, "Build a recipe of your own (fp8_recipe='custom').")


def export(config: MixedPrecisionConfig, *, num_layers: int | None = None) -> ExportReport:
    """Return the recipe's class and arguments; None where nothing runs below half precision.

    A precision that chooses modules is a `CustomRecipe` with a factory of ours, for `hydra.utils.instantiate`.
    """
    builder = ExportBuilder(config, TITLE)
    row = next((row for row in CLASSES.values() if row.name == config.scheme), None)
    detail = "a recipe says how matrix multiplications are quantised and nothing else"
    for name in (*MODES, *OUTSIDE):
        if name in MODES or builder.values[name] not in (None, False):
            builder.report_if_stated(name, "unsupported", detail, "Set it where the run is configured.")
    if builder.values["modules"] or (config.first_last_layers_bf16 and num_layers is not None):
        schemes = schemes_for(builder, num_layers, available=DEFAULT_FORMATS, setting="qfactory")
        if schemes is not None and schemes.chooses:
            return builder.finish(_custom(builder, schemes))
    if row is None:
        fields = ("fp8", "fp8_recipe") if config.fp8 else ("fp4", "fp4_recipe") if config.fp4 else ()
        detail, remedy = "a quantizer factory is code", "Build CustomRecipe in Python."
        builder.report_if_stated(fields, "unsupported", detail, remedy)
        return builder.finish(None)
    chosen = str(builder.values[row.family]).upper()
    payload: dict[str, Any] = {"_target_": f"{MODULE}.{row.te_class}", f"{row.family}_format": chosen}
    builder.map(row.family, f"{row.family}_format")
    builder.map(f"{row.family}_recipe", "_target_")
    for argument, name in {**row.te_keywords, **ATTENTION}.items():
        if row.name == "blockwise" and builder.values[name]:
            refused = "Transformer Engine refuses FP8 attention under Float8BlockScaling"
            builder.report(name, "unsupported", refused, "Set it to False.")
        elif name != "fp8_multi_head_attention" or row.name == "delayed":
            payload[argument] = builder.values[name]
            builder.map(name, argument)
    if not builder.values["fp8_wgrad"]:
        gone = "gone since Transformer Engine 2.0: the weight gradient runs in FP8"
        builder.report("fp8_wgrad", "dead knob", gone, "Drop it.")
    return builder.finish(payload)


def _custom(builder: ExportBuilder, schemes: ModuleSchemes) -> dict[str, Any]:
    """Return a recipe whose factory gives each module, by its name, the quantizers of its scheme."""
    config, run = builder.config, schemes.run
    wanted = (run, *(row.training.chosen for row in schemes.matchers.matchers if row.training))
    for chosen in dict.fromkeys(one for one in wanted if one is not None and one.scheme in DEFAULT_FORMATS):
        default = DEFAULT_FORMATS[chosen.scheme]
        if chosen.format != default:
            detail = f"Transformer Engine's factory of {chosen.scheme} quantizers has {default}, and no other format"
            remedy = f"{default} there; write a factory for {chosen.format}."
            builder.report("fp8" if chosen == run else "modules", "semantics", detail, remedy)
    off = () if config.scheme == "delayed" else tuple(DELAYED)
    off += () if config.fp8 else ("fp8_recipe",)
    off += () if config.fp4 else ("fp4_recipe",)
    fields = [name for name in IN_FACTORY if builder.values[name] and name not in off]
    for name in fields:
        builder.map(name, "qfactory")
    factory = {"_target_": FACTORY, **{name: builder.values[name] for name in fields}}
    if schemes.num_layers is not None:
        factory["num_layers"] = schemes.num_layers
    return {"_target_": f"{MODULE}.CustomRecipe", "qfactory": factory}


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for a Transformer Engine recipe, or None."""
    if _is_custom(document.mapping):
        return Recognised(0.97, f"names the factory `{FACTORY}`")
    named = (str(document.mapping.get(key)).rpartition(".")[2] for key in NAMES)
    found = next((name for name in named if name in CLASSES), None)
    return Recognised(0.97, f"names the class `{found}`") if found else None


CONTEXT = (
    ContextKey("mode", "what the run around the recipe trains in: bf16, fp16 or fp32", default="bf16"),
    NUM_LAYERS,
)
SYSTEM = System(
    "te-recipe", "Transformer Engine recipe", "2.20.2", import_, export, recognise, as_json, context=CONTEXT
)
