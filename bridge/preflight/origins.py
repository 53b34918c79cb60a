"""`Origins`: the sources that set each key of a run's config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN_ORIGIN = "configuration"
"""Origin of a key that no layer set."""


@dataclass(frozen=True, kw_only=True)
class ConfigLayer:
    """One of the configs that a run is composed of, such as a recipe or a YAML file."""

    origin: str
    """Its name in messages: "recipe bf16_mixed", "model/gpt_5m.yaml"."""
    values: Mapping[str, Any]
    """Dotted key -> the value that it sets."""
    is_recipe: bool = False
    """Whether it is part of the chosen recipe."""


@dataclass(frozen=True, kw_only=True)
class Origins:
    """The sources that set each key of a run's config."""

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Key -> origin -> the value that the origin set; the last origin is in effect.

    The value is None if only the origin is known.
    """
    order: tuple[str, ...] = ()
    """Origins in the order of composition; a later one overrides an earlier one."""
    recipe_origins: frozenset[str] = frozenset()
    """Origins that are part of the chosen recipe."""

    @classmethod
    def from_layers(cls, layers: Iterable[ConfigLayer]) -> Origins:
        """Return the origins of a config that is composed of layers.

        Args:
            layers: The layers in the order of composition; a later one overrides an earlier one.
        """
        values: dict[str, dict[str, Any]] = {}
        order = []
        recipe_origins = set()
        for layer in layers:
            if layer.origin not in order:
                order.append(layer.origin)
            if layer.is_recipe:
                recipe_origins.add(layer.origin)
            for key, value in layer.values.items():
                setters = values.setdefault(key, {})
                # The origin in effect is the last one, also if the layer set the key before.
                setters.pop(layer.origin, None)
                setters[layer.origin] = value
        return cls(values=values, order=tuple(order), recipe_origins=frozenset(recipe_origins))

    @classmethod
    def from_keys(cls, keys: Iterable[str], origin: str) -> Origins:
        """Return the origins of keys that one origin set."""
        return cls(values={key: {origin: None} for key in keys})

    def get_origin(self, key: str) -> str:
        """Return the origin of a key, or else of a key around it, or else of a key inside it.

        It is "configuration" if nobody set any of them.
        """
        set_key = key
        while set_key and set_key not in self.values:
            set_key = set_key.rpartition(".")[0]
        if set_key:
            setters = self.values[set_key]
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
        """Return these origins with one more layer below them.

        Args:
            layer: The layer that these origins override.
            instead_of: The key whose own value the layer replaces: a recipe's fields replace the
                recipe's name.
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

    The key of a value that is not a mapping, or of an empty mapping, is the prefix itself.
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
