"""Record of the GEMMs that Transformer Engine's modules run, by the module that each belongs to.

Forward, a hook knows the module. Backward, each of Transformer Engine's autograd functions was told by its forward pass
(`patches.py`, rows `*.forward` and `*.backward`). A weight that is quantised once a step is read by every GEMM.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    Where = tuple[int, str]
    Watcher = Callable[["Where | None", str, Any, Any], None]

_running: list[Where | None] = []
"""Modules whose forward or backward pass is running, the innermost last."""
_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher of GEMMs", default=None)


def current() -> Where | None:
    """Return the layer and the name of the module that is running; None where none was named."""
    return _running[-1] if _running else None


@contextmanager
def inside(where: Where | None) -> Iterator[None]:
    """Run a module's backward pass under its name."""
    _running.append(where)
    try:
        yield
    finally:
        _running.pop()


def note(gemm: str, left: Any, right: Any) -> None:
    """Hand a GEMM to the watcher, if there is one.

    Args:
        gemm: fprop, dgrad or wgrad.
        left: The operand with the result's first axis: a `GemmOperand`, or a tensor in high precision.
        right: The operand with the result's last axis.
    """
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(current(), gemm, left, right)


@contextmanager
def watching(modules: Mapping[torch.nn.Module, Where], watcher: Watcher) -> Iterator[None]:
    """Hand every GEMM of a ``with`` block to a watcher, with the layer's number and the module's name.

    Args:
        modules: Transformer Engine's modules and their places.
        watcher: Called with place, GEMM, left and right operand, before the GEMM runs.
    """
    handles = []
    for module, where in modules.items():

        def enter(_module: Any, _arguments: Any, where: Where = where) -> None:
            _running.append(where)

        def leave(_module: Any, _arguments: Any, _output: Any) -> None:
            _running.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)
        for handle in handles:
            handle.remove()
