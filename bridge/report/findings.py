"""Findings of a check: for people, as plain data, and as SARIF 2.1.0, the format that code review takes."""

from collections.abc import Sequence
from typing import Any

from bridge.errors import bounded
from bridge.precision.values import plain
from bridge.preflight.check import Report
from bridge.rules.rule import EVIDENCE, Rule, RuleFinding, remedy_of
from bridge.rules.rulebook import BY_ID, RULES
from bridge.rules.run_context import RunContext

_FIELDS = [
    "id",
    "severity",
    "title",
    "path",
    "value",
    "where",
    "rule",
    "remedies",
    "source",
    "evidence",
    "depends_on",
]
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
    lines.extend(
        ((f"silenced {one.id} {one.path}: {one.silenced}", "dim"),) for one in report.silenced
    )
    lines.append(((verdict_line(report), ""),))
    if report.not_asked is not None:
        lines.append(((f"  {report.not_asked}", ""),))
    return lines


def verdict_line(report: Report) -> str:
    """Return how many findings of each kind there are, as one sentence."""
    counts = [(len(report.of(severity)), severity) for severity in ("error", "warning", "info")]
    found = [f"{count} {severity}{'s' if count > 1 else ''}" for count, severity in counts if count]
    silenced = f", {len(report.silenced)} silenced" if report.silenced else ""
    return f"{', '.join(found) or 'nothing found'}{silenced}"


def brief_line(report: Report) -> str:
    """Return the ids of the rules that find an error or a warning, and how many rules cannot be judged."""
    parts = []
    for severity in ("error", "warning"):
        found = report.of(severity)
        if found:
            ids = ", ".join(dict.fromkeys(finding.id for finding in found))
            parts.append(f"{len(found)} {severity}{'s' if len(found) > 1 else ''} ({ids})")
    unknown = [finding for finding in report.findings if finding.unknown]
    if unknown:
        parts.append(f"{len(unknown)} cannot be judged")
    if report.context.not_asked:
        parts.append(
            f"{len(report.context.not_asked)} not asked of {report.context.run.reading.other_layers}"
        )
    return ", ".join(parts) or "nothing found"


def findings_dict(report: Report, *, strict: bool = False) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "precision": report.precision,
        "target": report.target,
        "auto": report.context.run.choice.to_dict()
        if report.context.run.choice is not None
        else None,
        "gradients": report.context.flow,
        "verdict": report.verdict,
        "exit_code": report.exit_code(strict=strict),
        "findings": [finding_dict(finding) for finding in report.findings],
        "silenced": [finding_dict(finding) for finding in report.silenced],
        "not_asked": report.not_asked,
    }


def finding_dict(finding: RuleFinding) -> dict[str, Any]:
    """Return a finding as plain data."""
    row = {name: getattr(finding, name) for name in _FIELDS} | {"value": plain(finding.value)}
    row["remedies"] = list(finding.remedies)
    row["unknown"] = dict(finding.unknown)
    return row | ({"silenced": finding.silenced} if finding.silenced is not None else {})


def _finding(finding: RuleFinding) -> list[Line]:
    where = f" ({finding.where})" if finding.where and finding.where != "stated" else ""
    fault = bounded(f" {finding.path} = {plain(finding.value)!r}{where}: {finding.rule}.")
    note = "" if finding.evidence == "verified" else f" ({EVIDENCE[finding.evidence]})"
    return [
        ((f"{finding.severity} {finding.id}", STYLES[finding.severity]), (fault, "")),
        *(((f"    - {remedy_of((text,))}", ""),) for text in finding.remedies),
        ((f"    source: {finding.source}{note}", "dim"),),
    ]


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_INDEX = {rule.id: index for index, rule in enumerate(RULES)}


def sarif(reports: Sequence[Report], *, file: str, version: str) -> dict[str, Any]:
    """Return reports as a SARIF log, one run each; silenced findings are in it as suppressed, with the reason."""
    runs = []
    for report in reports:
        properties = {"precision": report.precision, "target": report.target}
        runs.append(_sarif_run(_results(report, file), properties, version))
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": runs}


def sarif_of_files(checked: Sequence[tuple[str, Report]], *, version: str) -> dict[str, Any]:
    """Return the reports of several files as a SARIF log of one run: code review takes 20 runs at most."""
    results, rows = [], []
    for file, report in checked:
        results += _results(report, file)
        rows.append({"file": file, "precision": report.precision, "target": report.target})
    run = _sarif_run(results, {"checked": rows}, version)
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _sarif_run(
    results: list[dict[str, Any]], properties: dict[str, Any], version: str
) -> dict[str, Any]:
    driver = {
        "name": "precision-bridge",
        "semanticVersion": version,
        "rules": [_rule(rule) for rule in RULES],
    }
    return {"tool": {"driver": driver}, "properties": properties, "results": results}


def _results(report: Report, file: str) -> list[dict[str, Any]]:
    """Return every finding of a report, the silenced ones too."""
    return [_result(finding, file) for finding in (*report.findings, *report.silenced)]


def _rule(rule: Rule[RunContext]) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(
            word.capitalize() for word in rule.title.replace("-", " ").split() if word.isalnum()
        ),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.explanation or rule.title},
        "help": {"text": f"Source: {rule.source}."},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"evidence": rule.evidence},
    }


def _result(finding: RuleFinding, file: str) -> dict[str, Any]:
    suppressed = (
        [{"kind": "external", "justification": finding.silenced}]
        if finding.silenced is not None
        else []
    )
    return {
        "ruleId": finding.id,
        "ruleIndex": _INDEX[finding.id],
        "level": _LEVELS[finding.severity],
        "message": {"text": str(finding)},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": file}, "region": {"startLine": 1}},
                "logicalLocations": [{"fullyQualifiedName": finding.path, "kind": "member"}],
            }
        ],
        "partialFingerprints": {"ruleAndSetting": f"{finding.id}/{finding.path}"},
        "properties": {"source": BY_ID[finding.id].source},
        **({"suppressions": suppressed} if suppressed else {}),
    }
