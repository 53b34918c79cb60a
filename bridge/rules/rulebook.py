"""The tables of all rules: by topic, by id, and in the order of their ids."""

from operator import attrgetter

from bridge.rules.rule import Rule, cast_to_precision_rules
from bridge.rules.run_context import RunContext
from bridge.rules.topics.model import alignment, attention, moe, residual
from bridge.rules.topics.precision import (
    blackwell,
    first_last_layers,
    loss_scale,
    mode,
    modules,
    scheme,
    stored_weights,
)
from bridge.rules.topics.statements import recipe, values
from bridge.rules.topics.system import environment, frameworks, target, train_script
from bridge.rules.topics.training import (
    checkpoint,
    determinism,
    optimizer,
    parallel,
    recompute,
    reduction,
    sharding,
)

TOPICS: dict[str, tuple[Rule[RunContext], ...]] = {
    "Mode and dtypes": mode.RULES,
    "Values and keys as they are written": values.RULES,
    "Recipe and configs": recipe.RULES,
    "Loss scale": loss_scale.RULES,
    "Residual stream": residual.RULES,
    "Formats and schemes": scheme.RULES,
    "Delayed scaling": scheme.DELAYED_RULES,
    "MXFP8 and NVFP4": blackwell.RULES,
    "Layers kept in BF16": first_last_layers.RULES,
    "Precision of single modules": modules.RULES,
    "Weights stored in FP8 or FP4": stored_weights.RULES,
    "FSDP": sharding.RULES,
    "Optimizer": optimizer.RULES,
    "Gradient reduction": reduction.RULES,
    "Parallel layout": parallel.RULES,
    "Mixture of experts": moe.RULES,
    "Attention": attention.RULES,
    "Recomputation, graphs and compilation": recompute.RULES,
    "Alignment": alignment.RULES,
    "Environment": environment.RULES,
    "Determinism": determinism.RULES,
    "Checkpoints and adapters": checkpoint.RULES,
    "Target": target.RULES,
    "Runs of this project": train_script.RULES,
    "Frameworks": frameworks.RULES,
}
"""Topic -> its rules."""


def _sort_rules_by_id() -> tuple[Rule[RunContext], ...]:
    rules: list[Rule[RunContext]] = []
    for topic in TOPICS.values():
        rules += topic
    return tuple(sorted(rules, key=attrgetter("id")))


RULES = _sort_rules_by_id()
"""All rules in the order of their ids, which is the order of findings in a report."""
RULES_BY_ID = {rule.id: rule for rule in RULES}

FINALIZE_RULES = cast_to_precision_rules(rule for rule in RULES if rule.is_of_finalize)
"""Rules of errors that are found from the precision without its configs."""
