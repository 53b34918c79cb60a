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

__all__ = ["EVIDENCE", "START", "printed_arguments"]

START = re.compile(r"-{8,} (?:\w+ )?arguments -{8,}")
END = re.compile(r"-{8,} end of (?:\w+ )?arguments -{8,}")
LINE = re.compile(r"(?:^|[\s:\]>|])([A-Za-z_]\w*) \.+ (.*)$")
EVIDENCE = "is a log with the arguments that Megatron-LM prints when it starts"
WORDS = {"None": None, "True": True, "False": False}
NUMBER = re.compile(r"[-+]?\d+")
DECIMAL = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DTYPE = re.compile(r"torch\.(\w+)")


def printed_arguments(text: str) -> list[dict[str, Any]]:
    """Return the arguments of each run that a log shows, by their names; a block that stands twice counts once."""
    found: list[dict[str, Any]] = []
    block: dict[str, Any] | None = None
    for line in text.split("\n"):
        if START.search(line) and "end of" not in line:
            block = {}
        elif block is not None and END.search(line):
            if block and block not in found:
                found.append(block)
            block = None
        elif block is not None and (match := LINE.search(line.rstrip())) is not None:
            block[match[1]] = _value(match[2].strip())
    if block and block not in found:
        found.append(block)
    return found


def _value(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    if NUMBER.fullmatch(text):
        return int(text)
    if DECIMAL.fullmatch(text):
        return float(text)
    dtype = DTYPE.fullmatch(text)
    return DTYPES.get(dtype[1], dtype[1]) if dtype else text
