"""Megatron Core's per-module recipe, `quant_recipe` of a model config and the file behind `--te-precision-config-file`.

    configs:                     name -> payload
      bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
    matchers:                    in order; the first whose glob takes a module's path decides
      qkv: {type: glob, pattern: "*.linear_qkv", config: bf16, enabled: true}

Paths are those within one model chunk of one pipeline stage: ``decoder.layers.0`` is the chunk's own first layer. A
matcher without `enabled` is off. Transformer Engine's linear layers read it; the embedding, norms, the router and the
output layer do not.

Source: megatron-core 0.16.1 and 0.19.2 quantization/quant_config.py, extensions/transformer_engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

TRAINING, EVALUATION = "training_recipe", "evaluation_recipe"
CONFIG_TYPE = {"transformer_engine_config_type": "TEQuantizationParams"}
PAYLOAD_KEYS = (
    *("fp8_quantization_recipe", "fp4_quantization_recipe", "custom_recipe_factory", "fp8_format"),
    *("override_quantized_autocast", "override_nonquantized_autocast", "tp_only_amax_red", "fp8_param", "fp4_param"),
)
"""Keys of a training or evaluation recipe; the last two from megatron-core 0.18 on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matcher:
    """One matcher that is on."""

    name: str
    pattern: str
    config: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleEffect:
    """The effect of a payload's training or evaluation recipe on a module's GEMMs."""

    family: str | None = None
    """fp8 or fp4; None: high precision."""
    scheme: str | None = None
    format: str | None = None
    in_low: bool = True
    """It acts where the layer runs in FP8 or FP4 (`override_quantized_autocast`)."""
    in_high: bool = False
    """It acts where the layer does not (`override_nonquantized_autocast`)."""
    stored: bool = False
    """It asks for a weight in the format (`fp8_param`, `fp4_param`)."""

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> ModuleEffect:
        """Return the effect of a training or evaluation recipe, Megatron's defaults where it has no key."""
        families = {name: recipe.get(f"{name}_quantization_recipe") for name in ("fp8", "fp4")}
        family = next((name for name, scheme in families.items() if scheme), None)
        scheme = families[family] if family is not None else None
        forms = {"fp8": str(recipe.get("fp8_format") or "e4m3"), "fp4": "e2m1"}
        return cls(
            family=family,
            scheme=str(getattr(scheme, "value", scheme)) if scheme else None,
            format=forms[family] if family is not None else None,
            in_low=bool(recipe.get("override_quantized_autocast", True)),
            in_high=bool(recipe.get("override_nonquantized_autocast", False)),
            stored=family is not None and bool(recipe.get(f"{family}_param", False)),
        )

    def acts(self, *, is_low: bool) -> bool:
        """Return whether a module takes it in a layer that runs, or does not run, in FP8 or FP4."""
        return self.in_low if is_low else self.in_high


@dataclass(frozen=True, kw_only=True)
class QuantRecipe:
    """One file, or one stage's part of it."""

    configs: Mapping[str, Any]
    matchers: tuple[Matcher, ...]
    """The matchers that are on, in order."""

    @classmethod
    def of(cls, given: Any) -> QuantRecipe | None:
        """Return the recipe that a mapping, or an object of Megatron's `RecipeConfig`, describes; None for another."""
        if isinstance(given, Mapping):
            given = as_file(given)
            configs, written = given.get("configs") or {}, given.get("matchers") or {}
            if not isinstance(configs, Mapping) or not isinstance(written, Mapping):
                return None
            rows = [(str(name), row) for name, row in written.items() if isinstance(row, Mapping)]
            matchers = [
                Matcher(name=name, pattern=str(row.get("pattern")), config=str(row.get("config")))
                for name, row in rows
                if row.get("enabled", False)
            ]
            return cls(configs=configs, matchers=tuple(matchers))
        configs, held = getattr(given, "configs", None), getattr(given, "matchers", None)
        if not isinstance(configs, Mapping) or not isinstance(held, list | tuple):
            return None
        globs = [one for one in held if hasattr(one, "pattern") and hasattr(one, "config_key")]
        matchers = [
            Matcher(name=str(number), pattern=str(one.pattern), config=str(one.config_key))
            for number, one in enumerate(globs)
        ]
        return cls(configs=configs, matchers=tuple(matchers))

    def matcher_of(self, path: str) -> Matcher | None:
        """Return the first matcher that takes a module's path within its chunk, or None."""
        return next((one for one in self.matchers if fnmatchcase(path, one.pattern)), None)

    def effect_of(self, config: str, part: str = TRAINING) -> ModuleEffect | None:
        """Return the effect of a payload; None where it has no such part, or is none of Transformer Engine's."""
        payload = self.configs.get(config)
        recipe = payload.get(part) if isinstance(payload, Mapping) else None
        return ModuleEffect.of(recipe) if isinstance(recipe, Mapping) else None

    def same_as(self, other: QuantRecipe) -> bool:
        """Return whether both do the same: the names of matchers do not count."""
        mine, theirs = ([(one.pattern, one.config) for one in recipe.matchers] for recipe in (self, other))
        return mine == theirs and dict(self.configs) == dict(other.configs)

    def to_file(self) -> dict[str, Any]:
        """Return it as the content of a file, without the matchers that are off."""
        rows = {
            one.name: {"config": one.config, "type": "glob", "pattern": one.pattern, "enabled": True}
            for one in self.matchers
        }
        return {"configs": dict(self.configs), "matchers": rows}


def as_file(written: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the content of a file for what a run's config.yaml of Megatron Bridge holds, and a file's as it is.

    Megatron Bridge writes the constructor's arguments, or those of `from_config_dict`.

    Source: NVIDIA-NeMo/Megatron-Bridge training/utils/config_utils.py, 2026-08-22.
    """
    written = written["config"] if isinstance(written.get("config"), Mapping) else written
    matchers = written.get("matchers")
    if "config_dict" not in written or not isinstance(matchers, list | tuple):
        return written
    rows = {
        f"matcher_{number}": {
            "config": one.get("config_key"),
            "type": "glob",
            "pattern": one.get("pattern"),
            "enabled": True,
        }
        for number, one in enumerate(matchers)
        if isinstance(one, Mapping)
    }
    return {"configs": written["config_dict"] or {}, "matchers": rows}


def quant_recipes(held: Any) -> tuple[QuantRecipe, ...]:
    """Return what `model.quant_recipe` holds: one recipe for every chunk, or one per chunk in order of execution.

    It holds None, a mapping, a list of mappings, an object of Megatron's `RecipeConfig`, or one with `files`.
    """
    parts = getattr(held, "files", held)
    found = [QuantRecipe.of(part) for part in (parts if isinstance(parts, list | tuple) else [parts])]
    return tuple(recipe for recipe in found if recipe is not None)
