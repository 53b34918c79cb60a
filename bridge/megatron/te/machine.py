"""Requirements of Transformer Engine that a machine lacks: the GPU, the package, its CUDA parts, or their versions."""

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, Scheme
from bridge.rules.versions import at_least, dotted, installed, parse_version

SCHEMES = {**FP4_SCHEMES, **FP8_SCHEMES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Properties of a machine that decide whether Transformer Engine runs on it."""

    device: str | None = None
    compute_capability: tuple[int, int] | None = None
    cuda: str | None = None
    """Version of CUDA that torch was built with, None for a CPU build."""
    transformer_engine: str | None = None
    load_error: str | None = None
    """Why the installed package cannot be imported; None where it can, or where no CUDA device is there to try it."""


def read_machine() -> Machine:
    """Return the machine of this process. Imports Transformer Engine where there is a CUDA device for it."""
    present = torch.cuda.is_available()
    version = installed("te")
    return Machine(
        device=torch.cuda.get_device_name() if present else None,
        compute_capability=torch.cuda.get_device_capability() if present else None,
        cuda=torch.version.cuda,
        transformer_engine=str(version) if version is not None else None,
        load_error=_load_error() if present and version is not None else None,
    )


def missing_for_te(scheme: str | None = None, machine: Machine | None = None) -> list[str]:
    """Return the requirements of Transformer Engine that a machine, by default this one, lacks, as nouns to be listed.

    With Megatron's name of a scheme those of the scheme are among them.
    """
    machine = read_machine() if machine is None else machine
    missing = []
    if machine.device is None:
        missing.append("a CUDA device" if machine.cuda else "a CUDA device (torch is built for the CPU alone)")
    if machine.transformer_engine is None:
        missing.append("transformer_engine (not installed)")
    elif machine.load_error is not None:
        missing.append(f"a transformer_engine that can be loaded ({machine.transformer_engine}: {machine.load_error})")
    if scheme in SCHEMES:
        missing += _below_floors(SCHEMES[scheme], machine)
    return missing


def _below_floors(row: Scheme, machine: Machine) -> Iterator[str]:
    """Yield which floors of a scheme the machine stays below, as far as it has the part at all."""
    capability, floor, ceiling = machine.compute_capability, row.min_compute_capability, row.below_compute_capability
    if capability is not None and floor is not None and capability < floor:
        yield f"compute capability {dotted(floor)} for {row.name} ({machine.device} has {dotted(capability)})"
    if capability is not None and ceiling is not None and capability >= ceiling:
        below = f"a compute capability below {dotted(ceiling)}"
        yield f"{below} for {row.name} ({machine.device} has {dotted(capability)})"
    if machine.cuda is not None and row.min_cuda is not None and _is_below(machine.cuda, row.min_cuda):
        yield f"CUDA {row.min_cuda} for {row.name} (torch is built with {machine.cuda})"
    version, oldest = machine.transformer_engine, row.min_transformer_engine
    if version is not None and oldest is not None and _is_below(version, oldest):
        yield f"transformer_engine {oldest} for {row.name} ({version} is installed)"


def _load_error() -> str | None:
    """Return why Transformer Engine cannot be imported, None where it can."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:  # a package without its CUDA parts fails with any of these
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return re.split(r"\. ", reason)[0].rstrip(".")
    return None


def _is_below(version: str, least: str) -> bool:
    return at_least(parse_version(version), least) is False
