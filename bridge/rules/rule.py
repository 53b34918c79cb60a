"""`Rule`: one law as a row of named columns, and the findings that the violations of a run make.

A row reads without its code: `when` says of a run where it breaks the law, and `message` and `remedies` are whole
sentences over ``run``, the context, and over the words of a violation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from packaging.specifiers import SpecifierSet

from bridge.errors import Finding
from bridge.model.reads import reads
from bridge.rules.context import RuleContext
from bridge.rules.unknown import deciders_text, named_first, settings_text
from bridge.rules.violation import HELD, Predicate, Violation
from bridge.target.versions import VersionRange

SEVERITIES = ("error", "warning", "info")
"""Worst first. An error means that the run will not start, or will be another run than the one asked for."""

EVIDENCE = {
    "verified": "read in the source that is named, or executed",
    "reported": "reported by users or maintainers in the thread that is named, not reproduced here",
    "weak": "few or conflicting reports",
}

PARSER = "Megatron-LM training/arguments.py validate_args, 0.19.2 (argument parser only)"
MODEL_CHECK = "megatron-core 0.16.1 transformer_config.py __post_init__"
OPTIMIZER_CHECK = "megatron-core 0.16.1 optimizer_config.py __post_init__"
"""Sources of many rules: the last two run when the config is made, the parser does not for configs built in Python."""

SYNC = {
    "reported": "the sync reports it",
    "strict": "the sync reports it, and refuses it where the run begins next",
    "refused": "the sync refuses it",
}
"""The reaction of a sync to a rule. It knows the precision and the owners, and does not ask the other rules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One row."""

    id: str
    """PB and three digits; the first says the topic."""
    title: str
    """The fault in a few words."""
    setting: str
    """What the rule is about: a field of the precision, or section.field."""
    severity: str
    """One of `SEVERITIES`."""
    is_of_finalize: bool = False
    """`finalize` asks it, which knows the precision alone. `check` asks every rule."""
    sync: str | None = None
    """A key of `SYNC`; None: a sync does not ask it."""
    versions: tuple[VersionRange, ...] = ()
    """Versions it holds for. Where one is not known, the finding says so and is one step milder."""
    when: Predicate
    """Returns where a run breaks the rule; empty for silence."""
    message: str
    """The rule as a clause about the setting, without a full stop."""
    remedies: tuple[str, ...]
    """The remedies, each an imperative clause without a full stop; one whose words are empty is left out."""
    source: str
    """File and version, or thread and date."""
    evidence: str = "verified"
    """A key of `EVIDENCE`."""
    explanation: str = ""
    """The effect and its cause, for `explain` and the reference page."""


error, warning, info = (partial(Rule, severity=severity) for severity in SEVERITIES)
"""The rows by severity."""
contradiction = partial(error, is_of_finalize=True)
"""The row of an error that can never be right about a precision, whatever it is written into."""
no_effect = partial(warning, sync="reported")
"""The row of a setting that changes nothing in a run: a warning, also of the sync."""


def _range(product: str, *, since: str | None = None, until: str | None = None) -> VersionRange:
    limits = [f"{operator}{version}" for operator, version in ((">=", since), ("<", until)) if version is not None]
    return VersionRange(product=product, versions=SpecifierSet(",".join(limits)))


mcore = partial(_range, "mcore")
te = partial(_range, "te")


@dataclass(frozen=True, kw_only=True)
class RuleFinding(Finding):
    """The finding of a rule about one context."""

    title: str = ""
    source: str = ""
    evidence: str = "verified"
    remedies: tuple[str, ...] = ()
    depends_on: str | None = None
    """The version that would decide whether it holds, where that is not known."""
    silenced: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Settings that it rests on and that nothing states -> what decides each; with any, it is an info."""


MILDER = {"error": "warning", "warning": "info", "info": "info"}


def ask(rules: Iterable[Rule], context: RuleContext) -> list[RuleFinding]:
    """Return what the rules find in `context`, in the order of the rules."""
    found: list[RuleFinding] = []
    for rule in rules:
        try:
            found += findings_of(rule, context)
        except Exception as error:  # noqa: BLE001  one rule that stumbles must not hide what the others say
            found.append(_stumbled(rule, context, error))
    return found


def findings_of(rule: Rule, context: RuleContext) -> list[RuleFinding]:
    """Return what one rule finds in `context`: nothing where the versions rule it out."""
    with reads() as paths:
        violations = rule.when(context)
    if context.leaves_out(rule.id, paths) or not violations:
        return []
    holds = {one: _holds(one, context) for one in rule.versions}
    if False in holds.values():
        return []
    depends = [one for one, is_met in holds.items() if is_met is None]
    found = []
    for violation in violations:
        unknown = context.unknown_among(paths if violation.rests_on is None else violation.rests_on)
        if unknown and rule.severity != "info":  # an info that cannot be judged says nothing
            found.append(_unjudged(rule, context, violation, unknown))
        elif not unknown:
            found.append(_finding(rule, context, violation, depends))
    return found


def _holds(versions: VersionRange, context: RuleContext) -> bool | None:
    """Return whether a product of the target is in a range; None where its version is not known, or assumed."""
    holds = versions.holds(getattr(context.target, versions.product))
    if holds and context.unknown_among([f"target.{versions.product}"]):
        return None
    return holds


def _unjudged(rule: Rule, context: RuleContext, violation: Violation, unknown: Mapping[str, str]) -> RuleFinding:
    """Return the info that a rule cannot be judged, since a setting that it rests on is not known."""
    path = context.path(violation.path or rule.setting)
    value = context.value(path) if violation.value is HELD else violation.value
    states = " ".join(f"{name}=VALUE" for name in named_first(unknown, path))
    settings, deciders = settings_text(unknown, path), deciders_text(unknown)
    clause = f"cannot be judged: {settings} are not known, since {deciders} may set them"
    if len(unknown) == 1:
        clause = f"cannot be judged: {settings} is not known, since {deciders} may set it"
    return _made(
        rule,
        path=path,
        rule=f"{clause}; the rule is about: {rule.title}",
        value=value,
        where=violation.where or context.where(path),
        remedy=f"State what is known: {states}.",
        severity="info",
        remedies=(f"state what is known: {states}",),
        unknown=unknown,
    )


def _finding(rule: Rule, context: RuleContext, violation: Violation, depends: Sequence[VersionRange]) -> RuleFinding:
    path = context.path(violation.path or rule.setting)
    value = context.value(path) if violation.value is HELD else violation.value
    words = {**violation.words, "run": context, "path": path, "value": value}
    severity = violation.severity or rule.severity
    remedies = tuple(filter(None, (one.format(**words) for one in rule.remedies)))
    clause = rule.message.format(**words)
    ranges = " and ".join(map(str, depends)) or None
    if ranges is not None:
        clause += f" (holds for {ranges}; {_not_known(depends, context)})"
    if rule.evidence == "weak":
        clause += " (weak evidence)"
    return _made(
        rule,
        path=path,
        rule=clause,
        value=value,
        where=violation.where or context.where(path),
        remedy=remedy_of(remedies),
        severity=severity if ranges is None else MILDER[severity],
        remedies=remedies,
        depends_on=ranges,
    )


def _not_known(depends: Sequence[VersionRange], context: RuleContext) -> str:
    """Return why it is not known whether a version is in its range, as a clause."""
    for one in depends:
        version = getattr(context.target, one.product)
        if version is not None and context.unknown_among([f"target.{one.product}"]):
            return f"the release is not stated, and {version} is assumed"
    return "the target does not say which it is"


def _made(row: Rule, **columns: Any) -> RuleFinding:
    return RuleFinding(id=row.id, title=row.title, source=row.source, evidence=row.evidence, **columns)


def remedy_of(remedies: tuple[str, ...]) -> str:
    """Return the remedies as one sentence: "Do this.", or "Do this; or do that; or ..."."""
    sentence = "; or ".join(remedies)
    return f"{sentence[:1].upper()}{sentence[1:]}{'' if sentence.endswith('?') else '.'}"


def _stumbled(rule: Rule, context: RuleContext, error: Exception) -> RuleFinding:
    path = context.path(rule.setting)
    clause = f"could not be judged ({type(error).__name__}: {error})"
    remedy = "Please report this: a rule has to cope with any value."
    return _made(rule, path=path, rule=clause, value=context.value(path), remedy=remedy, severity="warning")
