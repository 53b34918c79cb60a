"""The GPU declared for a process that runs Transformer Engine's Python on its CPU.

Such a process runs `precision_backend=te_cpu`, and Transformer Engine takes its branches for the
declared GPU. Megatron decides at import whether there is Transformer Engine. So the declaration
comes first, and the first import of `bridge.runtime.megatron` acts on it.

    from bridge.preflight.declared_gpu import declare

    declare("b200")                 # then everything else
"""

from collections.abc import Iterable

from bridge.errors import BackendUnavailableError, RunConfigError
from bridge.precision.schemes import find_scheme
from bridge.target.declaration import parse_target
from bridge.target.target import Target
from bridge.target.versions import format_dotted

TE_CPU_BACKEND = "te_cpu"
"""The value of `precision_backend`."""
_OLDEST_CAPABILITY = (9, 0)
"""Compute capability of the oldest GPU that stands for one that nobody named.

It is Hopper, which runs every older scheme.
"""
_declared_capabilities: list[tuple[int, int]] = []


def get_declared_capability() -> tuple[int, int] | None:
    """Return the compute capability of the declared GPU, None in an ordinary process."""
    if _declared_capabilities:
        return _declared_capabilities[0]
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
        capability = _find_oldest_capability(schemes)
    elif place.capability is not None:
        capability = place.capability
    else:
        rule = "must name a GPU for precision_backend=te_cpu"
        raise RunConfigError.of("target", rule, target, "Name an NVIDIA GPU, h100 or b200 say.")
    before = get_declared_capability()
    if before is not None and before != capability:
        raise BackendUnavailableError(
            "precision_backend=te_cpu: a process has one GPU, and compute capability "
            f"{format_dotted(before)} was declared before {format_dotted(capability)}. "
            "Start a process for each."
        )
    if before is None:
        _declared_capabilities.append(capability)
    return capability


def _find_oldest_capability(schemes: Iterable[object]) -> tuple[int, int]:
    capability = _OLDEST_CAPABILITY
    for scheme in schemes:
        row = find_scheme(str(scheme))
        if row is not None and row.min_compute_capability is not None:
            capability = max(capability, row.min_compute_capability)
    return capability
