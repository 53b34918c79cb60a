"""Frameworks on top of Megatron Core: settings that their files state and that their code does not forward."""

from typing import Any

from bridge.precision.fields import LAYER_COUNTS
from bridge.rules.context import RuleContext
from bridge.rules.rule import warning
from bridge.rules.violation import Violation

FIRST_LAST = "model.first_last_layers_bf16"
COUNTS = frozenset(f"model.{name}" for name in LAYER_COUNTS)
"""Settings that act with the one above."""
OF_LOW_PRECISION = frozenset({"model.quant_recipe", FIRST_LAST})
"""Settings that change nothing in a run without FP8 and FP4."""
OTHER_RULES = frozenset({"optimizer.fp8_recipe"})
"""Settings whose rule compares the owners: PB124."""


def _dropped(run: RuleContext) -> list[Violation]:
    found = []
    for one in run.dropped:
        if one.path in OTHER_RULES or one.path in COUNTS or not one.value:
            continue
        severity = "info"
        if one.path in OF_LOW_PRECISION:
            severity = "warning"
            if not (run.fp8 or run.fp4):
                continue
        role, _, name = one.path.partition(".")
        if getattr(run.views[role], name) == one.value:
            continue
        found.append(_violation(one, severity))
    return found


def _violation(one: Any, severity: str) -> Violation:
    reach = f"state {one.instead}" if one.instead else ""
    take = f"take a version with {one.mended}" if one.mended else ""
    words = {"framework": one.framework, "because": one.because, "code": f"{one.source}, {one.code}"}
    return Violation(
        one.path, value=one.value, where=one.key, severity=severity, rests_on=(), reach=reach, take=take, **words
    )


RULES = (
    warning(
        id="PB135",
        title="setting that the framework does not forward",
        setting=FIRST_LAST,
        when=_dropped,
        message="{framework} does not forward it to Megatron Core: {because} ({code})",
        remedies=("{reach}", "{take}", "remove it from the file"),
        source="this project: the tables of bridge/read/framework, each row with its file and commit",
    ),
)
