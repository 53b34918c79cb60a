"""What a config *means* once what has no effect is left out: the equality under which precisions are compared.

Two configs that state different fields can ask for the same run: a scheme is unread while its format is off, amax
settings are unread outside delayed scaling, a dtype that nobody stated is that of the mode. `meaning` leaves out what
is unread and fills in what is derived; `recipe_named` finds the registered recipe of that meaning.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeWarning
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES
from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["meaning", "recipe_named", "semantics_of"]

DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
FP8_ONLY = ("fp8_recipe", "fp8_wgrad", "fp8_param", "fp8_param_gather")
FP4_ONLY = ("fp4_recipe", "fp4_param", "fp4_param_gather")
SCHEME_SETTINGS = tuple(
    sorted({name for row in (*FP8_SCHEMES.values(), *FP4_SCHEMES.values()) for name in row.settings})
)


def meaning(config: MixedPrecisionConfig) -> dict[str, Any]:
    """Return the fields that have an effect, as they act: dtypes resolved, unread fields left out. Needs no torch."""
    values = config.to_dict(full=True)
    values["fp32"] = config.mode == "fp32"
    values["params_dtype"] = values["params_dtype"] or config.mode
    values["pipeline_dtype"] = values["pipeline_dtype"] or config.mode
    values["autocast_dtype"] = values["autocast_dtype"] or values["params_dtype"]
    unread = set()
    if not config.autocast_enabled:
        unread.add("autocast_dtype")
    if config.mode == "fp32":
        unread.add("grad_reduce_in_fp32")  # gradients have the dtype of the weights, which is FP32
    unread |= _unread_of_low_precision(config, values) | _unread_of_loss_scale(config, values)
    for twin in ("fp8_param", "fp4_param"):
        unread.add(twin)  # the other name of *_param_gather
    return {name: value for name, value in values.items() if name not in unread}


def _unread_of_low_precision(config: MixedPrecisionConfig, values: dict[str, Any]) -> set[str]:
    unread: set[str] = set()
    if config.fp8 is None:
        unread.update(FP8_ONLY)
    if config.fp4 is None:
        unread.update(FP4_ONLY)
    rows = (
        FP8_SCHEMES.get(config.fp8_recipe) if config.fp8 else None,
        FP4_SCHEMES.get(config.fp4_recipe) if config.fp4 else None,
    )
    read = {name for row in rows if row is not None for name in row.settings}
    unread.update(name for name in SCHEME_SETTINGS if name not in read)
    if not config.first_last_layers_bf16 or (config.fp8 is None and config.fp4 is None):
        unread.update((*LAYER_COUNTS, "first_last_layers_bf16"))
    else:
        values.update({name: 1 for name in LAYER_COUNTS if not config.is_stated(name)})  # Megatron's own count
    return unread


def _unread_of_loss_scale(config: MixedPrecisionConfig, values: dict[str, Any]) -> set[str]:
    values["loss_scale"] = values["loss_scale"] or None  # Megatron takes 0 for unset
    scaled = config.fp16 or (config.autocast_enabled and values["autocast_dtype"] == "fp16")
    return set() if scaled and values["loss_scale"] is None else set(DYNAMIC_SCALE)


def recipe_named(config: MixedPrecisionConfig) -> str | None:
    """Return the name of the first registered recipe that means the same, or None; misnamed ones are passed over."""
    wanted = meaning(config)
    for recipe in REGISTRY.recipes():
        if "misnamed" in recipe.tags:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BridgeWarning)
            try:
                candidate = REGISTRY.get(recipe.name)
            except Exception:  # noqa: BLE001, S112  a plugin's recipe may fail in any way, and is no match then
                continue
        if meaning(candidate) == wanted:
            return recipe.name
    return None


def semantics_of(config: MixedPrecisionConfig) -> str:
    """Return which of `contract.SEMANTICS` a config asks of Megatron Core.

    FP32 weights under autocast are O1. In FP16 that is `fp16=True` with `params_dtype="fp32"`, which keeps the loss
    scale; in BF16 it is `fp32=True`, as in the recipe `bf16_autocast_mixed`.
    """
    if config.autocast_enabled and (config.to_dict().get("params_dtype") or config.mode) == "fp32":
        return "amp_o1"
    return "fp32" if config.mode == "fp32" else "megatron_o2"
