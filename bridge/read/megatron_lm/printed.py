"""The arguments of a run as the run itself wrote them: printed into a log, or saved in a checkpoint.

    ------------------------ arguments ------------------------
      bf16 ............................................ True
      fp8 ............................................. hybrid
    -------------------- end of arguments ---------------------

Each line of a log may stand behind a rank or a timestamp. Source: Megatron-LM 0.20
training/arguments.py.

A checkpoint (`common.pt`) is read without running code of the file. `torch.load(weights_only=True)`
makes tensors, containers and `argparse.Namespace`. Megatron-LM's enums, paths and signals become
values without a meaning; a file that names anything else is refused.
"""

import io
import pickle
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from bridge.errors import PayloadError
from bridge.precision.values import SPELLINGS, number_of_text

START = re.compile(r"(?<!-)-{8,}+ (?:\w+ )?arguments -{8,}+")
END = re.compile(r"(?<!-)-{8,}+ end of (?:\w+ )?arguments -{8,}+")
"""A row of dashes is tried once, from its first one: each of them again takes time with the square
of their number."""
LINE = re.compile(r"(?:^|[\s:\]>|])([A-Za-z_]\w*) \.+ (.*)$", re.MULTILINE)
EVIDENCE = "is a log with the arguments that Megatron-LM prints when it starts"
WORDS = {"None": None, "True": True, "False": False}
SUFFIX = ".pt"
DAMAGED = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    LookupError,
    EOFError,
    TypeError,
    AttributeError,
    OSError,
)
"""Errors of `torch.load` for a damaged file."""
INERT = ("megatron.", "signal.Signals", "pathlib.PosixPath", "pathlib.PurePosixPath")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedBlock:
    """The arguments that a run printed."""

    arguments: Mapping[str, Any]
    """Name of an argument -> its value."""
    has_end: bool
    """Whether the block has its last line, so that every argument is in it."""


def printed_arguments(text: str) -> list[PrintedBlock]:
    """Return the blocks of arguments that a log shows.

    A block that stands twice counts once. A block without its end counts where it is the last.
    """
    blocks: list[PrintedBlock] = []
    pieces = START.split(text)[1:]
    for number, piece in enumerate(pieces, 1):
        lines, *rest = END.split(piece, maxsplit=1)
        arguments: dict[str, Any] = {}
        for match in LINE.finditer(lines):
            arguments[match[1]] = _value(match[2].strip())
        is_repeated = PrintedBlock(arguments=arguments, has_end=True) in blocks
        is_whole_or_last = bool(rest) or number == len(pieces)
        if arguments and is_whole_or_last and not is_repeated:
            blocks.append(PrintedBlock(arguments=arguments, has_end=bool(rest)))
    return blocks


def _value(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    if text.startswith("torch."):
        return SPELLINGS.get(text.removeprefix("torch."), text.removeprefix("torch."))
    return number_of_text(text)


class _Inert:
    """An object in the place of an instance of a class that is not imported."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(map(str, getattr(self, "values", ())))


def arguments_text(data: bytes, path: str) -> str:
    """Return the `args` of a checkpoint as the block that Megatron-LM prints when a run starts.

    PayloadError for a file that names a class or function which a checkpoint's arguments do not
    need, that is none of `torch.save`'s, or that holds no arguments.
    """
    import torch  # two seconds, and only for this kind of file

    allowed: list[Any] = [Namespace]
    for name in _read(torch.serialization.get_unsafe_globals_in_checkpoint, data, path):
        if name.startswith(INERT):
            allowed.append((_Inert, name))
        elif name != "argparse.Namespace":
            rule = f"a checkpoint must not name {name}"
            raise PayloadError(f"{path}: {rule}. Give the log of the run.")
    with torch.serialization.safe_globals(allowed):
        content = _read(partial(torch.load, map_location="cpu", weights_only=True), data, path)
    arguments = None
    if isinstance(content, dict):
        arguments = content.get("args")
    if not isinstance(arguments, Namespace):
        rule = "must hold `args` of Megatron-LM, and does not"
        raise PayloadError(f"{path}: {rule}. Give common.pt of a checkpoint.")
    lines: list[str] = []
    for name, value in sorted(vars(arguments).items()):
        words = " ".join(str(value).split())
        lines.append(f"  {name} ... {words}")
    title = "------------------------ checkpoint arguments ------------------------"
    return "\n".join([title, *lines, title.replace("checkpoint", "end of"), ""])


def _read(call: Callable[[io.BytesIO], Any], data: bytes, path: str) -> Any:
    """Return the answer of a function of torch about a file; PayloadError where the file is damaged."""
    try:
        return call(io.BytesIO(data))
    except DAMAGED as error:
        reason = type(error).__name__
        raise PayloadError(
            f"{path}: must be a file of torch.save, got {reason}. Give the log of the run."
        ) from None
