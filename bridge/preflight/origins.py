"""`Origins`: the sources that set each key of a run's config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NOT_KNOWN = "configuration"
"""Origin of a key that no layer set."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One of the configs that a run is composed of."""

    origin: str
    """Its name in messages: "recipe bf16_mixed", "model/gpt_5m.yaml"."""
    values: Mapping[str, Any]
    """Dotted key -> the value that it sets."""
    is_recipe: bool = False
    """Whether it is part of the chosen recipe."""


@dataclass(frozen=True, kw_only=True)
class Origins:
    """Who set each key of a config."""

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Key -> each origin that set it, the one in effect last -> the value; None
    where only the origin is known.
    """
    order: tuple[str, ...] = ()
    """Origins in the order of composition; a later one overrides an earlier one."""
    of_recipe: frozenset[str] = frozenset()
    """Origins that are part of the chosen recipe."""

    @classmethod
    def of_layers(cls, layers: Iterable[Layer]) -> Origins:
        """Return the origins that layers leave, the later over the earlier."""
        values: dict[str, dict[str, Any]] = {}
        order: dict[str, bool] = {}
        for layer in layers:
            order[layer.origin] = order.get(layer.origin, False) or layer.is_recipe
            for key, value in layer.values.items():
                own = values.setdefault(key, {})
                own.pop(layer.origin, None)
                own[layer.origin] = value
        return cls(
            values=values,
            order=tuple(order),
            of_recipe=frozenset(one for one in order if order[one]),
        )

    @classmethod
    def of_keys(cls, keys: Iterable[str], origin: str) -> Origins:
        """Return the origins of keys that one origin set."""
        return cls(values={key: {origin: None} for key in keys})

    def of(self, key: str) -> str:
        """Return who set `key`, or what is around it or in it; "configuration" where that is not known."""
        around = key
        while around and around not in self.values:
            around = around.rpartition(".")[0]
        inside = (own for known, own in self.values.items() if known.startswith(f"{key}."))
        own = self.values[around] if around else next(inside, None)
        return [*own][-1] if own else NOT_KNOWN

    def over(self, layer: Layer, *, instead_of: str) -> Origins:
        """Return these origins over another layer, which stands in the place of the key `instead_of` itself."""
        values = {
            key: {layer.origin: value, **self.values.get(key, {})}
            for key, value in layer.values.items()
        }
        kept = {key: own for key, own in self.values.items() if key not in (*values, instead_of)}
        of_recipe = self.of_recipe | {layer.origin}
        return Origins(
            values={**values, **kept}, order=(layer.origin, *self.order), of_recipe=of_recipe
        )


def leaves(value: Any, prefix: str) -> dict[str, Any]:
    """Return dotted key -> value of plain data below `prefix`; the prefix itself for what is no mapping or empty."""
    if not (isinstance(value, dict) and value):
        return {prefix: value} if prefix else {}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    return found
