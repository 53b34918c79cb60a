"""Per-module recipes in the emulated backend: Megatron's own matcher chooses, `GPTModel` hands each layer its payload.

Source: megatron-core 0.16.1 models/gpt/gpt_model.py (`finish_init`), extensions/transformer_engine.py.
"""

from typing import Any

from bridge.numerics import GemmPrecision
from bridge.precision.quant_recipe import EVALUATION, TRAINING, ModuleEffect, quant_recipes

Chosen = GemmPrecision | None


def chooses_low(config: Any) -> bool:
    """Return whether a per-module recipe puts modules of a run without FP8 and FP4 into a low precision."""
    effects = [effect for _, effect in _effects(config)]
    return any(effect.family is not None and effect.in_high for effect in effects)


def module_schemes(config: Any) -> list[str]:
    """Return the scaling schemes that a per-module recipe chooses for single modules."""
    return [effect.scheme for _, effect in _effects(config) if effect.scheme is not None]


def per_module_faults(config: Any) -> list[str]:
    """Return a sentence for each per-module choice that the emulation cannot run."""
    faults = []
    for name, effect in _effects(config):
        if effect.scheme in ("custom", "delayed"):
            why = "which needs Transformer Engine" if effect.scheme == "custom" else "which no single module can have"
            faults.append(
                f"model.quant_recipe: the emulated backend does not run {name}, {why}, got {effect.scheme!r}."
            )
        if effect.stored:
            why = "which Megatron drops in a GPT"
            faults.append(f"model.quant_recipe: the emulated backend does not run {name}, {why}, got fp8_param=True.")
    return [*faults, *_faults_of_stored_weights(config)]


def _faults_of_stored_weights(config: Any) -> list[str]:
    """Return a sentence for each choice that cannot be made where the run's weights are stored in FP8 or FP4.

    A module in the dtype of the run dequantises its weight; Transformer Engine refuses one in another scheme.
    """
    family = next((one for one in ("fp8", "fp4") if getattr(config, one, None)), None)
    if family is None or not getattr(config, f"{family}_param", None):
        return []
    held = getattr(config, f"{family}_recipe", None)
    stored = str(getattr(held, "value", held))
    chosen = {effect.scheme for _, effect in _effects(config) if effect.in_low and effect.scheme} - {stored}
    if not chosen:
        return []
    others = ", ".join(sorted(chosen))
    return [f"model.{family}_param: weights stored in {stored} cannot be multiplied in {others}, got True."]


def _effects(config: Any) -> list[tuple[str, ModuleEffect]]:
    """Return (payload's name, effect) of each part of each payload that a matcher names."""
    found: dict[tuple[str, str], ModuleEffect] = {}
    for recipe in quant_recipes(getattr(config, "quant_recipe", None)):
        for matcher in recipe.matchers:
            for part in (TRAINING, EVALUATION):
                effect = recipe.effect_of(matcher.config, part)
                if effect is not None:
                    found[matcher.config, part] = effect
    return [(name, effect) for (name, _), effect in found.items()]


class ModuleGemms:
    """The precision of one layer's GEMMs in training and in evaluation; None is high precision."""

    def __init__(self, layer: Chosen, *, payload: dict[str, Any] | None) -> None:
        self.training = layer if payload is None else _chosen(payload[TRAINING], layer)
        evaluation = (payload or {}).get(EVALUATION)
        self.evaluation = self.training if evaluation is None else _chosen(evaluation, layer)

    def of(self, *, training: bool) -> Chosen:
        """Return the precision in training, or in evaluation."""
        return self.training if training else self.evaluation


def _chosen(recipe: dict[str, Any], layer: Chosen) -> Chosen:
    effect = ModuleEffect.of(recipe)
    if not effect.acts(is_low=layer is not None):
        return layer
    if effect.scheme is None or effect.format is None:
        return None
    return GemmPrecision(scheme=effect.scheme, format=effect.format)
