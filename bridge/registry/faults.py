"""The faults of a precision alone: what can never be right about it, in any run."""

from collections.abc import Sequence

from bridge.errors import Finding
from bridge.precision.config import PrecisionConfig


def faults_of(precision: PrecisionConfig) -> Sequence[Finding]:
    """Return everything that can never be right about a precision, in the order of the rules."""
    from bridge.rules.context import RuleContext  # a list of recipes does without the rules
    from bridge.rules.rule import ask
    from bridge.rules.rulebook import ALONE

    return sorted(ask(ALONE, RuleContext.of_precision(precision)), key=lambda fault: fault.id)
