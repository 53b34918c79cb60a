"""`precision-bridge explain PB101`: a rule of the check, in full; `explain rules` lists them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from bridge.errors import UnknownFieldError, close_matches, did_you_mean

if TYPE_CHECKING:
    from bridge.rules.rule import Rule

__all__ = ["explain_rule", "is_rule", "rule_dict", "spoken"]

LIST = "rules"


def is_rule(word: str | None) -> bool:
    """Return whether `word` is meant as a rule's id, or as the list of them."""
    return word is not None and (word == LIST or re.fullmatch(r"[Pp][Bb]\d+", word) is not None)


def explain_rule(word: str, *, as_json: bool) -> None:
    """Print a rule, or all of them a line each.

    Raises:
        UnknownFieldError: No rule has this id; the nearest are named.
    """
    from bridge.rules.rulebook import BY_ID, RULES  # the rules are read when one is asked for

    if word == LIST:
        _print_list(RULES, as_json=as_json)
        return
    rule = BY_ID.get(word.upper())
    if rule is None:
        matches = [name for name in BY_ID if name.startswith(word.upper())][:3] or close_matches(word, BY_ID)
        hint = did_you_mean(matches) or f"`precision-bridge explain {LIST}` lists them."
        raise UnknownFieldError(f"Unknown rule {word!r}. {hint}", matches)
    row = rule_dict(rule)
    print(json.dumps(row, indent=2) if as_json else _text(row))


def rule_dict(rule: Rule) -> dict[str, Any]:
    """Return everything about a rule as plain data."""
    from bridge.rules.rule import EVIDENCE

    return {
        "id": rule.id,
        "severity": rule.severity,
        "title": rule.title,
        "about": rule.path,
        "says": spoken(rule.message),
        "remedies": [spoken(remedy) for remedy in rule.remedies],
        "explanation": rule.explanation,
        "holds_for": [str(versions) for versions in rule.versions],
        "source": rule.source,
        "evidence": rule.evidence,
        "evidence_means": EVIDENCE[rule.evidence],
    }


def spoken(template: str) -> str:
    """Return a message with names for the values that a run fills in: "needs {s.scheme}" -> "needs <scheme>"."""
    names = re.sub(r"\{(?:s\.)?([\w.]+)(?:\[\d\])?(?:![rs])?\}", lambda found: f"<{_last(found[1])}>", template)
    return names.replace("<capability>.<capability>", "<capability>")


def _last(path: str) -> str:
    return path.rpartition(".")[2].replace("_", " ")


def _print_list(rules: tuple[Rule, ...], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([rule_dict(rule) for rule in rules], indent=2))
        return
    print("\n".join(f"{rule.id}  {rule.severity:<7}  {rule.title}" for rule in rules))


def _text(row: dict[str, Any]) -> str:
    lines = [f"{row['id']}, {row['severity']}: {row['title']}", f"  {row['about']}: {row['says']}."]
    if row["explanation"]:
        lines.append(f"  {row['explanation']}")
    lines.append("  Remedies:")
    lines += [
        f"    - {remedy[:1].upper()}{remedy[1:]}{'' if remedy.endswith('?') else '.'}" for remedy in row["remedies"]
    ]
    lines += [f"  Holds for {versions}." for versions in row["holds_for"]]
    lines.append(f"  Source: {row['source']}.")
    lines.append(f"  Evidence: {row['evidence']} ({row['evidence_means']}).")
    lines.append(f"  Silence it with --silence {row['id']}=REASON; the reason is kept with the run.")
    return "\n".join(lines)
