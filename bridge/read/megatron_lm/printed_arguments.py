"""`parse_printed_arguments`: the arguments of a run as the run itself printed them into a log.

    ------------------------ arguments ------------------------
      bf16 ............................................ True
      fp8 ............................................. hybrid
    -------------------- end of arguments ---------------------

Each line of a log may stand behind a rank or a timestamp. Source: Megatron-LM 0.20
training/arguments.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.precision.coercion import DTYPE_SPELLINGS, parse_number

BLOCK_START = re.compile(r"(?<!-)-{8,}+ (?:\w+ )?arguments -{8,}+")
BLOCK_END = re.compile(r"(?<!-)-{8,}+ end of (?:\w+ )?arguments -{8,}+")
"""A row of dashes is tried once, from its first one: each of them again takes time with the square
of their number."""
ARGUMENT_LINE = re.compile(r"(?:^|[\s:\]>|])([A-Za-z_]\w*) \.+ (.*)$", re.MULTILINE)
LOG_EVIDENCE = "is a log with the arguments that Megatron-LM prints when it starts"
LITERALS = {"None": None, "True": True, "False": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedBlock:
    """The arguments that a run printed."""

    arguments: Mapping[str, Any]
    """Name of an argument -> its value."""
    has_end: bool
    """Whether the block has its last line, so that every argument is in it."""


def parse_printed_arguments(text: str) -> list[PrintedBlock]:
    """Return the blocks of arguments that a log shows.

    A block that stands twice counts once. A block without its end counts where it is the last.
    """
    blocks: list[PrintedBlock] = []
    pieces = BLOCK_START.split(text)[1:]
    for number, piece in enumerate(pieces, 1):
        lines, *rest = BLOCK_END.split(piece, maxsplit=1)
        arguments: dict[str, Any] = {}
        for match in ARGUMENT_LINE.finditer(lines):
            arguments[match[1]] = _parse_value(match[2].strip())
        is_repeated = PrintedBlock(arguments=arguments, has_end=True) in blocks
        is_whole_or_last = bool(rest) or number == len(pieces)
        if arguments and is_whole_or_last and not is_repeated:
            blocks.append(PrintedBlock(arguments=arguments, has_end=bool(rest)))
    return blocks


def _parse_value(text: str) -> Any:
    if text in LITERALS:
        return LITERALS[text]
    if text.startswith("torch."):
        return DTYPE_SPELLINGS.get(text.removeprefix("torch."), text.removeprefix("torch."))
    return parse_number(text)
