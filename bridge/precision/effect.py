"""The effect of a choice for a single module: the precision of its GEMMs, and where it acts.

A training or evaluation recipe of Megatron's per-module recipe is one written form of it, a row of `modules` another.

Source: megatron-core 0.16.1 and 0.19.2 extensions/transformer_engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES

Run = TypeVar("Run")

HIGH = "bf16"
"""The word for a module without FP8 and FP4: it computes in the dtype of the run."""
TRAINING, EVALUATION = "training_recipe", "evaluation_recipe"
CONFIG_TYPE = {"transformer_engine_config_type": "TEQuantizationParams"}
PAYLOAD_KEYS = (
    *("fp8_quantization_recipe", "fp4_quantization_recipe", "custom_recipe_factory", "fp8_format"),
    *("override_quantized_autocast", "override_nonquantized_autocast", "tp_only_amax_red", "fp8_param", "fp4_param"),
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
        chosen = [(name, str(getattr(scheme, "value", scheme))) for name, scheme in schemes.items() if scheme]
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
        recipe: dict[str, Any] = {f"{self.family}_quantization_recipe": self.scheme}
        if self.family == "fp8":
            recipe["fp8_format"] = self.format
        if self.in_high:
            recipe["override_nonquantized_autocast"] = True
        if self.factory is not None:
            recipe["custom_recipe_factory"] = self.factory
        if self.tp_only_amax_red is not None:
            recipe["tp_only_amax_red"] = self.tp_only_amax_red
        if self.stored:  # False is Megatron's default, and releases before 0.18 know no such key
            recipe[f"{self.family}_param"] = True
        return recipe

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

    def format_in(self, run: str | None) -> str:
        """Return the format of a module in FP8 or FP4, in a run whose own is `run`."""
        schemes = FP4_SCHEMES if self.family == "fp4" else FP8_SCHEMES
        legal = schemes[self.scheme or ""].formats
        return self.format or (run if run in legal else legal[0])

    def acts(self, *, is_low: bool) -> bool:
        """Return whether a module takes it in a layer that runs, or does not run, in FP8 or FP4."""
        return self.in_low if is_low else self.in_high

    def computes(self, layer: Run | None) -> Chosen | Run | None:
        """Return what a module computes in where its layer's own choice is `layer`; None is the dtype of the run."""
        if not self.acts(is_low=layer is not None):
            return layer
        return self.chosen


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
