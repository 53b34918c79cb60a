"""`Target`: the GPUs and versions of a run, None for unknown.

The GPU generations are rows: compute capability, memory, and the formats that their matrix units take.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bridge.rules.versions import TITLES, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One row: a GPU that people name when they say what they train on."""

    name: str
    """The name in a target, lower case and without spaces."""
    title: str
    generation: str
    capability: tuple[int, int] | None
    """CUDA compute capability; None for what has none."""
    memory_gib: int
    """Device memory as the driver reports it, rounded down; the common model where there are several; 0: not known."""
    formats: tuple[str, ...]
    """Formats that its matrix units multiply: fp16, bf16, tf32, fp8, mxfp8, nvfp4."""
    aliases: tuple[str, ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU at all."""
        return self.generation != "CPU"

    @property
    def has_native_bf16(self) -> bool:
        """Whether BF16 runs in hardware. torch's `is_bf16_supported()` counts emulation, this does not."""
        return "bf16" in self.formats


_HALF = ("fp16", "bf16", "tf32")
_EIGHT = (*_HALF, "fp8")
_FOUR = (*_EIGHT, "mxfp8", "nvfp4")


# Capabilities: NVIDIA, CUDA GPUs (developer.nvidia.com/cuda-gpus). Formats: NVIDIA architecture white papers and
# Transformer Engine 2.20 pytorch/quantization.py; MI300X: AMD CDNA 3 white paper (its FP8 is the "fnuz" kind). Rubin:
# CUDA 13.4 release notes (capability 10.7); how much memory a driver reports there is not published.
_TABLE: tuple[tuple[Any, ...], ...] = (
    ("v100", "V100", "Volta", (7, 0), 31, ("fp16",), ""),
    ("t4", "T4", "Turing", (7, 5), 15, ("fp16",), "rtx20 rtx2080"),
    ("a100", "A100", "Ampere", (8, 0), 79, _HALF, "a800"),
    ("a10", "A10", "Ampere", (8, 6), 22, _HALF, "a10g"),
    ("rtx30", "RTX 30", "Ampere", (8, 6), 23, _HALF, "rtx3090 rtx3080"),
    ("l4", "L4", "Ada", (8, 9), 22, _EIGHT, ""),
    ("l40", "L40", "Ada", (8, 9), 44, _EIGHT, "l40s rtx6000ada"),
    ("rtx40", "RTX 40", "Ada", (8, 9), 23, _EIGHT, "rtx4090 rtx4080"),
    ("h100", "H100", "Hopper", (9, 0), 79, _EIGHT, "h800 hopper"),
    ("h200", "H200", "Hopper", (9, 0), 139, _EIGHT, ""),
    ("gh200", "GH200", "Hopper", (9, 0), 95, _EIGHT, ""),
    ("b200", "B200", "Blackwell", (10, 0), 178, _FOUR, "blackwell"),
    ("gb200", "GB200", "Blackwell", (10, 0), 184, _FOUR, ""),
    ("b300", "B300", "Blackwell", (10, 3), 268, _FOUR, ""),
    ("gb300", "GB300", "Blackwell", (10, 3), 277, _FOUR, ""),
    ("r100", "R100", "Rubin", (10, 7), 0, _FOUR, "rubin"),
    ("vr200", "VR200", "Rubin", (10, 7), 0, _FOUR, "verarubin"),
    ("rtx50", "RTX 50", "Blackwell (RTX)", (12, 0), 31, _FOUR, "rtx5090 rtx5080"),
    ("rtxpro", "RTX PRO Blackwell", "Blackwell (RTX)", (12, 0), 95, _FOUR, "rtxproblackwell rtxpro6000"),
    ("mi300x", "MI300X", "CDNA 3", None, 191, _EIGHT, "mi300"),
    ("cpu", "no GPU", "CPU", None, 0, ("bf16",), ""),
)

_COLUMNS = ("name", "title", "generation", "capability", "memory_gib", "formats")

GPUS = MappingProxyType(
    {row[0]: Gpu(**dict(zip(_COLUMNS, row[:-1], strict=True)), aliases=tuple(row[-1].split())) for row in _TABLE}
)
"""Name -> row, oldest generation first; "cpu" is a machine without a GPU."""

CPU = GPUS["cpu"]


def gpu_of_capability(capability: tuple[int, int]) -> Gpu:
    """Return what is known of a compute capability alone: the formats of its generation, and no memory size."""
    older = [row for row in GPUS.values() if row.capability is not None and row.capability <= capability]
    return Gpu(
        name=f"sm{capability[0]}{capability[1]}",
        title=f"compute capability {capability[0]}.{capability[1]}",
        generation=older[-1].generation if older else "before Volta",
        capability=capability,
        memory_gib=0,
        formats=older[-1].formats if older else (),
    )


PRODUCTS = tuple(TITLES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """GPUs and versions of a run. None means unknown."""

    gpu: Gpu | None = None
    count: int | None = None
    mcore: Version | None = None
    te: Version | None = None
    cuda: Version | None = None
    cudnn: Version | None = None
    torch: Version | None = None
    has_te: bool | None = None
    """Whether Transformer Engine is there at all; None: unknown."""
    is_detected: bool = False
    """Read off this machine rather than declared."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU, or None."""
        return self.gpu.capability if self.gpu is not None else None

    def is_from(self, major: int, minor: int = 0) -> bool:
        """Return whether the GPU is known to have this compute capability or a later one."""
        return self.capability is not None and self.capability >= (major, minor)

    def is_before(self, major: int, minor: int = 0) -> bool:
        """Return whether the GPU is known to have an earlier compute capability."""
        return self.capability is not None and self.capability < (major, minor)

    def stated(self, name: str) -> str | int | None:
        """Return what is stated of one part of the target, gpu, count or a product; of all of it without a name."""
        if name == "gpu":
            return self.gpu.title if self.gpu is not None else None
        if name == "te" and self.has_te is False:
            return "none"
        known: Version | int | str | None = getattr(self, name) if name else str(self)
        return str(known) if isinstance(known, Version) else known

    def __str__(self) -> str:
        parts = []
        if self.gpu is not None:
            parts.append(self.gpu.name + (f"x{self.count}" if self.count is not None else ""))
            known = GPUS.get(self.gpu.name)
            if self.gpu.memory_gib != (known.memory_gib if known is not None else 0):
                parts.append(f"memory={self.gpu.memory_gib}GiB")
        for product in PRODUCTS:
            version: Version | None = getattr(self, product)
            if version is not None:
                parts.append(f"{product}{version}")
        if self.has_te is False:
            parts.append("te-none")
        return ",".join(parts) or "nothing declared"
