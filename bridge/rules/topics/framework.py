"""Frameworks on top of Megatron Core: settings that their files state and that their code does not forward."""

from collections.abc import Iterator

from bridge.precision.fields import LAYER_COUNTS
from bridge.rules.program import Dropped
from bridge.rules.rule import warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation

FIRST_LAST = "model.first_last_layers_bf16"
COUNTS = frozenset(f"model.{name}" for name in LAYER_COUNTS)
"""Settings that act with the one above."""
OF_LOW_PRECISION = frozenset({"model.quant_recipe", FIRST_LAST})
"""Settings that change nothing in a run without FP8 and FP4."""
OTHER_RULES = frozenset({"optimizer.fp8_recipe"})
"""Settings whose rule compares the owners: PB124."""


def settings_that_are_dropped(run: RunContext) -> Iterator[Violation]:
    """Yield the settings of a file that its framework does not forward, where the run holds another value."""
    for dropped in run.program.dropped:
        if dropped.path in OTHER_RULES or dropped.path in COUNTS or not dropped.value:
            continue
        is_of_low_precision = dropped.path in OF_LOW_PRECISION
        if is_of_low_precision and not run.is_low:
            continue
        role, _, name = dropped.path.partition(".")
        if getattr(run.views[role], name) != dropped.value:
            yield _violation(dropped, is_warning=is_of_low_precision)


def _violation(dropped: Dropped, *, is_warning: bool) -> Violation:
    reach = take = ""
    if dropped.instead:
        reach = f"state {dropped.instead}"
    if dropped.mended:
        take = f"take a version with {dropped.mended}"
    severity = "info"
    if is_warning:
        severity = "warning"
    return Violation(
        dropped.path,
        value=dropped.value,
        where=dropped.key,
        severity=severity,
        rests_on=(),
        framework=dropped.framework,
        because=dropped.because,
        code=f"{dropped.source}, {dropped.code}",
        reach=reach,
        take=take,
    )


RULES = (
    warning(
        id="PB135",
        title="setting that the framework does not forward",
        setting=FIRST_LAST,
        when=settings_that_are_dropped,
        message="{framework} does not forward it to Megatron Core: {because} ({code})",
        remedies=("{reach}", "{take}", "remove it from the file"),
        source="this project: the tables of bridge/read/framework, each row with its file and commit",
    ),
)
