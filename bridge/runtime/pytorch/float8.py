"""FP8 and FP4 linear layers of a recipe: torchao's config, or layers emulated on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import BackendUnavailableError, PrecisionTypeError
from bridge.precision.matchers import Chosen
from bridge.precision.mode import scheme_of
from bridge.precision.module_schemes import ModuleSchemes
from bridge.precision.schemes import FP4_SCHEMES
from bridge.precision.statements import field_value
from bridge.precision.values import torch_dtype
from bridge.registry.config import MixedPrecisionConfig
from bridge.runtime.pytorch.linear_schemes import linear_schemes
from bridge.runtime.pytorch.loop import checked, require_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

OPERANDS = ("input", "weight", "grad_output")
OF_WGRAD = ("input_for_grad_weight", "grad_output_for_grad_weight")


def float8_linear_config_for(config: MixedPrecisionConfig, *, emulate: bool = False) -> Any:
    """Return torchao's config for the recipe's linear layers, None where the recipe has neither FP8 nor FP4.

    Args:
        config: The recipe.
        emulate: Compute in high precision what FP8 hardware would, for any device.

    Returns:
        A `Float8LinearConfig` (tensorwise) or `MXFP8TrainingOpConfig` (MXFP8).

    Raises:
        BackendUnavailableError: torchao is not installed, or has no such scheme, or the recipe has rows of `modules`.
    """
    rows = field_value(checked(config), "modules")
    if rows:
        raise BackendUnavailableError(
            "mixed_precision.modules: one config of torchao holds no choice of modules, got "
            f"{len(rows)} row{'s' * (len(rows) > 1)}. Use convert_linears(model, config), which follows them."
        )
    if scheme_of(config) is None:
        return None
    settings = float8_settings(config)
    if not settings:
        raise BackendUnavailableError(
            f"float8_linear_config_for: torchao has no {scheme_of(config)} scaling. "
            "Use a tensorwise or MXFP8 recipe, or emulate_linears."
        )
    try:
        return _torchao_object(settings, emulate=emulate)
    except ImportError as error:
        raise BackendUnavailableError(
            f"float8_linear_config_for: torchao 0.18 is needed ({error}). pip install torchao==0.18.0."
        ) from None


def convert_linears(
    model: torch.nn.Module, config: MixedPrecisionConfig, *, emulate: bool = False
) -> dict[str, Chosen]:
    """Convert the linear layers of a model with torchao, each in the scheme that the recipe gives it.

    Rows of `modules` and `first_last_layers_bf16` choose the layers, and `bridge.precision.foreign_names` says which of
    Megatron's layers a layer is. The output layer and routers stay as they are, as in Megatron.

    Args:
        model: Converted in place.
        config: The recipe.
        emulate: Compute in high precision what FP8 hardware would, for any device.

    Returns:
        Scheme and format of each converted layer, by name.

    Raises:
        BackendUnavailableError: torchao is not installed, or has no such scheme; nothing is converted.
        PrecisionTypeError: A row takes no layer of the model.
    """
    chosen = {
        name: one for name, one in linear_schemes(model, checked(config)).items() if one is not None
    }
    objects = {
        one: float8_linear_config_for(with_one_scheme(config, one), emulate=emulate)
        for one in chosen.values()
    }
    if not objects:
        return {}
    from torchao.float8 import convert_to_float8_training
    from torchao.quantization import quantize_

    for one, made in objects.items():

        def takes(_module: torch.nn.Module, name: str, one: Chosen = one) -> bool:
            return chosen.get(name) == one

        if one.scheme == "mxfp8":
            quantize_(model, made, filter_fn=takes)
        else:
            convert_to_float8_training(model, config=made, module_filter_fn=takes)
    return chosen


def with_one_scheme(config: MixedPrecisionConfig, chosen: Chosen) -> MixedPrecisionConfig:
    """Return the recipe with one scheme for all modules."""
    family = "fp4" if chosen.scheme in FP4_SCHEMES and chosen.format == "e2m1" else "fp8"
    others = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("modules", "fp8", "fp4")
    }
    return MixedPrecisionConfig.from_dict(
        {**others, family: chosen.format, f"{family}_recipe": chosen.scheme}
    )


def emulate_linears(
    model: torch.nn.Module, config: MixedPrecisionConfig, *, skip: str | Collection[str] = ()
) -> list[str]:
    """Run the model's linear layers in the recipe's FP8 or FP4, emulated; nothing happens without either.

    Args:
        model: Its `nn.Linear` modules are replaced in place and keep their parameters.
        config: The recipe.
        skip: Names of `nn.Linear` modules to leave alone, as in `model.named_modules()`; a string is one name.

    Returns:
        The names of what was replaced.

    Raises:
        PrecisionTypeError: `skip` names what is no linear layer of the model, or the model has none to replace: it is
            itself an `nn.Linear`, or was converted before; or a row of `modules` takes no layer of it.
    """
    rows = field_value(require_config(config), "modules")
    if scheme_of(config) is None and not rows:
        return []
    from bridge.runtime.numerics.spec import GemmPrecision
    from bridge.runtime.pytorch.emulated_linear import EmulatedLinear

    skipped = (skip,) if isinstance(skip, str) else tuple(skip)
    linears = _linears_to_replace(model, skipped)
    chosen = (
        linear_schemes(model, config)
        if rows
        else dict.fromkeys(linears, ModuleSchemes.of_run(config))
    )
    replaced = {
        name: one for name in linears if name not in skipped and (one := chosen[name]) is not None
    }
    for name, one in replaced.items():
        parent, _, child = name.rpartition(".")
        precision = GemmPrecision(
            scheme=one.scheme,
            format=one.format,
            margin=config.fp8_margin if one.scheme == "delayed" else 0,
            amax_history_len=config.fp8_amax_history_len,
            amax_compute_algo=config.fp8_amax_compute_algo,
        )
        setattr(model.get_submodule(parent), child, EmulatedLinear.of(linears[name], precision))
    return list(replaced)


def _linears_to_replace(
    model: torch.nn.Module, skipped: Collection[str]
) -> dict[str, torch.nn.Linear]:
    """Return the linear layers of a model by name, those to be skipped among them."""
    import torch

    from bridge.runtime.pytorch.emulated_linear import EmulatedLinear

    linears = {
        name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear
    }
    if any(isinstance(module, EmulatedLinear) for module in model.modules()):
        rule = "must not be emulated already, got a model with EmulatedLinear layers"
        raise PrecisionTypeError(f"model: {rule}. Convert a fresh one, once.")
    if not linears or "" in linears:
        rule, what = "must contain nn.Linear modules to replace", type(model).__name__
        raise PrecisionTypeError(
            f"model: {rule}, got a bare {what}. Wrap a single layer in nn.Sequential."
        )
    for name in (one for one in skipped if one not in linears):
        rule, remedy = (
            "must name nn.Linear modules of the model",
            "Take names from model.named_modules().",
        )
        raise PrecisionTypeError(f"skip: {rule}, got {name!r}. {remedy}")
    return linears


def float8_settings(config: MixedPrecisionConfig) -> dict[str, dict[str, Any]]:
    """Return the recipe as torchao's settings; empty where torchao has no such scheme. Needs neither torch nor torchao.

    Under tensorwise scaling that is `{"float8": ...}`, under MXFP8 `{"mxfp8": ...}`. A weight gradient in high
    precision switches off both operands of that GEMM.
    """
    if config.fp8 is None:
        return {}
    if config.fp8_recipe == "mxfp8":
        return {
            "mxfp8": {"recipe": "mxfp8_rceil" if config.fp8_wgrad else "mxfp8_rceil_wgrad_with_hp"}
        }
    if config.fp8_recipe != "tensorwise":
        return {}
    target = (
        {"target_dtype": "e4m3"} if config.fp8 == "e4m3" else {}
    )  # of both casts of an operand, on or off
    kinds = dict.fromkeys(OPERANDS, "dynamic") | (
        {} if config.fp8_wgrad else dict.fromkeys(OF_WGRAD, "disabled")
    )
    float8: dict[str, Any] = {
        f"cast_config_{name}": {"scaling_type": kind, **target} for name, kind in kinds.items()
    }
    if config.fp8_wgrad and not target:
        float8 = {"recipe_name": "tensorwise"}
    return {"float8": {**float8, "enable_fsdp_float8_all_gather": config.fp8_param_gather}}


def _torchao_object(settings: Mapping[str, Any], *, emulate: bool) -> Any:
    if "mxfp8" in settings:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

        recipe = settings["mxfp8"]["recipe"]
        made = MXFP8TrainingOpConfig.from_recipe(
            MXFP8TrainingRecipe("mxfp8_emulated_rceil" if emulate else recipe)
        )
        made.wgrad_with_hp = recipe.endswith("wgrad_with_hp")
        return made
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType

    arguments: dict[str, Any] = {"emulate": emulate}
    for name, value in settings["float8"].items():
        if name.startswith("cast_config_"):
            target = (
                {"target_dtype": torch_dtype(value["target_dtype"])}
                if "target_dtype" in value
                else {}
            )
            arguments[name] = CastConfig(scaling_type=ScalingType(value["scaling_type"]), **target)
        elif name != "recipe_name":  # tensorwise is what the class's own defaults are
            arguments[name] = value
    return Float8LinearConfig(**arguments)
