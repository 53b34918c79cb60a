"""The precision of single modules: ordered matchers. The first that takes a module's name decides.

    # Effect(family="fp8", scheme="mxfp8", ...), None for none
    matchers.effect("decoder.layers.0.mlp.linear_fc2")

`ModulePrecision` is the precision of a module's GEMMs and where it acts, `Matcher` is globs over module
names with their effect. Rows of `modules` (`bridge.precision.row_normalisation`) and Megatron Core's
per-module recipe are two forms of matchers.

The recipe is `quant_recipe` of a model config and the file behind `--te-precision-config-file`:

    configs:                     name -> payload
      bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
    matchers:                    in order
      qkv: {type: glob, pattern: "*.linear_qkv", config: bf16, enabled: true}

Its names are those within one model chunk of one pipeline stage: ``decoder.layers.0`` is the
chunk's own first layer. A matcher without `enabled` is off. Transformer Engine's linear layers read
it; the embedding, norms, the router and the output layer do not.

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
"""The word for a module without FP8 and FP4: it computes in the dtype of the run."""
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
"""Keys of a training or evaluation recipe; the last two from megatron-core 0.18 on."""


class SchemeChoice(NamedTuple):
    """A scaling scheme and its format."""

    scheme: str
    format: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulePrecision:
    """The precision of a module's GEMMs, and where it acts."""

    family: str | None = None
    """fp8 or fp4; None: the dtype of the run."""
    scheme: str | None = None
    format: str | None = None
    """e4m3, hybrid or e2m1; None: that of the run, where the scheme takes it."""
    factory: str | None = None
    """Import path of a quantizer factory, for the scheme `custom`."""
    stored: bool | None = None
    """Store the weight in the format (`fp8_param`, `fp4_param`); None: not stated."""
    tp_only_amax_red: bool | None = None
    """Reduce amaxes over the tensor-parallel ranks alone; None: not stated."""
    in_low: bool = True
    """It acts where the layer runs in FP8 or FP4 (`override_quantized_autocast`)."""
    in_high: bool = False
    """It acts where the layer does not (`override_nonquantized_autocast`)."""

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> ModulePrecision:
        """Return the effect of a training or evaluation recipe.

        A key that it does not have counts with Megatron's default.
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
        """Return it as a training or evaluation recipe, without Megatron's defaults."""
        if self.family is None:
            return {}
        recipe: dict[str, Any] = {f"{self.family}_quantization_recipe": self.scheme}
        if self.family == "fp8":
            recipe["fp8_format"] = self.format
        if self.in_high:
            recipe["override_nonquantized_autocast"] = True
        recipe["custom_recipe_factory"] = self.factory
        recipe["tp_only_amax_red"] = self.tp_only_amax_red
        if self.stored:  # False is the default, and no key of releases before 0.18
            recipe[f"{self.family}_param"] = self.stored
        return {key: value for key, value in recipe.items() if value is not None}

    @property
    def label(self) -> str:
        """The scheme; bf16 for no FP8 and FP4."""
        return self.scheme or HIGH_PRECISION

    @property
    def chosen(self) -> SchemeChoice | None:
        """The scheme and its format; None: the dtype of the run."""
        if self.scheme is None:
            return None
        return SchemeChoice(self.scheme, str(self.format))

    @property
    def chooses_in_high_precision(self) -> bool:
        """Whether it chooses FP8 or FP4 in a layer that runs in neither."""
        return self.family is not None and self.in_high

    def resolve_in_run(self, run: str | None, *, in_high: bool = False) -> ModulePrecision:
        """Return the effect in a run whose own format is `run`.

        An effect in FP8 or FP4 has a format there, and `in_high` says whether it acts in a layer
        that runs in neither.
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
        """Return whether a module takes it in a layer that runs, or does not run, in FP8 or FP4."""
        if is_low:
            return self.in_low
        return self.in_high

    def computes(self, layer: LayerChoice | None) -> SchemeChoice | LayerChoice | None:
        """Return what a module computes in where its layer's own choice is `layer`.

        None is the dtype of the run.
        """
        if self.acts_in_layer(is_low=layer is not None):
            return self.chosen
        return layer


def find_payload_faults(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, rule) of each fault for which Transformer Engine refuses a recipe.

    The recipe is one of training or evaluation. The key is empty where several together are at
    fault.
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
    """One matcher that is on."""

    name: str
    """Its name in the file, or the row's number."""
    patterns: tuple[str, ...]
    """Globs, of which one has to match."""
    training: ModulePrecision | None
    """None: a payload that is none of Transformer Engine's."""
    evaluation: ModulePrecision | None = None
    """The effect outside of training; None: that of training."""
    config: str = ""
    """Name of the payload in a file."""
    library: str = "unknown"
    """The library of a payload that is none of Transformer Engine's."""
    select: str = ""
    """The choice as it is stated."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers that it names, as they are stated."""

    def matches(self, path: str) -> bool:
        """Return whether it selects a module by its name."""
        return any(fnmatchcase(path, pattern) for pattern in self.patterns)

    @property
    def precision(self) -> str:
        """A scheme, bf16 for no FP8 and FP4.

        For a payload that is none of Transformer Engine's it is the payload's library.
        """
        if self.training is None:
            return self.library
        return self.training.label

    @property
    def evaluation_label(self) -> str | None:
        """The same outside of training; None: that of training."""
        if self.evaluation is None:
            return None
        return self.evaluation.label

    @property
    def effects(self) -> tuple[ModulePrecision, ...]:
        """The effects in training and in evaluation that are there."""
        effects = (self.training, self.evaluation)
        return tuple(effect for effect in effects if effect is not None)


@dataclass(frozen=True, kw_only=True)
class QuantRecipe:
    """The matchers of a run, of one file, or of one stage's part of it."""

    matchers: tuple[Matcher, ...]
    """The matchers that are on, in order."""
    configs: Mapping[str, Any] = field(default_factory=dict)
    """Name -> payload, as a file has them."""

    @classmethod
    def from_value(cls, recipe: Any) -> QuantRecipe | None:
        """Return the matchers of a mapping, or of an object of Megatron's `RecipeConfig`.

        None for anything else.
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
        """Return the effect on a module in training, None for none."""
        for matcher in self.matchers:
            if matcher.matches(path):
                return matcher.training
        return None

    def has_same_effect(self, other: QuantRecipe) -> bool:
        """Return whether both do the same: the names of matchers do not count."""
        return self._globs_and_configs == other._globs_and_configs and dict(self.configs) == dict(
            other.configs
        )

    @property
    def _globs_and_configs(self) -> list[tuple[tuple[str, ...], str]]:
        """The globs of each matcher and the name of its payload."""
        return [(matcher.patterns, matcher.config) for matcher in self.matchers]

    def to_file(self) -> dict[str, Any]:
        """Return it as the content of a file, a matcher of several globs as several."""
        rows = {}
        for matcher in self.matchers:
            for part, pattern in enumerate(matcher.patterns):
                name = matcher.name
                if len(matcher.patterns) > 1:
                    name = f"{matcher.name}_{part}"
                rows[name] = _make_file_row(matcher.config, pattern)
        return {"configs": dict(self.configs), "matchers": rows}


def _make_file_row(config: object, pattern: object) -> dict[str, Any]:
    """Return a matcher as a file has it."""
    return {"config": config, "type": "glob", "pattern": pattern, "enabled": True}


def _convert_to_mapping(recipe: Any) -> dict[str, Any] | None:
    """Return an object of Megatron's `RecipeConfig` as the arguments of its constructor."""
    globs = getattr(recipe, "matchers", None)
    if not isinstance(globs, list | tuple):
        return None
    rows = []
    for glob in globs:
        row = {
            "pattern": getattr(glob, "pattern", None),
            "config_key": getattr(glob, "config_key", None),
        }
        rows.append(row)
    return {"config_dict": getattr(recipe, "configs", None), "matchers": rows}


def convert_to_file_content(recipe: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a recipe of a run's config.yaml as its file has it, which `from_config_dict` reads.

    Megatron Bridge writes the arguments of `from_config_dict` there, or those of the constructor.

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

    It is one recipe for every chunk, or one per chunk in order of execution.

    Args:
        value: None, a mapping, a list of mappings, an object of Megatron's `RecipeConfig`, or one
            with `files`.
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
    """Return the per-module recipe of a model chunk, by its place in the order of execution.

    None without a recipe.
    """
    if not recipes:
        return None
    if len(recipes) == 1:
        return recipes[0]
    return recipes[chunk]
