"""`parse_printed_arguments`: the arguments of a run as the run itself printed them into a log.

    ------------------------ arguments ------------------------
      bf16 ............................................ True
      fp8 ............................................. hybrid
    -------------------- end of arguments ---------------------

A rank or a timestamp may stand before each line of a log.

Source: Megatron-LM 0.20 training/arguments.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bridge.precision.coercion import DTYPE_SPELLINGS, parse_number

BLOCK_START = re.compile(r"(?<!-)-{8,}+ (?:\w+ )?arguments -{8,}+")
BLOCK_END = re.compile(r"(?<!-)-{8,}+ end of (?:\w+ )?arguments -{8,}+")
"""Both patterns match a row of dashes only from its first dash. A search from each dash of a long row
would take time with the square of its length."""
ARGUMENT_LINE = re.compile(r"(?:^|[\s:\]>|])([A-Za-z_]\w*) \.+ (.*)$", re.MULTILINE)
LOG_EVIDENCE = "is a log with the arguments that Megatron-LM prints when it starts"
LITERALS = {"None": None, "True": True, "False": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedBlock:
    """The arguments that a run printed."""

    arguments: Mapping[str, object]
    """Name of an argument -> its value."""
    has_end: bool
    """Whether the block has its last line, and so every argument."""


def parse_printed_arguments(text: str) -> list[PrintedBlock]:
    """Return the blocks of arguments in a log.

    Equal blocks count once. A block without its end counts only if it is the last one.
    """
    blocks: list[PrintedBlock] = []
    pieces = BLOCK_START.split(text)[1:]
    for number, piece in enumerate(pieces, 1):
        lines, *rest = BLOCK_END.split(piece, maxsplit=1)
        has_end = bool(rest)
        arguments = _parse_lines(lines)
        is_repeated = PrintedBlock(arguments=arguments, has_end=True) in blocks
        is_complete_or_last = has_end or number == len(pieces)
        if arguments and is_complete_or_last and not is_repeated:
            blocks.append(PrintedBlock(arguments=arguments, has_end=has_end))
    return blocks


def _parse_lines(text: str) -> dict[str, object]:
    """Return the arguments of the lines of a block."""
    arguments: dict[str, object] = {}
    for match in ARGUMENT_LINE.finditer(text):
        arguments[match[1]] = _parse_value(match[2].strip())
    return arguments


def _parse_value(text: str) -> object:
    """Return a printed value: None, a bool, a number, our name of a dtype, or the text itself."""
    if text in LITERALS:
        return LITERALS[text]
    if text.startswith("torch."):
        dtype = text.removeprefix("torch.")
        return DTYPE_SPELLINGS.get(dtype, dtype)
    return parse_number(text)
