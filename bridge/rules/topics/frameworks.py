"""Frameworks on top of Megatron Core that do not hand over what their files state, by their tables."""

from collections.abc import Iterator

from bridge.rules.rule import warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation


def not_forwarded(run: RunContext) -> Iterator[Violation]:
    """Yield the settings and options that the framework of the run's file does not forward."""
    for fault in run.program.not_forwarded:
        yield Violation(
            fault.path, value=fault.value, why=fault.rule, remedy=fault.remedy, rests_on=()
        )


RULES = (
    warning(
        id="PB801",
        title="setting that the framework does not forward",
        setting="arguments",
        when=not_forwarded,
        message="{why}",
        remedies=("{remedy}",),
        source="this project: bridge.read.framework, a table for each framework with file and commit; "
        "docs/explain/where-megatron-core-runs.md",
    ),
)
