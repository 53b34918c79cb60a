"""Per-module recipes in the emulated backend: Megatron's own matcher chooses, `GPTModel` hands each layer its payload.

Source: megatron-core 0.16.1 models/gpt/gpt_model.py (`finish_init`), extensions/transformer_engine.py.
"""

from typing import Any

from bridge.numerics import GemmPrecision
from bridge.precision.matchers import TRAINING, Chosen, Effect, Matcher, matchers_in


def _matchers(config: Any) -> list[Matcher]:
    return matchers_in(getattr(config, "quant_recipe", None))


def chooses_low(config: Any) -> bool:
    """Return whether a per-module recipe puts modules of a run without FP8 and FP4 into a low precision."""
    return any(effect.chooses_in_high for matcher in _matchers(config) for effect in matcher.effects)


def module_schemes(config: Any) -> list[str]:
    """Return the scaling schemes that a per-module recipe chooses for single modules."""
    effects = (effect for matcher in _matchers(config) for effect in matcher.effects)
    return [effect.scheme for effect in effects if effect.scheme is not None]


def per_module_faults(config: Any) -> list[str]:
    """Return a sentence for each per-module choice that the emulation cannot run."""
    faults = []
    for name, effect in dict.fromkeys((one.config, effect) for one in _matchers(config) for effect in one.effects):
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
    family = "fp8" if getattr(config, "fp8", None) else "fp4"
    if not getattr(config, family, None) or not getattr(config, f"{family}_param", None):
        return []
    held = getattr(config, f"{family}_recipe", None)
    stored = str(getattr(held, "value", held))
    effects = [effect for matcher in _matchers(config) for effect in matcher.effects]
    chosen = {effect.scheme for effect in effects if effect.in_low and effect.scheme} - {stored}
    if not chosen:
        return []
    others = ", ".join(sorted(chosen))
    return [f"model.{family}_param: weights stored in {stored} cannot be multiplied in {others}, got True."]


def in_module(layer: GemmPrecision | None, payload: dict[str, Any] | None, part: str) -> GemmPrecision | None:
    """Return what the payload of a per-module recipe, or None, makes of a layer's own precision; None is high.

    `part` is `TRAINING` or `EVALUATION`, which is that of training where the payload has none.
    """
    if payload is None:
        return layer
    stated = payload.get(part)
    found = Effect.of(payload[TRAINING] if stated is None else stated).computes(layer)
    return GemmPrecision(scheme=found.scheme, format=found.format) if isinstance(found, Chosen) else found
