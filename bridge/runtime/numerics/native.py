"""`get_kernel`: the choice between the C kernel and plain torch for a tensor.

`BRIDGE_NUMERICS` is `auto` (the default: the C kernel as soon as it is compiled), `native` (wait
for the kernel, and fail without it) or `torch` (never the kernel). The bits are the same under all
three choices. Only the speed differs.
"""

import os
from typing import NamedTuple

import torch

from bridge.errors import BackendUnavailableError, RunConfigError, close_matches
from bridge.runtime.numerics.kernel import KERNEL_DTYPES, Kernel
from bridge.runtime.numerics.kernel_build import KernelBuild

_KERNEL_CHOICES = ("auto", "native", "torch")


class _Selection(NamedTuple):
    """The choice of a process, and its origin for messages."""

    choice: str
    """auto, native or torch."""
    setting: str
    origin: str
    remedy: str
    """A clause about how to choose `auto`."""


_build = KernelBuild()
_kernel: Kernel | None = None
_selection: _Selection | None = None
"""The choice of this process. None: it is not made yet."""


def get_kernel_choice() -> str:
    """Return the choice of this process: auto, native or torch.

    The first call reads `BRIDGE_NUMERICS`.

    Raises:
        RunConfigError: The variable has another value.
    """
    global _selection  # noqa: PLW0603  (one choice per process)
    if _selection is None:
        choice = os.environ.get("BRIDGE_NUMERICS", "auto")
        _require_known_choice(choice, setting="BRIDGE_NUMERICS", origin="environment")
        _selection = _Selection(
            choice=choice,
            setting="BRIDGE_NUMERICS",
            origin="environment",
            remedy="use BRIDGE_NUMERICS=auto",
        )
    return _selection.choice


def use(choice: str) -> str | None:
    """Choose auto, native or torch for this process.

    Returns:
        A sentence about why the C kernel cannot be compiled, or None if the choice can be used.

    Raises:
        RunConfigError: There is no such choice. The earlier choice stays.
    """
    global _selection  # noqa: PLW0603
    _require_known_choice(choice, setting="use", origin="call of use")
    _selection = _Selection(
        choice=choice, setting="use", origin="call of use", remedy='call use("auto")'
    )
    if choice == "native" and load_kernel(wait=True) is None:
        return _build.problem
    return None


def _require_known_choice(choice: str, *, setting: str, origin: str) -> None:
    """Refuse a choice that does not exist.

    Args:
        setting: The variable or function that states it, for the message.
        origin: The origin of the choice, for the message.

    Raises:
        RunConfigError: There is no such choice.
    """
    if choice not in _KERNEL_CHOICES:
        message = (
            f"{setting}: must be auto, native or torch, got {choice!r} ({origin}). "
            "Use one of these."
        )
        raise RunConfigError(message, close_matches(choice, _KERNEL_CHOICES))


def get_kernel(x: torch.Tensor) -> Kernel | None:
    """Return the kernel for a tensor, or None if plain torch is used.

    Plain torch is used on other devices and dtypes, under the choice `torch`, and until the kernel
    is compiled.

    Raises:
        BackendUnavailableError: The choice is `native`, and the kernel cannot be compiled.
    """
    if x.device.type != "cpu" or x.dtype not in KERNEL_DTYPES:
        return None
    choice = get_kernel_choice()
    if choice == "torch":
        return None
    must_wait = choice == "native"
    kernel = load_kernel(wait=must_wait)
    if kernel is None and must_wait and _selection is not None:
        raise BackendUnavailableError(
            f"{_selection.setting}: the C kernel must be compilable, got 'native' "
            f"({_selection.origin}). {_build.problem} "
            f"Install a C compiler, or {_selection.remedy}."
        )
    return kernel


def load_kernel(*, wait: bool) -> Kernel | None:
    """Return the kernel. The first call starts its compilation.

    Args:
        wait: Whether the call waits for the compiler. Otherwise the result is None while the kernel
            is compiled.

    Returns:
        The kernel, or None if it cannot be compiled.
    """
    global _kernel  # noqa: PLW0603  (one library per process)
    if _kernel is None:
        library = _build.get_library(wait=wait)
        if library is not None:
            _kernel = Kernel(library)
    return _kernel
