"""`format_checkpoint_arguments`: the arguments of a run in a checkpoint (`common.pt`).

No code of the file is run.

`torch.load(weights_only=True)` makes tensors, containers and `argparse.Namespace`. Megatron-LM's
enums, paths and signals become values without a meaning; a file that names anything else is refused.
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
"""Beginnings of the names of classes that are not imported."""


class _Inert:
    """An object in the place of an instance of a class that is not imported."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(map(str, getattr(self, "values", ())))


def format_checkpoint_arguments(data: bytes, path: str) -> str:
    """Return the `args` of a checkpoint as the block that Megatron-LM prints when a run starts.

    PayloadError for a file that names a class or function which a checkpoint's arguments do not
    need, that is none of `torch.save`'s, or that holds no arguments.
    """
    import torch  # two seconds, and only for this kind of file

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
    """Return the answer of a function of torch about a file; PayloadError where the file is damaged."""
    try:
        return call(io.BytesIO(data))
    except DAMAGED_FILE_ERRORS as error:
        reason = type(error).__name__
        raise PayloadError(
            f"{path}: must be a file of torch.save, got {reason}. Give the log of the run."
        ) from None
