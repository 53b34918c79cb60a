"""Declaration that this process runs Transformer Engine's Python on its CPU (`precision_backend=te_cpu`).

Megatron decides at import whether there is Transformer Engine. So the declaration comes first, and
the first import of `bridge.runtime.megatron` acts on it.

    from bridge.preflight.te_cpu import declare

    declare("b200")                 # then everything else
"""

from collections.abc import Iterable

from bridge.errors import BackendUnavailableError, RunConfigError
from bridge.precision.schemes import scheme_row
from bridge.target.target import Target, parse_target
from bridge.target.versions import dotted

BACKEND = "te_cpu"
"""The value of `precision_backend`."""
_OLDEST = (9, 0)
"""Compute capability of the oldest GPU that stands for one that nobody named: Hopper,
which runs every older scheme.
"""
_declared: list[tuple[int, int]] = []


def declared() -> tuple[int, int] | None:
    """Return the compute capability of the declared GPU, None where this process is an ordinary one."""
    return _declared[0] if _declared else None


def declare(target: str | None = None, *, schemes: Iterable[object] = ()) -> tuple[int, int]:
    """Declare that this process runs Transformer Engine on its CPU; return the compute capability of the GPU.

    Without a GPU in the target, the GPU whose branches Transformer Engine takes is the oldest that
    runs the schemes. BackendUnavailableError where another one was declared.
    """
    rows = (scheme_row(str(scheme)) for scheme in schemes)
    capability = max(
        [_OLDEST, *(row.min_compute_capability or _OLDEST for row in rows if row is not None)]
    )
    place = parse_target(target) if target is not None else Target()
    if place.gpu is not None:
        if place.capability is None:
            remedy = "Name an NVIDIA GPU, h100 or b200 say."
            raise RunConfigError.of(
                "target", "must name a GPU for precision_backend=te_cpu", target, remedy
            )
        capability = place.capability
    before = declared()
    if before is not None and before != capability:
        raise BackendUnavailableError(
            f"precision_backend=te_cpu: a process has one GPU, and compute capability {dotted(before)} was declared "
            f"before {dotted(capability)}. Start a process for each."
        )
    if before is None:
        _declared.append(capability)
    return capability
