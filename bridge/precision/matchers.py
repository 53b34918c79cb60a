"""`QuantRecipe`: the precision of single modules, as ordered matchers of module names.

    # ModulePrecision(family="fp8", scheme="mxfp8", ...), or None if no matcher matches
    recipe.effect("decoder.layers.0.mlp.linear_fc2")

The first matcher that matches the name of a module decides its precision. A `Matcher` has globs over
module names and a `ModulePrecision`: the precision of the module's GEMMs, and the layers in which it
acts. Rows of `modules` (`bridge.precision.row_normalisation`) and Megatron Core's per-module recipe
are two forms of matchers.

The per-module recipe is `quant_recipe` of a model config, or a file of `--te-precision-config-file`:

    configs:                     name -> payload
      bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
    matchers:                    in order
      qkv: {type: glob, pattern: "*.linear_qkv", config: bf16, enabled: true}

The recipe matches names within one model chunk of one pipeline stage: ``decoder.layers.0`` is the
first layer of the chunk. A matcher without `enabled` is off. Only Transformer Engine's linear layers
read the recipe. The embedding, norms, the router and the output layer do not.

Source: megatron-core 0.16.1 and 0.19.2 quantization/quant_config.py,
extensions/transformer_engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from bridge.precision.schemes import find_scheme

LayerChoice = TypeVar("LayerChoice")

HIGH_PRECISION = "bf16"
"""The label of a module without FP8 and FP4, which computes in the dtype of the run."""
TRAINING, EVALUATION = "training_recipe", "evaluation_recipe"
TE_CONFIG_TYPE = {"transformer_engine_config_type": "TEQuantizationParams"}
PAYLOAD_KEYS = (
    "fp8_quantization_recipe",
    "fp4_quantization_recipe",
    "custom_recipe_factory",
    "fp8_format",
    "override_quantized_autocast",
    "override_nonquantized_autocast",
    "tp_only_amax_red",
    "fp8_param",
    "fp4_param",
)
"""Keys of a training or evaluation recipe. megatron-core has the last two from 0.18 on."""


class SchemeChoice(NamedTuple):
    """A scaling scheme and its format."""

    scheme: str
    format: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulePrecision:
    """The precision of a module's GEMMs, and the layers in which it acts."""

    family: str | None = None
    """fp8 or fp4. None: the module computes in the dtype of the run."""
    scheme: str | None = None
    format: str | None = None
    """e4m3, hybrid or e2m1. None: the format of the run, if the scheme has it."""
    factory: str | None = None
    """The import path of a quantizer factory, for the scheme `custom`."""
    stored: bool | None = None
    """Whether the weight is stored in the format (`fp8_param`, `fp4_param`). None: not stated."""
    tp_only_amax_red: bool | None = None
    """Whether amaxes are reduced only over the tensor-parallel ranks. None: not stated."""
    in_low: bool = True
    """Whether it acts in layers that run in FP8 or FP4 (`override_quantized_autocast`)."""
    in_high: bool = False
    """Whether it acts in layers that run in neither (`override_nonquantized_autocast`)."""

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> ModulePrecision:
        """Return the precision of a training or evaluation recipe.

        A missing key has Megatron's default.
        """
        in_low = bool(recipe.get("override_quantized_autocast", True))
        in_high = bool(recipe.get("override_nonquantized_autocast", False))
        for family in ("fp8", "fp4"):
            scheme = recipe.get(f"{family}_quantization_recipe")
            if not scheme:
                continue
            format_ = "e2m1"
            if family == "fp8":
                format_ = str(recipe.get("fp8_format") or "e4m3")
            return cls(
                family=family,
                scheme=str(getattr(scheme, "value", scheme)),
                format=format_,
                factory=recipe.get("custom_recipe_factory"),
                stored=recipe.get(f"{family}_param"),
                tp_only_amax_red=recipe.get("tp_only_amax_red"),
                in_low=in_low,
                in_high=in_high,
            )
        return cls(in_low=in_low, in_high=in_high)

    def to_recipe(self) -> dict[str, Any]:
        """Return the precision as a training or evaluation recipe, without Megatron's defaults."""
        if self.family is None:
            return {}
        recipe: dict[str, Any] = {f"{self.family}_quantization_recipe": self.scheme}
        if self.family == "fp8":
            recipe["fp8_format"] = self.format
        if self.in_high:
            recipe["override_nonquantized_autocast"] = True
        recipe["custom_recipe_factory"] = self.factory
        recipe["tp_only_amax_red"] = self.tp_only_amax_red
        if self.stored:  # False is the default, and releases before 0.18 refuse the key
            recipe[f"{self.family}_param"] = self.stored
        return {key: value for key, value in recipe.items() if value is not None}

    @property
    def label(self) -> str:
        """The scheme, or bf16 without FP8 and FP4."""
        return self.scheme or HIGH_PRECISION

    @property
    def chosen(self) -> SchemeChoice | None:
        """The scheme and its format. None: the dtype of the run."""
        if self.scheme is None:
            return None
        return SchemeChoice(self.scheme, str(self.format))

    @property
    def chooses_in_high_precision(self) -> bool:
        """Whether it chooses FP8 or FP4 in layers that run in neither."""
        return self.family is not None and self.in_high

    def resolve_in_run(self, run: str | None, *, in_high: bool = False) -> ModulePrecision:
        """Return the precision in a run, with its format filled in.

        Without FP8 and FP4 the precision is returned as it is.

        Args:
            run: The format of the run. None: the run has no FP8 and FP4.
            in_high: Whether the precision acts in layers that run in neither.
        """
        row = find_scheme(self.scheme, self.family)
        if row is None:
            return self
        format_ = self.format
        if not format_:
            format_ = row.formats[0]
            if run in row.formats:
                format_ = run
        return replace(self, format=format_, in_high=in_high)

    def acts_in_layer(self, *, is_low: bool) -> bool:
        """Return whether the precision acts in a layer.

        Args:
            is_low: Whether the layer runs in FP8 or FP4.
        """
        if is_low:
            return self.in_low
        return self.in_high

    def computes(self, layer: LayerChoice | None) -> SchemeChoice | LayerChoice | None:
        """Return the scheme in which a module computes. None: it computes in the dtype of the run.

        Args:
            layer: The scheme of the layer around the module.
        """
        if self.acts_in_layer(is_low=layer is not None):
            return self.chosen
        return layer


def find_payload_faults(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, rule) of each fault for which Transformer Engine refuses a recipe.

    Args:
        recipe: A training or evaluation recipe.

    Returns:
        The faults. The key is empty if several keys contradict each other.
    """
    fp8 = recipe.get("fp8_quantization_recipe")
    fp4 = recipe.get("fp4_quantization_recipe")
    faults = []
    if fp8 == "delayed":
        faults.append(("fp8_quantization_recipe", "delayed scaling cannot be chosen per module"))
    if fp8 and fp4:
        faults.append(("", "a module has either an FP8 or an FP4 recipe"))
    if "custom" in (fp8, fp4) and not recipe.get("custom_recipe_factory"):
        faults.append(("", "a custom recipe needs custom_recipe_factory"))
    return faults


@dataclass(frozen=True, kw_only=True, slots=True)
class Matcher:
    """A matcher that is on."""

    name: str
    """The name of the matcher in the file, or the number of the row of `modules`."""
    patterns: tuple[str, ...]
    """Globs. The matcher matches if one of them does."""
    training: ModulePrecision | None
    """The precision in training. None: the payload is for another library than Transformer Engine."""
    evaluation: ModulePrecision | None = None
    """The precision in evaluation. None: the precision in training."""
    config: str = ""
    """The name of the payload in a file."""
    library: str = "unknown"
    """The library that the payload is for, if it is not Transformer Engine."""
    select: str = ""
    """The selector as the user states it."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers in the selector, as the user states them."""

    def matches(self, path: str) -> bool:
        """Return whether the matcher matches the name of a module."""
        return any(fnmatchcase(path, pattern) for pattern in self.patterns)

    @property
    def precision(self) -> str:
        """The scheme in training, or bf16 without FP8 and FP4.

        If the payload is for another library than Transformer Engine, the name of the library.
        """
        if self.training is None:
            return self.library
        return self.training.label

    @property
    def evaluation_label(self) -> str | None:
        """The scheme in evaluation, or bf16. None: as in training."""
        if self.evaluation is None:
            return None
        return self.evaluation.label

    @property
    def effects(self) -> tuple[ModulePrecision, ...]:
        """The precision in training and the one in evaluation, without None."""
        effects = (self.training, self.evaluation)
        return tuple(effect for effect in effects if effect is not None)


@dataclass(frozen=True, kw_only=True)
class QuantRecipe:
    """The matchers of a run, of one file, or of the part of a file for one stage."""

    matchers: tuple[Matcher, ...]
    """The matchers that are on, in order."""
    configs: Mapping[str, Any] = field(default_factory=dict)
    """Name -> payload, as in a file."""

    @classmethod
    def from_value(cls, recipe: Any) -> QuantRecipe | None:
        """Return the matchers of a value of `model.quant_recipe`, or None for an unknown value.

        Args:
            recipe: A mapping, or an object of Megatron's `RecipeConfig`.
        """
        if not isinstance(recipe, Mapping):
            recipe = _convert_to_mapping(recipe)
            if recipe is None:
                return None
        content = convert_to_file_content(recipe)
        configs = content.get("configs") or {}
        rows = content.get("matchers") or {}
        if not isinstance(configs, Mapping) or not isinstance(rows, Mapping):
            return None
        matchers = {}
        for name, row in rows.items():
            if isinstance(row, Mapping) and row.get("enabled"):
                matchers[str(name)] = _parse_matcher(str(name), row, configs)
        return cls(configs=configs, matchers=tuple(matchers.values()))

    def effect(self, path: str) -> ModulePrecision | None:
        """Return the precision of a module in training, or None if no matcher matches it."""
        for matcher in self.matchers:
            if matcher.matches(path):
                return matcher.training
        return None

    def has_same_effect(self, other: QuantRecipe) -> bool:
        """Return whether two recipes have the same effect. The names of matchers do not matter."""
        if self._globs_and_configs != other._globs_and_configs:
            return False
        return dict(self.configs) == dict(other.configs)

    @property
    def _globs_and_configs(self) -> list[tuple[tuple[str, ...], str]]:
        """The globs of each matcher and the name of its payload."""
        return [(matcher.patterns, matcher.config) for matcher in self.matchers]

    def to_file(self) -> dict[str, Any]:
        """Return the recipe as the content of a file.

        A matcher with several globs becomes several matchers, because a file has one glob in each.
        """
        rows = {}
        for matcher in self.matchers:
            for part, pattern in enumerate(matcher.patterns):
                name = matcher.name
                if len(matcher.patterns) > 1:
                    name = f"{matcher.name}_{part}"
                rows[name] = _make_file_row(matcher.config, pattern)
        return {"configs": dict(self.configs), "matchers": rows}


def _make_file_row(config: object, pattern: object) -> dict[str, Any]:
    """Return a matcher in the form of a file."""
    return {"config": config, "type": "glob", "pattern": pattern, "enabled": True}


def _convert_to_mapping(recipe: Any) -> dict[str, Any] | None:
    """Return the constructor arguments of an object of Megatron's `RecipeConfig`, or None."""
    matchers = getattr(recipe, "matchers", None)
    if not isinstance(matchers, list | tuple):
        return None
    rows = []
    for matcher in matchers:
        row = {
            "pattern": getattr(matcher, "pattern", None),
            "config_key": getattr(matcher, "config_key", None),
        }
        rows.append(row)
    return {"config_dict": getattr(recipe, "configs", None), "matchers": rows}


def convert_to_file_content(recipe: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the recipe of a run's config.yaml in the form of a file of matchers.

    Megatron Bridge writes the arguments of `RecipeConfig.from_config_dict` into config.yaml, or those
    of the constructor.

    Source: NVIDIA-NeMo/Megatron-Bridge training/utils/config_utils.py, 2026-08-22.
    """
    if isinstance(recipe.get("config"), Mapping):
        recipe = recipe["config"]
    matchers = recipe.get("matchers")
    if "config_dict" not in recipe or not isinstance(matchers, list | tuple):
        return recipe
    rows: dict[str, Any] = {}
    for matcher in matchers:
        if isinstance(matcher, Mapping):
            row = _make_file_row(matcher.get("config_key"), matcher.get("pattern"))
            rows[f"matcher_{len(rows)}"] = row
    return {"configs": recipe["config_dict"] or {}, "matchers": rows}


def _parse_matcher(name: str, row: Mapping[str, Any], configs: Mapping[str, Any]) -> Matcher:
    pattern = str(row.get("pattern"))
    config = str(row.get("config"))
    payload = configs.get(config)
    if not isinstance(payload, Mapping):
        payload = {}
    library = "unknown"
    if "kitchen_config_type" in payload:
        library = "kitchen"
    return Matcher(
        name=name,
        patterns=(pattern,),
        training=_parse_precision(payload, TRAINING),
        evaluation=_parse_precision(payload, EVALUATION),
        config=config,
        library=library,
        select=pattern,
    )


def _parse_precision(payload: Mapping[str, Any], part: str) -> ModulePrecision | None:
    recipe = payload.get(part)
    if not isinstance(recipe, Mapping):
        return None
    return ModulePrecision.from_recipe(recipe)


def parse_quant_recipes(value: Any) -> tuple[QuantRecipe, ...]:
    """Return the recipes in a value of `model.quant_recipe`.

    It is one recipe for all model chunks, or one for each chunk in order of execution.

    Args:
        value: None, a mapping, a list of mappings, an object of Megatron's `RecipeConfig`, or an
            object with `files`.
    """
    parts = getattr(value, "files", value)
    if not isinstance(parts, list | tuple):
        parts = [parts]
    recipes = []
    for part in parts:
        recipe = QuantRecipe.from_value(part)
        if recipe is not None:
            recipes.append(recipe)
    return tuple(recipes)


def list_matchers(value: Any) -> list[Matcher]:
    """Return the matchers of all recipes in a value of `model.quant_recipe`."""
    matchers: list[Matcher] = []
    for recipe in parse_quant_recipes(value):
        matchers += recipe.matchers
    return matchers


def get_chunk_recipe(recipes: Sequence[QuantRecipe], chunk: int) -> QuantRecipe | None:
    """Return the per-module recipe of a model chunk, or None if there are no recipes.

    Args:
        recipes: A recipe for all chunks, or one for each chunk in order of execution.
        chunk: The index of the chunk in order of execution.
    """
    if not recipes:
        return None
    if len(recipes) == 1:
        return recipes[0]
    return recipes[chunk]
