"""`precision-bridge explain PB101`: a rule, with the finding of a run that breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from bridge.errors import UnknownFieldError, did_you_mean
from bridge.rules.rule import EVIDENCE, Rule
from bridge.rules.rulebook import RULES, RULES_BY_ID
from bridge.rules.run_context import RunContext

RULE_LIST = "rules"
"""The argument that lists all rules."""
MAX_MATCHES = 3
"""The most ids that an error about an unknown rule suggests."""


def format_rule_list() -> str:
    """Return a line for each rule."""
    lines = []
    for rule in RULES:
        lines.append(f"{rule.id}  {rule.severity:<7}  {rule.title}")
    return "\n".join(lines)


def get_rule(rule_id: str) -> Rule[RunContext]:
    """Return the rule of an id, in any case.

    Raises:
        UnknownFieldError: There is no such rule.
    """
    rule = RULES_BY_ID.get(rule_id.upper())
    if rule is None:
        # Spellings of numbers are never similar. So ids with the same beginning are suggested.
        matches = [known for known in RULES_BY_ID if known.startswith(rule_id.upper())]
        matches = matches[:MAX_MATCHES]
        hint = did_you_mean(matches) or f"`precision-bridge explain {RULE_LIST}` lists them."
        raise UnknownFieldError(f"Unknown rule {rule_id!r}. {hint}", matches)
    return rule


def rule_to_dict(rule: Rule[RunContext]) -> dict[str, Any]:
    """Return everything about a rule as plain data."""
    return {
        "id": rule.id,
        "severity": rule.severity,
        "title": rule.title,
        "about": rule.setting,
        "examples": _load_examples().get(rule.id, []),
        "explanation": rule.explanation,
        "holds_for": list(map(str, rule.versions)),
        "source": rule.source,
        "evidence": rule.evidence,
        "evidence_means": EVIDENCE[rule.evidence],
    }


@cache
def _load_examples() -> dict[str, list[str]]:
    """Return the id of a rule -> the findings of a run that breaks it.

    A finding has the form "severity path: rule, got value. Remedies.".
    """
    examples_yaml = (
        resources.files("bridge.rules")
        .joinpath("expected_findings.yaml")
        .read_text(encoding="utf-8")
    )
    examples: dict[str, list[str]] = yaml.safe_load(examples_yaml)
    return examples


def format_rule(row: Mapping[str, Any]) -> str:
    """Return a rule as text.

    Args:
        row: The result of `rule_to_dict`.
    """
    lines = [f"{row['id']}, {row['severity']}: {row['title']}"]
    if row["explanation"]:
        lines.append(f"  {row['explanation']}")
    lines.append("  The finding of a run that breaks it:")
    for example in row["examples"]:
        lines.append(f"    {example}")
    for versions in row["holds_for"]:
        lines.append(f"  Holds for {versions}.")
    lines.append(f"  Source: {row['source']}.")
    lines.append(f"  Evidence: {row['evidence']} ({row['evidence_means']}).")
    silenced = f"--silence {row['id']}=REASON"
    lines.append(f"  Silence it with {silenced}; the reason is kept with the run.")
    return "\n".join(lines)
