"""Rules about settings of a file that its framework does not forward to Megatron Core."""

from collections.abc import Iterator

from bridge.precision.stated_field import LAYER_COUNTS
from bridge.rules.program import DroppedField
from bridge.rules.rule import warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation

LAYER_COUNT_FIELDS = frozenset(f"model.{name}" for name in LAYER_COUNTS)
"""Fields that have an effect only with model.first_last_layers_bf16."""
EDGES = "model.first_last_layers_bf16"
"""A field that changes nothing in a run without FP8 and FP4."""
PRECISION_FIELDS = frozenset({"model.quant_recipe", EDGES})
"""Fields that decide the precision of modules.

The file of a `quant_recipe` can turn FP8 on in a run without it, by
`override_nonquantized_autocast`.
"""
JUDGED_BY_OTHER_RULES = frozenset({"optimizer.fp8_recipe"})
"""Fields that another rule reports. PB124 compares the owners."""


def find_dropped_settings(context: RunContext) -> Iterator[Violation]:
    """Yield the settings and options that the framework of the run's file does not forward."""
    for fault in context.program.faulty_options:
        yield Violation(
            fault.path, value=fault.value, why=fault.rule, remedy=fault.remedy, rests_on=()
        )
    for dropped in context.program.dropped_fields:
        owner_name, _, name = dropped.path.partition(".")
        if (
            _is_fault(dropped, context)
            and getattr(context.views[owner_name], name) != dropped.value
        ):
            yield _make_violation(dropped)


def _is_fault(dropped: DroppedField, context: RunContext) -> bool:
    """Return whether a field would have an effect in the run, and no other rule reports it."""
    if (
        dropped.path in JUDGED_BY_OTHER_RULES
        or dropped.path in LAYER_COUNT_FIELDS
        or not dropped.value
    ):
        return False
    return dropped.path != EDGES or context.is_low_precision


def _make_violation(dropped: DroppedField) -> Violation:
    remedies = ["remove it from the file"]
    if dropped.fixed_in:
        remedies.insert(0, f"take a version with {dropped.fixed_in}")
    if dropped.instead:
        remedies.insert(0, f"state {dropped.instead}")
    severity = "info"
    if dropped.path in PRECISION_FIELDS:
        severity = "warning"
    return Violation(
        dropped.path,
        value=dropped.value,
        where=dropped.key,
        severity=severity,
        rests_on=(),
        why=f"{dropped.framework} does not forward it: {dropped.because} ({dropped.source}, {dropped.code})",
        remedy="; or ".join(remedies),
    )


RULES = (
    warning(
        id="PB801",
        title="setting that the framework does not forward",
        setting="arguments",
        when=find_dropped_settings,
        message="{why}",
        remedies=("{remedy}",),
        source="this project: bridge.read.framework, a table for each framework with file and commit; "
        "docs/explain/where-megatron-core-runs.md",
    ),
)
