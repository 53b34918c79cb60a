"""`Origins`: the recipe, YAML file or command line that set each key of a run's config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["COMMAND_LINE", "Layer", "Origins", "leaves"]

COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One of the configs that a run is composed of."""

    origin: str
    """Its name in messages: "recipe bf16_mixed", "model/gpt_5m.yaml"."""
    keys: tuple[str, ...]
    """The dotted keys that it sets."""
    is_recipe: bool = False
    """Whether it is part of the chosen recipe."""


@dataclass(frozen=True, kw_only=True)
class Origins:
    """Who set each key of a config."""

    by_key: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> origin."""
    order: tuple[str, ...] = ()
    """Origins in the order of composition; a later one overrides an earlier one."""
    of_recipe: frozenset[str] = frozenset()
    """Origins that are part of the chosen recipe."""

    @classmethod
    def of_layers(cls, layers: Iterable[Layer]) -> Origins:
        """Return the origins that layers leave, the later over the earlier."""
        by_key: dict[str, str] = {}
        order: list[str] = []
        recipe: set[str] = set()
        for layer in layers:
            by_key.update(dict.fromkeys(layer.keys, layer.origin))
            order.append(layer.origin)
            if layer.is_recipe:
                recipe.add(layer.origin)
        return cls(by_key=by_key, order=tuple(dict.fromkeys(order)), of_recipe=frozenset(recipe))

    def of(self, key: str) -> str:
        """Return who set `key`, or what is around it or in it; "configuration" where that is not known."""
        around = key
        while around:
            if around in self.by_key:
                return self.by_key[around]
            around = around.rpartition(".")[0]
        return next((origin for known, origin in self.by_key.items() if known.startswith(f"{key}.")), "configuration")

    def rank(self, origin: str) -> int:
        """Return the place of `origin` in the order of composition."""
        return self.order.index(origin) if origin in self.order else len(self.order)

    def without(self, key: str) -> Origins:
        """Return these origins without the one of `key` itself."""
        return replace(self, by_key={known: origin for known, origin in self.by_key.items() if known != key})

    def under(self, layer: Layer) -> Origins:
        """Return these origins over another layer."""
        return Origins(
            by_key={**dict.fromkeys(layer.keys, layer.origin), **self.by_key},
            order=(layer.origin, *self.order),
            of_recipe=self.of_recipe | ({layer.origin} if layer.is_recipe else set()),
        )


def leaves(value: Any, prefix: str) -> Iterator[str]:
    """Yield the dotted keys of plain data below `prefix`; the prefix itself for what is no mapping or empty."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix
