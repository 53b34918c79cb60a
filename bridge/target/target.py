"""`Target`: the GPUs and versions of a run; declared in words, or read off this machine.

    parse_target("h100x8,te2.8,cuda12.9,mcore0.16")
    parse_target("auto")              # this machine; imports torch

The GPU generations are rows: compute capability, memory, and the formats that their matrix units
take. None is a version that a target does not state. A rule that needs it says so instead of
guessing.
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
    """Device memory as the driver reports it, rounded down; 0: not known.

    It is that of the common model where there are several.
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
        """Whether BF16 runs in hardware.

        torch's `is_bf16_supported()` counts emulation, this does not.
        """
        return "bf16" in self.formats


_HALF = ("fp16", "bf16", "tf32")
_EIGHT = (*_HALF, "fp8")
_FOUR = (*_EIGHT, "mxfp8", "nvfp4")
_CDNA_4 = ("fp16", "bf16", "fp8", "mxfp8", "mxfp4")


# Capabilities: NVIDIA, CUDA GPUs (developer.nvidia.com/cuda-gpus). Formats: NVIDIA architecture
# white papers and Transformer Engine 2.20 pytorch/quantization.py; AMD CDNA 3 white paper (MI300X
# and MI325X, gfx942: their FP8 is the "fnuz" kind) and CDNA 4 white paper (MI350X and MI355X,
# gfx950: FP8 of the OCP kind, no TF32). Rubin: CUDA 13.4 release notes (capability 10.7); how much
# memory a driver reports there is not published.
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


def _gpus() -> dict[str, Gpu]:
    gpus = {}
    for *columns, aliases in _TABLE:
        values = dict(zip(_COLUMNS, columns, strict=True))
        gpus[columns[0]] = Gpu(**values, aliases=tuple(aliases.split()))
    return gpus


GPUS = _gpus()
"""Name -> row, oldest generation first; "cpu" is a machine without a GPU."""

CPU = GPUS["cpu"]


def gpu_of_capability(capability: tuple[int, int]) -> Gpu:
    """Return what is known of a compute capability alone.

    That is the formats of its generation; its memory size is not known.
    """
    generation = "before Volta"
    formats: tuple[str, ...] = ()
    for row in GPUS.values():
        if row.capability is not None and row.capability <= capability:
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
        if self.gpu is None:
            return None
        return self.gpu.capability

    def is_from(self, major: int) -> bool:
        """Return whether the GPU is known to have this compute capability or a later one."""
        return self.capability is not None and self.capability[0] >= major

    def is_before(self, major: int) -> bool:
        """Return whether the GPU is known to have an earlier compute capability."""
        return self.capability is not None and self.capability[0] < major

    def stated(self, name: str) -> str | int | None:
        """Return what is stated of one part of the target.

        Args:
            name: gpu, count or a product; empty: all of it, as text.
        """
        if not name:
            return str(self)
        if name == "gpu":
            if self.gpu is None:
                return None
            return self.gpu.title
        if name == "te" and self.has_te is False:
            return "none"
        value: Version | int | str | None = getattr(self, name)
        if isinstance(value, Version):
            return str(value)
        return value

    def __str__(self) -> str:
        parts = []
        if self.gpu is not None:
            parts += self._gpu_parts(self.gpu)
        for product in PRODUCTS:
            version: Version | None = getattr(self, product)
            if version is not None:
                parts.append(f"{product}{version}")
        if self.has_te is False:
            parts.append("te-none")
        return ",".join(parts) or "nothing declared"

    def _gpu_parts(self, gpu: Gpu) -> list[str]:
        name = gpu.name
        if self.count is not None:
            name += f"x{self.count}"
        known_memory_gib = 0
        if gpu.name in GPUS:
            known_memory_gib = GPUS[gpu.name].memory_gib
        if gpu.memory_gib == known_memory_gib:
            return [name]
        return [name, f"memory={gpu.memory_gib}GiB"]


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
_ONE_VERSION = {name: f"one version of {title}" for name, title in TITLES.items()}
ONE = {MEMORY: "one memory size", **_ONE_VERSION}
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
        RunConfigError: A word that is neither, with the nearest; two GPUs, or two versions of one
            product.
    """
    words = re.split(r"[,\s]+", text.strip().strip("[]").lower())
    words = [word for word in words if word]
    if not words:
        raise _wrong("must name a GPU or a version", text, f"Write {EXAMPLE}, for example.")
    target = Target()
    if words[0] == "auto":
        target = detect_target()
        words = words[1:]
    word_of: dict[str, str] = {}
    memory_gib: int | None = None
    for word in words:
        fields = _meaning(word)
        for name in fields:
            if name in word_of:
                rule = f"must name {ONE.get(name, 'one GPU')}"
                raise _wrong(rule, f"{word_of[name]},{word}", "Drop one of the two.")
            word_of[name] = word
        memory_gib = fields.pop(MEMORY, memory_gib)
        target = replace(target, **fields)
    if memory_gib is None:
        return target
    if target.gpu is None:
        word = word_of[MEMORY]
        raise _wrong("must name the GPU of this memory", word, f"Write h100x8,{word}.")
    return replace(target, gpu=replace(target.gpu, memory_gib=memory_gib))


def target_of(given: Target | str | Sequence[str] | None) -> Target:
    """Return the target that was declared.

    Undeclared, it is what is known without one: the megatron-core installed here.
    """
    if given is None:
        return Target(mcore=installed("mcore"))
    if isinstance(given, Target):
        return given
    if isinstance(given, str):
        return parse_target(given)
    # Hydra takes target=[h100x8,te2.8] without quotes.
    return parse_target(",".join(map(str, given)))


def detect_target() -> Target:
    """Return this machine. Imports torch.

    Without a visible GPU the target is the CPU. The GPUs of a run are `WORLD_SIZE` where a launcher
    has set it.
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
    device = torch.cuda.get_device_name(0)
    gpu = None
    if torch.version.hip:
        gpu = _gpu_called(device)
    if gpu is None:
        gpu = _detected(device, torch.cuda.get_device_capability(0))
    cuda = None
    if torch.version.cuda:
        cuda = parse_version(torch.version.cuda)
    return replace(base, gpu=gpu, count=count, cuda=cuda, cudnn=_detected_cudnn())


def _detected_cudnn() -> Version | None:
    """Return the version of cuDNN that torch brought along, or that it loads.

    None where torch has none or refuses it. An installed package is asked first: loading the
    library can bring in another one, from `LD_LIBRARY_PATH` say.
    """
    packaged = installed("cudnn")
    if packaged is not None:
        return packaged
    import torch

    try:
        number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError):  # a library of another version, or one without a part of it
        return None
    if not number:
        return None
    return parse_version(f"{number // 10000}.{number // 100 % 100}.{number % 100}")


def _detected(device: str, capability: tuple[int, int]) -> Gpu:
    """Return the row that the device's name or else its capability points to.

    The capability is the device's.
    """
    named = _gpu_called(device)
    if named is not None and named.capability == capability:
        return named
    return gpu_of_capability(capability)


def _gpu_called(device: str) -> Gpu | None:
    """Return the row whose name is part of a device's name ("NVIDIA H100 80GB HBM3"), or None.

    Of several rows it is the one with the longest name.
    """
    squeezed = re.sub(r"[^a-z0-9]", "", device.lower())
    called: Gpu | None = None
    for row in GPUS.values():
        if not any(name in squeezed for name in (row.name, *row.aliases)):
            continue
        if called is None or len(row.name) > len(called.name):
            called = row
    return called


def _meaning(word: str) -> dict[str, Any]:
    """Return the fields of a target that a word states, and `MEMORY` where it states that."""
    if len(word) > LONGEST:
        raise _wrong(_RULE, word, f"Write {EXAMPLE}, for example.")
    if word in ("te-none", "tenone", "no-te"):
        return {"te": None, "has_te": False}
    product = re.fullmatch(r"(mcore|te|cuda|cudnn|torch)[-=]?v?(\d[\d.]*\w*)", word)
    if product is not None:
        return _product(word, product[1], parse_version(product[2]))
    memory = re.fullmatch(r"memory=(\d+)(gib|gb)", word)
    if memory is not None and int(memory[1]):
        return {MEMORY: int(memory[1]) * UNITS[memory[2]] // 2**30}
    if word.startswith(MEMORY):
        raise _wrong("must give the memory of a GPU in GiB or GB", word, "Write memory=80GiB.")
    capability = re.fullmatch(r"sm_?(\d+)(\d)a?(?:x(\d+))?", word)
    if capability is not None:
        gpu = gpu_of_capability((int(capability[1]), int(capability[2])))
        return _gpu_and_count(word, gpu, capability[3])
    return _gpu(word)


def _product(word: str, product: str, version: Version) -> dict[str, Any]:
    if version not in KNOWN[product]:
        title = TITLES[product]
        known = str(VersionRange(product=product, versions=KNOWN[product]))
        remedy = f"Versions are{known.removeprefix(title)}."
        raise _wrong(f"there is no such version of {title}", word, remedy)
    fields: dict[str, Any] = {product: version}
    if product == "te":
        fields["has_te"] = True
    return fields


def _gpu_and_count(word: str, gpu: Gpu, number: str | None) -> dict[str, Any]:
    if not number:
        return {"gpu": gpu}
    count = int(number)
    if count > MOST_GPUS:
        raise _wrong(f"must have at most {MOST_GPUS:,} GPUs", word, "Use fewer.")
    return {"gpu": gpu, "count": count}


def _gpu(word: str) -> dict[str, Any]:
    row_of = {}
    for row in GPUS.values():
        for name in (row.name, *row.aliases):
            row_of[name] = row
    squeezed = re.sub(r"[-_]", "", word)
    if squeezed in row_of:
        return {"gpu": row_of[squeezed]}
    name, _, number = squeezed.rpartition("x")
    if re.search(r"x[-_]\d+$", word):  # h100x-8
        meant = re.sub(r"x[-_](\d+)$", r"x\1", word)
        raise _wrong(_RULE, word, did_you_mean([meant]), [meant])
    if name in row_of and number.isdecimal() and int(number) > 0:
        return _gpu_and_count(word, row_of[name], number)
    if word in PRODUCTS:
        raise _wrong(_RULE, word, f"Give its version too, as in {EXAMPLE}.")
    stem = squeezed
    if number.isdecimal():
        stem = re.sub(r"x\d+$", "", squeezed)
    matches = close_matches(stem, row_of)
    if not matches:
        matches = close_matches(re.sub(r"[\d.]+$", "", stem), PRODUCTS)
    remedy = did_you_mean(matches) or f"GPUs: {', '.join(GPUS)}; products: {', '.join(PRODUCTS)}."
    raise _wrong(_RULE, word, remedy, matches)
