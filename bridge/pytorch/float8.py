"""FP8 and FP4 linear layers of a recipe: torchao's config, or layers emulated on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import BackendUnavailableError, PrecisionTypeError
from bridge.precision.dtypes import torch_dtype
from bridge.pytorch.loop import checked, for_plain_torch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from bridge.registry.config import MixedPrecisionConfig

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
    for_plain_torch(config)
    if config.fp8 is None and config.fp4 is None:
        return None
    settings = float8_settings(checked(config))
    if not settings:
        raise BackendUnavailableError(
            f"float8_linear_config_for: torchao has no {config.scheme} scaling. "
            "Use a tensorwise or MXFP8 recipe, or emulate_linears."
        )
    try:
        return _torchao_object(settings, emulate=emulate)
    except ImportError as error:
        raise BackendUnavailableError(
            f"float8_linear_config_for: torchao 0.18 is needed ({error}). pip install torchao==0.18.0."
        ) from None


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
            itself an `nn.Linear`, or was converted before.
        BackendUnavailableError: The recipe has rows of `modules`.
    """
    for_plain_torch(config)
    if config.fp8 is None and config.fp4 is None:
        return []
    import torch

    from bridge.numerics.spec import GemmPrecision
    from bridge.pytorch.emulated_linear import EmulatedLinear

    skipped = (skip,) if isinstance(skip, str) else tuple(skip)
    scheme, format_ = (config.fp8_recipe, config.fp8) if config.fp8 else (config.fp4_recipe, config.fp4)
    precision = GemmPrecision(
        scheme=scheme,
        format=str(format_),
        margin=config.fp8_margin if scheme == "delayed" else 0,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )
    linears = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    if any(isinstance(module, EmulatedLinear) for module in model.modules()):
        raise PrecisionTypeError(
            "model: must not be emulated already, got a model with EmulatedLinear layers. Convert a fresh one, once."
        )
    if not linears or "" in linears:
        what = type(model).__name__
        rule = "must contain nn.Linear modules to replace"
        raise PrecisionTypeError(f"model: {rule}, got a bare {what}. Wrap a single layer in nn.Sequential.")
    for name in skipped:
        if name not in linears:
            raise PrecisionTypeError(
                f"skip: must name nn.Linear modules of the model, got {name!r}. Take names from model.named_modules()."
            )
    replaced = [name for name in linears if name not in skipped]
    for name in replaced:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, EmulatedLinear.of(linears[name], precision))
    return replaced


def float8_settings(config: MixedPrecisionConfig) -> dict[str, dict[str, Any]]:
    """Return the recipe as torchao's settings; empty where torchao has no such scheme. Needs neither torch nor torchao.

    Under tensorwise scaling that is `{"float8": ...}`, under MXFP8 `{"mxfp8": ...}`. A weight gradient in high
    precision switches off both operands of that GEMM.
    """
    if config.fp8 is None:
        return {}
    if config.fp8_recipe == "mxfp8":
        return {"mxfp8": {"recipe": "mxfp8_rceil" if config.fp8_wgrad else "mxfp8_rceil_wgrad_with_hp"}}
    if config.fp8_recipe != "tensorwise":
        return {}
    target = {"target_dtype": "e4m3"} if config.fp8 == "e4m3" else {}  # of both casts of an operand, on or off
    kinds = dict.fromkeys(OPERANDS, "dynamic") | ({} if config.fp8_wgrad else dict.fromkeys(OF_WGRAD, "disabled"))
    float8: dict[str, Any] = {f"cast_config_{name}": {"scaling_type": kind, **target} for name, kind in kinds.items()}
    if config.fp8_wgrad and not target:
        float8 = {"recipe_name": "tensorwise"}
    return {"float8": {**float8, "enable_fsdp_float8_all_gather": config.fp8_param_gather}}


def _torchao_object(settings: Mapping[str, Any], *, emulate: bool) -> Any:
    if "mxfp8" in settings:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

        recipe = settings["mxfp8"]["recipe"]
        made = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe("mxfp8_emulated_rceil" if emulate else recipe))
        made.wgrad_with_hp = recipe.endswith("wgrad_with_hp")
        return made
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType

    arguments: dict[str, Any] = {"emulate": emulate}
    for name, value in settings["float8"].items():
        if name.startswith("cast_config_"):
            target = value.get("target_dtype")
            kind = {"scaling_type": ScalingType(value["scaling_type"])}
            arguments[name] = CastConfig(**kind, **({"target_dtype": torch_dtype(target)} if target else {}))
        elif name != "recipe_name":  # tensorwise is what the class's own defaults are
            arguments[name] = value
    return Float8LinearConfig(**arguments)
