"""`check`: every rule asked about one setup, all findings at once.

report = check(Setup("bf16_with_mxfp8_mixed", model=model, target=parse_target("h100x8")))
report.exit_code(strict=False)      # 0, 1 (warnings, where they count) or 2 (errors)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.rules.rule import SEVERITIES, Rule, RuleFinding, fires
from bridge.rules.rulebook import RULES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.preflight.setup import Setup
    from bridge.rules.versions import Version

__all__ = ["Report", "check", "findings_of"]

_MILDER = {"error": "warning", "warning": "info", "info": "info"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    findings: tuple[RuleFinding, ...]
    """What was found, errors first; without what was silenced."""
    silenced: tuple[RuleFinding, ...] = ()
    """What was found and silenced, each with the reason."""
    setup: Setup
    """What was checked."""

    @property
    def precision(self) -> str:
        """What was checked, in a few words."""
        return self.setup.label

    @property
    def target(self) -> str:
        """What it was checked against."""
        return str(self.setup.target)

    @property
    def flow(self) -> str:
        """The way of the gradients, from the weight gradient to the master weights."""
        return self.setup.flow

    def of(self, severity: str) -> tuple[RuleFinding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def verdict(self) -> str:
        """The worst severity found, or "ok"."""
        return next((severity for severity in SEVERITIES if self.of(severity)), "ok")

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 2 with errors, 1 with warnings where they count, else 0."""
        if self.of("error"):
            return 2
        return 1 if strict and self.of("warning") else 0


def _by_gate(rules: tuple[Rule, ...]) -> tuple[tuple[str | None, tuple[Rule, ...]], ...]:
    gates = dict.fromkeys(rule.gate for rule in rules)
    return tuple((gate, tuple(rule for rule in rules if rule.gate == gate)) for gate in gates)


_GATES = _by_gate(RULES)


def check(setup: Setup, silenced: Mapping[str, str] | None = None) -> Report:
    """Ask every rule.

    Args:
        setup: What is checked.
        silenced: Id of a rule -> why it is silenced; its findings are kept apart, with the reason.

    Raises:
        RunConfigError: An id that no rule has, or an empty reason.
    """
    reasons = silenced or {}
    _refuse_unknown(reasons)
    found: list[RuleFinding] = []
    for gate, rules in _GATES:
        if gate is not None and not getattr(setup, gate):
            continue
        for rule in rules:
            try:
                answer = rule.predicate(setup)
                if answer:
                    found.extend(findings_of(rule, setup, answer))
            except Exception as error:  # noqa: BLE001  one rule that stumbles must not hide what the others say
                found.append(_stumbled(rule, setup, error))
    if found:
        found.sort(key=lambda finding: (SEVERITIES.index(finding.severity), finding.id))
    return Report(
        findings=tuple(finding for finding in found if finding.id not in reasons),
        silenced=tuple(replace(finding, silenced=reasons[finding.id]) for finding in found if finding.id in reasons),
        setup=setup,
    )


def findings_of(rule: Rule, setup: Setup, answer: Any) -> list[RuleFinding]:
    """Return the findings that a predicate's answer makes, none where the versions rule it out."""
    depends = []
    for versions in rule.versions:
        held: Version | None = getattr(setup.target, versions.product)
        holds = versions.holds(held)
        if holds is False:
            return []
        if holds is None:
            depends.append(str(versions))
    return [_finding(rule, setup, values, " and ".join(depends) or None) for values in fires(answer)]


def _finding(rule: Rule, setup: Setup, values: Mapping[str, Any], depends: str | None) -> RuleFinding:
    words = {key: value for key, value in values.items() if key not in ("path", "where")}
    path = setup.path(values.get("path", rule.path))
    ways = tuple(way.format(s=setup, **words) for way in rule.remedies)
    clause = rule.message.format(s=setup, **words)
    if depends is not None:
        clause += f" (holds for {depends}; the target does not say which it is)"
    if rule.evidence == "weak":
        clause += " (weak evidence)"
    return RuleFinding(
        id=rule.id,
        title=rule.title,
        path=path,
        rule=clause,
        value=values.get("value", setup.value(path)),
        where=values.get("where", setup.where(path)),
        remedy=_remedy(ways),
        severity=rule.severity if depends is None else _MILDER[rule.severity],
        source=rule.source,
        evidence=rule.evidence,
        ways_out=ways,
        depends_on=depends,
    )


def _remedy(ways: tuple[str, ...]) -> str:
    """Return the ways out as one sentence: "Do this.", or "Do this; or do that; or ..."."""
    sentence = "; or ".join(ways)
    return f"{sentence[:1].upper()}{sentence[1:]}{'' if sentence.endswith('?') else '.'}"


def _stumbled(rule: Rule, setup: Setup, error: Exception) -> RuleFinding:
    path = setup.path(rule.path)
    return RuleFinding(
        id=rule.id,
        title=rule.title,
        path=path,
        rule=f"could not be judged ({type(error).__name__}: {error})",
        value=setup.value(path),
        remedy="Please report this: a rule has to cope with any value.",
        severity="warning",
        source=rule.source,
        evidence=rule.evidence,
    )


def _refuse_unknown(reasons: Mapping[str, str]) -> None:
    if not reasons:
        return
    known = [rule.id for rule in RULES]
    for name, reason in reasons.items():
        if name not in known:
            matches = [one for one in known if one.startswith(name)][:3] or close_matches(name, known)
            hint = did_you_mean(matches) or "`precision-bridge explain rules` lists them."
            raise RunConfigError(f"silence.{name}: no rule has this id, got {name!r}. {hint}", matches)
        if not str(reason).strip():
            raise RunConfigError(f"silence.{name}: needs a reason, got {reason!r}. Write {name}=why it is all right.")
