"""`check`: every rule asked about one run, all findings at once.

    run = Run.of("bf16_mixed", model={"num_layers": 80, "hidden_size": 8192}, target=parse_target("h100x8"))
    check(run).exit_code(strict=False)      # 0, 1 (warnings, where they count) or 2 (errors)

Nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from bridge.errors import RunConfigError
from bridge.preflight.context import CheckContext
from bridge.preflight.run import Run
from bridge.preflight.silence import refuse_unknown
from bridge.rules.rule import SEVERITIES, RuleFinding, ask
from bridge.rules.rulebook import RULES
from bridge.sync.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    findings: tuple[RuleFinding, ...]
    silenced: tuple[RuleFinding, ...] = ()
    context: CheckContext

    @property
    def precision(self) -> str:
        """The precision in a few words."""
        return self.context.label

    @property
    def target(self) -> str:
        """The target as text, with a release that nothing states as assumed."""
        return self.context.target_text

    def of(self, severity: str) -> tuple[RuleFinding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def not_asked(self) -> str | None:
        """Which rules were not asked, and why, as a sentence; None where all were."""
        rules = sorted(self.context.not_asked)
        kind = self.context.run.reading.other_layers
        if kind is None or not rules:
            return None
        noun = "1 rule that reads its layers was"
        if len(rules) > 1:
            noun = f"{len(rules)} rules that read its layers were"
        return f"The model is {kind}: {noun} not asked ({', '.join(rules)})."

    @property
    def verdict(self) -> str:
        """The worst severity found, or "ok"."""
        return next((severity for severity in SEVERITIES if self.of(severity)), "ok")

    def with_phase(self, number: int, later: Report) -> Report:
        """Return the report with the findings that a later phase of a precision schedule adds."""
        found = [*self.findings, *self.silenced]
        known = {(one.id, one.path) for one in found}
        new = [one for one in (*later.findings, *later.silenced) if (one.id, one.path) not in known]
        return _report(
            self.context, [*found, *(replace(one, where=f"phase {number}") for one in new)]
        )

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 2 with errors, 1 with warnings where they count, else 0."""
        if self.of("error"):
            return 2
        return 1 if strict and self.of("warning") else 0


def check(
    run: Run,
    *,
    silenced: Mapping[str, str] | None = None,
    backend: str | None = None,
    prediction: Prediction | None = None,
) -> Report:
    """Check a run, in every phase of its precision schedule, before anything of it is built.

    Args:
        run: The run; what it silences itself is silenced.
        silenced: Id of a rule -> why it is silenced. Its findings are kept apart.
        backend: te, emulated or te_cpu: what will run low-precision
            GEMMs; None: what the run states.
        prediction: The run with changed settings, after the sync; None: the run as it is.

    Raises:
        RunConfigError: An unknown rule, or a schedule without a number of steps.
    """
    reasons = {**_reasons(run.sections.get("silence")), **(silenced or {})}
    refuse_unknown(reasons)
    report = _asked(CheckContext(run, prediction=prediction, backend=backend), reasons)
    for phase in run.phases[1:]:
        later = run.prediction.under(phase.precision)
        in_phase = _asked(CheckContext(run, prediction=later, backend=backend), reasons)
        report = report.with_phase(phase.number, in_phase)
    return report


@lru_cache(maxsize=8)
def report_of(run: Run) -> Report:
    """Return the check of a run, which is asked once."""
    return check(run)


def _asked(context: CheckContext, reasons: Mapping[str, str]) -> Report:
    findings = [
        replace(finding, silenced=reasons.get(finding.id)) for finding in ask(RULES, context)
    ]
    return _report(context, findings)


def _report(context: CheckContext, found: Iterable[RuleFinding]) -> Report:
    """Return the findings as a report, the worst first."""
    ordered = sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), finding.id))
    silenced = [finding for finding in ordered if finding.silenced is not None]
    findings = [finding for finding in ordered if finding.silenced is None]
    return Report(findings=tuple(findings), silenced=tuple(silenced), context=context)


def _reasons(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping | None):
        raise RunConfigError(
            f"silence: must be a mapping of rule to reason, got {given!r}. Write PB306: why."
        )
    return {str(name): str(reason) for name, reason in (given or {}).items()}
