"""Attributes of torch, Megatron and Transformer Engine that are replaced, for a block of code or for good.

`device` and `te_cpu.patches` have rows of dotted path -> (original -> replacement), and the YAML file next to each says
who needs a row and what happens without it. Imports neither Megatron nor Transformer Engine.
"""

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import yaml


class Change(NamedTuple):
    """An attribute and its new value."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """One callable and what takes its place."""

    path: str
    """``torch.Tensor.to`` say."""
    replace: Callable[[Any], Any]
    """Original -> replacement."""
    needed_by: str
    """A place in the package that would not work; the version is in the YAML file."""
    without: str
    """The failure without this row."""
    releases: tuple[str, ...] = ()
    """Releases of Transformer Engine that need it; empty: all."""

    @property
    def owner(self) -> Any:
        """The module or class that holds the callable."""
        return pkgutil.resolve_name(self.path.rpartition(".")[0])

    @property
    def name(self) -> str:
        """Name of the callable in its owner."""
        return self.path.rpartition(".")[2]

    @property
    def change(self) -> Change:
        """The replacement of the callable that is there now."""
        owner = self.owner
        return Change(owner, self.name, self.replace(getattr(owner, self.name)))


def replacements(code: str, rows: Mapping[str, Callable[[Any], Any]]) -> tuple[Replacement, ...]:
    """Return the rows of a file of code, in order, with the reasons in the YAML file next to it."""
    reasons = yaml.safe_load(Path(code).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(Replacement(path=path, replace=replace, **reasons[path]) for path, replace in rows.items())


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
