"""Megatron Bridge's own config objects: recognised by their class, and read without importing it.

Recipes and model providers stay with Megatron Bridge, so its `MixedPrecisionConfig` meets ours in one program.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bridge.errors import UnknownFieldError
from bridge.precision.config import MODE_SWITCHES
from bridge.precision.fields import LAYER_COUNTS
from bridge.registry.config import MixedPrecisionConfig

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["PeerConfig", "from_peer", "is_peer_config"]

SOURCE = "Megatron Bridge's config"
SCHEMES = {"fp8": "fp8_recipe", "fp4": "fp4_recipe"}
FOLLOWING = ("fp8_param", "fp4_param")
"""Fields that the peer's class keeps equal to the gather of the same family, and leaves None until `finalize`."""


class PeerConfig(Protocol):
    """An object of Megatron Bridge's `MixedPrecisionConfig`, or of a subclass of it."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def is_peer_config(value: object) -> TypeGuard[PeerConfig]:
    """Return whether `value` is an object of a dataclass `MixedPrecisionConfig` of a module of `megatron.bridge`."""
    return dataclasses.is_dataclass(type(value)) and any(
        base.__name__ == "MixedPrecisionConfig" and f"{base.__module__}.".startswith("megatron.bridge.")
        for base in type(value).__mro__
    )


def from_peer(config: PeerConfig) -> MixedPrecisionConfig:
    """Return the config that an object of Megatron Bridge's class describes.

    Stated are the mode switches, the scheme of a format that is on, both counts of kept layers where one was given, and
    every other field away from the peer's default. A value given there that equals its default cannot be told
    from what was not given.

    Raises:
        PrecisionTypeError: A value of the wrong type.
        UnknownFieldError: A field away from its default that no field here stands for.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    given = {field.name for field in dataclasses.fields(config) if _differs(values[field.name], field)}
    given.update(name for name in MODE_SWITCHES if name in values)
    given.update(scheme for family, scheme in SCHEMES.items() if values.get(family))
    if given.intersection(LAYER_COUNTS):
        given.update(LAYER_COUNTS)
    given.difference_update(FOLLOWING)
    known = MixedPrecisionConfig.field_names()
    for name in sorted(given.difference(known)):
        rule = "is a field of Megatron Bridge's config that has no counterpart here"
        raise UnknownFieldError(f"mixed_precision.{name}: {rule}, got {values[name]!r:.80}. Leave it at its default.")
    return MixedPrecisionConfig().state(SOURCE, **{name: values[name] for name in known if name in given})


def _differs(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value != field.default_factory())
    return bool(value != field.default)
