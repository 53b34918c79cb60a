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
from collections.abc import Callable
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
INERT = ("megatron.", "signal.Signals", "pathlib.PosixPath", "pathlib.PurePosixPath")


def printed_arguments(text: str) -> list[tuple[dict[str, Any], bool]]:
    """Return the arguments of each run that a log shows, by their names, and whether the block has its end.

    A block that stands twice counts once.
    """
    blocks: list[tuple[dict[str, Any], bool]] = []
    pieces = START.split(text)[1:]
    for place, piece in enumerate(pieces, 1):
        lines, *rest = END.split(piece, maxsplit=1)
        block = {match[1]: _value(match[2].strip()) for match in LINE.finditer(lines)}
        is_whole_or_last = bool(rest) or place == len(pieces)
        if block and is_whole_or_last and (block, True) not in blocks:
            blocks.append((block, bool(rest)))
    return blocks


def _value(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    if text.startswith("torch."):
        return SPELLINGS.get(text.removeprefix("torch."), text.removeprefix("torch."))
    return number_of_text(text)


class _Inert:
    """Stands for an object of a class that is not imported."""

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

    named = _read(torch.serialization.get_unsafe_globals_in_checkpoint, data, path)
    other = [name for name in named if name != "argparse.Namespace" and not name.startswith(INERT)]
    if other:
        raise PayloadError(
            f"{path}: a checkpoint must not name {other[0]}. Give the log of the run."
        )
    allowed: list[Any] = [Namespace]
    for name in named:
        if name.startswith(INERT):
            allowed.append((_Inert, name))
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
    try:
        return call(io.BytesIO(data))
    except DAMAGED as error:
        reason = type(error).__name__
        raise PayloadError(
            f"{path}: must be a file of torch.save, got {reason}. Give the log of the run."
        ) from None
