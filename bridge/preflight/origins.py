"""`Origins`: the sources that set each key of a run's config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN_ORIGIN = "configuration"
"""Origin of a key that no layer set."""


@dataclass(frozen=True, kw_only=True)
class ConfigLayer:
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
    """Key -> each origin that set it, the one in effect last -> the value.

    The value is None where only the origin is known.
    """
    order: tuple[str, ...] = ()
    """Origins in the order of composition; a later one overrides an earlier one."""
    recipe_origins: frozenset[str] = frozenset()
    """Origins that are part of the chosen recipe."""

    @classmethod
    def from_layers(cls, layers: Iterable[ConfigLayer]) -> Origins:
        """Return the origins that layers leave, the later over the earlier."""
        values: dict[str, dict[str, Any]] = {}
        order: dict[str, None] = {}
        of_recipe = set()
        for layer in layers:
            order[layer.origin] = None
            if layer.is_recipe:
                of_recipe.add(layer.origin)
            for key, value in layer.values.items():
                setters = values.setdefault(key, {})
                setters.pop(layer.origin, None)
                setters[layer.origin] = value
        return cls(values=values, order=tuple(order), recipe_origins=frozenset(of_recipe))

    @classmethod
    def from_keys(cls, keys: Iterable[str], origin: str) -> Origins:
        """Return the origins of keys that one origin set."""
        return cls(values={key: {origin: None} for key in keys})

    def get_origin(self, key: str) -> str:
        """Return who set `key`, or what is around it or in it; "configuration" for nobody."""
        around = key
        while around and around not in self.values:
            around = around.rpartition(".")[0]
        setters: Mapping[str, Any] = {}
        if around:
            setters = self.values[around]
        else:
            setters = self._find_setters_inside(key)
        if setters:
            return [*setters][-1]
        return UNKNOWN_ORIGIN

    def _find_setters_inside(self, key: str) -> Mapping[str, Any]:
        """Return the origins of the first key below `key`."""
        for inner_key, setters in self.values.items():
            if inner_key.startswith(f"{key}."):
                return setters
        return {}

    def over(self, layer: ConfigLayer, *, instead_of: str) -> Origins:
        """Return these origins over another layer.

        The layer stands in the place of the key `instead_of` itself.
        """
        values: dict[str, Mapping[str, Any]] = {}
        for key, value in layer.values.items():
            values[key] = {layer.origin: value, **self.values.get(key, {})}
        for key, setters in self.values.items():
            if key not in values and key != instead_of:
                values[key] = setters
        return Origins(
            values=values,
            order=(layer.origin, *self.order),
            recipe_origins=self.recipe_origins | {layer.origin},
        )


def flatten_leaves(value: Any, prefix: str) -> dict[str, Any]:
    """Return dotted key -> value of plain data below `prefix`.

    A value that is no mapping, or an empty one, has the prefix itself as its key.
    """
    if not isinstance(value, dict) or not value:
        if prefix:
            return {prefix: value}
        return {}
    values: dict[str, Any] = {}
    for key, inner in value.items():
        path = str(key)
        if prefix:
            path = f"{prefix}.{key}"
        values.update(flatten_leaves(inner, path))
    return values
