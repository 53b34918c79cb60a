"""Attributes of torch, Megatron and Transformer Engine that are replaced, for a block of code or for good.

`device` and `te_cpu.patches` have rows of dotted path -> (original -> replacement), and the YAML file next to each says
who needs a row and what happens without it. Imports neither Megatron nor Transformer Engine.

Most of the callables are private, and a later release may change them. So a replacement passes on the arguments that it
does not know. It is left out, with one line in the log, where the callable is gone or no longer has the parameters that
the replacement names.
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

Rows = Mapping[str, Callable[[Any], Any]]
"""Dotted path of a callable -> original -> replacement."""
logger = logging.getLogger(__name__)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def changes(rows: Rows) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and new value of each callable, made of the one that is there when its turn comes.

    A callable that is not there, or that its replacement does not fit, is left out.
    """
    for path, replace in rows.items():
        place, _, name = path.rpartition(".")
        try:
            owner = pkgutil.resolve_name(place)
            original = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            log_left_out(path, str(error))
            continue
        value = replace(original)
        if _is_fitting(path, original, value):
            yield owner, name, value


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, (owner, name, value) each, for a ``with`` block; its end restores them, last one first."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value, create=True))
        yield


def fitting(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the changes, (owner, name, value) each, whose value can take the place of what is there."""
    for owner, name, value in changes:
        if _is_fitting(
            f"{getattr(owner, '__name__', type(owner).__name__)}.{name}",
            getattr(owner, name, None),
            value,
        ):
            yield owner, name, value


def misfit(original: object, replacement: object) -> str | None:
    """Return why a function cannot take the place of another; None where it can, or where nothing tells.

    Each parameter that the replacement names must be one of the original, and it must take all of the original's.
    Classes and functions of compiled extensions, which name no parameters, fit.
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
    takes_any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in theirs.values())
    for name, parameter in ours.parameters.items():
        if parameter.kind in _NAMED and name not in theirs and not takes_any_name:
            return f"it has no parameter {name!r}"
    only_by_name = {
        name for name, one in ours.parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY
    }
    by_place, by_name = [], {}
    for name, parameter in theirs.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or name in only_by_name:
            by_name[name] = parameter
        elif parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            by_place.append(parameter)
    try:
        ours.bind(*by_place, **by_name)
    except TypeError as error:
        return f"its replacement has {error}"
    return None


def _is_fitting(path: str, original: object, replacement: object) -> bool:
    reason = misfit(original, replacement)
    if reason is not None:
        log_left_out(path, reason)
    return reason is None


@functools.cache
def log_left_out(path: str, reason: str) -> None:
    """Log once in a process that a callable stays as it is."""
    logger.warning(
        "%s is left as it is: %s. Its replacement was written for another release.", path, reason
    )


def _not_cuda(argument: Any) -> Any:
    is_cuda = isinstance(argument, (str, torch.device)) and str(argument).startswith("cuda")
    return "cpu" if is_cuda else argument


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function by one for which a CUDA device means the CPU, and which pins no memory for it."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(
            *map(_not_cuda, args), **{name: _not_cuda(value) for name, value in kwargs.items()}
        )

    return called


def first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, by whatever name it is given; None for a call without arguments."""
    return args[0] if args else next(iter(kwargs.values()), None)


def always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return the replacement by a function that returns one value, whatever it is given."""
    return lambda _original: lambda *_args, **_kwargs: value


def rng_state(_original: object) -> Callable[..., torch.Tensor]:
    """Replace a getter of CUDA's random state by that of the CPU's."""
    return lambda *_args, **_kwargs: torch.get_rng_state()


def set_rng_state(_original: object) -> Callable[..., None]:
    """Replace a setter of CUDA's random state by that of the CPU's."""
    return lambda *args, **kwargs: torch.set_rng_state(first_of(args, kwargs))
