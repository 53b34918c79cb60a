"""`parse_hydra_overrides`: the overrides of a command line, in Hydra's grammar.

    words = map(ShellWord, ["policy.precision=float16", "+policy.x=1", "~policy.y"])
    overrides = parse_hydra_overrides(words)
    refused = apply_hydra_overrides(values, overrides, is_complete=True)

An import of Hydra takes longer than reading most files. So this module parses the grammar itself: a
sign, a key, and a value, which is YAML in a single line.

Source: Hydra 1.3 hydra/core/override_parser and _internal/config_loader_impl.py,
_apply_overrides_to_config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bridge.errors import Finding, PayloadError
from bridge.precision import strict_yaml
from bridge.read.launch.shell_word import ShellWord
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.inherited_config import ConfigTree

OVERRIDE_PATTERN = re.compile(
    r"(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w./@-]*)(?:=(?P<value>.*))?\Z", re.DOTALL
)
ABSENT_KEY_RULE = "is no key of the configuration, and Hydra refuses the override"
EXISTING_KEY_RULE = "is a key of the configuration already, and Hydra refuses to add it"
ABSENT_VALUE = object()
"""The value of an absent key. It is not None, because a key can have the value None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraOverride:
    """One override."""

    key: str
    """The dotted key."""
    value: object = None
    sign: str = ""
    """`+` adds a key, `++` adds or replaces it, `~` deletes it; empty: the key must exist."""
    is_open: bool = False
    """Whether only the run knows the value. `value` is then the text as it is written."""
    word: str = ""
    """The override as it is written."""


def parse_hydra_overrides(words: Iterable[ShellWord]) -> list[HydraOverride]:
    """Return the overrides among the arguments of a command. Other arguments are ignored."""
    overrides: list[HydraOverride] = []
    for word in words:
        match = OVERRIDE_PATTERN.match(word)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            continue
        text = match["value"] or ""
        is_open = ShellWord(text).is_open
        value: object = text
        if not is_open:
            value = parse_override_value(text)
        override = HydraOverride(
            key=match["key"],
            value=value,
            sign=match["sign"] or "",
            is_open=is_open,
            word=str(word),
        )
        overrides.append(override)
    return overrides


def parse_override_value(text: str) -> object:
    """Return the value of an override as YAML reads it. Text that is not YAML is unchanged."""
    if not text.strip():
        return ""
    try:
        documents = strict_yaml.load_documents(str(text), "override")
    except PayloadError:
        return str(text)
    if len(documents) != 1:
        return str(text)
    return documents[0]


def apply_hydra_overrides(
    values: ConfigTree, overrides: Iterable[HydraOverride], *, is_complete: bool
) -> list[Finding]:
    """Apply overrides to a configuration, in place.

    Args:
        values: The configuration.
        overrides: The overrides, in their order.
        is_complete: Whether the configuration has every key that the program knows. Otherwise
            nothing is refused, since an absent key may be in a file that was not read.

    Returns:
        A finding for each override that Hydra refuses.
    """
    refused: list[Finding] = []
    for override in overrides:
        has_known_section = override.key.partition(".")[0] in values
        if is_complete and not has_known_section and not override.sign:
            continue  # `NAME=value` of another program, or a variable
        if is_complete:
            finding = _find_refusal(override, values)
            if finding is not None:
                refused.append(finding)
        *sections, last = override.key.split(".")
        section = _get_or_make_section(values, sections)
        if override.sign == "~":
            section.pop(last, None)
        else:
            section[last] = override.value
    return refused


def _get_or_make_section(values: ConfigTree, names: Sequence[str]) -> ConfigTree:
    """Return the section at a path. An absent section is made, and replaces any other value."""
    section = values
    for name in names:
        inner = section.get(name)
        if not isinstance(inner, dict):
            inner = section[name] = {}
        section = inner
    return section


def _find_refusal(override: HydraOverride, values: ConfigTree) -> Finding | None:
    """Return why Hydra refuses an override. None if Hydra accepts it.

    If the value of an existing key is a mapping or a list, Hydra accepts `+key=value`, and extends
    that value.
    """
    key = override.key
    value = get_dotted_value(values, key, ABSENT_VALUE)
    if value is ABSENT_VALUE:
        if override.sign in ("", "~"):
            remedy = f"Write +{key}=VALUE"
            return Finding(path=key, rule=ABSENT_KEY_RULE, value=override.value, remedy=remedy)
    elif override.sign == "+" and not isinstance(value, dict | list | None):
        remedy = f"Write {key}=VALUE"
        return Finding(path=key, rule=EXISTING_KEY_RULE, value=override.value, remedy=remedy)
    return None
