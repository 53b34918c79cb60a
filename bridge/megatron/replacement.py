"""Attributes of torch, Megatron and Transformer Engine that are replaced, for a block of code or for good.

`device` and `te_cpu.patches` have rows of dotted path -> (original -> replacement), and the YAML file next to each says
who needs a row and what happens without it. Imports neither Megatron nor Transformer Engine.
"""

import functools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

Rows = Mapping[str, Callable[[Any], Any]]
"""Dotted path of a callable -> original -> replacement."""


def changes(rows: Rows) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and new value of each callable, made of the one that is there when its turn comes."""
    for path, replace in rows.items():
        place, _, name = path.rpartition(".")
        owner = pkgutil.resolve_name(place)
        yield owner, name, replace(getattr(owner, name))


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, (owner, name, value) each, for a ``with`` block; its end restores them, last one first."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value, create=True))
        yield


def _not_cuda(argument: Any) -> Any:
    is_cuda = isinstance(argument, (str, torch.device)) and str(argument).startswith("cuda")
    return "cpu" if is_cuda else argument


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function by one for which a CUDA device means the CPU, and which pins no memory for it."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*map(_not_cuda, args), **{name: _not_cuda(value) for name, value in kwargs.items()})

    return called


def always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return the replacement by a function that returns one value, whatever it is given."""
    return lambda _original: lambda *_args, **_kwargs: value


def rng_state(_original: object) -> Callable[..., torch.Tensor]:
    """Replace a getter of CUDA's random state by that of the CPU's."""
    return lambda *_args, **_kwargs: torch.get_rng_state()


def set_rng_state(_original: object) -> Callable[..., None]:
    """Replace a setter of CUDA's random state by that of the CPU's."""
    return lambda state, *_args, **_kwargs: torch.set_rng_state(state)
