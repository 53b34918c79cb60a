"""`hydra_words`: the overrides of a command line, as Hydra's grammar has them.

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
from bridge.read.launch.word import Word
from bridge.read.text.composed import Tree

WORD = re.compile(
    r"(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w./@-]*)(?:=(?P<value>.*))?\Z", re.DOTALL
)
ABSENT = "is no key of the configuration, and Hydra refuses the override"
THERE = "is a key of the configuration already, and Hydra refuses to add it"


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraWord:
    """One override."""

    key: str
    value: object = None
    sign: str = ""
    """`+` adds a key, `++` adds or replaces it, `~` deletes it; empty: the key has to be there."""
    is_late: bool = False
    """Whether only the run knows the value, which then is the text as it is written."""


def hydra_words(words: Iterable[Word]) -> list[HydraWord]:
    """Return the overrides among the words of a command; options and other words are left out."""
    overrides: list[HydraWord] = []
    for word in words:
        match = WORD.match(word)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            continue
        text = match["value"] or ""
        is_late = Word(text).is_unknown
        value: object = text
        if not is_late:
            value = value_of(text)
        override = HydraWord(
            key=match["key"], value=value, sign=match["sign"] or "", is_late=is_late
        )
        overrides.append(override)
    return overrides


def value_of(text: str) -> object:
    """Return the value of an override; a text that is no YAML in one line is the text itself."""
    if not text.strip():
        return ""
    try:
        documents = strict_yaml.load_all(str(text), "override")
    except PayloadError:
        return str(text)
    if len(documents) != 1:
        return str(text)
    return documents[0]


def write_over(values: Tree, words: Iterable[HydraWord], *, is_whole: bool) -> list[Finding]:
    """Write overrides over a mapping, in place, and return what Hydra refuses of them.

    Args:
        values: The mapping.
        words: The overrides, in their order.
        is_whole: The mapping has every key of the configuration, so that a key that is not there is refused.
    """
    refused: list[Finding] = []
    for word in words:
        is_of_the_tree = word.key.partition(".")[0] in values
        if is_whole and not is_of_the_tree and not word.sign:
            continue  # a word of another program, or a variable
        block, is_there = _block_of(values, word.key)
        last = word.key.rpartition(".")[2]
        is_there = is_there and last in block
        if is_whole:
            refused += _refusals(word, block.get(last), is_there=is_there)
        if word.sign == "~":
            block.pop(last, None)
        else:
            block[last] = word.value
    return refused


def _block_of(values: Tree, key: str) -> tuple[Tree, bool]:
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


def _refusals(word: HydraWord, value: object, *, is_there: bool) -> list[Finding]:
    """Return the refusal of an override by Hydra, where it refuses it.

    Args:
        word: The override.
        value: The value that the configuration has for its key.
        is_there: Whether the configuration has the key.
    """
    if not is_there and word.sign in ("", "~"):
        remedy = f"Write +{word.key}=VALUE"
        return [Finding(path=word.key, rule=ABSENT, value=word.value, remedy=remedy)]
    if is_there and word.sign == "+" and not isinstance(value, dict | list | None):
        remedy = f"Write {word.key}=VALUE"
        return [Finding(path=word.key, rule=THERE, value=word.value, remedy=remedy)]
    return []
