"""The findings of a check as lines of text, or as plain data."""

from typing import Any

from bridge.errors import bounded
from bridge.precision.coercion import to_plain_data
from bridge.preflight.rule_check import Report
from bridge.rules.rule import EVIDENCE, RuleFinding, format_remedies

SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}

Line = tuple[tuple[str, str], ...]
"""The parts of a line. Each is a text and its style by rich's name; an empty name: no style."""


def format_findings(report: Report, *, is_quiet: bool = False) -> list[Line]:
    """Return the lines of a report: the subject of the check, every finding, the verdict.

    Args:
        is_quiet: Whether to leave out findings that are for information only.
    """
    lines: list[Line] = [((f"{report.precision} against {report.target}", ""),)]
    if report.context.run.choice is not None:
        lines.append(((f"  {report.context.run.choice}", "dim"),))
    if report.context.gradient_flow is not None:
        lines.append(((f"  gradients: {report.context.gradient_flow}", "dim"),))
    for finding in report.findings:
        is_left_out = is_quiet and finding.severity == "info"
        if not is_left_out:
            lines.extend(_format_finding(finding))
    for finding in report.silenced:
        lines.append(((f"silenced {finding.id} {finding.path}: {finding.silenced}", "dim"),))
    lines.append(((format_verdict(report), ""),))
    if report.not_asked is not None:
        lines.append(((f"  {report.not_asked}", ""),))
    return lines


def format_verdict(report: Report) -> str:
    """Return the number of findings of each severity: "1 error, 2 warnings"."""
    counts = []
    for severity in ("error", "warning", "info"):
        count = len(report.of(severity))
        if count:
            counts.append(_format_count(count, severity))
    sentence = ", ".join(counts) or "nothing found"
    if report.silenced:
        sentence += f", {len(report.silenced)} silenced"
    return sentence


def _format_count(count: int, noun: str) -> str:
    """Return "1 error" or "2 errors"."""
    if count > 1:
        return f"{count} {noun}s"
    return f"{count} {noun}"


def format_brief(report: Report) -> str:
    """Return the errors and warnings of a report with the ids of their rules, in one line.

    The numbers of rules that cannot be judged or do not apply follow.
    """
    parts = []
    for severity in ("error", "warning"):
        findings = report.of(severity)
        if findings:
            ids = dict.fromkeys(finding.id for finding in findings)
            parts.append(f"{_format_count(len(findings), severity)} ({', '.join(ids)})")
    open_findings = [finding for finding in report.findings if finding.unknown]
    if open_findings:
        parts.append(f"{len(open_findings)} cannot be judged")
    unevaluated_rules = report.context.unevaluated_rules
    if unevaluated_rules:
        other_model_kind = report.context.run.reading.uncertainty.other_model_kind
        parts.append(f"{len(unevaluated_rules)} not asked of {other_model_kind}")
    return ", ".join(parts) or "nothing found"


def report_to_dict(report: Report, *, strict: bool = False) -> dict[str, Any]:
    """Return the report as plain data.

    Args:
        strict: Whether warnings decide the exit code too.
    """
    choice = report.context.run.choice
    auto = None
    if choice is not None:
        auto = choice.to_dict()
    return {
        "precision": report.precision,
        "target": report.target,
        "auto": auto,
        "gradients": report.context.gradient_flow,
        "verdict": report.verdict,
        "exit_code": report.exit_code(strict=strict),
        "findings": list(map(finding_to_dict, report.findings)),
        "silenced": list(map(finding_to_dict, report.silenced)),
        "not_asked": report.not_asked,
    }


def finding_to_dict(finding: RuleFinding) -> dict[str, Any]:
    """Return a finding as plain data."""
    row = {
        "id": finding.id,
        "severity": finding.severity,
        "title": finding.title,
        "path": finding.path,
        "value": to_plain_data(finding.value),
        "where": finding.where,
        "rule": finding.rule,
        "remedies": list(finding.remedies),
        "source": finding.source,
        "evidence": finding.evidence,
        "depends_on": finding.depends_on,
        "unknown": dict(finding.unknown),
    }
    if finding.silenced is not None:
        row["silenced"] = finding.silenced
    return row


def _format_finding(finding: RuleFinding) -> list[Line]:
    """Return the lines of a finding: the fault, a line for each remedy, the source."""
    origin = ""
    if finding.where and finding.where != "stated":
        origin = f" ({finding.where})"
    fault = bounded(f" {finding.path} = {to_plain_data(finding.value)!r}{origin}: {finding.rule}.")
    note = ""
    if finding.evidence != "verified":
        note = f" ({EVIDENCE[finding.evidence]})"
    head = (f"{finding.severity} {finding.id}", SEVERITY_STYLES[finding.severity])
    lines: list[Line] = [(head, (fault, ""))]
    for remedy in finding.remedies:
        lines.append(((f"    - {format_remedies((remedy,))}", ""),))
    lines.append(((f"    source: {finding.source}{note}", "dim"),))
    return lines
