"""The meaning of a config, without fields that have no effect: the equality under which precisions are compared.

Two configs that state different fields can ask for the same run: a scheme is unread while its
format is off, amax settings are unread outside delayed scaling, an unstated dtype is that of the
mode. `meaning` leaves out what is unread and fills in what is derived; `recipe_named` finds the
registered recipe of that meaning.
"""

import warnings
from collections.abc import Collection
from typing import Any

from bridge.errors import BridgeWarning
from bridge.precision.config import MEGATRON_FIELDS
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import mode_of
from bridge.precision.statements import is_stated
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.nearest import compute_alike
from bridge.registry.registry import REGISTRY
from bridge.rules.inert import SCALER_SCHEDULE, inert_fields


def meaning(config: MixedPrecisionConfig) -> dict[str, Any]:
    """Return the fields that have an effect, as they act: dtypes resolved, unread fields left out.

    Needs no torch.
    """
    values = config.to_dict(full=True)
    values["fp32"] = mode_of(config) == "fp32"
    values["params_dtype"] = values["params_dtype"] or mode_of(config)
    values["pipeline_dtype"] = values["pipeline_dtype"] or mode_of(config)
    values["autocast_dtype"] = values["autocast_dtype"] or values["params_dtype"]
    if config.first_last_layers_bf16:
        values.update(
            {name: 1 for name in LAYER_COUNTS if not is_stated(config, name)}
        )  # Megatron's own count
    values["modules"] = values["modules"] or None  # no rows are none
    values["loss_scale"] = values["loss_scale"] or None  # Megatron takes 0 for unset
    unread = {
        *unread_fields(config),
        "fp8_param",
        "fp4_param",
    }  # the last two: other names of *_param_gather
    return {name: value for name, value in values.items() if name not in unread}


def unread_fields(config: MixedPrecisionConfig) -> dict[str, str]:
    """Return each field without effect, with the reason.

    Autocast to FP16 needs a loss scale where FP16 would.
    """
    found = inert_fields(config)
    values = config.to_dict()
    dtype = values.get("autocast_dtype") or values.get("params_dtype") or mode_of(config)
    if config.autocast_enabled and dtype == "fp16" and not config.loss_scale:
        return {name: why for name, why in found.items() if name not in SCALER_SCHEDULE}
    return found


def recipe_named(config: MixedPrecisionConfig) -> str | None:
    """Return the name of the first registered recipe that means the same, or None.

    Misnamed ones are passed over.

    A recipe that states no field of Megatron's own fits a config that states some over it.
    """
    wanted = meaning(config)
    for recipe in REGISTRY.recipes():
        if "misnamed" in recipe.tags:
            continue
        with warnings.catch_warnings(action="ignore", category=BridgeWarning):
            try:
                candidate = REGISTRY.get(recipe.name)
            except Exception:  # noqa: BLE001, S112  a plugin's recipe may fail in any way, and is no match then
                continue
        if not compute_alike(candidate, config):
            continue
        ours = () if candidate.stated.intersection(MEGATRON_FIELDS) else MEGATRON_FIELDS
        if _without(meaning(candidate), ours) == _without(wanted, ours):
            return recipe.name
    return None


def _without(values: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def semantics_of(config: MixedPrecisionConfig) -> str:
    """Return which of `reports.SEMANTICS` a config asks of Megatron Core.

    FP32 weights under autocast are O1. In FP16 that is `fp16=True` with `params_dtype="fp32"`,
    which keeps the loss scale; in BF16 it is `fp32=True`, as in the recipe `bf16_autocast_mixed`.
    """
    if (
        config.autocast_enabled
        and (config.to_dict().get("params_dtype") or mode_of(config)) == "fp32"
    ):
        return "amp_o1"
    return "fp32" if mode_of(config) == "fp32" else "megatron_o2"
