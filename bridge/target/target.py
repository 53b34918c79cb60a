"""`Target`: the GPUs and versions of a run, None for unknown; declared in words, or read off this machine.

    parse_target("h100x8,te2.8,cuda12.9,mcore0.16")
    parse_target("auto")              # this machine; imports torch

The GPU generations are rows: compute capability, memory, and the formats that their
matrix units take. A version that a target does not state is unknown, and a rule that
needs it says so instead of guessing.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from packaging.specifiers import SpecifierSet

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.target.versions import TITLES, Version, VersionRange, installed, parse_version


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
    """Device memory as the driver reports it, rounded down; the common model where
    there are several; 0: not known.
    """
    formats: tuple[str, ...]
    """Formats that its matrix units multiply: fp16, bf16, tf32, fp8, mxfp8, nvfp4, mxfp4."""
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
_CDNA_4 = ("fp16", "bf16", "fp8", "mxfp8", "mxfp4")


# Capabilities: NVIDIA, CUDA GPUs (developer.nvidia.com/cuda-gpus). Formats: NVIDIA architecture white papers and
# Transformer Engine 2.20 pytorch/quantization.py; AMD CDNA 3 white paper (MI300X and MI325X, gfx942: their FP8 is the
# "fnuz" kind) and CDNA 4 white paper (MI350X and MI355X, gfx950: FP8 of the OCP kind, no TF32). Rubin:
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
    (
        "rtxpro",
        "RTX PRO Blackwell",
        "Blackwell (RTX)",
        (12, 0),
        95,
        _FOUR,
        "rtxproblackwell rtxpro6000",
    ),
    ("mi300x", "MI300X", "CDNA 3", None, 191, _EIGHT, "mi300"),
    ("mi325x", "MI325X", "CDNA 3", None, 255, _EIGHT, "mi325"),
    ("mi350x", "MI350X", "CDNA 4", None, 287, _CDNA_4, "mi350"),
    ("mi355x", "MI355X", "CDNA 4", None, 287, _CDNA_4, "mi355"),
    ("cpu", "no GPU", "CPU", None, 0, ("bf16",), ""),
)

_COLUMNS = ("name", "title", "generation", "capability", "memory_gib", "formats")

GPUS = {
    row[0]: Gpu(**dict(zip(_COLUMNS, row[:-1], strict=True)), aliases=tuple(row[-1].split()))
    for row in _TABLE
}
"""Name -> row, oldest generation first; "cpu" is a machine without a GPU."""

CPU = GPUS["cpu"]


def gpu_of_capability(capability: tuple[int, int]) -> Gpu:
    """Return what is known of a compute capability alone: the formats of its generation, and no memory size."""
    older = [
        row for row in GPUS.values() if row.capability is not None and row.capability <= capability
    ]
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

    def is_from(self, major: int) -> bool:
        """Return whether the GPU is known to have this compute capability or a later one."""
        return self.capability is not None and self.capability[0] >= major

    def is_before(self, major: int) -> bool:
        """Return whether the GPU is known to have an earlier compute capability."""
        return self.capability is not None and self.capability[0] < major

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


_RULE = "must be a GPU such as h100x8 or a version such as te2.8"
KNOWN = {
    "mcore": SpecifierSet("<3"),
    "te": SpecifierSet("<6"),
    "cuda": SpecifierSet(">=10,<16"),
    "cudnn": SpecifierSet(">=7,<15"),
    "torch": SpecifierSet(">=1,<6"),
}
"""Product -> versions that there are or may soon be; anything else is a slip of the pen."""
EXAMPLE = "h100x8,te2.8,cuda12.9,mcore0.16"
MEMORY = "memory"
UNITS = {"gib": 2**30, "gb": 10**9}
LONGEST = 60
"""Characters of a word."""
MOST_GPUS = 10**7
"""More than any run has: a slip of the finger."""
ONE = {
    MEMORY: "one memory size",
    **{name: f"one version of {title}" for name, title in TITLES.items()},
}
"""Part of a target, apart from a GPU and its number -> the only one that there may be."""
_wrong = partial(RunConfigError.of, "target")


def parse_target(text: str) -> Target:
    """Return the target that `text` declares.

    Args:
        text: Words separated by commas: a GPU with or without its number ("h100x8"; or "sm90",
            "cpu"), and products with their versions ("te2.8", "cuda12.9", "cudnn9.13.1",
            "mcore0.16", "torch2.9", "te-none"), and the memory of a GPU ("memory=288GiB") where it
            is not the known one. "auto" is this machine; words after it override what was found.

    Raises:
        RunConfigError: A word that is neither, with the nearest; two GPUs,
            or two versions of one product.
    """
    words = [word for word in re.split(r"[,\s]+", text.strip().strip("[]").lower()) if word]
    if not words:
        raise _wrong("must name a GPU or a version", text, f"Write {EXAMPLE}, for example.")
    target = Target()
    if words[0] == "auto":
        target = detect_target()
        words = words[1:]
    given: dict[str, str] = {}
    memory_gib: int | None = None
    for word in words:
        if len(word) > LONGEST:
            raise _wrong(_RULE, word, f"Write {EXAMPLE}, for example.")
        fields = _meaning(word)
        if fields.get("count", 0) > MOST_GPUS:
            raise _wrong(f"must have at most {MOST_GPUS:,} GPUs", word, "Use fewer.")
        for name in fields:
            if name in given:
                raise _wrong(
                    f"must name {ONE.get(name, 'one GPU')}",
                    f"{given[name]},{word}",
                    "Drop one of the two.",
                )
            given[name] = word
        memory_gib = fields.pop(MEMORY, memory_gib)
        target = replace(target, **fields)
    if memory_gib is None:
        return target
    if target.gpu is None:
        raise _wrong(
            "must name the GPU of this memory", given[MEMORY], f"Write h100x8,{given[MEMORY]}."
        )
    return replace(target, gpu=replace(target.gpu, memory_gib=memory_gib))


def target_of(given: Target | str | Sequence[str] | None) -> Target:
    """Return the target that was declared; undeclared, what is known without one: the megatron-core installed here."""
    if given is None:
        return Target(mcore=installed("mcore"))
    if isinstance(given, Target):
        return given
    # Hydra takes target=[h100x8,te2.8] without quotes.
    return parse_target(given if isinstance(given, str) else ",".join(map(str, given)))


def detect_target() -> Target:
    """Return this machine. Imports torch.

    Without a visible GPU the target is the CPU. The GPUs of a run are
    `WORLD_SIZE` where a launcher has set it.
    """
    import torch  # heavy: the one place in this room that needs it

    base = Target(
        gpu=CPU,
        mcore=installed("mcore"),
        te=installed("te"),
        torch=parse_version(torch.__version__),
        has_te=installed("te") is not None,
        is_detected=True,
    )
    if not torch.cuda.is_available():
        return base
    count = int(os.environ.get("WORLD_SIZE", "0")) or torch.cuda.device_count()
    gpu = _gpu_called(torch.cuda.get_device_name(0)) if torch.version.hip else None
    return replace(
        base,
        gpu=gpu or _detected(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)),
        count=count,
        cuda=parse_version(torch.version.cuda) if torch.version.cuda else None,
        cudnn=_detected_cudnn(),
    )


def _detected_cudnn() -> Version | None:
    """Return the version of cuDNN that torch brought along, or that it loads; None where it has none or refuses it.

    An installed package is asked first: loading the library can bring in another
    one, from `LD_LIBRARY_PATH` say.
    """
    packaged = installed("cudnn")
    if packaged is not None:
        return packaged
    import torch

    try:
        number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError):  # a library of another version, or one without a part of it
        return None
    return (
        parse_version(f"{number // 10000}.{number // 100 % 100}.{number % 100}") if number else None
    )


def _detected(device: str, capability: tuple[int, int]) -> Gpu:
    """Return the row that the device's name or else its capability points to; the capability is the device's."""
    named = _gpu_called(device)
    return (
        named
        if named is not None and named.capability == capability
        else gpu_of_capability(capability)
    )


def _gpu_called(device: str) -> Gpu | None:
    """Return the row whose name is part of a device's name ("NVIDIA H100 80GB HBM3"), or None."""
    squeezed = re.sub(r"[^a-z0-9]", "", device.lower())
    found = [
        row for row in GPUS.values() if any(name in squeezed for name in (row.name, *row.aliases))
    ]
    return max(found, key=lambda row: len(row.name)) if found else None


def _meaning(word: str) -> dict[str, Any]:
    if word in ("te-none", "tenone", "no-te"):
        return {"te": None, "has_te": False}
    product = re.fullmatch(r"(mcore|te|cuda|cudnn|torch)[-=]?v?(\d[\d.]*\w*)", word)
    if product is not None:
        version = parse_version(product[2])
        if version not in KNOWN[product[1]]:
            title, known = (
                TITLES[product[1]],
                str(VersionRange(product=product[1], versions=KNOWN[product[1]])),
            )
            raise _wrong(
                f"there is no such version of {title}",
                word,
                f"Versions are{known.removeprefix(title)}.",
            )
        found: dict[str, Any] = {product[1]: version}
        return found | {"has_te": True} if product[1] == "te" else found
    memory = re.fullmatch(r"memory=(\d+)(gib|gb)", word)
    if memory is not None and int(memory[1]):
        return {MEMORY: int(memory[1]) * UNITS[memory[2]] // 2**30}
    if word.startswith(MEMORY):
        raise _wrong("must give the memory of a GPU in GiB or GB", word, "Write memory=80GiB.")
    capability = re.fullmatch(r"sm_?(\d+)(\d)a?(?:x(\d+))?", word)
    if capability is not None:
        row = gpu_of_capability((int(capability[1]), int(capability[2])))
        return {"gpu": row} | ({"count": int(capability[3])} if capability[3] else {})
    return _gpu(word)


def _gpu(word: str) -> dict[str, Any]:
    names = {name: row for row in GPUS.values() for name in (row.name, *row.aliases)}
    squeezed = re.sub(r"[-_]", "", word)
    if squeezed in names:
        return {"gpu": names[squeezed]}
    name, _, number = squeezed.rpartition("x")
    if re.search(r"x[-_]\d+$", word):  # h100x-8
        near = re.sub(r"x[-_](\d+)$", r"x\1", word)
        raise _wrong(_RULE, word, did_you_mean([near]), [near])
    if name in names and number.isdecimal() and int(number) > 0:
        return {"gpu": names[name], "count": int(number)}
    if word in PRODUCTS:
        raise _wrong(_RULE, word, f"Give its version too, as in {EXAMPLE}.")
    near = re.sub(r"x\d+$", "", squeezed) if number.isdecimal() else squeezed
    matches = close_matches(near, names) or close_matches(re.sub(r"[\d.]+$", "", near), PRODUCTS)
    remedy = did_you_mean(matches) or f"GPUs: {', '.join(GPUS)}; products: {', '.join(PRODUCTS)}."
    raise _wrong(_RULE, word, remedy, matches)
