"""FP8 and FP4 linear layers of a recipe: torchao's config, or layers emulated on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import BackendUnavailableError, PrecisionTypeError
from bridge.precision.coercion import get_torch_dtype
from bridge.precision.matchers import SchemeChoice
from bridge.precision.mode import get_scheme
from bridge.precision.module_schemes import ModuleSchemes
from bridge.precision.schemes import FP4_SCHEMES
from bridge.precision.statements import get_field_value
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.runtime.pytorch.linear_schemes import linear_schemes
from bridge.runtime.pytorch.loop import finalize_config, require_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from bridge.runtime.numerics.spec import GemmPrecision

CAST_OPERANDS = ("input", "weight", "grad_output")
"""Operands of fprop and dgrad, as torchao's config names their casts."""
WGRAD_CAST_OPERANDS = ("input_for_grad_weight", "grad_output_for_grad_weight")
"""Operands of wgrad, as torchao's config names their casts."""


def float8_linear_config_for(config: MixedPrecisionConfig, *, emulate: bool = False) -> Any:
    """Return torchao's config for the recipe's linear layers, or None without FP8 and FP4.

    Args:
        config: The recipe.
        emulate: Whether to compute the results of FP8 hardware in high precision, on any device.

    Returns:
        A `Float8LinearConfig` (tensorwise) or `MXFP8TrainingOpConfig` (MXFP8).

    Raises:
        BackendUnavailableError: torchao is not installed, or has no such scheme, or the recipe has
            rows of `modules`.
    """
    rows = get_field_value(finalize_config(config), "modules")
    if rows:
        count = "1 row"
        if len(rows) > 1:
            count = f"{len(rows)} rows"
        raise BackendUnavailableError(
            "mixed_precision.modules: one config of torchao holds no choice of modules, got "
            f"{count}. Use convert_linears(model, config), which follows them."
        )
    if get_scheme(config) is None:
        return None
    settings = make_torchao_settings(config)
    if not settings:
        raise BackendUnavailableError(
            f"float8_linear_config_for: torchao has no {get_scheme(config)} scaling. "
            "Use a tensorwise or MXFP8 recipe, or emulate_linears."
        )
    try:
        return _make_torchao_config(settings, emulate=emulate)
    except ImportError as error:
        raise BackendUnavailableError(
            f"float8_linear_config_for: torchao 0.18 is needed ({error}). "
            "pip install torchao==0.18.0."
        ) from None


def convert_linears(
    model: torch.nn.Module, config: MixedPrecisionConfig, *, emulate: bool = False
) -> dict[str, SchemeChoice]:
    """Convert the linear layers of a model with torchao, each in its scheme of the recipe.

    Rows of `modules` and `first_last_layers_bf16` choose the layers, and
    `bridge.precision.foreign_names` has the layer of Megatron for each name. The output layer and
    routers are not converted, as in Megatron.

    Args:
        model: Converted in place.
        config: The recipe.
        emulate: Whether to compute the results of FP8 hardware in high precision, on any device.

    Returns:
        Scheme and format of each converted layer, by name.

    Raises:
        BackendUnavailableError: torchao is not installed, or has no such scheme. Nothing is
            converted.
        PrecisionTypeError: A row selects no layer of the model.
    """
    schemes = linear_schemes(model, finalize_config(config))
    chosen = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    configs: dict[SchemeChoice, Any] = {}
    for scheme in dict.fromkeys(chosen.values()):
        recipe = make_single_scheme_recipe(config, scheme)
        configs[scheme] = float8_linear_config_for(recipe, emulate=emulate)
    if not configs:
        return {}
    from torchao.float8 import convert_to_float8_training
    from torchao.quantization import quantize_

    for scheme, torchao_config in configs.items():

        def has_scheme(_module: torch.nn.Module, name: str, scheme: SchemeChoice = scheme) -> bool:
            return chosen.get(name) == scheme

        if scheme.scheme == "mxfp8":
            quantize_(model, torchao_config, filter_fn=has_scheme)
        else:
            convert_to_float8_training(model, config=torchao_config, module_filter_fn=has_scheme)
    return chosen


def make_single_scheme_recipe(
    config: MixedPrecisionConfig, chosen: SchemeChoice
) -> MixedPrecisionConfig:
    """Return a recipe with one scheme for all modules, and otherwise the values of a recipe.

    Args:
        config: The recipe.
    """
    family = "fp8"
    if chosen.scheme in FP4_SCHEMES and chosen.format == "e2m1":
        family = "fp4"
    values = config.to_dict()
    for name in ("modules", "fp8", "fp4"):
        values.pop(name, None)
    values[family] = chosen.format
    values[f"{family}_recipe"] = chosen.scheme
    return MixedPrecisionConfig.from_dict(values)


def emulate_linears(
    model: torch.nn.Module, config: MixedPrecisionConfig, *, skip: str | Collection[str] = ()
) -> list[str]:
    """Replace the model's linear layers by layers that emulate the recipe's FP8 or FP4.

    A recipe without FP8 and FP4 replaces nothing.

    Args:
        model: Its `nn.Linear` modules are replaced in place and keep their parameters.
        config: The recipe.
        skip: Names of `nn.Linear` modules that are not replaced, as in `model.named_modules()`; a
            string is one name.

    Returns:
        The names of the replaced layers.

    Raises:
        PrecisionTypeError: `skip` names no linear layer of the model. Or the model has no layer to
            replace, is itself an `nn.Linear`, or was converted before. Or a row of `modules`
            selects none of its layers.
    """
    rows = get_field_value(require_config(config), "modules")
    if get_scheme(config) is None and not rows:
        return []
    from bridge.runtime.pytorch.emulated_linear import EmulatedLinear

    skipped = tuple(skip)
    if isinstance(skip, str):
        skipped = (skip,)
    linears = _find_linears_to_replace(model, skipped)
    if rows:
        chosen = linear_schemes(model, config)
    else:
        chosen = dict.fromkeys(linears, ModuleSchemes.get_run_scheme(config))
    replaced = []
    for name, linear in linears.items():
        scheme = chosen[name]
        if scheme is None or name in skipped:
            continue
        parent, _, child = name.rpartition(".")
        layer = EmulatedLinear.from_linear(linear, _make_gemm_precision(config, scheme))
        setattr(model.get_submodule(parent), child, layer)
        replaced.append(name)
    return replaced


def _make_gemm_precision(config: MixedPrecisionConfig, chosen: SchemeChoice) -> GemmPrecision:
    """Return the precision of a layer's GEMMs in a scheme, with the recipe's delayed scaling."""
    from bridge.runtime.numerics.spec import GemmPrecision

    margin = 0
    if chosen.scheme == "delayed":
        margin = config.fp8_margin
    return GemmPrecision(
        scheme=chosen.scheme,
        format=chosen.format,
        margin=margin,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )


def _find_linears_to_replace(
    model: torch.nn.Module, skipped: Collection[str]
) -> dict[str, torch.nn.Linear]:
    """Return name -> linear layer of a model, including the skipped layers.

    Raises:
        PrecisionTypeError: A skipped name is not a linear layer, or the model has no layer to
            replace, is a linear layer, or was converted before.
    """
    import torch

    from bridge.runtime.pytorch.emulated_linear import EmulatedLinear

    linears = {}
    for name, module in model.named_modules():
        if isinstance(module, EmulatedLinear):
            rule = "must not be emulated already, got a model with EmulatedLinear layers"
            raise PrecisionTypeError(f"model: {rule}. Convert a fresh one, once.")
        if type(module) is torch.nn.Linear:
            linears[name] = module
    if not linears or "" in linears:
        rule = f"must contain nn.Linear modules to replace, got a bare {type(model).__name__}"
        raise PrecisionTypeError(f"model: {rule}. Wrap a single layer in nn.Sequential.")
    for name in skipped:
        if name not in linears:
            rule = f"must name nn.Linear modules of the model, got {name!r}"
            raise PrecisionTypeError(f"skip: {rule}. Take names from model.named_modules().")
    return linears


def make_torchao_settings(config: MixedPrecisionConfig) -> dict[str, dict[str, Any]]:
    """Return a recipe as torchao's settings, in plain data; empty if torchao has no such scheme.

    The result is `{"float8": ...}` under tensorwise scaling and `{"mxfp8": ...}` under MXFP8. With
    a weight gradient in high precision, the casts of both operands of wgrad are off. Neither torch
    nor torchao is imported.
    """
    if config.fp8 is None:
        return {}
    if config.fp8_recipe == "mxfp8":
        recipe = "mxfp8_rceil"
        if not config.fp8_wgrad:
            recipe = "mxfp8_rceil_wgrad_with_hp"
        return {"mxfp8": {"recipe": recipe}}
    if config.fp8_recipe != "tensorwise":
        return {}
    float8: dict[str, Any] = {}
    if config.fp8_wgrad and config.fp8 != "e4m3":
        float8["recipe_name"] = "tensorwise"
    else:
        scaling_types = dict.fromkeys(CAST_OPERANDS, "dynamic")
        if not config.fp8_wgrad:
            scaling_types.update(dict.fromkeys(WGRAD_CAST_OPERANDS, "disabled"))
        for name, scaling_type in scaling_types.items():
            cast = {"scaling_type": scaling_type}
            if config.fp8 == "e4m3":
                # torchao needs the same dtype in both casts of an operand, even if one is off.
                cast["target_dtype"] = "e4m3"
            float8[f"cast_config_{name}"] = cast
    float8["enable_fsdp_float8_all_gather"] = config.fp8_param_gather
    return {"float8": float8}


def _make_torchao_config(settings: Mapping[str, Any], *, emulate: bool) -> Any:
    """Return torchao's config of the settings that `make_torchao_settings` returned.

    Raises:
        ImportError: torchao is not installed, or has no such scheme.
    """
    if "mxfp8" in settings:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

        recipe = settings["mxfp8"]["recipe"]
        recipe_name = recipe
        if emulate:
            recipe_name = "mxfp8_emulated_rceil"
        config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe(recipe_name))
        # There is no emulated recipe with a weight gradient in high precision.
        config.wgrad_with_hp = recipe.endswith("wgrad_with_hp")
        return config
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType

    arguments: dict[str, Any] = {"emulate": emulate}
    for name, value in settings["float8"].items():
        if name.startswith("cast_config_"):
            cast: dict[str, Any] = {"scaling_type": ScalingType(value["scaling_type"])}
            if "target_dtype" in value:
                cast["target_dtype"] = get_torch_dtype(value["target_dtype"])
            arguments[name] = CastConfig(**cast)
        elif name != "recipe_name":  # the defaults of the class are tensorwise
            arguments[name] = value
    return Float8LinearConfig(**arguments)
