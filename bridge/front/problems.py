"""The keys of a run's config, `Origins`, who set each of them, and `Problems`, the faults found in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import MAX_LINES, RunConfigError, close_matches, did_you_mean
from bridge.rules.fields import NAMES
from bridge.training.config import CheckpointConfig, DataConfig, LoggingConfig, ResumeConfig, TrainConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bridge.registry.config import MixedPrecisionConfig

PRECISION = "mixed_precision"
RECIPES = "recipes_from"
MADE_BY = "_recipe_"
"""Key of `mixed_precision` in the config.yaml of a run: the recipe that its fields are from."""
SECTIONS = {
    "data": DataConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "resume": ResumeConfig,
    "logging": LoggingConfig,
}
"""Sections with classes of our own; they are listed with their defaults."""
OWNERS = ("model", "optimizer", "ddp")
"""Sections with classes of Megatron Core, which are imported only when a run needs them."""
RUN_KEYS = ("precision_backend", "precision_schedule", "target", "silence")
"""Keys of a run that are no sections."""
KEYS = (PRECISION, *RUN_KEYS, *OWNERS, *SECTIONS, RECIPES)


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

    by_key: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    """Origins in the order of composition; a later one overrides an earlier one."""
    of_recipe: frozenset[str] = frozenset()
    """Origins that are part of the chosen recipe."""
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Key -> each origin that set it, in the order of composition -> the value."""

    @classmethod
    def of_layers(cls, layers: Iterable[Layer]) -> Origins:
        """Return the origins that layers leave, the later over the earlier."""
        by_key: dict[str, str] = {}
        order: list[str] = []
        recipe: set[str] = set()
        values: dict[str, dict[str, Any]] = {}
        for layer in layers:
            by_key.update(dict.fromkeys(layer.values, layer.origin))
            order.append(layer.origin)
            for key, value in layer.values.items():
                values.setdefault(key, {})[layer.origin] = value
            if layer.is_recipe:
                recipe.add(layer.origin)
        return cls(by_key=by_key, order=tuple(dict.fromkeys(order)), of_recipe=frozenset(recipe), values=values)

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

    def over(self, layer: Layer, *, instead_of: str) -> Origins:
        """Return these origins over another layer, which stands in the place of the key `instead_of` itself."""
        kept = {key: origin for key, origin in self.by_key.items() if key != instead_of}
        return Origins(
            by_key={**dict.fromkeys(layer.values, layer.origin), **kept},
            order=(layer.origin, *self.order),
            of_recipe=self.of_recipe | {layer.origin},
            values=self.values,
        )


@dataclass(frozen=True, kw_only=True)
class GivenRun:
    """The sections of a run as they were read from a tree or a file, with the recipe that was chosen."""

    sections: Mapping[str, Any]
    """Key of the run -> plain values; `mixed_precision` is a mapping of fields, or a recipe's name."""
    choice: str | None = None
    """The option of the group `mixed_precision`, a recipe's name or a request for a choice."""
    recipe: MixedPrecisionConfig | None = None
    """That recipe as the registry made it; None for a YAML file's. Its fields stand in `mixed_precision` too."""
    origins: Origins = field(default_factory=Origins)
    name: str = "config"
    """The file, or the primary config, that was read."""


def leaves(value: Any, prefix: str) -> dict[str, Any]:
    """Return dotted key -> value of plain data below `prefix`; the prefix itself for what is no mapping or empty."""
    if not (isinstance(value, dict) and value):
        return {prefix: value} if prefix else {}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


class Problems:
    """Collects sentences; each names who set the value."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self._sentences: list[str] = []
        self._matches: list[str] = []

    def add(
        self, path: str, rule: str, value: Any, remedy: str = "", matches: Iterable[str] = (), *, rule_id: str = ""
    ) -> None:
        """Add one fault, with the remedy "Give one." where there is none, and the id of its rule of the check."""
        remedy = remedy or "Give one."
        end = "" if remedy.endswith((".", "?")) else "."
        given = "null" if value is None else repr(value)
        sentence = f"{path}: {rule}, got {given} ({self.origins.of(path)}). {remedy}{end}"
        self._sentences.append(f"{rule_id} {sentence}".lstrip())
        self._matches.extend(matches)

    def unknown(self, path: str, value: Any, rule: str, known: Iterable[str], *, word: str | None = None) -> None:
        """Add a key that does not exist, with the nearest ones that do; `word` is the wrong part, else the last one."""
        known = list(known)
        is_shown = len(self._sentences) < MAX_LINES  # of a file of 40,000 fields, say
        matches = close_matches(word or path.rpartition(".")[2], known) if is_shown else []
        section = next((role for role in NAMES if path in NAMES[role]), None)  # num_layers for model.num_layers
        if section is not None:
            matches = [f"{section}.{path}"]
        hint = did_you_mean(matches) or (f"There are {', '.join(known)}." if len(known) < 15 else "Remove it.")
        self.add(path, rule, value, hint, matches)

    def refuse_targets(self, value: Any, path: str = "") -> None:
        """Add every ``_target_`` in plain data below `path`."""
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list):
            items = enumerate(value)
        for key, inner in items:
            where = f"{path}.{key}" if path else str(key)
            if key == "_target_":
                rule = "configurations are data, and nothing in them is instantiated"
                self.add(where, rule, inner, "Register a recipe with recipes_from, or set the field's value.")
            self.refuse_targets(inner, where)

    def raise_any(self) -> None:
        """Raise RunConfigError with everything collected so far, or do nothing."""
        if not self._sentences:
            return
        lines = self._sentences
        if len(lines) > 1:
            lines = [f"{len(lines)} settings of this run cannot be used:", *(f"  {line}" for line in lines)]
        raise RunConfigError("\n".join(lines), self._matches)
