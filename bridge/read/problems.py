"""The keys of a run's config, `Origins`, who set each of them, and `Problems`, the faults found in it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import MAX_LINES, BridgeWarning, Finding, RunConfigError, close_matches, did_you_mean
from bridge.registry.config import MixedPrecisionConfig
from bridge.target.fields import FIELDS, NAMES
from bridge.training.config import CheckpointConfig, DataConfig, LoggingConfig, ResumeConfig, TrainConfig

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

NOT_KNOWN = "configuration"
"""Origin of a key that no layer set."""


@functools.cache
def fields_of(section: str) -> frozenset[str]:
    """Return the fields that a section of a run can have."""
    own = dataclasses.fields(SECTIONS[section]) if section in SECTIONS else ()
    return frozenset((*FIELDS.get(section, ()), *(one.name for one in own)))


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
    """Key -> each origin that set it, the one in effect last -> the value; None where only the origin is known."""
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
        return cls(values=values, order=tuple(order), of_recipe=frozenset(one for one in order if order[one]))

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
        values = {key: {layer.origin: value, **self.values.get(key, {})} for key, value in layer.values.items()}
        kept = {key: own for key, own in self.values.items() if key not in (*values, instead_of)}
        of_recipe = self.of_recipe | {layer.origin}
        return Origins(values={**values, **kept}, order=(layer.origin, *self.order), of_recipe=of_recipe)


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


def trusted_sources(name: str, named: Any, *, trust: bool) -> tuple[str, ...]:
    """Return the modules and files that a config's `recipes_from` names; a `BridgeWarning` and none without `trust`."""
    sources = recipe_sources(named)
    if trust or not sources:
        return sources
    text = f"{name}: {RECIPES} names {', '.join(sources):.200}, which is Python and was not run"
    warnings.warn(f"{text}. Give --trust to run it.", BridgeWarning, stacklevel=2)
    return ()


def recipe_sources(named: Any) -> tuple[str, ...]:
    """Return the modules and files that a value of `recipes_from` names."""
    if named is None:
        return ()
    names = named if isinstance(named, list) else [named]
    if not all(isinstance(name, str) for name in names):
        remedy = f"Write {RECIPES}=acme.recipes or {RECIPES}=[acme.recipes,lab/recipes.py]."
        raise RunConfigError.of(RECIPES, "must be a module or file, or a list of them", named, remedy)
    return tuple(names)


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

    def add_all(self, faults: Iterable[Finding]) -> None:
        """Add findings, each as it would be added by itself."""
        for one in faults:
            self.add(one.path, one.rule, one.value, one.remedy, rule_id=one.id)

    def unknown(self, path: str, value: Any, rule: str, known: Iterable[str], *, word: str | None = None) -> None:
        """Add a key that does not exist, with the nearest ones that do; `word` is the wrong part, else the last one."""
        known = list(known)
        is_shown = len(self._sentences) < MAX_LINES  # of a file of 40,000 fields, for example
        matches = close_matches(word or path.rpartition(".")[2], known) if is_shown else []
        section = next((role for role in NAMES if path in NAMES[role]), None)  # num_layers for model.num_layers
        if section is not None:
            matches = [f"{section}.{path}"]
        hint = did_you_mean(matches) or (f"There are {', '.join(known)}." if len(known) < 15 else "Remove it.")
        self.add(path, rule, value, hint, matches)

    def refuse_targets(self, value: Any, path: str = "") -> None:
        """Add every ``_target_`` in plain data below `path`."""
        items = dict(enumerate(value)) if isinstance(value, list) else value
        if not isinstance(items, dict):
            return
        for key, inner in items.items():
            where = f"{path}.{key}" if path else str(key)
            if key == "_target_":
                rule = "configurations are data, and nothing in them is instantiated"
                self.add(where, rule, inner, "Register a recipe with recipes_from, or set the field's value.")
            self.refuse_targets(inner, where)

    def refuse_sections(self, sections: Mapping[str, Any]) -> None:
        """Raise for a ``_target_`` anywhere in a run, and add every key of it that does not exist."""
        self.refuse_targets(sections)
        self.raise_any()
        for key, value in sections.items():
            if key not in KEYS:
                self.unknown(str(key), value, "no such section", KEYS)

    def raise_any(self) -> None:
        """Raise RunConfigError with everything collected so far, or do nothing."""
        if not self._sentences:
            return
        lines = self._sentences
        if len(lines) > 1:
            lines = [f"{len(lines)} settings of this run cannot be used:", *(f"  {line}" for line in lines)]
        raise RunConfigError("\n".join(lines), self._matches)
