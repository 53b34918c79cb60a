"""`format_checkpoint_arguments`: the arguments of a run, from its checkpoint (`common.pt`).

A checkpoint is a pickle, which could run any code. No such code runs here: `torch.load` with
`weights_only=True` makes only tensors, containers and `argparse.Namespace`. Megatron-LM's enums,
paths and signals become inert objects. A file that names another class or function is refused.
"""

import io
import pickle
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from bridge.errors import PayloadError

CHECKPOINT_SUFFIX = ".pt"
DAMAGED_FILE_ERRORS = (
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
INERT_NAME_PREFIXES = ("megatron.", "signal.Signals", "pathlib.PosixPath", "pathlib.PurePosixPath")
"""Beginnings of the names of classes whose instances become inert objects."""


class _Inert:
    """An object instead of an instance of a class that is not imported."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(map(str, getattr(self, "values", ())))


def format_checkpoint_arguments(data: bytes, path: str) -> str:
    """Return the `args` of a checkpoint as the block that Megatron-LM prints when a run starts.

    The reader of printed arguments can then read this text.

    Args:
        data: The content of the file.
        path: The name of the file in messages.

    Raises:
        PayloadError: `torch.save` did not write the file, it names another class or function, or
            it has no arguments.
    """
    import torch  # the import takes two seconds, and only this kind of file needs it

    allowed: list[Any] = [Namespace]
    for name in _call_torch(torch.serialization.get_unsafe_globals_in_checkpoint, data, path):
        if name.startswith(INERT_NAME_PREFIXES):
            allowed.append((_Inert, name))
        elif name != "argparse.Namespace":
            rule = f"a checkpoint must not name {name}"
            raise PayloadError(f"{path}: {rule}. Give the log of the run.")
    with torch.serialization.safe_globals(allowed):
        content = _call_torch(
            partial(torch.load, map_location="cpu", weights_only=True), data, path
        )
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


def _call_torch(call: Callable[[io.BytesIO], Any], data: bytes, path: str) -> Any:
    """Call a function of torch on the content of a file, and return the result.

    Raises:
        PayloadError: The file is damaged.
    """
    try:
        return call(io.BytesIO(data))
    except DAMAGED_FILE_ERRORS as error:
        reason = type(error).__name__
        raise PayloadError(
            f"{path}: must be a file of torch.save, got {reason}. Give the log of the run."
        ) from None
