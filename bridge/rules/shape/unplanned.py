"""The fields of Megatron's model config that the plan does not know.

A field of `UNPLANNED` gives the model modules that the plan does not know: set to another value than Megatron's default
it is refused, so that there is never a plan of another model. A test lists every other field of each known release: the
plan reads it, or it changes no module.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from bridge.precision.fields import default_of
from bridge.rules.fields import FIELDS, read_field
from bridge.rules.versions import Version

UNPLANNED = {
    "heterogeneous_block_specs": "each layer has modules of its own",
    "experimental_attention_variant": "layers get another attention",
    "qk_l2_norm": "queries and keys get norms without weights",
    "mla_down_proj_fusion": "one projection takes the place of two",
    "enable_mhc_connections": "the residual stream is mixed by modules of its own",
    "use_kitchen": "linear layers come from another library",
    "moe_use_legacy_grouped_gemm": "experts are one module without linear layers",
    "moe_extended_tp": "experts are split in another way",
    "gtp_weight_remat_size": "weights are sharded once more",
    "expert_gtp_weight_remat_size": "weights of experts are sharded once more",
    "tensor_parallel_num_weight_shards": "weights are sharded once more",
    "expert_tensor_parallel_num_weight_shards": "weights of experts are sharded once more",
}
"""Field -> the change of the modules that the plan does not know."""


def unplanned(model: Any) -> list[tuple[str, str, object]]:
    """Return (field, reason, value) of each field that gives a model modules that the plan does not know.

    A field that a newer Megatron Core has, and no release that is known here, counts where it is not at its default.
    """
    rows = [
        (name, why, read_field(model, name))
        for name, why in UNPLANNED.items()
        if _differs(read_field(model, name), FIELDS["model"][name].default)
    ]
    rows += [
        (field.name, "the field is newer than the releases that the plan knows", getattr(model, field.name, None))
        for field in _fields_of_megatron(model)
        if field.name not in FIELDS["model"] and getattr(model, field.name, None) != default_of(field)
    ]
    return rows


def _differs(value: Any, default: Any) -> bool:
    """Return whether a value is neither absent nor the default; sizes of None and 1 are the same."""
    value = getattr(value, "name", value)
    return value not in (None, default) and not (default is None and value in (1, "1"))


def _fields_of_megatron(model: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of an object that a class of Megatron Core declares; subclasses add their own settings."""
    theirs = [cls for cls in type(model).__mro__ if cls.__module__.startswith("megatron.core.")]
    declared = {name for cls in theirs for name in vars(cls).get("__annotations__", {}) if not name.startswith("_")}
    return [field for field in getattr(model, "__dataclass_fields__", {}).values() if field.name in declared]


def absent_fields(role: str, config: Any, version: Version | None) -> dict[str, str]:
    """Return each field that is set and that a version of Megatron Core does not have -> the versions that have it."""
    if version is None:
        return {}
    return {
        name: str(row.has)
        for name, row in FIELDS[role].items()
        if row.has is not None
        and row.has.holds(version) is False
        and read_field(config, name, row.default) != row.default
    }


class _Hidden:
    """An object without some of its attributes."""

    def __init__(self, held: Any, names: Collection[str]) -> None:
        self._held, self._names = held, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._held, name)


def without(config: Any, names: Collection[str]) -> Any:
    """Return a config without some of its fields; the config itself where there are none to leave out."""
    if not names:
        return config
    if isinstance(config, Mapping):
        return {name: value for name, value in config.items() if name not in names}
    return _Hidden(config, names)
