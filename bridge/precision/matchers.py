"""The precision of single modules: ordered matchers, of which the first that takes a module's name decides.

    matchers.effect("decoder.layers.0.mlp.linear_fc2")    # Effect(family="fp8", scheme="mxfp8", ...), None for none

`Effect` is the precision of a module's GEMMs and where it acts, `Matcher` is globs over module
names with their effect. Rows of `modules` (`bridge.precision.modules`) and Megatron Core's
per-module recipe are two ways to write matchers.

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

from bridge.precision.schemes import scheme_row

Run = TypeVar("Run")

HIGH = "bf16"
"""The word for a module without FP8 and FP4: it computes in the dtype of the run."""
TRAINING, EVALUATION = "training_recipe", "evaluation_recipe"
CONFIG_TYPE = {"transformer_engine_config_type": "TEQuantizationParams"}
PAYLOAD_KEYS = (
    *("fp8_quantization_recipe", "fp4_quantization_recipe", "custom_recipe_factory", "fp8_format"),
    *(
        "override_quantized_autocast",
        "override_nonquantized_autocast",
        "tp_only_amax_red",
        "fp8_param",
        "fp4_param",
    ),
)
"""Keys of a training or evaluation recipe; the last two from megatron-core 0.18 on."""


class Chosen(NamedTuple):
    """A scaling scheme and its format."""

    scheme: str
    format: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
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
    def of(cls, recipe: Mapping[str, Any]) -> Effect:
        """Return the effect of a training or evaluation recipe, Megatron's defaults where it has no key."""
        schemes = {name: recipe.get(f"{name}_quantization_recipe") for name in ("fp8", "fp4")}
        chosen = [
            (name, str(getattr(scheme, "value", scheme)))
            for name, scheme in schemes.items()
            if scheme
        ]
        in_low = bool(recipe.get("override_quantized_autocast", True))
        in_high = bool(recipe.get("override_nonquantized_autocast", False))
        if not chosen:
            return cls(in_low=in_low, in_high=in_high)
        family, scheme = chosen[0]
        return cls(
            family=family,
            scheme=scheme,
            format=str(recipe.get("fp8_format") or "e4m3") if family == "fp8" else "e2m1",
            factory=recipe.get("custom_recipe_factory"),
            stored=recipe.get(f"{family}_param"),
            tp_only_amax_red=recipe.get("tp_only_amax_red"),
            in_low=in_low,
            in_high=in_high,
        )

    def to_recipe(self) -> dict[str, Any]:
        """Return it as a training or evaluation recipe, without Megatron's defaults."""
        if self.family is None:
            return {}
        recipe = {
            f"{self.family}_quantization_recipe": self.scheme,
            "fp8_format": self.format if self.family == "fp8" else None,
            "override_nonquantized_autocast": self.in_high or None,
            "custom_recipe_factory": self.factory,
            "tp_only_amax_red": self.tp_only_amax_red,
            f"{self.family}_param": self.stored
            or None,  # False is the default, and no key of releases before 0.18
        }
        return {key: value for key, value in recipe.items() if value is not None}

    @property
    def label(self) -> str:
        """The scheme; bf16 for no FP8 and FP4."""
        return self.scheme or HIGH

    @property
    def chosen(self) -> Chosen | None:
        """The scheme and its format; None: the dtype of the run."""
        return Chosen(self.scheme, str(self.format)) if self.scheme is not None else None

    @property
    def chooses_in_high(self) -> bool:
        """Whether it chooses FP8 or FP4 in a layer that runs in neither."""
        return self.family is not None and self.in_high

    def in_run(self, run: str | None, *, in_high: bool = False) -> Effect:
        """Return the effect in a run whose own format is `run`: one of FP8 or FP4 has a format, and acts as said."""
        row = scheme_row(self.scheme, self.family)
        if row is None:
            return self
        format_ = self.format or (run if run in row.formats else row.formats[0])
        return replace(self, format=format_, in_high=in_high)

    def acts(self, *, is_low: bool) -> bool:
        """Return whether a module takes it in a layer that runs, or does not run, in FP8 or FP4."""
        return self.in_low if is_low else self.in_high

    def computes(self, layer: Run | None) -> Chosen | Run | None:
        """Return what a module computes in where its layer's own choice is `layer`; None is the dtype of the run."""
        return self.chosen if self.acts(is_low=layer is not None) else layer


def payload_faults(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, rule) of each fault for which Transformer Engine refuses a training or evaluation recipe.

    The key is empty where several together are at fault.
    """
    fp8, fp4 = (recipe.get(f"{family}_quantization_recipe") for family in ("fp8", "fp4"))
    found = []
    if fp8 == "delayed":
        found.append(("fp8_quantization_recipe", "delayed scaling cannot be chosen per module"))
    if fp8 and fp4:
        found.append(("", "a module has either an FP8 or an FP4 recipe"))
    if "custom" in (fp8, fp4) and not recipe.get("custom_recipe_factory"):
        found.append(("", "a custom recipe needs custom_recipe_factory"))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Matcher:
    """One matcher that is on."""

    name: str
    """Its name in the file, or the row's number."""
    patterns: tuple[str, ...]
    """Globs, of which one has to match."""
    training: Effect | None
    """None: a payload that is none of Transformer Engine's."""
    evaluation: Effect | None = None
    """The effect outside of training; None: that of training."""
    config: str = ""
    """Name of the payload in a file."""
    library: str = "unknown"
    """The library of a payload that is none of Transformer Engine's."""
    select: str = ""
    """The choice as it is stated."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers that it names, as they are stated."""

    def takes(self, path: str) -> bool:
        """Return whether it selects a module by its name."""
        return any(fnmatchcase(path, pattern) for pattern in self.patterns)

    @property
    def precision(self) -> str:
        """A scheme, bf16 for no FP8 and FP4, or the library of a payload that is none of Transformer Engine's."""
        return self.training.label if self.training is not None else self.library

    @property
    def outside(self) -> str | None:
        """The same outside of training; None: that of training."""
        return self.evaluation.label if self.evaluation is not None else None

    @property
    def effects(self) -> tuple[Effect, ...]:
        """The effects in training and in evaluation that are there."""
        return tuple(one for one in (self.training, self.evaluation) if one is not None)


@dataclass(frozen=True, kw_only=True)
class Matchers:
    """The matchers of a run, of one file, or of one stage's part of it."""

    matchers: tuple[Matcher, ...]
    """The matchers that are on, in order."""
    configs: Mapping[str, Any] = field(default_factory=dict)
    """Name -> payload, as a file has them."""

    @classmethod
    def of(cls, given: Any) -> Matchers | None:
        """Return the matchers of a mapping, or of an object of Megatron's `RecipeConfig`; None for another."""
        if not isinstance(given, Mapping):
            globs = getattr(given, "matchers", None)
            if not isinstance(globs, list | tuple):
                return None
            rows = [
                {name: getattr(one, name, None) for name in ("pattern", "config_key")}
                for one in globs
            ]
            given = {"config_dict": getattr(given, "configs", None), "matchers": rows}
        content = file_content(given)
        configs, matchers = content.get("configs") or {}, content.get("matchers") or {}
        if not isinstance(configs, Mapping) or not isinstance(matchers, Mapping):
            return None
        on = {
            str(name): row
            for name, row in matchers.items()
            if isinstance(row, Mapping) and row.get("enabled")
        }
        return cls(
            configs=configs,
            matchers=tuple(_matcher(name, row, configs) for name, row in on.items()),
        )

    def effect(self, path: str) -> Effect | None:
        """Return the effect on a module in training, None for none."""
        for matcher in self.matchers:
            if matcher.takes(path):
                return matcher.training
        return None

    def same_as(self, other: Matchers) -> bool:
        """Return whether both do the same: the names of matchers do not count."""
        mine, theirs = (
            [(one.patterns, one.config) for one in held.matchers] for held in (self, other)
        )
        return mine == theirs and dict(self.configs) == dict(other.configs)

    def to_file(self) -> dict[str, Any]:
        """Return it as the content of a file, a matcher of several globs as several."""
        rows = {}
        for one in self.matchers:
            for part, pattern in enumerate(one.patterns):
                name = one.name if len(one.patterns) == 1 else f"{one.name}_{part}"
                rows[name] = {
                    "config": one.config,
                    "type": "glob",
                    "pattern": pattern,
                    "enabled": True,
                }
        return {"configs": dict(self.configs), "matchers": rows}


def file_content(given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a recipe of a run's config.yaml as its file has it, which `from_config_dict` reads.

    Megatron Bridge writes the arguments of `from_config_dict` there, or those of the constructor.

    Source: NVIDIA-NeMo/Megatron-Bridge training/utils/config_utils.py, 2026-08-22.
    """
    given = given["config"] if isinstance(given.get("config"), Mapping) else given
    matchers = given.get("matchers")
    if "config_dict" not in given or not isinstance(matchers, list | tuple):
        return given
    rows = {}
    for at, one in enumerate(one for one in matchers if isinstance(one, Mapping)):
        config, pattern = one.get("config_key"), one.get("pattern")
        rows[f"matcher_{at}"] = {
            "config": config,
            "type": "glob",
            "pattern": pattern,
            "enabled": True,
        }
    return {"configs": given["config_dict"] or {}, "matchers": rows}


def _matcher(name: str, row: Mapping[str, Any], configs: Mapping[str, Any]) -> Matcher:
    pattern, config = str(row.get("pattern")), str(row.get("config"))
    payload = configs.get(config)
    payload = payload if isinstance(payload, Mapping) else {}
    parts = {
        part: payload[part]
        for part in (TRAINING, EVALUATION)
        if isinstance(payload.get(part), Mapping)
    }
    effects = {part: Effect.of(recipe) for part, recipe in parts.items()}
    return Matcher(
        name=name,
        patterns=(pattern,),
        training=effects.get(TRAINING),
        evaluation=effects.get(EVALUATION),
        config=config,
        library="kitchen" if "kitchen_config_type" in payload else "unknown",
        select=pattern,
    )


def quant_recipes(held: Any) -> tuple[Matchers, ...]:
    """Return what `model.quant_recipe` holds: one recipe for every chunk, or one per chunk in order of execution.

    It holds None, a mapping, a list of mappings, an object of Megatron's
    `RecipeConfig`, or one with `files`.
    """
    parts = getattr(held, "files", held)
    found = map(Matchers.of, parts if isinstance(parts, list | tuple) else [parts])
    return tuple(recipe for recipe in found if recipe is not None)


def matchers_in(held: Any) -> list[Matcher]:
    """Return the matchers of everything that `model.quant_recipe` holds."""
    return [matcher for recipe in quant_recipes(held) for matcher in recipe.matchers]


def recipe_of(recipes: Sequence[Matchers], chunk: int) -> Matchers | None:
    """Return the per-module recipe of a model chunk, by its place in the order of execution; None without one."""
    place = chunk if len(recipes) > 1 else 0
    return recipes[place] if recipes else None
