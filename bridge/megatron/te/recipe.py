"""The recipe object that Transformer Engine should get for a Megatron config, computed without Transformer Engine.

Megatron makes the same object at each forward pass (fp8_utils.get_fp8_recipe, fp4_utils.get_fp4_recipe). Here it is
computed once more, and independently, for three reasons: a setting can be dropped between the config and the object
without a message, environment variables change the classes' defaults, and a run's report names the recipe it ran with.

    te_recipe(config)                  -> TERecipe      a plain value
    TERecipe.build(import_recipes())   -> the object, every keyword checked before and after
    TERecipe.differences(megatrons)    -> the attributes in which another recipe object differs

Transformer Engine's recipes are pydantic dataclasses: they drop keywords they do not know, turn "3" into 3 and 1.0 into
1, and two of them have keywords that their linear layers never look at. So every keyword is compared with the class's
fields before the object is made, and with its attributes after.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from bridge.errors import BackendUnavailableError, Finding, PrecisionConfigError, close_matches, did_you_mean
from bridge.megatron.te.environment import NVTE_VARIABLES, Environment
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, Scheme
from bridge.rules.fields import DEFAULTS

_FORMATS = {"e4m3": "E4M3", "hybrid": "HYBRID"}
_MEGATRON_DEFAULTS = {name: DEFAULTS["model"][name] for name in FP8_SCHEMES["delayed"].te_keywords.values()}
"""Defaults of `TransformerConfig`: another value was set by the user."""
_POWER_OF_TWO = {"use_power_2_scales": True, "use_f32_scales": False}
"""Keyword -> the value under which scales are powers of two."""

_QPARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


@dataclass(frozen=True, kw_only=True)
class TERecipe:
    """Class and keywords of one Transformer Engine recipe, as plain values."""

    name: str
    """The class in `transformer_engine.common.recipe`."""
    scheme: str
    keywords: Mapping[str, object] = field(default_factory=dict)
    """Keyword -> value. Formats are names of members of `Format`; a factory may be a dotted path."""
    notes: tuple[str, ...] = ()
    """Sentences on settings of the config that the recipe has no keyword for, and on keywords from the environment."""

    def __str__(self) -> str:
        values = (f"{key}={value}" for key, value in self.keywords.items())
        return f"{self.name}({', '.join(values)})"

    def build(self, recipes: ModuleType) -> Any:
        """Make the recipe object.

        Args:
            recipes: `transformer_engine.common.recipe`, see `import_recipes`; or that file loaded by its path.

        Returns:
            An instance of the class called `name`, whose attributes equal the keywords. Power-of-two scales are set
            where Transformer Engine's linear layers read them, which its own keywords do not reach.

        Raises:
            BackendUnavailableError: this Transformer Engine has no such class.
            PrecisionConfigError: the class has no such keyword, refuses a value, or keeps another one.
        """
        kind = getattr(recipes, self.name, None)
        if kind is None:
            floor = {**FP4_SCHEMES, **FP8_SCHEMES}[self.scheme].min_transformer_engine
            raise BackendUnavailableError(
                f"{self.name}: this Transformer Engine has no such recipe. Install version {floor} or later."
            )
        known = [item.name for item in dataclasses.fields(kind)]
        self._refuse([self._unknown(keyword, known) for keyword in self.keywords if keyword not in known])
        values = {keyword: _resolved(recipes, keyword, value) for keyword, value in self.keywords.items()}
        try:
            recipe = kind(**values)
        except (ValueError, TypeError, AssertionError) as error:
            self._refuse([Finding(path=self.name, rule=_reason(error), value=str(self), remedy="Correct the value.")])
        for other in _other_scale_rules(recipe, self.keywords):
            setattr(recipe, other.attribute, dataclasses.replace(other.params, power_2_scale=other.wanted))
        self._refuse(self.differences(recipe, recipes))
        return recipe

    def differences(self, recipe: Any, recipes: ModuleType | None = None) -> list[Finding]:
        """Return the attributes in which a recipe object differs from this; empty where they agree.

        Args:
            recipe: the recipe that Megatron made, for example.
            recipes: the module the recipe's class is from; None imports Transformer Engine's.
        """
        if type(recipe).__name__ != self.name:
            rule = f"the recipe must be a {self.name}"
            return [Finding(path=self.name, rule=rule, value=type(recipe).__name__, remedy="Compare the configs.")]
        recipes = import_recipes() if recipes is None else recipes
        found = []
        for keyword, value in self.keywords.items():
            wanted, got = _resolved(recipes, keyword, value), getattr(recipe, keyword, None)
            if got != wanted or type(got) is not type(wanted):
                rule = f"must be {wanted!r}, as the config says"
                found.append(self._finding(keyword, rule, got, "Find where it was changed."))
        for other in _other_scale_rules(recipe, self.keywords):
            rule = f"power_2_scale must be {other.wanted}, as {other.keyword}={self.keywords[other.keyword]} says"
            found.append(
                self._finding(other.attribute, rule, other.params.power_2_scale, "Set it on the recipe object.")
            )
        return found

    def _unknown(self, keyword: str, known: list[str]) -> Finding:
        hint = did_you_mean(close_matches(keyword, known)) or f"It has {', '.join(known)}."
        rule = f"{self.name} of this Transformer Engine has no such keyword, and would drop it in silence"
        return self._finding(keyword, rule, self.keywords[keyword], hint)

    def _finding(self, keyword: str, rule: str, value: object, remedy: str) -> Finding:
        return Finding(path=f"{self.name}.{keyword}", rule=rule, value=value, remedy=remedy)

    @staticmethod
    def _refuse(findings: list[Finding]) -> None:
        if findings:
            raise PrecisionConfigError("Transformer Engine would not run what the config says:", findings)


def import_recipes() -> Any:
    """Return the module `transformer_engine.common.recipe`."""
    try:
        return importlib.import_module("transformer_engine.common.recipe")
    except (ImportError, OSError, RuntimeError) as error:  # a package without its CUDA parts fails with any of these
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BackendUnavailableError(
            f"transformer_engine: must be importable, and is not ({reason}). Install transformer-engine[pytorch]."
        ) from error


def _resolved(recipes: ModuleType, keyword: str, value: object) -> object:
    if keyword.endswith("_format"):
        return getattr(recipes, "Format")[value]  # noqa: B009 mypy knows no attribute of a module
    if keyword != "qfactory" or not isinstance(value, str):
        return value
    module, _, name = value.rpartition(".")  # as Megatron finds it
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        finding = Finding(
            path="quantizer_factory",
            rule=f"must be the dotted path of a function ({error})",
            value=value,
            remedy="Check the spelling, and that its folder is on PYTHONPATH.",
        )
        raise PrecisionConfigError("The quantizer factory cannot be found:", [finding]) from error


class _OtherScaleRule(NamedTuple):
    """An attribute in which the linear layers would read another rule of scales than the keyword says."""

    keyword: str
    attribute: str
    params: Any
    wanted: bool
    """The `power_2_scale` that the keyword says."""


def _other_scale_rules(recipe: Any, keywords: Mapping[str, object]) -> list[_OtherScaleRule]:
    """Return where the linear layers would read another rule of scales than the keywords say.

    `fp8_quant_*` have no annotations, so they are class attributes, computed when the module was imported; the keywords
    `use_power_2_scales` and `use_f32_scales` come too late for them (Transformer Engine 2.20 common/recipe/
    __init__.py:302-306 and :429-434, read in pytorch/module/linear.py:2762-2789).
    """
    wanted = {keyword: keywords[keyword] is when for keyword, when in _POWER_OF_TWO.items() if keyword in keywords}
    params = {name: getattr(recipe, name, None) for name in _QPARAMS}
    return [
        _OtherScaleRule(keyword, name, param, rule)
        for keyword, rule in wanted.items()
        for name, param in params.items()
        if param is not None and param.power_2_scale != rule
    ]


def _reason(error: Exception) -> str:
    """Return why a class refused its arguments, as a clause; of pydantic's report only the messages."""
    faults = getattr(error, "errors", None)
    if faults is None:
        return str(error).rstrip(".")
    messages = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ") for fault in faults())
    return "; ".join(messages).rstrip(".")


def te_recipe(config: Any, environment: Environment | None = None) -> TERecipe | None:
    """Return the recipe for a config; None where it has no low-precision matrix multiplications.

    Args:
        config: Megatron's `TransformerConfig`, or anything with its precision fields.
        environment: the result of `read_environment`. Variables that add to the recipe without contradicting the
            config become keywords of it; each is in the notes. `environment_findings` judges them.

    Raises:
        PrecisionConfigError: formats or schemes that no recipe exists for; lists all faults.
    """
    fp8, fp4 = getattr(config, "fp8", None), getattr(config, "fp4", None)
    if not fp8 and not fp4:
        return None
    scheme = _scheme_of(config, fp8, fp4)
    keywords: dict[str, object] = {}
    if scheme.family == "fp8" and scheme.name != "custom":
        keywords["fp8_format"] = _FORMATS[str(fp8)]
    for keyword, path in scheme.te_keywords.items():
        keywords[keyword] = getattr(config, path, _MEGATRON_DEFAULTS[path])
    keywords |= _stated_by_scheme(scheme)
    if scheme.name == "custom":
        keywords["qfactory"] = getattr(config, f"{scheme.family}_quantizer_factory")
    notes = [*_config_notes(config, scheme), *_environment_notes(scheme, keywords, environment)]
    return TERecipe(name=scheme.te_class, scheme=scheme.name, keywords=keywords, notes=tuple(notes))


def _scheme_of(config: Any, fp8: object, fp4: object) -> Scheme:
    findings: list[Finding] = []

    def fault(path: str, rule: str, value: object, remedy: str) -> None:
        findings.append(Finding(path=path, rule=rule, value=value, remedy=remedy))

    if fp8 and fp4:
        fault("fp4", f"must be None together with fp8={fp8!r}", fp4, "Choose one of the two.")
    if fp8 and fp8 not in _FORMATS:
        fault("fp8", f"must be {' or '.join(_FORMATS)}", fp8, "Use one of these, or None for no FP8.")
    if fp4 and fp4 != "e2m1":
        fault("fp4", "must be e2m1", fp4, "Use it, or None for no FP4.")
    family, table = ("fp8", FP8_SCHEMES) if fp8 else ("fp4", FP4_SCHEMES)
    value = getattr(config, f"{family}_recipe", None)
    found = table.get(str(getattr(value, "value", value)))  # Megatron's Fp8Recipe and Fp4Recipe are string enums
    if found is None:
        hint = did_you_mean(close_matches(str(value), table)) or "Use one of these."
        fault(f"{family}_recipe", f"must be one of {', '.join(table)}", value, hint)
    elif found.name == "custom" and not getattr(config, f"{family}_quantizer_factory", None):
        path = f"{family}_quantizer_factory"
        fault(path, f"must name a function where {family}_recipe is custom", None, "Give its dotted path.")
    if found is None or findings:
        raise PrecisionConfigError("No Transformer Engine recipe can be made of this config:", findings)
    return found


def _stated_by_scheme(scheme: Scheme) -> dict[str, object]:
    """Return keywords that Megatron leaves to their defaults and that the scheme's row decides."""
    if scheme.name == "blockwise":
        return {"use_f32_scales": not scheme.power_of_two_scale}
    if scheme.name == "nvfp4":
        weight = scheme.operand("weight")
        return {
            "disable_rht": not scheme.operand("input").hadamard,
            "disable_stochastic_rounding": not scheme.operand("grad_output").stochastic,
            "disable_2d_quantization": weight.row != weight.column,
        }
    return {}


def _config_notes(config: Any, scheme: Scheme) -> list[str]:
    """Return a sentence for each setting of a config that does not reach Transformer Engine."""
    notes = []
    for path, default in _MEGATRON_DEFAULTS.items():
        value = getattr(config, path, default)
        if value != default and path not in scheme.te_keywords.values():
            notes.append(f"{path}={value!r} has no effect: {scheme.te_class} gets no such keyword.")
    if getattr(config, "fp8_dot_product_attention", False) and scheme.name in ("mxfp8", "nvfp4"):
        since = "0.18" if scheme.name == "mxfp8" else "0.17"
        notes.append(f"fp8_dot_product_attention is passed on under {scheme.name} from megatron-core {since}.")
    if getattr(config, "fp8", None) and not getattr(config, "fp8_wgrad", True):
        notes.append("fp8_wgrad=False has no effect: Transformer Engine 2.0 dropped it, and wgrad runs in FP8.")
    if scheme.name == "custom" and scheme.family == "fp8":
        notes.append(f"fp8={config.fp8!r} switches FP8 on and no more: the factory chooses the formats.")
    if getattr(config, "fp8", None) == "hybrid" and scheme.name in ("blockwise", "mxfp8"):
        notes.append(f"fp8='hybrid' under {scheme.name} makes gradients E5M2; Transformer Engine's default is E4M3.")
    if getattr(config, "tp_only_amax_red", False):
        notes.append("tp_only_amax_red=True is no keyword: it chooses the group that autocast reduces amaxes over.")
    return notes


def _environment_notes(scheme: Scheme, keywords: dict[str, object], environment: Environment | None) -> list[str]:
    """Add the keywords that the environment sets; return a sentence about each variable."""
    notes = []
    for name, text in (environment or Environment()).values.items():
        row = NVTE_VARIABLES[name]
        if row.keyword is None or not row.concerns(scheme.name, attention=bool(keywords.get("fp8_dpa"))):
            continue
        if not row.is_active(text):  # of a refused value, `environment_findings` has the error
            continue
        if text in row.contradicts or scheme.name in row.refused_by:
            notes.append(f"{name}={text} is not followed: it contradicts the config.")
        else:
            keywords[row.keyword] = row.parse(text)
            notes.append(f"{row.keyword}={row.parse(text)} comes from {name}={text}.")
    return notes
