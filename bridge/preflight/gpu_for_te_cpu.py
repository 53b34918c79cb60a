"""The GPU declared for a process that runs Transformer Engine's Python on its CPU.

Such a process runs `precision_backend=te_cpu`, and Transformer Engine takes its branches for the
declared GPU. Megatron looks for Transformer Engine when it is imported. So the GPU is declared
before the first import of `bridge.runtime.megatron`, which applies the declaration.

    from bridge.preflight.gpu_for_te_cpu import declare

    declare("b200")                 # then everything else
"""

from collections.abc import Iterable, Mapping
from typing import Any

from bridge.errors import BackendUnavailableError, RunConfigError
from bridge.precision.module_row import list_row_schemes
from bridge.precision.schemes import find_scheme
from bridge.target.declaration import parse_target
from bridge.target.target import Target
from bridge.target.versions import format_dotted

TE_CPU_BACKEND = "te_cpu"
"""The value of `precision_backend`."""
_OLDEST_CAPABILITY = (9, 0)
"""Compute capability of the GPU that is declared at least, if the target names none.

It is that of Hopper, which runs every older scheme.
"""
_declared_capabilities: list[tuple[int, int]] = []
"""The compute capability of the declared GPU; empty until `declare` is called."""


def get_declared_capability() -> tuple[int, int] | None:
    """Return the compute capability of the declared GPU, None in an ordinary process."""
    if _declared_capabilities:
        return _declared_capabilities[0]
    return None


def declare(target: str | None = None, *, schemes: Iterable[object] = ()) -> tuple[int, int]:
    """Declare the GPU whose branches Transformer Engine takes on the CPU of this process.

    Args:
        target: The target; without a GPU in it, the oldest GPU that runs the schemes is declared.
        schemes: The scaling schemes of the run.

    Returns:
        The compute capability of the declared GPU.

    Raises:
        RunConfigError: The target's GPU has no compute capability.
        BackendUnavailableError: The process declared another GPU before.
    """
    parsed_target = Target()
    if target is not None:
        parsed_target = parse_target(target)
    if parsed_target.gpu is None:
        capability = _find_oldest_capability(schemes)
    elif parsed_target.capability is not None:
        capability = parsed_target.capability
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


def declare_for_run(target: str | None, fields: Mapping[str, Any]) -> None:
    """Declare a GPU that can run the schemes of a run.

    Args:
        target: The target of the run. None: it states no target.
        fields: The fields of the precision or of the model, and `modules`.
    """
    scheme = None
    if fields.get("fp4"):
        scheme = fields.get("fp4_recipe")
    elif fields.get("fp8"):
        scheme = fields.get("fp8_recipe")
    declare(target, schemes=[scheme, *list_row_schemes(fields.get("modules"))])


def _find_oldest_capability(schemes: Iterable[object]) -> tuple[int, int]:
    """Return the compute capability of the oldest GPU that runs every scheme."""
    capability = _OLDEST_CAPABILITY
    for scheme in schemes:
        row = find_scheme(str(scheme))
        if row is not None and row.min_compute_capability is not None:
            capability = max(capability, row.min_compute_capability)
    return capability
