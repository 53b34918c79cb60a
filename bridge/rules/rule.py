"""`Rule`: one rule as a row of named columns, and the evaluation of rules.

A row can be read without its code. `when` finds the places where a run breaks the rule. `message`
and `remedies` are templates. Their names are ``run``, which is the context, and the template values
of a violation.

    contradiction(id="PB204", setting="fp4", when=lambda context: context.is_fp8 and context.is_fp4, ...)
    error(id="PB264", when=find_counts_beyond_stage, ...)    # a function that returns or yields violations
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
"""The worst severity first. An error means that the run does not start or breaks a statement."""

EVIDENCE = {
    "verified": "read in the source that is named, or executed",
    "reported": "reported by users or maintainers in the thread that is named, not reproduced here",
    "weak": "few or conflicting reports",
}

PARSER_SOURCE = "Megatron-LM training/arguments.py validate_args, 0.19.2 (argument parser only)"
MODEL_CHECK_SOURCE = "megatron-core 0.16.1 transformer_config.py __post_init__"
OPTIMIZER_CHECK_SOURCE = "megatron-core 0.16.1 optimizer_config.py __post_init__"
"""Sources of many rules.

The last two checks run when a config object is made. The parser does not run for configs that are
built in Python.
"""

SYNC_REACTIONS = {
    "reported": "the sync reports it",
    "last": "the sync reports it, and the last sync before a run refuses it",
    "refused": "the sync refuses it",
}
"""The reactions of a sync to a violation. A sync knows only the precision and its owners."""

Context_contra = TypeVar("Context_contra", bound=RuleContext, contravariant=True)
"""The context that a rule needs: `RuleContext`, or `RunContext` for a rule that only a check uses."""


@dataclass(frozen=True, kw_only=True)  # no slots: `typing` sets __orig_class__ on an instance
class Rule(Generic[Context_contra]):
    """One rule as a row."""

    id: str
    """PB and three digits. A new rule gets the next free number, in every topic."""
    title: str
    """A short noun phrase for the fault."""
    setting: str
    """The setting that the rule is about: a field of the precision, or section.field."""
    severity: str
    """One of `SEVERITIES`."""
    is_of_finalize: bool = False
    """Whether `finalize`, which knows only the precision, evaluates it. A check evaluates every rule."""
    sync: str | None = None
    """A key of `SYNC_REACTIONS`. None: a sync does not evaluate the rule."""
    versions: tuple[VersionRange, ...] = ()
    """The versions for which the rule is true.

    If a version is not known, the finding states that, and its severity is one step milder.
    """
    when: Callable[[Context_contra], bool | Violation | Iterable[Violation] | None]
    """A function that finds the places where a run breaks the rule.

    It returns whether the run breaks the rule, or the violation if there is one, or it yields
    several violations.
    """
    message: str
    """The rule as a clause about the setting, without a full stop."""
    remedies: tuple[str, ...]
    """Imperative clauses without a full stop. An empty clause is left out."""
    source: str
    """The file and version, or the thread and date."""
    evidence: str = "verified"
    """A key of `EVIDENCE`."""
    explanation: str = ""
    """The effect of the fault and its cause, for `explain` and the reference page."""

    def find_violations(self, context: Context_contra) -> list[Violation]:
        """Return the places where a run breaks the rule."""
        answer = self.when(context)
        if answer is None or answer is False:
            return []
        if answer is True:
            return [Violation()]
        if isinstance(answer, Violation):
            return [answer]
        return list(answer)


error = partial(Rule[RunContext], severity="error")
warning = partial(Rule[RunContext], severity="warning")
info = partial(Rule[RunContext], severity="info")
"""Rules of a check only, by severity."""
sync_error = partial(Rule[RuleContext], severity="error")
sync_warning = partial(Rule[RuleContext], severity="warning")
sync_info = partial(Rule[RuleContext], severity="info")
"""Rules that a sync evaluates too, by severity. Their rows state `sync`."""
contradiction = partial(Rule[RuleContext], severity="error", is_of_finalize=True)
"""Errors of the precision itself, in any run. `finalize` evaluates them."""
no_effect = partial(Rule[RuleContext], severity="warning", sync="reported")
"""Warnings about a setting without effect. A sync reports them too."""


def cast_to_precision_rules(rules: Iterable[Rule[RunContext]]) -> tuple[Rule[RuleContext], ...]:
    """Return rules of `finalize` or of a sync, typed as rules that need only a `RuleContext`.

    The table of rules has the type of the widest context. A test evaluates each of these rules with
    a `RuleContext`.
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
    """A finding of a rule."""

    title: str = ""
    source: str = ""
    evidence: str = "verified"
    remedies: tuple[str, ...] = ()
    depends_on: str | None = None
    """The version ranges for which the finding is true, if the run's version is not known."""
    silenced: str | None = None
    """The reason for which a user silenced the finding."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Setting that the finding depends on and that is not known -> its decider.

    A finding with unknown settings is an info.
    """


MILDER_SEVERITY = {"error": "warning", "warning": "info", "info": "info"}
"""Severity -> the severity one step milder."""


ContextT = TypeVar("ContextT", bound=RuleContext)


def evaluate_rules(rules: Iterable[Rule[ContextT]], context: ContextT) -> list[RuleFinding]:
    """Return the findings of rules about a context, in the order of the rules.

    A rule that raises an exception gives a finding about that.
    """
    findings: list[RuleFinding] = []
    for rule in rules:
        try:
            findings += evaluate_rule(rule, context)
        except Exception as error:  # noqa: BLE001  one rule must not hide the findings of the others
            findings.append(_make_crash_finding(rule, context, error))
    return findings


def evaluate_rule(rule: Rule[ContextT], context: ContextT) -> list[RuleFinding]:
    """Return the findings of a rule about a context.

    The settings that the rule reads are recorded. If one of them is not known, the rule cannot be
    judged, and its finding becomes an info. A violation can name a smaller set of settings in
    `rests_on`. A rule has no findings for versions outside its ranges.
    """
    with track_reads() as paths:
        violations = rule.find_violations(context)
    if context.reads_missing_layers(paths):
        context.note_unevaluated(rule.id)
        return []
    if not violations:
        return []
    undecided_ranges = []
    for versions in rule.versions:
        is_in_range = _is_in_range(versions, context)
        if is_in_range is False:
            return []
        if is_in_range is None:
            undecided_ranges.append(versions)
    findings = []
    for violation in violations:
        if violation.rests_on is None:
            unknown = context.find_unknown(paths)
        else:
            unknown = context.find_unknown(violation.rests_on)
        if not unknown:
            findings.append(_make_violation_finding(rule, context, violation, undecided_ranges))
        elif rule.severity != "info":  # an undecided info is left out
            findings.append(_make_undecided_finding(rule, context, violation, unknown))
    return findings


def _is_in_range(versions: VersionRange, context: RuleContext) -> bool | None:
    """Return whether the version of a product is in a range, or None if it is unknown or assumed."""
    holds = versions.holds(getattr(context.target, versions.product))
    if holds and context.find_unknown([f"target.{versions.product}"]):
        return None
    return holds


def _make_undecided_finding(
    rule: Rule[ContextT], context: RuleContext, violation: Violation, unknown: Mapping[str, str]
) -> RuleFinding:
    """Return the info that a rule cannot be judged, because a setting is not known."""
    path = context.get_path(violation.path or rule.setting)
    named = select_named_settings(unknown, path)
    assignments = " ".join(f"{name}=VALUE" for name in named)
    remedy = f"state what is known: {assignments}"
    if len(named) < len(unknown):
        remedy = "state each of them, which --json lists"
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
        where=violation.where or context.get_source(path),
        remedy=f"{remedy[0].upper()}{remedy[1:]}.",
        severity="info",
        remedies=(remedy,),
        unknown=unknown,
    )


def _make_violation_finding(
    rule: Rule[ContextT],
    context: RuleContext,
    violation: Violation,
    undecided_ranges: Sequence[VersionRange],
) -> RuleFinding:
    """Return the finding of a violation. It is one step milder if it depends on an unknown version."""
    path = context.get_path(violation.path or rule.setting)
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
    if undecided_ranges:
        ranges = " and ".join(str(versions) for versions in undecided_ranges)
        severity = MILDER_SEVERITY[severity]
        clause += f" (holds for {ranges}; {_explain_unknown_version(undecided_ranges, context)})"
    if rule.evidence == "weak":
        clause += " (weak evidence)"
    return _make_finding(
        rule,
        path=path,
        rule=clause,
        value=value,
        where=violation.where or context.get_source(path),
        remedy=format_remedies(remedies),
        severity=severity,
        remedies=tuple(remedies),
        depends_on=ranges,
    )


def _get_value_at_fault(violation: Violation, context: RuleContext, path: str) -> object:
    """Return the value of the violation, or the value of the path if the violation has none."""
    if violation.value is VALUE_OF_PATH:
        return context.get_value(path)
    return violation.value


def _explain_unknown_version(ranges: Sequence[VersionRange], context: RuleContext) -> str:
    """Return a clause about why it is not known whether a version is in its range."""
    for versions in ranges:
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
    if sentence.endswith("?"):  # "Did you mean fp8_margin?"
        return sentence
    return f"{sentence}."


def _make_crash_finding(
    rule: Rule[ContextT], context: RuleContext, error: Exception
) -> RuleFinding:
    path = context.get_path(rule.setting)
    clause = f"could not be judged ({type(error).__name__}: {error})"
    remedy = "Please report this: a rule has to cope with any value."
    value = context.get_value(path)
    return _make_finding(
        rule, path=path, rule=clause, value=value, remedy=remedy, severity="warning"
    )
