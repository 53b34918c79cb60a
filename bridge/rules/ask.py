"""Asking rules: the findings of some rows about one context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.rules.rule import Rule, RuleFinding, fires

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bridge.rules.context import RuleContext
    from bridge.rules.versions import Version

__all__ = ["Gates", "ask", "by_gate", "findings_of"]

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
        remedy=_remedy(remedies),
        severity=severity if depends is None else MILDER[severity],
        source=rule.source,
        evidence=rule.evidence,
        remedies=remedies,
        depends_on=depends,
    )


def _remedy(remedies: tuple[str, ...]) -> str:
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
