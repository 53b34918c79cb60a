"""The arguments that Megatron-LM prints when a run starts: the exact answer to a script that decides at run time.

    ------------------------ arguments ------------------------
      bf16 ............................................ True
      fp8 ............................................. hybrid
    -------------------- end of arguments ---------------------

Each line may stand behind a rank or a timestamp. Source: Megatron-LM 0.20 training/arguments.py, `_print_args`.
"""

from __future__ import annotations

import re
from typing import Any

from bridge.precision.dtypes import SPELLINGS
from bridge.precision.fields import number_of_text

__all__ = ["EVIDENCE", "START", "printed_arguments"]

START = re.compile(r"-{8,} (?:\w+ )?arguments -{8,}")
END = re.compile(r"-{8,} end of (?:\w+ )?arguments -{8,}")
LINE = re.compile(r"(?:^|[\s:\]>|])([A-Za-z_]\w*) \.+ (.*)$")
EVIDENCE = "is a log with the arguments that Megatron-LM prints when it starts"
WORDS = {"None": None, "True": True, "False": False}


def printed_arguments(text: str) -> list[tuple[dict[str, Any], bool]]:
    """Return the arguments of each run that a log shows, by their names, and whether the block has its end.

    A block that stands twice counts once.
    """
    found: list[tuple[dict[str, Any], bool]] = []
    block: dict[str, Any] | None = None
    for line in text.split("\n"):
        if START.search(line) and "end of" not in line:
            block = {}
        elif block is not None and END.search(line):
            if block and (block, True) not in found:
                found.append((block, True))
            block = None
        elif block is not None and (match := LINE.search(line.rstrip())) is not None:
            block[match[1]] = _value(match[2].strip())
    if block and (block, True) not in found:
        found.append((block, False))
    return found


def _value(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    if text.startswith("torch."):
        return SPELLINGS.get(text.removeprefix("torch."), text.removeprefix("torch."))
    return number_of_text(text)
