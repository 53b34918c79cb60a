"""One recipe object of Transformer Engine as a plain value, and the checks that its classes lack.

Transformer Engine's recipes are pydantic dataclasses: they drop keywords they do not know, turn "3" into 3 and 1.0 into
1, and two of them have keywords that their linear layers never look at. So every keyword is compared with the class's
fields before the object is made, and with its attributes after.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import BackendUnavailableError, Finding, PrecisionConfigError, close_matches, did_you_mean
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

__all__ = ["TERecipe", "import_recipes"]

_POWER_OF_TWO = {"use_power_2_scales": True, "use_f32_scales": False}
"""Keyword -> the value under which scales are powers of two."""

_QPARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


@dataclass(frozen=True, kw_only=True)
class TERecipe:
    """Class and keywords of one Transformer Engine recipe, as plain values."""

    name: str
    """The class in `transformer_engine.common.recipe`."""
    scheme: str
    """Megatron's name of the scheme."""
    keywords: Mapping[str, object] = field(default_factory=dict)
    """Keyword -> value. Formats are names of members of `Format`; a factory may be a dotted path."""
    notes: tuple[str, ...] = ()
    """Sentences: what of the config has no place in the recipe, and what the environment adds to it."""

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
        unknown = [self._unknown(keyword, known) for keyword in self.keywords if keyword not in known]
        self._refuse(unknown)
        values = {keyword: _resolved(recipes, keyword, value) for keyword, value in self.keywords.items()}
        try:
            recipe = kind(**values)
        except (ValueError, TypeError, AssertionError) as error:
            finding = Finding(path=self.name, rule=_reason(error), value=str(self), remedy="Correct the value.")
            self._refuse([finding])
        _set_power_of_two(recipe, self.keywords)
        self._refuse(self.differences(recipe, recipes))
        return recipe

    def differences(self, recipe: Any, recipes: ModuleType | None = None) -> list[Finding]:
        """Return what a recipe object has otherwise than this says; empty where they agree.

        Args:
            recipe: the recipe that Megatron made, say.
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
                found.append(self._finding(keyword, rule, got, "Find what changed it on the way."))
        for keyword, when in _POWER_OF_TWO.items():
            if keyword in self.keywords:
                wanted = self.keywords[keyword] is when
                params = {name: getattr(recipe, name, None) for name in _QPARAMS}
                for name, param in params.items():
                    if param is not None and param.power_2_scale != wanted:
                        rule = f"power_2_scale must be {wanted}, as {keyword}={self.keywords[keyword]} says"
                        found.append(self._finding(name, rule, param.power_2_scale, "Set it on the recipe object."))
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
    """Return the module `transformer_engine.common.recipe`.

    Raises:
        BackendUnavailableError: it cannot be imported.
    """
    try:
        return importlib.import_module("transformer_engine.common.recipe")
    except (ImportError, OSError, RuntimeError) as error:  # a package without its CUDA parts fails in any of these ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BackendUnavailableError(
            f"transformer_engine: must be importable, and is not ({reason}). Install transformer-engine[pytorch]."
        ) from error


def _resolved(recipes: ModuleType, keyword: str, value: object) -> object:
    """Return a keyword's value as the class takes it."""
    if keyword.endswith("_format"):
        return getattr(recipes, "Format")[value]  # noqa: B009 mypy knows no attribute of a module
    if keyword == "qfactory" and isinstance(value, str):
        return _function(value)
    return value


def _function(path: str) -> object:
    """Return the function at a dotted path, as Megatron finds it."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        finding = Finding(
            path="quantizer_factory",
            rule=f"must be the dotted path of a function ({error})",
            value=path,
            remedy="Check the spelling, and that its folder is on PYTHONPATH.",
        )
        raise PrecisionConfigError("The quantizer factory cannot be found:", [finding]) from error


def _set_power_of_two(recipe: Any, keywords: Mapping[str, object]) -> None:
    """Bring the scale rule to where the linear layers read it.

    `fp8_quant_*` have no annotations, so they are class attributes, computed when the module was imported; the keywords
    `use_power_2_scales` and `use_f32_scales` come too late for them (Transformer Engine 2.20 common/recipe/
    __init__.py:302-306 and :429-434, read in pytorch/module/linear.py:2762-2789).
    """
    for keyword, when in _POWER_OF_TWO.items():
        for name in _QPARAMS if keyword in keywords else ():
            params = getattr(recipe, name, None)
            wanted = keywords[keyword] is when
            if params is not None and params.power_2_scale != wanted:
                setattr(recipe, name, dataclasses.replace(params, power_2_scale=wanted))


def _reason(error: Exception) -> str:
    """Return why a class refused its arguments, as a clause; of pydantic's report only the messages."""
    faults = getattr(error, "errors", None)
    if faults is None:
        return str(error).rstrip(".")
    said = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ") for fault in faults())
    return "; ".join(said).rstrip(".")
