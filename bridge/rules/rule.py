"""A rule as a row: the setting, the predicate, the sentence, the remedies, and the source.

A predicate is a plain function of a `RuleContext`. It returns something falsy for silence, True, a mapping of values
for the message, or several mappings for several findings. `path`, `value`, `where` and `severity` in a mapping take the
place of the row's. The message and the remedies are format strings over these values and ``s``, the context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from bridge.errors import Finding
from bridge.rules.versions import VersionRange

if TYPE_CHECKING:
    from bridge.rules.context import RuleContext

__all__ = [
    "EVIDENCE",
    "MODEL_CHECK",
    "NEEDS",
    "OPTIMIZER_CHECK",
    "PARSER",
    "SEVERITIES",
    "SYNC",
    "Predicate",
    "Rule",
    "RuleFinding",
    "each",
    "environment_rule",
    "fires",
    "inert_rule",
    "mcore",
    "owners_rule",
    "precision_rule",
    "target_rule",
    "te",
]

Predicate = Callable[["RuleContext"], Any]

SEVERITIES = ("error", "warning", "info")
"""Worst first. An error means that the run will not start, or will be another run than the one asked for."""

EVIDENCE = {
    "verified": "read in the source that is named, or executed",
    "reported": "reported by users or maintainers in the thread that is named, not reproduced here",
    "weak": "few or conflicting reports",
}
"""The kinds of evidence of a rule."""

PARSER = "Megatron-LM training/arguments.py validate_args, 0.19.2 (argument parser only)"
MODEL_CHECK = "megatron-core 0.16.1 transformer_config.py __post_init__"
OPTIMIZER_CHECK = "megatron-core 0.16.1 optimizer_config.py __post_init__"
"""Sources of many rules: the last two run when the config is made, the parser does not for configs built in Python."""

NEEDS = {
    "precision": "the fields of the precision",
    "owners": "the precision and the configs that a sync writes into",
    "shape": "these and the run's other settings: sizes, layout, batches, data, adapters, checkpoint",
    "target": "these and the GPUs of the run and their libraries",
    "environment": "these and the environment variables of the run",
}
"""The least that a rule has to know. `finalize` asks the errors that need the precision alone, `check` asks all."""

SYNC = {
    "reported": "the sync reports it",
    "strict": "the sync reports it, and refuses it where the run begins next",
    "refused": "the sync refuses it",
}
"""The reaction of a sync to a rule that needs the precision and the owners. A sync does not ask the other rules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One row."""

    id: str
    """PB and three digits; the first says the topic."""
    title: str
    """The fault in a few words."""
    path: str
    """The setting it is about: a field of the precision, or section.field."""
    predicate: Predicate
    """When it speaks."""
    message: str
    """The rule as a clause without a full stop."""
    remedies: tuple[str, ...]
    """The remedies, each an imperative clause without a full stop."""
    source: str
    """File and version, or thread and date."""
    severity: str = "error"
    """error, warning or info."""
    evidence: str = "verified"
    """A key of `EVIDENCE`."""
    needs: str = "shape"
    """A key of `NEEDS`."""
    sync: str | None = None
    """A key of `SYNC`; None: a sync does not ask it."""
    gate: str | None = None
    """Attribute of `RuleContext` that has to be truthy for the rule to apply at all."""
    versions: tuple[VersionRange, ...] = ()
    """Versions it holds for. Where one is not known, the finding says so and is one step milder."""
    explanation: str = ""
    """The effect and its cause, for `explain` and the reference page."""


# A row names its need by its constructor: `Rule` itself is for one that needs the shape.
precision_rule = partial(Rule, needs="precision")
owners_rule = partial(Rule, needs="owners")
target_rule = partial(Rule, needs="target")
environment_rule = partial(Rule, needs="environment")
inert_rule = partial(owners_rule, severity="warning", message="has no effect: {why}", sync="reported", gate="precision")


@dataclass(frozen=True, kw_only=True)
class RuleFinding(Finding):
    """The finding of a rule about one context."""

    title: str = ""
    """Of the rule."""
    source: str = ""
    """Of the rule."""
    evidence: str = "verified"
    """Of the rule."""
    remedies: tuple[str, ...] = ()
    """Of the rule, filled in."""
    depends_on: str | None = None
    """The version that would decide whether it holds, where that is not known."""
    silenced: str | None = None
    """Why it was silenced; None where it was not."""


def mcore(*, since: str | None = None, until: str | None = None) -> VersionRange:
    """Return a range of megatron-core versions."""
    return _range("mcore", since, until)


def te(*, since: str | None = None, until: str | None = None) -> VersionRange:
    """Return a range of Transformer Engine versions."""
    return _range("te", since, until)


def _range(product: str, since: str | None, until: str | None) -> VersionRange:
    limits = [f"{operator}{version}" for operator, version in ((">=", since), ("<", until)) if version is not None]
    return VersionRange(product=product, versions=SpecifierSet(",".join(limits)))


def each(*rows: tuple[str, Any]) -> list[dict[str, str]]:
    """Return the values of a finding for each (path, condition) whose condition holds."""
    return [{"path": path} for path, holds in rows if holds]


def fires(found: Any) -> tuple[Mapping[str, Any], ...]:
    """Return what a predicate's answer means: the values of each finding."""
    if not found:
        return ()
    if found is True:
        return ({},)
    if isinstance(found, Mapping):
        return (found,)
    return tuple(found) if isinstance(found, list | tuple) else ({},)
