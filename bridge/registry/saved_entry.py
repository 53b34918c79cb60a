"""`make_saved_entry`: a precision as an entry of the YAML that Megatron Bridge saves for a run.

Megatron Bridge builds only objects of its classes from a file, and its `MixedPrecisionConfig` states
every field. A field that our config does not state is written with the value of its owner: after
`setup` with the value itself, before `setup` with a reference that OmegaConf resolves:

    fp8_margin: ${oc.select:model.fp8_margin,${oc.select:model.transformer.fp8_margin,0}}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bridge.precision.coercion import get_torch_dtype
from bridge.precision.mode import FILLED_DTYPE_FIELDS, get_mode, is_family_on
from bridge.precision.precision_config import FIELDS, MEGATRON_BRIDGE_FIELDS, PrecisionConfig
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.precision.statements import get_field_value, is_stated, list_field_names
from bridge.precision.subjects import SCALER

if TYPE_CHECKING:
    from bridge.rules.sync_row import SyncRow

PEER_TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
"""The import path of Megatron Bridge's class of the same name."""
REFERENCE_PREFIX = "${oc.select:"
"""The beginning of a reference to an owner's value in a file."""
SETUP_MEMORY = "_values_after_setup"
"""The attribute of a config that has the values which its `setup` wrote."""

log = logging.getLogger(__name__)


def _build_owner_table() -> dict[str, str]:
    owner_by_field: dict[str, str] = {}
    for name, field in FIELDS.items():
        if field.subject is SCALER:
            owner_by_field[name] = "optimizer"
    for name, field in FIELDS.items():
        if field.family and field.twin is None and "recipe" not in name:
            owner_by_field[name] = "model"
    for name in (*LAYER_COUNTS, "first_last_layers_bf16"):
        owner_by_field[name] = "model"
    for name in ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"):
        owner_by_field[name] = "ddp"
    return owner_by_field


OWNER_BY_FIELD = _build_owner_table()
"""Field whose unstated value is left to an owner -> the name of that owner.

The scheme is not in it: an unstated scheme has the default of Megatron Bridge.
"""


def remember_values_after_setup(config: PrecisionConfig, rows: Iterable[SyncRow]) -> None:
    """Keep the values that `setup` wrote into the owners, for `make_saved_entry`."""
    values = {row.field: row.new for row in rows if row.verdict != "absent"}
    vars(config)[SETUP_MEMORY] = values


def get_values_after_setup(config: PrecisionConfig) -> Mapping[str, Any]:
    """Return field -> the value that `setup` wrote into its owner; empty before `setup`."""
    values: Mapping[str, Any] = vars(config).get(SETUP_MEMORY, {})
    return values


def make_saved_entry(
    config: PrecisionConfig, values_after_setup: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``_target_`` and every field of Megatron Bridge's class.

    Args:
        values_after_setup: Field -> the value that `setup` wrote into its owner; empty before
            `setup`.
    """
    without_place: list[str] = []
    for name in list_field_names(config):
        if name not in MEGATRON_BRIDGE_FIELDS and is_stated(config, name):
            without_place.append(name)
    if without_place and not values_after_setup:
        names = ", ".join(without_place)
        log.warning(
            "mixed_precision: a file of Megatron Bridge has no place for %s before setup", names
        )
    saved: dict[str, Any] = {"_target_": PEER_TARGET}
    for name in MEGATRON_BRIDGE_FIELDS:
        saved[name] = _choose_saved_value(config, name, values_after_setup)
    return saved


def _choose_saved_value(
    config: PrecisionConfig, name: str, values_after_setup: Mapping[str, Any]
) -> Any:
    """Return the value for a field of Megatron Bridge's class.

    With these values the sync of Megatron Bridge writes the same settings as ours.
    """
    has_effect = is_family_on(config, FIELDS[name].family)
    if name == "fp8_recipe" and not has_effect:
        return None  # any other value makes the optimizer treat the run as one in FP8
    if name in FILLED_DTYPE_FIELDS and not is_stated(config, name):
        return get_torch_dtype(get_mode(config))
    if is_stated(config, name) or not has_effect or name not in OWNER_BY_FIELD:
        return getattr(config, name)
    if name in values_after_setup:
        return values_after_setup[name]
    value = get_field_value(config, name)
    if name in LAYER_COUNTS and config.first_last_layers_bf16:
        value = 1
    return format_reference(OWNER_BY_FIELD[name], name, json.dumps(value).strip('"'))


def format_reference(owner: str, name: str, otherwise: str) -> str:
    """Return OmegaConf's text for a reference to a field of a section.

    Args:
        owner: The section.
        name: The field. A field of the model may be in its `transformer`.
        otherwise: The value if the section does not have the field.
    """
    if owner == "model":
        otherwise = f"{REFERENCE_PREFIX}model.transformer.{name},{otherwise}}}"
    return f"{REFERENCE_PREFIX}{owner}.{name},{otherwise}}}"


def drop_references(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the fields of a saved precision without the references to owners."""
    kept = {}
    for name, value in fields.items():
        is_reference = isinstance(value, str) and value.startswith(REFERENCE_PREFIX)
        if not is_reference:
            kept[name] = value
    return kept
