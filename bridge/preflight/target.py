"""The target: on which GPUs, and with which versions, a run is meant to happen.

    parse_target("h100x8,te2.8,cuda12.9,mcore0.16")
    parse_target("auto")              # this machine; imports torch

A version that a target does not state is unknown, and a rule that needs it says so instead of guessing.
"""

import os
import re
from dataclasses import replace
from functools import partial
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.rules.target import CPU, GPUS, PRODUCTS, Gpu, Target, gpu_of_capability
from bridge.rules.versions import TITLES, VersionRange, installed, parse_version

__all__ = ["EXAMPLE", "Target", "detect_target", "parse_target"]

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
ONE = {MEMORY: "one memory size"}
_wrong = partial(RunConfigError.of, "target")


def parse_target(text: str) -> Target:
    """Return the target that `text` declares.

    Args:
        text: Words separated by commas: a GPU with or without its number ("h100x8"; or "sm90", "cpu"), and products
            with their versions ("te2.8", "cuda12.9", "cudnn9.13.1", "mcore0.16", "torch2.9", "te-none"), and the
            memory of a GPU ("memory=288GiB") where it is not the known one. "auto" is this machine; words after it
            override what was found.

    Raises:
        RunConfigError: A word that is neither, with the nearest; two GPUs, or two versions of one product.
    """
    words = [word for word in re.split(r"[,\s]+", text.strip().strip("[]").lower()) if word]
    if not words:
        raise RunConfigError(f"target: must name a GPU or a version, got {text!r}. Write {EXAMPLE}, say.")
    target = Target()
    if words[0] == "auto":
        target = detect_target()
        words = words[1:]
    given: dict[str, str] = {}
    memory_gib: int | None = None
    for word in words:
        if len(word) > LONGEST:
            raise RunConfigError.of("target", _RULE, word, f"Write {EXAMPLE}, say.")
        fields = _meaning(word)
        if fields.get("count", 0) > MOST_GPUS:
            raise RunConfigError.of("target", f"must have at most {MOST_GPUS:,} GPUs", word, "Use fewer.")
        twice = next((name for name in fields if name in given), None)
        if twice is not None:
            one = f"one version of {TITLES[twice]}" if twice in PRODUCTS else ONE.get(twice, "one GPU")
            raise _wrong(f"must name {one}", f"{given[twice]},{word}", "Drop one of the two.")
        given.update(dict.fromkeys(fields, word))
        memory_gib = fields.pop(MEMORY, memory_gib)
        target = replace(target, **fields)
    if memory_gib is None:
        return target
    if target.gpu is None:
        raise _wrong("must name the GPU of this memory", given[MEMORY], f"Write h100x8,{given[MEMORY]}.")
    return replace(target, gpu=replace(target.gpu, memory_gib=memory_gib))


def detect_target() -> Target:
    """Return this machine. Imports torch.

    Without a visible GPU the target is the CPU. The GPUs of a run are `WORLD_SIZE` where a launcher has set it.
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

    An installed package is asked first: loading the library can bring in another one, from `LD_LIBRARY_PATH` say.
    """
    packaged = installed("cudnn")
    if packaged is not None:
        return packaged
    import torch

    try:
        number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError):  # a library of another version, or one without a part of it
        return None
    return parse_version(f"{number // 10000}.{number // 100 % 100}.{number % 100}") if number else None


def _detected(device: str, capability: tuple[int, int]) -> Gpu:
    """Return the row that the device's name or else its capability points to; the capability is the device's."""
    named = _gpu_called(device)
    return named if named is not None and named.capability == capability else gpu_of_capability(capability)


def _gpu_called(device: str) -> Gpu | None:
    """Return the row whose name is part of a device's name ("NVIDIA H100 80GB HBM3"), or None."""
    squeezed = re.sub(r"[^a-z0-9]", "", device.lower())
    found = [row for row in GPUS.values() if any(name in squeezed for name in (row.name, *row.aliases))]
    return max(found, key=lambda row: len(row.name)) if found else None


def _meaning(word: str) -> dict[str, Any]:
    """Return the fields of `Target` that one word sets."""
    if word in ("te-none", "tenone", "no-te"):
        return {"te": None, "has_te": False}
    product = re.fullmatch(r"(mcore|te|cuda|cudnn|torch)[-=]?v?(\d[\d.]*\w*)", word)
    if product is not None:
        version = parse_version(product[2])
        if version not in KNOWN[product[1]]:
            known = VersionRange(product=product[1], versions=KNOWN[product[1]])
            limits = str(known).removeprefix(TITLES[product[1]])
            raise _wrong(f"there is no such version of {TITLES[product[1]]}", word, f"Versions are{limits}.")
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
