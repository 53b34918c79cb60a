"""`parse_hydra_overrides`: the overrides of a command line, as Hydra's grammar has them.

    words = hydra_words(["policy.precision=float16", "+policy.x=1", "~policy.y"])
    problems = write_over(values, words, is_whole=True)

Hydra takes longer to import than most files take to read. So the words are read here: a key, a sign
in front of it, and a value that is YAML in one line.

Source: Hydra 1.3 hydra/core/override_parser and _internal/config_loader_impl.py,
_apply_overrides_to_config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bridge.errors import Finding, PayloadError
from bridge.precision import strict_yaml
from bridge.read.launch.shell_word import ShellWord
from bridge.read.text.inherited_config import ConfigTree

OVERRIDE_PATTERN = re.compile(
    r"(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w./@-]*)(?:=(?P<value>.*))?\Z", re.DOTALL
)
ABSENT_KEY_RULE = "is no key of the configuration, and Hydra refuses the override"
EXISTING_KEY_RULE = "is a key of the configuration already, and Hydra refuses to add it"


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraOverride:
    """One override."""

    key: str
    value: object = None
    sign: str = ""
    """`+` adds a key, `++` adds or replaces it, `~` deletes it; empty: the key has to be there."""
    is_late: bool = False
    """Whether only the run knows the value, which then is the text as it is written."""


def parse_hydra_overrides(words: Iterable[ShellWord]) -> list[HydraOverride]:
    """Return the overrides among the words of a command; options and other words are left out."""
    overrides: list[HydraOverride] = []
    for word in words:
        match = OVERRIDE_PATTERN.match(word)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            continue
        text = match["value"] or ""
        is_late = ShellWord(text).is_unknown
        value: object = text
        if not is_late:
            value = parse_override_value(text)
        override = HydraOverride(
            key=match["key"], value=value, sign=match["sign"] or "", is_late=is_late
        )
        overrides.append(override)
    return overrides


def parse_override_value(text: str) -> object:
    """Return the value of an override; a text that is no YAML in one line is the text itself."""
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
    """Write overrides over a mapping, in place, and return what Hydra refuses of them.

    Args:
        values: The mapping.
        overrides: The overrides, in their order.
        is_complete: The mapping has every key of the configuration, so that a key that is not there is refused.
    """
    refused: list[Finding] = []
    for word in overrides:
        is_of_the_tree = word.key.partition(".")[0] in values
        if is_complete and not is_of_the_tree and not word.sign:
            continue  # a word of another program, or a variable
        block, is_there = _get_or_make_block(values, word.key)
        last = word.key.rpartition(".")[2]
        is_there = is_there and last in block
        if is_complete:
            refused += _list_refusals(word, block.get(last), is_there=is_there)
        if word.sign == "~":
            block.pop(last, None)
        else:
            block[last] = word.value
    return refused


def _get_or_make_block(values: ConfigTree, key: str) -> tuple[ConfigTree, bool]:
    """Return the mapping that a key stands in, and whether it was there; it is made where it was not."""
    block = values
    is_there = True
    for name in key.split(".")[:-1]:
        inner = block.get(name)
        if not isinstance(inner, dict):
            is_there = False
            inner = block[name] = {}
        block = inner
    return block, is_there


def _list_refusals(word: HydraOverride, value: object, *, is_there: bool) -> list[Finding]:
    """Return the refusal of an override by Hydra, where it refuses it.

    Args:
        word: The override.
        value: The value that the configuration has for its key.
        is_there: Whether the configuration has the key.
    """
    if not is_there and word.sign in ("", "~"):
        remedy = f"Write +{word.key}=VALUE"
        return [Finding(path=word.key, rule=ABSENT_KEY_RULE, value=word.value, remedy=remedy)]
    if is_there and word.sign == "+" and not isinstance(value, dict | list | None):
        remedy = f"Write {word.key}=VALUE"
        return [Finding(path=word.key, rule=EXISTING_KEY_RULE, value=word.value, remedy=remedy)]
    return []
