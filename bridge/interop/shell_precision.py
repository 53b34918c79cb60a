"""Which words of a script bear on precision, and which defaults of its variables such words depend on."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from bridge.interop.megatron_lm.flags import SWITCH
from bridge.interop.shell_variables import MARK, is_unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bridge.interop.shell_variables import Value

__all__ = [
    "PRECISION_WORDS",
    "bearing",
    "bears",
    "deciding",
    "deciding_keys",
    "known",
    "loose",
    "may_hold_options",
    "options",
    "relevant",
]

PRECISION_WORDS = re.compile(
    r"fp8|fp4|fp16|bf16|fp32|fp64|tf32|bfloat|float(?:16|32|8)|\bhalf\b|dtype|precision|loss[-_]?scale|amax|mxfp|nvfp"
    r"|hysteresis|grads[-_]in|grad[-_]reduce[-_]in|quant|transformer[-_]impl|QK_LAYER|query[-_]key[-_]layer|kitchen"
    r"|--use-(?:megatron|custom|torch)-fsdp|yaml[-_]cfg|deepspeed[-_]config",
    re.IGNORECASE,
)
"""What a piece of a script that bears on precision looks like."""
OTHER_OPTIONS = re.compile(
    r"--(?:optim|fsdp\w*|deepspeed|use[-_](?:fsdp|deepspeed|cpu)|no[-_]cuda|load[-_]in[-_][48]bit|bits|torch[-_]compile\w*"
    r"|finetuning[-_]type|mx\..+)(?:=.*)?|.*(?:\bmodel\.converters|amp_O2|\btrainer\.(?:strategy|plugins))(?:\b.*)?"
)
"""Options that the systems beside Megatron-LM read with those."""
NAMES_A_FILE = re.compile(r"--(?:deepspeed|(?:job\.)?config[-_]file|config|config-name|config-path)")
"""Options that name a file which can set the precision."""
OWN_FILE = re.compile(r"\.(?:ya?ml|json|toml)$")
VARIABLE_OF_A_FILE = frozenset({"CONFIG_FILE"})
HOLDS_OPTIONS = re.compile(r"ARG|OPTS|OPTION|FLAG|PARAMS|EXTRA", re.IGNORECASE)
"""Names of variables that hold options rather than the value of one."""
KEY = re.compile(r'"(\w+)"\s*:')
SWITCHES = frozenset({"enabled", "initial_scale_power", "communication_data_type"})
"""Keys of DeepSpeed's that bear on precision by where they stand."""
MODES = ("--bf16", "--fp16")
"""Switches in Megatron-LM, and followed by a value elsewhere."""
PAIR = re.compile(r"\+{0,2}[A-Za-z_][\w./@-]*=")


class _Place(NamedTuple):
    """A word and where it stands in a text."""

    start: int
    end: int
    text: str
    counts: bool
    """It says something about precision."""


@lru_cache(maxsize=4096)
def bears(text: str) -> bool:
    """Return whether a piece of a script bears on precision."""
    return PRECISION_WORDS.search(text) is not None or OTHER_OPTIONS.fullmatch(text) is not None


def relevant(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that bear on precision: such flags with their values, and unknown words that may hold some."""
    return tuple(word for word, before in _pairs(words) if _counts(word, before) or _may_hold(word, before))


def known(words: Sequence[str]) -> tuple[str, ...]:
    """Return what `relevant` does without words that only the run knows."""
    return tuple(word for word, before in _pairs(words) if _counts(word, before) and not _may_hold(word, before))


def loose(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that only the run knows and that may hold options."""
    return tuple(word for word, before in _pairs(words) if _may_hold(word, before))


def options(value: Value | None) -> tuple[str, ...]:
    """Return what a variable holds of options that bear on precision."""
    if value is None:
        return ()
    words = value if isinstance(value, list) else value.split()
    if isinstance(value, list) and any(" " in word for word in words):
        words = " ".join(words).split()
    found = []
    for word, before in _pairs(words):
        is_file = word.startswith("@") and len(word) > 1
        if _decides(word, before) or is_file or (_may_hold(word, before) and len(words) > 1):
            found.append(word)
    return tuple(found)


def bearing(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the variables of an environment that bear on precision."""
    return {
        name: value
        for name, value in variables
        if bears(name) or name.startswith("ACCELERATE_") or name in VARIABLE_OF_A_FILE
    }


def deciding(pieces: Iterable[tuple[str, frozenset[str]]]) -> set[str]:
    """Return the defaulted variables on which an option that bears on precision depends.

    Args:
        pieces: What stands on a command line or in a value, one after the other, with the defaults of each.
    """
    known_pieces = list(pieces)
    text = "".join(piece for piece, _ in known_pieces)
    words = _words(text)
    found: set[str] = set()
    start = at = 0
    for piece, origins in known_pieces:
        end = start + len(piece)
        while at < len(words) and words[at].end <= start:
            at += 1
        if origins:
            inside = at
            while inside < len(words) and words[inside].start < end:
                found |= origins if words[inside].counts else set()
                inside += 1
            before = words[at - 1].text if at else ""
            if not piece.strip() and _is_free(text, start, end) and not _is_value(before):
                found |= set(filter(HOLDS_OPTIONS.search, origins))
        start = end
    return found


def deciding_keys(pieces: Iterable[tuple[str, frozenset[str]]]) -> set[str]:
    """Return the same for the text of a JSON file, where the key on its line says what a value is about."""
    found: set[str] = set()
    key = ""
    for piece, origins in pieces:
        if key and (bears(key) or key in SWITCHES):
            found |= origins
        if "\n" in piece:
            key = ""
        key = next(reversed(KEY.findall(piece.rpartition("\n")[2])), key)
    return found


def _words(text: str) -> list[_Place]:
    """Return where each word stands, and whether it says something about precision."""
    found, before = [], ""
    for word in re.finditer(r"\S+", text):
        found.append(_Place(word.start(), word.end(), word[0], _decides(word[0], before)))
        before = word[0]
    return found


def _is_free(text: str, start: int, end: int) -> bool:
    """Return whether blanks are on both sides of a piece."""
    return not (text[start - 1 : start] if start else "").strip() and not text[end : end + 1].strip()


def _pairs(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    return zip(words, ("", *words), strict=False)


def _is_flag(word: str) -> bool:
    name = word.partition("=")[0]
    return bears(name) or NAMES_A_FILE.fullmatch(name) is not None


def _is_pair(word: str) -> bool:
    return PAIR.match(word) is not None and bears(word.partition("=")[0])


def _decides(word: str, before: str) -> bool:
    """Return whether a word says something about precision, for what stands before it."""
    if word.startswith("-"):
        return _is_flag(word)
    return (before.startswith("-") and "=" not in before and _is_flag(before)) or _is_pair(word)


def _is_value(before: str) -> bool:
    return before.startswith("--") and "=" not in before and not SWITCH.fullmatch(before) and before not in MODES


def _counts(word: str, before: str) -> bool:
    if word.startswith("@") or OWN_FILE.search(word):
        return True
    if before.startswith("--") and not word.startswith("--") and bears(before):
        return True
    return bears(word) and (word.startswith("-") or "/" not in word)


def _may_hold(word: str, before: str) -> bool:
    """Return whether a word that only the run knows may hold options: not the value of one, and no path."""
    if word.startswith("--"):
        return is_unknown(word.partition("=")[0])
    return is_unknown(word) and not _is_value(before) and may_hold_options(word)


def may_hold_options(word: str) -> bool:
    """Return whether a word with unknown pieces may be options once they are known: not a path, not part of a name."""
    rest = MARK.sub("", word)
    return not rest.strip() or (is_unknown(word[:1]) and "/" not in rest)
