"""`compute_effective_fields`: the fields of a config that have an effect.

Two configs that state different fields can mean the same run. A scheme has no effect while its
format is off. Amax settings have no effect outside delayed scaling. An unstated dtype equals the
dtype of the mode. `compute_effective_fields` drops fields without effect and fills in derived
values, so that two precisions can be compared. `find_equivalent_recipe` finds the registered recipe
with the same effective fields.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from bridge.errors import BridgeWarning
from bridge.precision.mode import get_mode
from bridge.precision.precision_config import MEGATRON_FIELDS
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.precision.statements import is_stated
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.nearest_recipe import has_same_computation
from bridge.registry.registry import REGISTRY
from bridge.rules.inert_fields import LOSS_SCALER_FIELDS, find_inert_fields

DEFAULT_LAYER_COUNT = 1
"""Layers at each end that Megatron keeps in BF16 if their number is not stated."""
ALIAS_FIELDS = ("fp8_param", "fp4_param")
"""Other names of `fp8_param_gather` and `fp4_param_gather`."""


def compute_effective_fields(config: MixedPrecisionConfig) -> dict[str, Any]:
    """Return the fields with an effect. Unstated dtypes and numbers of layers are filled in."""
    mode = get_mode(config)
    values = config.to_dict(full=True)
    values["fp32"] = mode == "fp32"
    values["params_dtype"] = values["params_dtype"] or mode
    values["pipeline_dtype"] = values["pipeline_dtype"] or mode
    values["autocast_dtype"] = values["autocast_dtype"] or values["params_dtype"]
    if config.first_last_layers_bf16:
        for name in LAYER_COUNTS:
            if not is_stated(config, name):
                values[name] = DEFAULT_LAYER_COUNT
    values["modules"] = values["modules"] or None  # an empty list has no effect
    values["loss_scale"] = values["loss_scale"] or None  # for Megatron, 0 means unset
    return _remove_names(values, {*collect_inert_everywhere(config), *ALIAS_FIELDS})


def collect_inert_everywhere(config: MixedPrecisionConfig) -> dict[str, str]:
    """Return each field that has no effect in Megatron Core or in any other system -> the reason.

    Under autocast to FP16, other systems scale the loss in any mode, and Megatron Core only in the
    mode FP16. So the fields of the loss scaler have an effect under such autocast.
    """
    inert = find_inert_fields(config)
    values = config.to_dict()
    dtype = values.get("autocast_dtype") or values.get("params_dtype") or get_mode(config)
    if config.autocast_enabled and dtype == "fp16" and not config.loss_scale:
        return _remove_names(inert, LOSS_SCALER_FIELDS)
    return inert


def find_equivalent_recipe(config: MixedPrecisionConfig) -> str | None:
    """Return the name of the first registered recipe with the same effective fields, or None.

    Recipes with a misleading name are skipped. Fields that only Megatron has, such as
    `num_layers_at_start_in_bf16`, are compared only for a recipe that states some of them.
    """
    wanted = compute_effective_fields(config)
    for recipe in REGISTRY.recipes():
        if "misnamed" in recipe.tags:
            continue
        candidate = _maybe_get_recipe(recipe.name)
        if candidate is None or not has_same_computation(candidate, config):
            continue
        ignored: Collection[str] = MEGATRON_FIELDS
        if candidate.stated.intersection(MEGATRON_FIELDS):
            ignored = ()
        fields = compute_effective_fields(candidate)
        if _remove_names(fields, ignored) == _remove_names(wanted, ignored):
            return recipe.name
    return None


def _maybe_get_recipe(name: str) -> MixedPrecisionConfig | None:
    """Return the config of a recipe. None if a plugin's recipe fails."""
    with warnings.catch_warnings(action="ignore", category=BridgeWarning):
        try:
            return REGISTRY.get(name)
        except Exception:  # noqa: BLE001  the code of a plugin may fail in any way
            return None


def _remove_names(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a mapping without some of its names."""
    return {name: value for name, value in values.items() if name not in names}
