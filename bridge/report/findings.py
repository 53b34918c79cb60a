"""Findings of a check: for people, as plain data, and as SARIF 2.1.0, which code review takes."""

from collections.abc import Sequence
from typing import Any

from bridge.errors import bounded
from bridge.precision.values import plain
from bridge.preflight.check import Report
from bridge.rules.rule import EVIDENCE, Rule, RuleFinding, remedy_of
from bridge.rules.rulebook import BY_ID, RULES
from bridge.rules.run_context import RunContext

STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


Line = tuple[tuple[str, str], ...]
"""A line for people: its parts, each a text and its style in rich's words."""


def findings_lines(report: Report, *, is_quiet: bool = False) -> list[Line]:
    """Return the report for people: the subject of the check, every finding, the verdict."""
    lines: list[Line] = [((f"{report.precision} against {report.target}", ""),)]
    if report.context.run.choice is not None:
        lines.append(((f"  {report.context.run.choice}", "dim"),))
    if report.context.flow is not None:
        lines.append(((f"  gradients: {report.context.flow}", "dim"),))
    for finding in report.findings:
        if not (is_quiet and finding.severity == "info"):
            lines.extend(_finding(finding))
    for finding in report.silenced:
        lines.append(((f"silenced {finding.id} {finding.path}: {finding.silenced}", "dim"),))
    lines.append(((verdict_line(report), ""),))
    if report.not_asked is not None:
        lines.append(((f"  {report.not_asked}", ""),))
    return lines


def verdict_line(report: Report) -> str:
    """Return how many findings of each kind there are, as one sentence."""
    counts = []
    for severity in ("error", "warning", "info"):
        count = len(report.of(severity))
        if count:
            counts.append(_counted(count, severity))
    sentence = ", ".join(counts) or "nothing found"
    if report.silenced:
        sentence += f", {len(report.silenced)} silenced"
    return sentence


def _counted(count: int, noun: str) -> str:
    if count > 1:
        return f"{count} {noun}s"
    return f"{count} {noun}"


def brief_line(report: Report) -> str:
    """Return the ids of the rules that find an error or a warning.

    The number of rules that cannot be judged follows.
    """
    parts = []
    for severity in ("error", "warning"):
        findings = report.of(severity)
        if findings:
            ids = dict.fromkeys(finding.id for finding in findings)
            parts.append(f"{_counted(len(findings), severity)} ({', '.join(ids)})")
    unknown = [finding for finding in report.findings if finding.unknown]
    if unknown:
        parts.append(f"{len(unknown)} cannot be judged")
    not_asked = report.context.not_asked
    if not_asked:
        other_layers = report.context.run.reading.other_layers
        parts.append(f"{len(not_asked)} not asked of {other_layers}")
    return ", ".join(parts) or "nothing found"


def findings_dict(report: Report, *, strict: bool = False) -> dict[str, Any]:
    """Return the report as plain data."""
    choice = report.context.run.choice
    auto = None
    if choice is not None:
        auto = choice.to_dict()
    return {
        "precision": report.precision,
        "target": report.target,
        "auto": auto,
        "gradients": report.context.flow,
        "verdict": report.verdict,
        "exit_code": report.exit_code(strict=strict),
        "findings": list(map(finding_dict, report.findings)),
        "silenced": list(map(finding_dict, report.silenced)),
        "not_asked": report.not_asked,
    }


def finding_dict(finding: RuleFinding) -> dict[str, Any]:
    """Return a finding as plain data."""
    row = {
        "id": finding.id,
        "severity": finding.severity,
        "title": finding.title,
        "path": finding.path,
        "value": plain(finding.value),
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


def _finding(finding: RuleFinding) -> list[Line]:
    where = ""
    if finding.where and finding.where != "stated":
        where = f" ({finding.where})"
    fault = bounded(f" {finding.path} = {plain(finding.value)!r}{where}: {finding.rule}.")
    note = ""
    if finding.evidence != "verified":
        note = f" ({EVIDENCE[finding.evidence]})"
    head = (f"{finding.severity} {finding.id}", STYLES[finding.severity])
    lines: list[Line] = [(head, (fault, ""))]
    for remedy in finding.remedies:
        lines.append(((f"    - {remedy_of((remedy,))}", ""),))
    lines.append(((f"    source: {finding.source}{note}", "dim"),))
    return lines


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_INDEX = {rule.id: index for index, rule in enumerate(RULES)}


def sarif(reports: Sequence[Report], *, file: str, version: str) -> dict[str, Any]:
    """Return reports as a SARIF log, one run each.

    Silenced findings are in it as suppressed, with the reason.
    """
    runs = []
    for report in reports:
        properties = {"precision": report.precision, "target": report.target}
        runs.append(_sarif_run(_results(report, file), properties, version))
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": runs}


def sarif_of_files(checked: Sequence[tuple[str, Report]], *, version: str) -> dict[str, Any]:
    """Return the reports of several files as a SARIF log of one run.

    Code review takes 20 runs at most.
    """
    results: list[dict[str, Any]] = []
    rows = []
    for file, report in checked:
        results += _results(report, file)
        rows.append({"file": file, "precision": report.precision, "target": report.target})
    run = _sarif_run(results, {"checked": rows}, version)
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _sarif_run(
    results: list[dict[str, Any]], properties: dict[str, Any], version: str
) -> dict[str, Any]:
    rules = [_rule(rule) for rule in RULES]
    driver = {"name": "precision-bridge", "semanticVersion": version, "rules": rules}
    return {"tool": {"driver": driver}, "properties": properties, "results": results}


def _results(report: Report, file: str) -> list[dict[str, Any]]:
    """Return every finding of a report, the silenced ones too."""
    return [_result(finding, file) for finding in (*report.findings, *report.silenced)]


def _rule(rule: Rule[RunContext]) -> dict[str, Any]:
    words = []
    for word in rule.title.replace("-", " ").split():
        if word.isalnum():
            words.append(word.capitalize())
    return {
        "id": rule.id,
        "name": "".join(words),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.explanation or rule.title},
        "help": {"text": f"Source: {rule.source}."},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"evidence": rule.evidence},
    }


def _result(finding: RuleFinding, file: str) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": file}, "region": {"startLine": 1}}
    setting = {"fullyQualifiedName": finding.path, "kind": "member"}
    result: dict[str, Any] = {
        "ruleId": finding.id,
        "ruleIndex": _INDEX[finding.id],
        "level": _LEVELS[finding.severity],
        "message": {"text": str(finding)},
        "locations": [{"physicalLocation": place, "logicalLocations": [setting]}],
        "partialFingerprints": {"ruleAndSetting": f"{finding.id}/{finding.path}"},
        "properties": {"source": BY_ID[finding.id].source},
    }
    if finding.silenced is not None:
        result["suppressions"] = [{"kind": "external", "justification": finding.silenced}]
    return result
