"""`hydra_words`: the overrides of a command line as Hydra's grammar has them, and a mapping with them written over it.

    words = hydra_words(["policy.precision=float16", "+policy.x=1", "~policy.y"])
    problems = write_over(values, words, is_whole=True)

Hydra itself takes longer to import than most files take to read, so the words are read here: a key, a sign in front of
it, and a value that is YAML in one line.

Source: Hydra 1.3 hydra/core/override_parser and _internal/config_loader_impl.py: _apply_overrides_to_config.
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
    """Only the run knows the value, which is the text as it is written."""


def hydra_words(words: Iterable[Word]) -> list[HydraWord]:
    """Return the overrides among the words of a command; options and other words are left out."""
    found = []
    for word in words:
        match = WORD.match(word)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            continue
        text = match["value"] or ""
        is_late = Word(text).is_unknown
        value = text if is_late else value_of(text)
        found.append(
            HydraWord(key=match["key"], value=value, sign=match["sign"] or "", is_late=is_late)
        )
    return found


def value_of(text: str) -> object:
    """Return the value of an override; a text that is no YAML in one line is the text itself."""
    if not text.strip():
        return ""
    try:
        documents = strict_yaml.load_all(str(text), "override")
    except PayloadError:
        return str(text)
    return documents[0] if len(documents) == 1 else str(text)


def write_over(values: Tree, words: Iterable[HydraWord], *, is_whole: bool) -> list[Finding]:
    """Write overrides over a mapping, in place, and return what Hydra refuses of them.

    Args:
        values: The mapping.
        words: The overrides, in their order.
        is_whole: The mapping has every key of the configuration, so that a key that is not there is refused.
    """
    refused = []
    for word in words:
        *holders, last = word.key.split(".")
        if is_whole and word.key.partition(".")[0] not in values and not word.sign:
            continue  # a word of another program, or a variable
        held = values
        is_there = True
        for name in holders:
            inner = held.get(name)
            if not isinstance(inner, dict):
                is_there = False
                inner = held[name] = {}
            held = inner
        is_there = is_there and last in held
        if is_whole and not is_there and word.sign in ("", "~"):
            remedy = f"Write +{word.key}=VALUE"
            refused.append(Finding(path=word.key, rule=ABSENT, value=word.value, remedy=remedy))
        if (
            is_whole
            and is_there
            and word.sign == "+"
            and not isinstance(held[last], dict | list | None)
        ):
            remedy = f"Write {word.key}=VALUE"
            refused.append(Finding(path=word.key, rule=THERE, value=word.value, remedy=remedy))
        if word.sign == "~":
            held.pop(last, None)
        else:
            held[last] = word.value
    return refused
