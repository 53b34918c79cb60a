"""`check`: every rule asked about one setup, all findings at once.

report = check(Setup("bf16_with_mxfp8_mixed", model=model, target=parse_target("h100x8")))
report.exit_code(strict=False)      # 0, 1 (warnings, where they count) or 2 (errors)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.rules.rule import SEVERITIES, ask, by_gate
from bridge.rules.rulebook import RULES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.preflight.setup import Setup
    from bridge.rules.rule import RuleFinding

__all__ = ["Report", "check", "refuse_unknown"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    findings: tuple[RuleFinding, ...]
    """The findings, errors first, without the silenced ones."""
    silenced: tuple[RuleFinding, ...] = ()
    """The silenced findings, each with the reason."""
    setup: Setup
    """The run that was checked."""

    @property
    def precision(self) -> str:
        """The precision in a few words."""
        return self.setup.label

    @property
    def target(self) -> str:
        """The target as text."""
        return str(self.setup.target)

    @property
    def flow(self) -> str:
        """The dtypes of a gradient, from the weight gradient to the master weights."""
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


_GATES = by_gate(RULES)


def check(setup: Setup, silenced: Mapping[str, str] | None = None) -> Report:
    """Ask every rule.

    Args:
        setup: What is checked.
        silenced: Id of a rule -> why it is silenced; its findings are kept apart, with the reason.

    Raises:
        RunConfigError: An id that no rule has, or an empty reason.
    """
    reasons = silenced or {}
    refuse_unknown(reasons)
    found = ask(_GATES, setup)
    if found:
        found.sort(key=lambda finding: (SEVERITIES.index(finding.severity), finding.id))
    return Report(
        findings=tuple(finding for finding in found if finding.id not in reasons),
        silenced=tuple(replace(finding, silenced=reasons[finding.id]) for finding in found if finding.id in reasons),
        setup=setup,
    )


def refuse_unknown(reasons: Mapping[str, str]) -> None:
    """Refuse to silence what is no rule, or without a reason."""
    known = [rule.id for rule in RULES]
    for name, reason in reasons.items():
        if name not in known:
            matches = [one for one in known if one.startswith(name)][:3] or close_matches(name, known)
            hint = did_you_mean(matches) or "`precision-bridge explain rules` lists them."
            raise RunConfigError(f"silence.{name}: no rule has this id, got {name!r}. {hint}", matches)
        if not str(reason).strip():
            raise RunConfigError(f"silence.{name}: needs a reason, got {reason!r}. Write {name}=why it is all right.")
