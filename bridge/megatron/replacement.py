"""Attributes of torch, Megatron and Transformer Engine that are replaced, for a block of code or for good.

`device` and `te_cpu.patches` have rows of dotted path -> (original -> replacement), and the YAML file next to each says
who needs a row and what happens without it. Imports neither Megatron nor Transformer Engine.
"""

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


def is_cuda(device: object) -> bool:
    """Return whether an argument names a CUDA device."""
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return the replacement by a function that returns one value, whatever it is given."""
    return lambda _original: lambda *_args, **_kwargs: value


def rng_state(_original: object) -> Callable[..., torch.Tensor]:
    """Replace a getter of CUDA's random state by that of the CPU's."""
    return lambda *_args, **_kwargs: torch.get_rng_state()


def set_rng_state(_original: object) -> Callable[..., None]:
    """Replace a setter of CUDA's random state by that of the CPU's."""
    return lambda state, *_args, **_kwargs: torch.set_rng_state(state)
