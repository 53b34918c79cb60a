"""`check`: every rule evaluated about one run, with all findings in one report.

    model = {"num_layers": 80, "hidden_size": 8192}
    run = Run.from_configs("bf16_mixed", model=model, target=parse_target("h100x8"))
    check(run).exit_code(strict=False)      # 2 with errors; 1 with warnings, if strict; else 0

Neither torch nor Megatron is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from bridge.preflight.check_context import CheckContext
from bridge.preflight.run import Run
from bridge.preflight.silence import parse_reasons, refuse_unknown_names
from bridge.rules.rule import SEVERITIES, RuleFinding, evaluate_rules
from bridge.rules.rulebook import RULES
from bridge.sync.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    findings: tuple[RuleFinding, ...]
    """The findings that count, the worst first."""
    silenced: tuple[RuleFinding, ...] = ()
    """The findings of rules that the run silences."""
    context: CheckContext
    """The run as the rules read it."""

    @property
    def precision(self) -> str:
        """The label of the precision."""
        return self.context.label

    @property
    def target(self) -> str:
        """The target as text; a release that nothing states is marked as assumed."""
        return self.context.target_text

    def of(self, severity: str) -> tuple[RuleFinding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def not_asked(self) -> str | None:
        """A sentence about the rules that were not evaluated; None if all were."""
        rules = sorted(self.context.unevaluated_rules)
        kind = self.context.run.reading.uncertainty.other_model_kind
        if kind is None or not rules:
            return None
        noun = "1 rule that reads its layers was"
        if len(rules) > 1:
            noun = f"{len(rules)} rules that read its layers were"
        return f"The model is {kind}: {noun} not asked ({', '.join(rules)})."

    @property
    def verdict(self) -> str:
        """The worst severity found, or "ok"."""
        for severity in SEVERITIES:
            if self.of(severity):
                return severity
        return "ok"

    def with_phase(self, number: int, later: Report) -> Report:
        """Return the report with the findings that a later phase of a precision schedule adds."""
        findings = [*self.findings, *self.silenced]
        reported = {(finding.id, finding.path) for finding in findings}
        for finding in (*later.findings, *later.silenced):
            if (finding.id, finding.path) not in reported:
                findings.append(replace(finding, where=f"phase {number}"))
        return _make_report(self.context, findings)

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 2 with errors, 1 with warnings if `strict`, and else 0."""
        if self.of("error"):
            return 2
        if strict and self.of("warning"):
            return 1
        return 0


def check(
    run: Run,
    *,
    silenced: Mapping[str, str] | None = None,
    backend: str | None = None,
    prediction: Prediction | None = None,
) -> Report:
    """Check a run, in every phase of its precision schedule, before anything of it is built.

    Args:
        run: The run. The rules that it silences itself are silenced too.
        silenced: Id of a rule -> the reason why it is silenced.
        backend: te, emulated or te_cpu, which runs low-precision GEMMs. None: the backend that the
            run states.
        prediction: The run after the sync with changed settings. None: the run's own prediction.

    Returns:
        The findings of every phase. A finding that only a later phase has names that phase.

    Raises:
        RunConfigError: An unknown rule, or a schedule without a number of steps.
    """
    reasons = {**parse_reasons(run.sections.get("silence")), **(silenced or {})}
    refuse_unknown_names(reasons)
    report = _evaluate_rules(CheckContext(run, prediction=prediction, backend=backend), reasons)
    for phase in run.phases[1:]:
        later = run.prediction.with_precision(phase.precision)
        in_phase = _evaluate_rules(CheckContext(run, prediction=later, backend=backend), reasons)
        report = report.with_phase(phase.number, in_phase)
    return report


@lru_cache(maxsize=8)
def get_report(run: Run) -> Report:
    """Return the check of a run. A command checks a run once, however many answers need it."""
    return check(run)


def _evaluate_rules(context: CheckContext, reasons: Mapping[str, str]) -> Report:
    """Return the report of every rule about a run, with the findings that are silenced marked."""
    findings = []
    for finding in evaluate_rules(RULES, context):
        findings.append(replace(finding, silenced=reasons.get(finding.id)))
    return _make_report(context, findings)


def _make_report(context: CheckContext, findings: Iterable[RuleFinding]) -> Report:
    """Return the findings as a report, the worst first."""
    reported = []
    silenced = []
    for finding in sorted(findings, key=_get_sort_key):
        if finding.silenced is None:
            reported.append(finding)
        else:
            silenced.append(finding)
    return Report(findings=tuple(reported), silenced=tuple(silenced), context=context)


def _get_sort_key(finding: RuleFinding) -> tuple[int, str]:
    return SEVERITIES.index(finding.severity), finding.id
