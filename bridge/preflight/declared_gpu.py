"""The GPU declared for a process that runs Transformer Engine's Python on its CPU.

Such a process runs `precision_backend=te_cpu`, and Transformer Engine takes its branches for the
declared GPU. Megatron decides at import whether there is Transformer Engine. So the declaration
comes first, and the first import of `bridge.runtime.megatron` acts on it.

    from bridge.preflight.declared_gpu import declare

    declare("b200")                 # then everything else
"""

from collections.abc import Iterable

from bridge.errors import BackendUnavailableError, RunConfigError
from bridge.precision.schemes import scheme_row
from bridge.target.declaration import parse_target
from bridge.target.target import Target
from bridge.target.versions import dotted

BACKEND = "te_cpu"
"""The value of `precision_backend`."""
_OLDEST = (9, 0)
"""Compute capability of the oldest GPU that stands for one that nobody named.

It is Hopper, which runs every older scheme.
"""
_declared: list[tuple[int, int]] = []


def declared() -> tuple[int, int] | None:
    """Return the compute capability of the declared GPU, None in an ordinary process."""
    if _declared:
        return _declared[0]
    return None


def declare(target: str | None = None, *, schemes: Iterable[object] = ()) -> tuple[int, int]:
    """Declare that this process runs Transformer Engine on its CPU.

    Return the compute capability of the GPU. Without a GPU in the target, the GPU whose branches
    Transformer Engine takes is the oldest that runs the schemes. BackendUnavailableError where
    another one was declared.
    """
    place = Target()
    if target is not None:
        place = parse_target(target)
    if place.gpu is None:
        capability = _oldest_that_runs(schemes)
    elif place.capability is not None:
        capability = place.capability
    else:
        rule = "must name a GPU for precision_backend=te_cpu"
        raise RunConfigError.of("target", rule, target, "Name an NVIDIA GPU, h100 or b200 say.")
    before = declared()
    if before is not None and before != capability:
        raise BackendUnavailableError(
            "precision_backend=te_cpu: a process has one GPU, and compute capability "
            f"{dotted(before)} was declared before {dotted(capability)}. "
            "Start a process for each."
        )
    if before is None:
        _declared.append(capability)
    return capability


def _oldest_that_runs(schemes: Iterable[object]) -> tuple[int, int]:
    capability = _OLDEST
    for scheme in schemes:
        row = scheme_row(str(scheme))
        if row is not None and row.min_compute_capability is not None:
            capability = max(capability, row.min_compute_capability)
    return capability
