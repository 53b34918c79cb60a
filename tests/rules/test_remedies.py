"""Remedies of all examples: none is what the run has already, and one that can be typed works.

A remedy is typed here as a reader would: FIELD=VALUE goes to the recipe where it has the field, or else to the config
that has it; "set it to VALUE" goes to the setting of the finding; a version goes to the target.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from bridge.precision.precision_config import FIELD_DEFAULTS
from bridge.preflight.check_context import CheckContext
from bridge.preflight.rule_check import check
from bridge.registry.registry import REGISTRY
from bridge.rules.rule import RuleFinding
from bridge.rules.rulebook import RULES_BY_ID
from bridge.target.fields import OWNER_FIELDS
from bridge.target.versions import PRODUCT_TITLES, is_at_least, parse_version
from tests.rules.cases import CASES
from tests.rules.situations import run_of, setup_of

ASSIGNED = re.compile(r"([A-Za-z_][\w.]*)=('[^']*'|[\w.+-]*\w)")
SET_TO = re.compile(r"(?:set|leave) it (?:to|at) (?!the\b|package\b)('[^']*'|[\w.+-]*\w)")
VERSION = re.compile(rf"({'|'.join(PRODUCT_TITLES.values())}) (\d+(?:\.\d+)+)(?! \()")
OWNERS = ("model", "optimizer", "ddp", "train", "data")
PRODUCTS = {title: product for product, title in PRODUCT_TITLES.items()}
WORDS = {"True": True, "False": False, "None": None, "null": None, "none": "none"}

UNTYPED = {("PB612", "precision_backend"): "a setting of the run, and no section"}
"""Rule and field of an assignment that no section of a case has -> reason."""
NOT_ENOUGH = {
    ("PB353", "state use_precision_aware_optimizer=True in a bf16 run"): "the mode is one of the two conditions",
}
"""Rule and remedy that silences the rule together with more than the words that can be typed -> reason."""


class Step(NamedTuple):
    """One typed part of a remedy."""

    section: str
    """precision, a role, environment, or target."""
    name: str
    value: Any


def steps_of(finding: RuleFinding, remedy: str, setup: CheckContext) -> list[Step]:
    """Return what a remedy says to set, in its order."""
    steps = []
    for name, text in ASSIGNED.findall(remedy):
        if (finding.id, name) not in UNTYPED:
            steps += [Step(section, field, _value(text)) for section, field in _places(name, finding, remedy, setup)]
    for text in SET_TO.findall(remedy):
        section, _, field = finding.path.partition(".")
        steps.append(Step("precision" if section == "mixed_precision" else section, field, _value(text)))
    for title, text in VERSION.findall(remedy):
        if re.match(r"(use|choose)\b", remedy):
            steps.append(Step("target", PRODUCTS[title], text))
    return steps


def _value(text: str) -> Any:
    text = text.strip("'")
    if text in WORDS:
        return WORDS[text]
    return int(text) if text.isdecimal() else text


def _places(name: str, finding: RuleFinding, remedy: str, setup: CheckContext) -> Iterator[tuple[str, str]]:
    section, _, field = name.rpartition(".")
    if section.startswith("data.") or section in OWNERS:
        root, _, rest = name.partition(".")
        yield root, rest
        return
    if name.isupper():
        yield "environment", name
        return
    if setup.precision is not None and field in FIELD_DEFAULTS:
        yield "precision", field
        return
    if "in optimizer and ddp" in remedy:
        yield from (("optimizer", field), ("ddp", field))
        return
    own = finding.path.partition(".")[0]
    roles = [role for role in (own, *OWNERS) if field in OWNER_FIELDS.get(role, {})]
    assert roles, f"{finding.id}: no config has {field}"
    yield roles[0], field


def held_by(setup: CheckContext, step: Step) -> Any:
    """Return what a run has where a step sets something."""
    if step.section == "precision":
        return setup.get_setting_value(step.name)
    if step.section == "environment":
        return setup.environment.get(step.name)
    if step.section == "target":
        return getattr(setup.target, step.name)
    value = setup.views[step.section]
    for part in step.name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def is_there_already(setup: CheckContext, step: Step) -> bool:
    """Return whether a run has what a step sets."""
    held = held_by(setup, step)
    if step.section == "target":
        return is_at_least(held, step.value) is True
    return held is not None and str(held) == str(step.value)


def is_fulfilled(setup: CheckContext, finding: RuleFinding, step: Step) -> bool:
    """Return whether a run has what a remedy says to set; an earlier release may be the remedy for a later one."""
    if finding.path == f"{step.section}.{step.name}":  # as it was before the sync
        return str(finding.value) == str(step.value)
    for versions in RULES_BY_ID[finding.id].versions:
        if versions.product == step.name and versions.holds(parse_version(str(step.value))) is False:
            return False
    return is_there_already(setup, step)


def typed(case: Mapping[str, Any], steps: list[Step]) -> dict[str, Any]:
    """Return a case after some steps."""
    changed = dict(case)
    for step in steps:
        if step.section == "target":
            changed["target"] = _retargeted(changed.get("target"), step)
            continue
        given = changed.get(step.section) or {}
        if isinstance(given, str):
            given = REGISTRY.get(given).to_dict()
        first, *rest = step.name.split(".")
        value = {**(given.get(first) or {}), rest[0]: step.value} if rest else step.value
        value = str(value) if step.section == "environment" else value
        changed[step.section] = {**given, first: value}
    return changed


def _retargeted(target: str | None, step: Step) -> str:
    words = [word for word in (target or "").split(",") if word and not re.fullmatch(rf"{step.name}[\d.]+", word)]
    return ",".join([*words, f"{step.name}{step.value}"])


def remedies_of(name: str) -> list[tuple[RuleFinding, str, list[Step]]]:
    """Return each remedy of a rule's findings about the run that breaks it, with its steps."""
    setup = setup_of(CASES[name][0])
    found = [one for one in check(setup.run).findings if one.id == name]
    return [(one, remedy, steps_of(one, remedy, setup)) for one in found for remedy in one.remedies]


@pytest.mark.parametrize("name", sorted(RULES_BY_ID))
def test_no_remedy_of_any_finding_is_what_the_run_has_already(name: str) -> None:
    for case in CASES[name]:
        setup = setup_of(case)
        for finding in check(setup.run).findings:
            for remedy in finding.remedies:
                steps = steps_of(finding, remedy, setup)
                there = [step for step in steps if is_fulfilled(setup, finding, step)]
                assert not there, f"{finding.id}: {remedy}: {there}"


@pytest.mark.parametrize("name", sorted(RULES_BY_ID))
def test_a_remedy_that_can_be_typed_silences_its_finding_or_leaves_an_info(name: str) -> None:
    for finding, remedy, steps in remedies_of(name):
        if not steps or (name, remedy) in NOT_ENOUGH:
            continue
        after = check(run_of(typed(CASES[name][0], steps))).findings
        same = [one for one in after if (one.id, one.path) == (name, finding.path)]
        left = [str(one) for one in same if one.severity != "info" or finding.severity == "info"]
        assert left == [], remedy


def test_most_rules_have_a_remedy_that_these_tests_type() -> None:
    rules = {name for name in RULES_BY_ID for _, _, steps in remedies_of(name) if steps}
    assert len(rules) > 110


def test_a_version_that_has_not_come_and_a_value_that_is_there_are_told_apart() -> None:
    setup = setup_of({"precision": {"bf16": True}, "target": "te2.14,mcore0.17"})
    assert is_there_already(setup, Step("precision", "bf16", True))
    assert is_there_already(setup, Step("target", "te", "2.14"))
    assert not is_there_already(setup, Step("target", "mcore", "0.17.1"))
    assert parse_version("2.14") == held_by(setup, Step("target", "te", ""))
