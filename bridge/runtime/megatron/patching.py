"""Functions that replace attributes of torch, Transformer Engine and Megatron.

They replace an attribute for a block of code or for the rest of the process.

`cpu/cuda_shim.py` and `te_cpu/patches.py` have tables of replacements. The YAML file of the same
name has the caller that needs each row, and the failure without it. This file imports neither
Megatron nor Transformer Engine.

Most of the callables are private, and a later release may change them. So a replacement passes on
the arguments that it does not know. If the callable is missing, or lacks parameters that the
replacement names, it is not replaced, and a line is logged.
"""

import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

PatchTable = Mapping[str, Callable[[Any], Any]]
"""Dotted path of a callable -> original -> replacement."""
Patch = tuple[Any, str, Any]
"""Owner, name of an attribute, and its new value."""
logger = logging.getLogger(__name__)
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def resolve_patches(rows: PatchTable) -> Iterator[Patch]:
    """Yield the patch of each callable of a table.

    The original is read when its row is reached: an earlier row may have replaced it. A callable
    that does not exist, or that does not fit its replacement, is left out.
    """
    for path, replace in rows.items():
        owner_path, _, name = path.rpartition(".")
        try:
            owner = pkgutil.resolve_name(owner_path)
            original = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            log_skipped_patch(path, str(error))
            continue
        value = replace(original)
        if _is_compatible(path, original, value):
            yield owner, name, value


@contextmanager
def apply_patches(changes: Iterable[Patch]) -> Iterator[None]:
    """Set attributes for a ``with`` block, whose end restores them in reverse order."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value, create=True))
        yield


def keep_compatible(changes: Iterable[Patch]) -> Iterator[Patch]:
    """Yield the changes whose value can take the place of the present value."""
    for owner, name, value in changes:
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        if _is_compatible(f"{owner_name}.{name}", getattr(owner, name, None), value):
            yield owner, name, value


def find_incompatibility(original: object, replacement: object) -> str | None:
    """Return a clause about why a function cannot take the place of another, or None if it can.

    Each parameter that the replacement names must be a parameter of the original, and the
    replacement must accept all parameters of the original. Classes fit, and so do functions of
    compiled extensions, whose parameters have no names.
    """
    if isinstance(original, type) or isinstance(replacement, type):
        return None
    if not (callable(original) and callable(replacement)):
        return None
    try:
        theirs = inspect.signature(original).parameters
        ours = inspect.signature(replacement, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in theirs.values()}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
    keyword_only = set()
    for name, parameter in ours.parameters.items():
        if parameter.kind in _KEYWORD_KINDS and name not in theirs and not takes_any_name:
            return f"it has no parameter {name!r}"
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            keyword_only.add(name)
    # A call of the original with all of its parameters must be a call of the replacement too.
    positional: list[inspect.Parameter] = []
    keywords: dict[str, inspect.Parameter] = {}
    for name, parameter in theirs.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or name in keyword_only:
            keywords[name] = parameter
        elif parameter.kind in _POSITIONAL_KINDS:
            positional.append(parameter)
    try:
        ours.bind(*positional, **keywords)
    except TypeError as error:
        return f"its replacement has {error}"
    return None


def _is_compatible(path: str, original: object, replacement: object) -> bool:
    """Return whether a replacement fits its original. A misfit is logged."""
    reason = find_incompatibility(original, replacement)
    if reason is not None:
        log_skipped_patch(path, reason)
    return reason is None


@functools.cache
def log_skipped_patch(path: str, reason: str) -> None:
    """Log once in a process that a callable stays as it is."""
    logger.warning(
        "%s is left as it is: %s. Its replacement was written for another release.", path, reason
    )


def _replace_cuda_device(argument: Any) -> Any:
    """Return "cpu" for an argument that names a CUDA device, and any other argument unchanged."""
    if isinstance(argument, (str, torch.device)) and str(argument).startswith("cuda"):
        return "cpu"
    return argument


def redirect_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function by a function for which a CUDA device is the CPU.

    The replacement pins no memory for the device.
    """

    @functools.wraps(function)
    def call_on_cpu(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        named = {name: _replace_cuda_device(value) for name, value in kwargs.items()}
        return function(*map(_replace_cuda_device, args), **named)

    return call_on_cpu


def get_first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, by position or by name, or None without arguments."""
    if args:
        return args[0]
    for value in kwargs.values():
        return value
    return None


def replace_by_constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return the replacement by a function that returns a constant, whatever its arguments are."""
    return lambda _original: lambda *_args, **_kwargs: value


def replace_rng_getter(_original: object) -> Callable[..., torch.Tensor]:
    """Replace the getter of CUDA's random state by the getter of the CPU's."""
    return lambda *_args, **_kwargs: torch.get_rng_state()


def replace_rng_setter(_original: object) -> Callable[..., None]:
    """Replace the setter of CUDA's random state by the setter of the CPU's."""
    return lambda *args, **kwargs: torch.set_rng_state(get_first_argument(args, kwargs))
