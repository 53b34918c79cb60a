"""The findings of a check as SARIF 2.1.0, the format of code review."""

from collections.abc import Sequence
from typing import Any

from bridge.preflight.rule_check import Report
from bridge.rules.rule import Rule, RuleFinding
from bridge.rules.rulebook import RULES, RULES_BY_ID
from bridge.rules.run_context import RunContext

SCHEMA_URL = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_RULE_INDEX = {rule.id: index for index, rule in enumerate(RULES)}


def make_sarif(reports: Sequence[Report], *, file: str, version: str) -> dict[str, Any]:
    """Return reports on one file as a SARIF log with a run for each report.

    Silenced findings are suppressed results, with the reason as the justification.

    Args:
        reports: The report on the file, and the reports on its other branches.
        file: The file that the results point to.
        version: The version of this package.
    """
    runs = []
    for report in reports:
        properties = {"precision": report.precision, "target": report.target}
        runs.append(_make_run(_list_results(report, file), properties, version))
    return {"$schema": SCHEMA_URL, "version": "2.1.0", "runs": runs}


def make_sarif_of_files(checked: Sequence[tuple[str, Report]], *, version: str) -> dict[str, Any]:
    """Return the reports on several files as a SARIF log with one run.

    GitHub's code scanning accepts 20 runs at most, so the files share a run.

    Args:
        checked: Each file with its report.
        version: The version of this package.
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
    """Return a run of SARIF with its results and the descriptions of all rules."""
    rules = list(map(_make_rule, RULES))
    driver = {"name": "precision-bridge", "semanticVersion": version, "rules": rules}
    return {"tool": {"driver": driver}, "properties": properties, "results": results}


def _list_results(report: Report, file: str) -> list[dict[str, Any]]:
    """Return a result for every finding of a report, silenced findings included."""
    results = []
    for finding in (*report.findings, *report.silenced):
        results.append(_make_result(finding, file))
    return results


def _make_rule(rule: Rule[RunContext]) -> dict[str, Any]:
    """Return the description of a rule. SARIF's name of a rule is its title in Pascal case."""
    name = ""
    for word in rule.title.replace("-", " ").split():
        if word.isalnum():
            name += word.capitalize()
    return {
        "id": rule.id,
        "name": name,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.explanation or rule.title},
        "help": {"text": f"Source: {rule.source}."},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"evidence": rule.evidence},
    }


def _make_result(finding: RuleFinding, file: str) -> dict[str, Any]:
    """Return a finding as a result. A finding has no line, so every result points to line 1."""
    location = {"artifactLocation": {"uri": file}, "region": {"startLine": 1}}
    setting = {"fullyQualifiedName": finding.path, "kind": "member"}
    result: dict[str, Any] = {
        "ruleId": finding.id,
        "ruleIndex": _RULE_INDEX[finding.id],
        "level": _LEVELS[finding.severity],
        "message": {"text": str(finding)},
        "locations": [{"physicalLocation": location, "logicalLocations": [setting]}],
        "partialFingerprints": {"ruleAndSetting": f"{finding.id}/{finding.path}"},
        "properties": {"source": RULES_BY_ID[finding.id].source},
    }
    if finding.silenced is not None:
        result["suppressions"] = [{"kind": "external", "justification": finding.silenced}]
    return result
