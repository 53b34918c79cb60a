"""The payloads of per-module recipes: keys that are refused, and factories that they name."""

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.precision.matchers import EVALUATION, TRAINING, find_payload_faults, parse_quant_recipes
from bridge.precision.quantizer_factories import find_shipped_factory
from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.facts.import_paths import find_import_fault
from bridge.rules.facts.module_violations import make_module_violation
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.versions import is_at_least

FACTORIES_SINCE_TE = "2.19"
"""The first release of Transformer Engine with the factories of `quantizer_factories`.

2.16 to 2.18 have others, under other names. The files of 2.19 were not read, and those of 2.20.2 have them."""


def list_payloads(context: RuleContext) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name.part, recipe) of each payload; the recipes of a run's chunks share them."""
    for recipe in parse_quant_recipes(context.model.quant_recipe)[:1]:
        for name, body in recipe.configs.items():
            if not isinstance(body, Mapping):
                continue
            for part in (TRAINING, EVALUATION):
                if isinstance(body.get(part), Mapping):
                    yield f"{name}.{part}", body[part]


def find_refused_payloads(context: RuleContext) -> Iterator[Violation]:
    """Yield the entries that Transformer Engine's per-module recipes refuse."""
    if not context.has_model:
        return
    for key, row in list_payloads(context):
        for _, fault in find_payload_faults(row):
            yield Violation(key=key, what=fault)


def list_factories(context: RuleContext) -> Iterator[tuple[str | None, str]]:
    """Yield (setting, import path) of each quantizer factory, of modules and of the run."""
    for _, row in list_payloads(context):
        factory = row.get("custom_recipe_factory")
        if factory:
            yield make_module_violation(context, None).path, str(factory)
    for family in FAMILIES:
        name = f"{family}_quantizer_factory"
        if context.is_custom and context.get_format(family) and getattr(context.model, name):
            yield name, str(getattr(context.model, name))


def find_missing_factories(context: RuleContext) -> Iterator[Violation]:
    """Yield the quantizer factories that are not found on this machine, nor in the target's Transformer Engine.

    The emulated backend refuses every factory.
    """
    if context.is_emulated:
        return
    for path, factory in list_factories(context):
        is_of_te = find_shipped_factory(factory) is not None
        if is_of_te and context.target.te is not None and not context.target.is_detected:
            continue
        why = find_import_fault(factory)
        if why is not None:
            yield Violation(path, value=factory, why=why)


def find_factories_of_later_te(context: RuleContext) -> Iterator[Violation]:
    """Yield the factories of Transformer Engine that the target's release has not."""
    for path, factory in list_factories(context):
        if (
            find_shipped_factory(factory) is not None
            and is_at_least(context.target.te, FACTORIES_SINCE_TE) is False
        ):
            yield Violation(path, value=factory, te=context.target.te)


def find_recipes_with_stored_weights(context: RunContext) -> Iterator[Violation]:
    """Yield the patterns of a hybrid model's recipes in a run with stored weights.

    A GPT reads no fp8_param of a payload (PB289).
    """
    if not context.is_low_precision or not context.shape.is_hybrid:
        return
    if not context.gathers_fp8 and not context.gathers_fp4:
        return
    for recipe in parse_quant_recipes(context.model.quant_recipe)[:1]:
        yield make_module_violation(context, [matcher.select for matcher in recipe.matchers])
