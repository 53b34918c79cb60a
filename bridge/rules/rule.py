"""A rule as a row: the setting, the predicate, the sentence, the remedies, and the source.

A predicate is a plain function of a `RuleContext`. It returns something falsy for silence, True, a mapping of values
for the message, or several mappings for several findings. `path`, `value`, `where` and `severity` in a mapping take the
place of the row's. The message and the remedies are format strings over these values and ``s``, the context.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from packaging.specifiers import SpecifierSet

from bridge.errors import Finding
from bridge.rules.context import RuleContext
from bridge.rules.versions import Version, VersionRange

Predicate = Callable[["RuleContext"], Any]

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

    heading: str
    """Its id (PB and three digits; the first says the topic) and the fault in a few words: "PB101: ..."."""
    predicate: Predicate
    error: str = ""
    """The setting (a field of the precision, or section.field), a colon, and the rule as a clause without a full stop.
    The severity is the name of the field that holds it: one of these three."""
    warning: str = ""
    info: str = ""
    remedies: tuple[str, ...]
    """The remedies, each an imperative clause without a full stop."""
    verified: str = ""
    """The source: file and version, or thread and date. The evidence is the name of the field that holds it: one of
    these three, the keys of `EVIDENCE`."""
    reported: str = ""
    weak: str = ""
    needs: str = "shape"
    sync: str | None = None
    """A key of `SYNC`; None: a sync does not ask it."""
    gate: str | None = None
    """Attribute of `RuleContext` that has to be truthy for the rule to apply at all."""
    versions: tuple[VersionRange, ...] = ()
    """Versions it holds for. Where one is not known, the finding says so and is one step milder."""
    explanation: str = ""
    """The effect and its cause, for `explain` and the reference page."""

    @property
    def id(self) -> str:
        """PB and three digits."""
        return self.heading[:5]

    @property
    def title(self) -> str:
        """The fault in a few words."""
        return self.heading[7:]

    @property
    def severity(self) -> str:
        """error, warning or info."""
        return next(name for name in SEVERITIES if getattr(self, name))

    @property
    def message(self) -> str:
        """The rule as a clause."""
        return self._sentence.partition(": ")[2]

    @property
    def source(self) -> str:
        """File and version, or thread and date."""
        return self.verified or self.reported or self.weak

    @property
    def evidence(self) -> str:
        """A key of `EVIDENCE`."""
        return next(name for name in EVIDENCE if getattr(self, name))

    @property
    def path(self) -> str:
        """The setting that the rule is about."""
        return self._sentence.partition(": ")[0]

    @property
    def _sentence(self) -> str:
        return self.error or self.warning or self.info


# A row names its need by its constructor: `Rule` itself is for one that needs the shape.
precision_rule = partial(Rule, needs="precision")
owners_rule = partial(Rule, needs="owners")
target_rule = partial(Rule, needs="target")
environment_rule = partial(Rule, needs="environment")
sync_rule = partial(owners_rule, sync="reported")


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


def _range(product: str, *, since: str | None = None, until: str | None = None) -> VersionRange:
    limits = [f"{operator}{version}" for operator, version in ((">=", since), ("<", until)) if version is not None]
    return VersionRange(product=product, versions=SpecifierSet(",".join(limits)))


mcore = partial(_range, "mcore")
te = partial(_range, "te")


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


MILDER = {"error": "warning", "warning": "info", "info": "info"}
Gates = tuple[tuple[str | None, tuple[Rule, ...]], ...]


def by_gate(rules: Iterable[Rule]) -> Gates:
    """Return the rules in groups of one gate, so that a group is passed over at once."""
    rules = tuple(rules)
    gates = dict.fromkeys(rule.gate for rule in rules)
    return tuple((gate, tuple(rule for rule in rules if rule.gate == gate)) for gate in gates)


def ask(gates: Gates, context: RuleContext) -> list[RuleFinding]:
    """Return what the rules find in `context`, in the order of the rules."""
    found: list[RuleFinding] = []
    for gate, rules in gates:
        if gate is not None and not getattr(context, gate):
            continue
        for rule in rules:
            try:
                answer = rule.predicate(context)
                if answer:
                    found.extend(findings_of(rule, context, answer))
            except Exception as error:  # noqa: BLE001  one rule that stumbles must not hide what the others say
                found.append(_stumbled(rule, context, error))
    return found


def findings_of(rule: Rule, context: RuleContext, answer: Any) -> list[RuleFinding]:
    """Return the findings that a predicate's answer makes, none where the versions rule it out."""
    depends = []
    for versions in rule.versions:
        held: Version | None = getattr(context.target, versions.product)
        holds = versions.holds(held)
        if holds is False:
            return []
        if holds is None:
            depends.append(str(versions))
    return [_finding(rule, context, values, " and ".join(depends) or None) for values in fires(answer)]


def _finding(rule: Rule, context: RuleContext, values: Mapping[str, Any], depends: str | None) -> RuleFinding:
    path = context.path(values.get("path", rule.path))
    words = {**values, "path": path}
    severity = values.get("severity", rule.severity)
    remedies = tuple(filter(None, (one.format(s=context, **words) for one in rule.remedies)))
    clause = rule.message.format(s=context, **words)
    if depends is not None:
        clause += f" (holds for {depends}; the target does not say which it is)"
    if rule.evidence == "weak":
        clause += " (weak evidence)"
    return RuleFinding(
        id=rule.id,
        title=rule.title,
        path=path,
        rule=clause,
        value=values.get("value", context.value(path)),
        where=values.get("where", context.where(path)),
        remedy=remedy_of(remedies),
        severity=severity if depends is None else MILDER[severity],
        source=rule.source,
        evidence=rule.evidence,
        remedies=remedies,
        depends_on=depends,
    )


def remedy_of(remedies: tuple[str, ...]) -> str:
    """Return the remedies as one sentence: "Do this.", or "Do this; or do that; or ..."."""
    sentence = "; or ".join(remedies)
    return f"{sentence[:1].upper()}{sentence[1:]}{'' if sentence.endswith('?') else '.'}"


def _stumbled(rule: Rule, context: RuleContext, error: Exception) -> RuleFinding:
    path = context.path(rule.path)
    return RuleFinding(
        id=rule.id,
        title=rule.title,
        path=path,
        rule=f"could not be judged ({type(error).__name__}: {error})",
        value=context.value(path),
        remedy="Please report this: a rule has to cope with any value.",
        severity="warning",
        source=rule.source,
        evidence=rule.evidence,
    )
