"""The payloads of per-module recipes: keys that are refused, and factories that they name."""

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.precision.matchers import EVALUATION, TRAINING, payload_faults, quant_recipes
from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.facts.import_paths import why_not_found
from bridge.rules.facts.selected_modules import about
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation


def payloads(run: RuleContext) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name.part, recipe) of each payload; the recipes of a run's chunks share them."""
    for recipe in quant_recipes(run.model.quant_recipe)[:1]:
        for name, body in recipe.configs.items():
            if not isinstance(body, Mapping):
                continue
            for part in (TRAINING, EVALUATION):
                if isinstance(body.get(part), Mapping):
                    yield f"{name}.{part}", body[part]


def wrong_payloads(run: RuleContext) -> Iterator[Violation]:
    """Yield the entries that Transformer Engine's per-module recipes refuse."""
    if not run.has_model:
        return
    for key, row in payloads(run):
        for _, fault in payload_faults(row):
            yield Violation(key=key, what=fault)


def missing_factories(run: RuleContext) -> Iterator[Violation]:
    """Yield the quantizer factories, of modules and of the run, that are not found on this machine.

    The emulated backend refuses every factory.
    """
    if run.is_emulated:
        return
    paths = []
    for _, row in payloads(run):
        factory = row.get("custom_recipe_factory")
        if factory:
            paths.append((about(run, None).path, factory))
    for family in FAMILIES:
        name = f"{family}_quantizer_factory"
        if run.is_custom and run.format_of(family) and getattr(run.model, name):
            paths.append((name, getattr(run.model, name)))
    for path, factory in paths:
        why = why_not_found(str(factory))
        if why is not None:
            yield Violation(path, value=factory, why=why)


def next_to_stored_weights(run: RunContext) -> Iterator[Violation]:
    """Yield the patterns of a hybrid model's recipes in a run with stored weights.

    A GPT reads no fp8_param of a payload (PB289).
    """
    if not run.is_low or not run.shape.is_hybrid:
        return
    if not run.gathers_fp8 and not run.gathers_fp4:
        return
    for recipe in quant_recipes(run.model.quant_recipe)[:1]:
        yield about(run, [matcher.select for matcher in recipe.matchers])
