"""`Rule`: one law as a row of named columns, and the findings that the violations of a run make.

A row reads without its code: `when` yields the places where a run breaks the law, and `message` and
`remedies` are whole sentences over ``run``, the context, and over the words of a violation.

    contradiction(id="PB204", setting="fp4", when=lambda context: context.is_fp8 and context.is_fp4, ...)
    error(id="PB264", when=more_layers_than_a_stage_has, ...)    # yields its violations
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from packaging.specifiers import SpecifierSet

from bridge.errors import Finding
from bridge.model.read_tracking import track_reads
from bridge.rules.context import RuleContext
from bridge.rules.run_context import RunContext
from bridge.rules.unknown_settings import (
    format_deciders,
    format_unknown_settings,
    select_named_settings,
)
from bridge.rules.violation import VALUE_OF_PATH, Violation
from bridge.target.versions import VersionRange

SEVERITIES = ("error", "warning", "info")
"""Worst first. An error means that the run will not start, or be another than was asked for."""

EVIDENCE = {
    "verified": "read in the source that is named, or executed",
    "reported": "reported by users or maintainers in the thread that is named, not reproduced here",
    "weak": "few or conflicting reports",
}

PARSER_SOURCE = "Megatron-LM training/arguments.py validate_args, 0.19.2 (argument parser only)"
MODEL_CHECK_SOURCE = "megatron-core 0.16.1 transformer_config.py __post_init__"
OPTIMIZER_CHECK_SOURCE = "megatron-core 0.16.1 optimizer_config.py __post_init__"
"""Sources of many rules.

The last two run when the config is made; the parser does not for configs built in Python.
"""

SYNC_REACTIONS = {
    "reported": "the sync reports it",
    "last": "the sync reports it, and the last sync before a run refuses it",
    "refused": "the sync refuses it",
}
"""The reaction of a sync to a rule that it asks; it knows the precision and the owners alone."""

Context_contra = TypeVar("Context_contra", bound=RuleContext, contravariant=True)
"""The context that a rule needs: `RuleContext`, or `RunContext` for one that a check alone asks."""


@dataclass(frozen=True, kw_only=True)  # `typing` notes the context on an instance: no slots
class Rule(Generic[Context_contra]):
    """A law as a row."""

    id: str
    """PB and three digits: the next free number, whatever the topic."""
    title: str
    """The fault in a few words."""
    setting: str
    """The setting that the rule is about: a field of the precision, or section.field."""
    severity: str
    """One of `SEVERITIES`."""
    is_of_finalize: bool = False
    """Whether `finalize`, which knows the precision alone, asks it. `check` asks every rule."""
    sync: str | None = None
    """A key of `SYNC`; None: a sync does not ask it."""
    versions: tuple[VersionRange, ...] = ()
    """The versions that it holds for.

    Where a version is not known, the finding states that, and is one step milder.
    """
    when: Callable[[Context_contra], bool | Iterable[Violation]]
    """Yields the places where a run breaks the rule, or returns whether `setting` is at fault."""
    message: str
    """The rule as a clause about the setting, without a full stop."""
    remedies: tuple[str, ...]
    """Imperative clauses without a full stop. A clause that is empty is left out."""
    source: str
    """File and version, or thread and date."""
    evidence: str = "verified"
    """A key of `EVIDENCE`."""
    explanation: str = ""
    """The effect and its cause, for `explain` and the reference page."""

    def find_violations(self, run: Context_contra) -> list[Violation]:
        """Return the places where a run breaks the rule."""
        answer = self.when(run)
        if answer is False:
            return []
        if answer is True:
            return [Violation()]
        return list(answer)


error = partial(Rule[RunContext], severity="error")
warning = partial(Rule[RunContext], severity="warning")
info = partial(Rule[RunContext], severity="info")
"""The rows by severity."""
sync_error = partial(Rule[RuleContext], severity="error")
sync_warning = partial(Rule[RuleContext], severity="warning")
sync_info = partial(Rule[RuleContext], severity="info")
"""The rows that a sync asks too, by severity; `sync` is stated."""
contradiction = partial(Rule[RuleContext], severity="error", is_of_finalize=True)
"""The row of an error that can never be right about a precision, whatever it is written into."""
no_effect = partial(Rule[RuleContext], severity="warning", sync="reported")
"""The row of a setting that changes nothing in a run: a warning, also of the sync."""


def cast_to_precision_rules(rules: Iterable[Rule[RunContext]]) -> tuple[Rule[RuleContext], ...]:
    """Return rules that are asked about less than a whole run, by `finalize` or a sync for example.

    A test asks each of them about a `RuleContext`.
    """
    return tuple(cast("Rule[RuleContext]", rule) for rule in rules)


def _make_version_range(
    product: str, *, since: str | None = None, until: str | None = None
) -> VersionRange:
    limits = []
    if since is not None:
        limits.append(f">={since}")
    if until is not None:
        limits.append(f"<{until}")
    return VersionRange(product=product, versions=SpecifierSet(",".join(limits)))


mcore = partial(_make_version_range, "mcore")
te = partial(_make_version_range, "te")


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
    """Setting that it rests on and that nothing states -> its decider; with any, it is an info."""


MILDER_SEVERITY = {"error": "warning", "warning": "info", "info": "info"}


ContextT = TypeVar("ContextT", bound=RuleContext)


def evaluate_rules(rules: Iterable[Rule[ContextT]], context: ContextT) -> list[RuleFinding]:
    """Return the findings of rules about a context, in the order of the rules."""
    findings: list[RuleFinding] = []
    for rule in rules:
        try:
            findings += evaluate_rule(rule, context)
        except Exception as error:  # noqa: BLE001  it must not hide the findings of other rules
            findings.append(_make_crash_finding(rule, context, error))
    return findings


def evaluate_rule(rule: Rule[ContextT], context: ContextT) -> list[RuleFinding]:
    """Return the findings of a rule about a context; none for versions that it is not about."""
    with track_reads() as paths:
        violations = rule.find_violations(context)
    if context.skips_rule(rule.id, paths) or not violations:
        return []
    depends = []
    for versions in rule.versions:
        holds = _is_in_range(versions, context)
        if holds is False:
            return []
        if holds is None:
            depends.append(versions)
    findings = []
    for violation in violations:
        if violation.rests_on is None:
            unknown = context.find_unknown(paths)
        else:
            unknown = context.find_unknown(violation.rests_on)
        if not unknown:
            findings.append(_make_violation_finding(rule, context, violation, depends))
        elif rule.severity != "info":  # an info that cannot be judged is not worth a line
            findings.append(_make_undecided_finding(rule, context, violation, unknown))
    return findings


def _is_in_range(versions: VersionRange, context: RuleContext) -> bool | None:
    """Return whether a product is in a range; None where its version is not known, or assumed."""
    holds = versions.holds(getattr(context.target, versions.product))
    if holds and context.find_unknown([f"target.{versions.product}"]):
        return None
    return holds


def _make_undecided_finding(
    rule: Rule[ContextT], context: RuleContext, violation: Violation, unknown: Mapping[str, str]
) -> RuleFinding:
    """Return the info that a rule cannot be judged, as a setting that it rests on is not known."""
    path = context.path(violation.path or rule.setting)
    states = " ".join(f"{name}=VALUE" for name in select_named_settings(unknown, path))
    settings = format_unknown_settings(unknown, path)
    deciders = format_deciders(unknown)
    clause = f"cannot be judged: {settings} are not known, since {deciders} may set them"
    if len(unknown) == 1:
        clause = f"cannot be judged: {settings} is not known, since {deciders} may set it"
    return _make_finding(
        rule,
        path=path,
        rule=f"{clause}; the rule is about: {rule.title}",
        value=_get_value_at_fault(violation, context, path),
        where=violation.where or context.where(path),
        remedy=f"State what is known: {states}.",
        severity="info",
        remedies=(f"state what is known: {states}",),
        unknown=unknown,
    )


def _make_violation_finding(
    rule: Rule[ContextT],
    context: RuleContext,
    violation: Violation,
    depends: Sequence[VersionRange],
) -> RuleFinding:
    """Return the finding of a violation; it is milder where it depends on an unknown version."""
    path = context.path(violation.path or rule.setting)
    value = _get_value_at_fault(violation, context, path)
    words = {**violation.words, "run": context, "path": path, "value": value}
    remedies = []
    for template in rule.remedies:
        remedy = template.format(**words)
        if remedy:
            remedies.append(remedy)
    clause = rule.message.format(**words)
    severity = violation.severity or rule.severity
    ranges = None
    if depends:
        ranges = " and ".join(str(versions) for versions in depends)
        severity = MILDER_SEVERITY[severity]
        clause += f" (holds for {ranges}; {_explain_unknown_version(depends, context)})"
    if rule.evidence == "weak":
        clause += " (weak evidence)"
    return _make_finding(
        rule,
        path=path,
        rule=clause,
        value=value,
        where=violation.where or context.where(path),
        remedy=format_remedies(remedies),
        severity=severity,
        remedies=tuple(remedies),
        depends_on=ranges,
    )


def _get_value_at_fault(violation: Violation, context: RuleContext, path: str) -> object:
    """Return the value at fault: that of the violation, or else that of the path."""
    if violation.value is VALUE_OF_PATH:
        return context.value(path)
    return violation.value


def _explain_unknown_version(depends: Sequence[VersionRange], context: RuleContext) -> str:
    """Return why it is not known whether a version is in its range, as a clause."""
    for versions in depends:
        version = getattr(context.target, versions.product)
        if version is not None and context.find_unknown([f"target.{versions.product}"]):
            return f"the release is not stated, and {version} is assumed"
    return "the target does not say which it is"


def _make_finding(row: Rule[ContextT], **columns: Any) -> RuleFinding:
    return RuleFinding(
        id=row.id, title=row.title, source=row.source, evidence=row.evidence, **columns
    )


def format_remedies(remedies: Sequence[str]) -> str:
    """Return the remedies as one sentence: "Do this.", or "Do this; or do that; or ..."."""
    sentence = "; or ".join(remedies)
    sentence = f"{sentence[:1].upper()}{sentence[1:]}"
    if sentence.endswith("?"):
        return sentence
    return f"{sentence}."


def _make_crash_finding(
    rule: Rule[ContextT], context: RuleContext, error: Exception
) -> RuleFinding:
    path = context.path(rule.setting)
    clause = f"could not be judged ({type(error).__name__}: {error})"
    remedy = "Please report this: a rule has to cope with any value."
    value = context.value(path)
    return _make_finding(
        rule, path=path, rule=clause, value=value, remedy=remedy, severity="warning"
    )
