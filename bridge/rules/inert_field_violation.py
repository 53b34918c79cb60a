"""`find_fields_without_effect`: the violations of rules about settings without effect."""

from collections.abc import Iterable, Iterator

from bridge.rules.context import RuleContext
from bridge.rules.violation import Violation


def find_fields_without_effect(context: RuleContext, fields: Iterable[str]) -> Iterator[Violation]:
    """Yield a violation for each field that has no effect and a stated value other than its default."""
    stated = [name for name in fields if context.differs_from_default(name)]
    for name in stated:
        if name in context.reasons_without_effect:
            yield Violation(name, why=context.reasons_without_effect[name])
