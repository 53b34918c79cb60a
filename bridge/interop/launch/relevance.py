"""Which words of a script bear on precision, and which unknown ones may hold options that do."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from bridge.interop.launch.values import MARK, is_unknown
from bridge.interop.megatron_lm.flags import SWITCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "MODES",
    "PRECISION_WORDS",
    "STATING",
    "bears",
    "is_variable",
    "known",
    "loose",
    "may_hold_options",
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
"""Options that systems other than Megatron-LM read with those."""
OWN_FILE = re.compile(r"\.(?:ya?ml|json|toml)$")
STATING = re.compile(
    r"(?<![\w-])--(?:bf16|fp16|(?:fp8|fp4)[\w-]*|precision|(?:mixed[-_]|compute[-_]|torch[-_])?(?:precision|dtype))(?![\w-])"
)
"""A flag that states a precision."""
MODES = ("--bf16", "--fp16")
"""Switches in Megatron-LM, and followed by a value elsewhere."""


@lru_cache(maxsize=4096)
def bears(text: str) -> bool:
    """Return whether a piece of a script bears on precision."""
    return PRECISION_WORDS.search(text) is not None or OTHER_OPTIONS.fullmatch(text) is not None


def known(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that bear on precision and are known: such flags with their values."""
    return tuple(word for word, before in _pairs(words) if _counts(word, before) and not _may_hold(word, before))


def loose(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that only the run knows and that may hold options."""
    return tuple(word for word, before in _pairs(words) if _may_hold(word, before))


def is_variable(name: str) -> bool:
    """Return whether a variable of the environment bears on precision."""
    return bears(name) or name.startswith("ACCELERATE_") or name == "CONFIG_FILE"


def _pairs(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    return zip(words, ("", *words), strict=False)


def _is_value(before: str) -> bool:
    return before.startswith("--") and "=" not in before and not SWITCH.fullmatch(before) and before not in MODES


def _counts(word: str, before: str) -> bool:
    if word.startswith("@") or OWN_FILE.search(word):
        return True
    if _is_value(before) and not word.startswith("-"):
        return bears(before)
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
