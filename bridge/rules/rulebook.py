"""All rules: a table per topic, and one of them all."""

from collections.abc import Iterator

from bridge.rules.own_run import RULES as OWN_RUN
from bridge.rules.rule import Rule, without_run
from bridge.rules.run_context import RunContext
from bridge.rules.topics import (
    alignment,
    attention,
    blackwell,
    checkpoint,
    determinism,
    environment,
    frameworks,
    layers,
    loss_scale,
    mode,
    modules,
    moe,
    names,
    optimizer,
    parallel,
    recompute,
    reduction,
    residual,
    scheme,
    sharding,
    stored,
    target,
)

TOPICS: dict[str, tuple[Rule[RunContext], ...]] = {
    "Mode and dtypes": mode.RULES,
    "Names, types and origins": names.RULES,
    "Loss scale": loss_scale.RULES,
    "Residual stream": residual.RULES,
    "Formats and schemes": scheme.RULES,
    "Delayed scaling": scheme.DELAYED_RULES,
    "MXFP8 and NVFP4": blackwell.RULES,
    "Layers kept in BF16": layers.RULES,
    "Precision of single modules": modules.RULES,
    "Weights stored in FP8 or FP4": stored.RULES,
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
    "Runs of this project": OWN_RUN,
    "Frameworks": frameworks.RULES,
}
"""Topic -> its rules, in the order of their ids."""


def _all() -> Iterator[Rule[RunContext]]:
    for rules in TOPICS.values():
        yield from rules


RULES = tuple(_all())
BY_ID = {rule.id: rule for rule in RULES}

ALONE = without_run(rule for rule in RULES if rule.is_of_finalize)
"""Errors that the precision alone shows."""
