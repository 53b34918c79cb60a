"""`list_missing_for_te`: the requirements of Transformer Engine that a machine does not meet.

They are about the GPU, packages and versions.
"""

import importlib
import re
from collections.abc import Iterator

import torch

from bridge.precision.schemes import Scheme, find_scheme
from bridge.target.machine import detect_target
from bridge.target.target import Target
from bridge.target.versions import Version, format_dotted, is_at_least


def list_missing_for_te(scheme: str | None = None, machine: Target | None = None) -> list[str]:
    """Return the requirements of Transformer Engine that a machine does not meet, for a sentence.

    Transformer Engine is imported if this machine has a CUDA device for it.

    Args:
        scheme: Megatron's name of a scheme whose requirements count too. None: no scheme.
        machine: A declared machine. None: this machine.
    """
    target = machine
    if target is None:
        target = detect_target()
    has_gpu = target.gpu is not None and target.gpu.is_gpu
    missing = []
    if not has_gpu and torch.version.cuda:
        missing.append("a CUDA device")
    elif not has_gpu:
        missing.append("a CUDA device (torch is built for the CPU alone)")
    if target.te is None:
        missing.append("transformer_engine (not installed)")
    elif machine is None and has_gpu:
        fault = find_load_error()
        if fault is not None:
            missing.append(f"a transformer_engine that can be loaded ({target.te}: {fault})")
    row = find_scheme(scheme)
    if row is not None:
        missing.extend(_list_unmet_requirements(row, target))
    return missing


def _list_unmet_requirements(row: Scheme, target: Target) -> Iterator[str]:
    """Yield the requirements of a scheme that a machine does not meet, for a sentence.

    A requirement on a part that the machine does not have, or that is not known, is left out.
    """
    capability = target.capability
    floor = row.min_compute_capability
    ceiling = row.below_compute_capability
    if capability is not None and floor is not None and capability < floor:
        yield (
            f"compute capability {format_dotted(floor)} for {row.name} (the GPU has {format_dotted(capability)})"
        )
    if capability is not None and ceiling is not None and capability >= ceiling:
        yield (
            f"a compute capability below {format_dotted(ceiling)} for {row.name} "
            f"(the GPU has {format_dotted(capability)})"
        )
    if _is_older(target.cuda, row.min_cuda):
        yield f"CUDA {row.min_cuda} for {row.name} (torch is built with {target.cuda})"
    if _is_older(target.te, row.min_transformer_engine):
        yield (
            f"transformer_engine {row.min_transformer_engine} for {row.name} "
            f"({target.te} is installed)"
        )


def _is_older(version: Version | None, minimum: str | None) -> bool:
    """Return whether a version is known to be older than a minimum, if there is a minimum."""
    return minimum is not None and is_at_least(version, minimum) is False


def find_load_error() -> str | None:
    """Return the first sentence of Transformer Engine's import error, or None without an error."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    # A package without its CUDA libraries fails with any of these.
    except (ImportError, OSError, RuntimeError) as error:
        reason = type(error).__name__
        if str(error):
            reason = str(error).splitlines()[0]
        return re.split(r"\. ", reason)[0].rstrip(".")
    return None
