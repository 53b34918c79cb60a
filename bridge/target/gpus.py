"""`GPUS`: the GPUs that models are trained on, with compute capability, memory and formats.

To add a GPU, add a row to `_ROWS`, at the place of its compute capability. For a new generation of
NVIDIA's, see also the capabilities in `precision/schemes.py` and the policies in
`preflight/auto_recipe.py`.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU, or a machine without a GPU."""

    name: str
    """The name in a target, in lower case and without spaces."""
    title: str
    """The name in messages."""
    generation: str
    """The name of the architecture."""
    capability: tuple[int, int] | None
    """CUDA compute capability. None: no GPU, or a GPU of another vendor than NVIDIA."""
    memory_gib: int
    """Device memory in GiB, as the driver reports it, rounded down. 0: not known.

    If a GPU is sold with several memory sizes, this is the common size.
    """
    formats: tuple[str, ...]
    """Formats that the matrix units multiply: fp16, bf16, tf32, fp8, mxfp8, nvfp4, mxfp4.

    The rules ask it only for GPUs of other vendors. For NVIDIA's they ask the capability.
    """
    aliases: tuple[str, ...] = ()
    """Other names in a target, in lower case and without spaces."""

    @property
    def is_gpu(self) -> bool:
        """Whether the row is a GPU. The row "cpu" is a machine without a GPU."""
        return self.generation != "CPU"

    @property
    def has_native_bf16(self) -> bool:
        """Whether the matrix units multiply BF16.

        torch's `is_bf16_supported()` also returns True for emulated BF16.
        """
        return "bf16" in self.formats


def _make_gpu(  # noqa: PLR0917  the columns of a table
    name: str,
    title: str,
    generation: str,
    capability: tuple[int, int] | None,
    memory_gib: int,
    formats: tuple[str, ...],
    aliases: str = "",
) -> Gpu:
    """Return a row. The arguments are the fields of `Gpu`; the aliases are separated by spaces."""
    return Gpu(
        name=name,
        title=title,
        generation=generation,
        capability=capability,
        memory_gib=memory_gib,
        formats=formats,
        aliases=tuple(aliases.split()),
    )


_FP16 = ("fp16",)
_HALF = ("fp16", "bf16", "tf32")
_FP8 = (*_HALF, "fp8")
_FP4 = (*_FP8, "mxfp8", "nvfp4")
_CDNA_4 = ("fp16", "bf16", "fp8", "mxfp8", "mxfp4")

# Capabilities: NVIDIA, CUDA GPUs (developer.nvidia.com/cuda-gpus). Formats: NVIDIA architecture
# white papers and Transformer Engine 2.20 pytorch/quantization.py; AMD CDNA 3 white paper (MI300X
# and MI325X, gfx942: their FP8 is the "fnuz" kind) and CDNA 4 white paper (MI350X and MI355X,
# gfx950: FP8 of the OCP kind, no TF32). Rubin: CUDA 13.4 release notes (capability 10.7); how much
# memory a driver reports there is not published.
_ROWS = (
    _make_gpu("v100", "V100", "Volta", (7, 0), 31, _FP16),
    _make_gpu("t4", "T4", "Turing", (7, 5), 15, _FP16, "rtx20 rtx2080"),
    _make_gpu("a100", "A100", "Ampere", (8, 0), 79, _HALF, "a800"),
    _make_gpu("a10", "A10", "Ampere", (8, 6), 22, _HALF, "a10g"),
    _make_gpu("rtx30", "RTX 30", "Ampere", (8, 6), 23, _HALF, "rtx3090 rtx3080"),
    _make_gpu("l4", "L4", "Ada", (8, 9), 22, _FP8),
    _make_gpu("l40", "L40", "Ada", (8, 9), 44, _FP8, "l40s rtx6000ada"),
    _make_gpu("rtx40", "RTX 40", "Ada", (8, 9), 23, _FP8, "rtx4090 rtx4080"),
    _make_gpu("h100", "H100", "Hopper", (9, 0), 79, _FP8, "h800 hopper"),
    _make_gpu("h200", "H200", "Hopper", (9, 0), 139, _FP8),
    _make_gpu("gh200", "GH200", "Hopper", (9, 0), 95, _FP8),
    _make_gpu("b200", "B200", "Blackwell", (10, 0), 178, _FP4, "blackwell"),
    _make_gpu("gb200", "GB200", "Blackwell", (10, 0), 184, _FP4),
    _make_gpu("b300", "B300", "Blackwell", (10, 3), 268, _FP4),
    _make_gpu("gb300", "GB300", "Blackwell", (10, 3), 277, _FP4),
    _make_gpu("r100", "R100", "Rubin", (10, 7), 0, _FP4, "rubin"),
    _make_gpu("vr200", "VR200", "Rubin", (10, 7), 0, _FP4, "verarubin"),
    _make_gpu("rtx50", "RTX 50", "Blackwell (RTX)", (12, 0), 31, _FP4, "rtx5090 rtx5080"),
    _make_gpu(
        "rtxpro",
        "RTX PRO Blackwell",
        "Blackwell (RTX)",
        (12, 0),
        95,
        _FP4,
        "rtxproblackwell rtxpro6000",
    ),
    _make_gpu("mi300x", "MI300X", "CDNA 3", None, 191, _FP8, "mi300"),
    _make_gpu("mi325x", "MI325X", "CDNA 3", None, 255, _FP8, "mi325"),
    _make_gpu("mi350x", "MI350X", "CDNA 4", None, 287, _CDNA_4, "mi350"),
    _make_gpu("mi355x", "MI355X", "CDNA 4", None, 287, _CDNA_4, "mi355"),
    _make_gpu("cpu", "no GPU", "CPU", None, 0, ("bf16",)),
)

GPUS = {gpu.name: gpu for gpu in _ROWS}
"""Name -> GPU, oldest NVIDIA generation first, then AMD's. "cpu" is a machine without a GPU."""

CPU = GPUS["cpu"]


def make_gpu_of_capability(capability: tuple[int, int]) -> Gpu:
    """Return a GPU of which only the compute capability is known.

    Its generation and formats come from the row with the largest capability that is not larger.
    """
    generation = "before Volta"
    formats: tuple[str, ...] = ()
    nearest = (0, 0)
    for row in GPUS.values():
        if row.capability is not None and nearest <= row.capability <= capability:
            nearest = row.capability
            generation = row.generation
            formats = row.formats
    major, minor = capability
    return Gpu(
        name=f"sm{major}{minor}",
        title=f"compute capability {major}.{minor}",
        generation=generation,
        capability=capability,
        memory_gib=0,
        formats=formats,
    )


def find_gpu_of_device(device: str) -> Gpu | None:
    """Return the GPU whose name is a part of a device's name, or None.

    If several names fit, the GPU with the longest name is returned: a GB200 is not a B200.

    Args:
        device: The name that the driver reports ("NVIDIA H100 80GB HBM3").
    """
    compact_name = re.sub(r"[^a-z0-9]", "", device.lower())
    longest: Gpu | None = None
    for row in GPUS.values():
        if not any(name in compact_name for name in (row.name, *row.aliases)):
            continue
        if longest is None or len(row.name) > len(longest.name):
            longest = row
    return longest
