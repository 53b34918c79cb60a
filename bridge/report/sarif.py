"""Findings of a check as SARIF 2.1.0, which code review takes."""

from collections.abc import Sequence
from typing import Any

from bridge.preflight.check import Report
from bridge.rules.rule import Rule, RuleFinding
from bridge.rules.rulebook import RULES, RULES_BY_ID
from bridge.rules.run_context import RunContext

SCHEMA_URL = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_RULE_INDEX = {rule.id: index for index, rule in enumerate(RULES)}


def make_sarif(reports: Sequence[Report], *, file: str, version: str) -> dict[str, Any]:
    """Return reports as a SARIF log, one run each.

    Silenced findings are in it as suppressed, with the reason.
    """
    runs = []
    for report in reports:
        properties = {"precision": report.precision, "target": report.target}
        runs.append(_make_run(_list_results(report, file), properties, version))
    return {"$schema": SCHEMA_URL, "version": "2.1.0", "runs": runs}


def make_sarif_of_files(checked: Sequence[tuple[str, Report]], *, version: str) -> dict[str, Any]:
    """Return the reports of several files as a SARIF log of one run.

    Code review takes 20 runs at most.
    """
    results: list[dict[str, Any]] = []
    rows = []
    for file, report in checked:
        results += _list_results(report, file)
        rows.append({"file": file, "precision": report.precision, "target": report.target})
    run = _make_run(results, {"checked": rows}, version)
    return {"$schema": SCHEMA_URL, "version": "2.1.0", "runs": [run]}


def _make_run(
    results: list[dict[str, Any]], properties: dict[str, Any], version: str
) -> dict[str, Any]:
    rules = list(map(_make_rule, RULES))
    driver = {"name": "precision-bridge", "semanticVersion": version, "rules": rules}
    return {"tool": {"driver": driver}, "properties": properties, "results": results}


def _list_results(report: Report, file: str) -> list[dict[str, Any]]:
    """Return every finding of a report, the silenced ones too."""
    results = []
    for finding in (*report.findings, *report.silenced):
        results.append(_make_result(finding, file))
    return results


def _make_rule(rule: Rule[RunContext]) -> dict[str, Any]:
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


def _make_result(finding: RuleFinding, file: str) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": file}, "region": {"startLine": 1}}
    setting = {"fullyQualifiedName": finding.path, "kind": "member"}
    result: dict[str, Any] = {
        "ruleId": finding.id,
        "ruleIndex": _RULE_INDEX[finding.id],
        "level": _LEVELS[finding.severity],
        "message": {"text": str(finding)},
        "locations": [{"physicalLocation": place, "logicalLocations": [setting]}],
        "partialFingerprints": {"ruleAndSetting": f"{finding.id}/{finding.path}"},
        "properties": {"source": RULES_BY_ID[finding.id].source},
    }
    if finding.silenced is not None:
        result["suppressions"] = [{"kind": "external", "justification": finding.silenced}]
    return result
