"""The findings of a check as SARIF 2.1.0, the format that code review takes from static analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.rules.rulebook import BY_ID, RULES

if TYPE_CHECKING:
    from bridge.preflight.check import Report
    from bridge.rules.rule import Rule, RuleFinding

__all__ = ["sarif"]

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_INDEX = {rule.id: index for index, rule in enumerate(RULES)}


def sarif(report: Report, *, file: str, version: str) -> dict[str, Any]:
    """Return the report as a SARIF log.

    Args:
        report: The outcome of a check; silenced findings are in it as suppressed, with the reason.
        file: The config that was checked, relative to the repository.
        version: Of this package.
    """
    findings = (*report.findings, *report.silenced)
    driver = {
        "name": "precision-bridge",
        "semanticVersion": version,
        "rules": [_rule(rule) for rule in RULES],
    }
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "properties": {"precision": report.precision, "target": report.target},
                "results": [_result(finding, file) for finding in findings],
            }
        ],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.title.replace("-", " ").split() if word.isalnum()),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.explanation or rule.title},
        "help": {"text": f"Source: {rule.source}."},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"evidence": rule.evidence},
    }


def _result(finding: RuleFinding, file: str) -> dict[str, Any]:
    suppressed = [{"kind": "external", "justification": finding.silenced}] if finding.silenced is not None else []
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
