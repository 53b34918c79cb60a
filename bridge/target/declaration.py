"""`parse_target`: the target that a user declares as text.

    parse_target("h100x8,te2.8,cuda12.9,mcore0.16")
    parse_target("auto")  # this machine; imports torch

A text has parts, separated by commas. Each part states a GPU, a version or a memory size.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from packaging.specifiers import SpecifierSet

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.target.gpus import GPUS, Gpu, make_gpu_of_capability
from bridge.target.machine import detect_target
from bridge.target.target import PRODUCTS, Target
from bridge.target.versions import (
    PRODUCT_TITLES,
    Version,
    VersionRange,
    get_installed_version,
    parse_version,
)

_PART_RULE = "must be a GPU such as h100x8 or a version such as te2.8"
"""The rule in the error about a part of the text that is neither a GPU nor a version."""
PLAUSIBLE_VERSIONS = {
    "mcore": SpecifierSet("<3"),
    "te": SpecifierSet("<6"),
    "cuda": SpecifierSet(">=10,<16"),
    "cudnn": SpecifierSet(">=7,<15"),
    "torch": SpecifierSet(">=1,<6"),
}
"""Product -> plausible versions. Any other version is taken for a typing error."""
TARGET_EXAMPLE = "h100x8,te2.8,cuda12.9,mcore0.16"
MEMORY_KEY = "memory"
"""The name before the memory of a GPU ("memory=288GiB"), and its key among parsed fields."""
MEMORY_UNITS = {"gib": 2**30, "gb": 10**9}
"""Unit -> bytes."""
MAX_PART_LENGTH = 60
"""The most characters of a part of the text."""
MAX_GPUS = 10**7
"""The most GPUs. No run has so many, and a larger number is taken for a typing error."""
_ONE_VERSION = {name: f"one version of {title}" for name, title in PRODUCT_TITLES.items()}
SINGLE_PARTS = {MEMORY_KEY: "one memory size", **_ONE_VERSION}
"""Part of a target that a text states at most once -> its description in the error about a
repetition."""
_make_error = partial(RunConfigError.of, "target")
"""Returns the error about a target: rule, value, remedy, close matches."""


def parse_target(text: str) -> Target:
    """Return the target that a text declares.

    Args:
        text: Parts separated by commas. A part is a GPU with or without its number ("h100x8",
            "sm90", "cpu"), a product with its version ("te2.8", "cuda12.9", "cudnn9.13.1",
            "mcore0.16", "torch2.9", "te-none"), or the memory of the GPU ("memory=288GiB") if it is
            not the common size. "auto" is this machine, and the parts after it replace its values.

    Raises:
        RunConfigError: A part is neither a GPU nor a version (the error names the nearest name), or
            there are two GPUs or two versions of a product.
    """
    parts = re.split(r"[,\s]+", text.strip().strip("[]").lower())
    parts = [part for part in parts if part]
    if not parts:
        raise _make_error(
            "must name a GPU or a version", text, f"Write {TARGET_EXAMPLE}, for example."
        )
    target = Target()
    if parts[0] == "auto":
        target = detect_target()
        parts = parts[1:]
    part_of_field: dict[str, str] = {}
    memory_gib: int | None = None
    for part in parts:
        fields = _parse_part(part)
        for name in fields:
            if name in part_of_field:
                rule = f"must name {SINGLE_PARTS.get(name, 'one GPU')}"
                raise _make_error(rule, f"{part_of_field[name]},{part}", "Drop one of the two.")
            part_of_field[name] = part
        memory_gib = fields.pop(MEMORY_KEY, memory_gib)
        target = replace(target, **fields)
    if memory_gib is None:
        return target
    if target.gpu is None:
        part = part_of_field[MEMORY_KEY]
        raise _make_error("must name the GPU of this memory", part, f"Write h100x8,{part}.")
    return replace(target, gpu=replace(target.gpu, memory_gib=memory_gib))


def make_target(declared: Target | str | Sequence[str] | None) -> Target:
    """Return the target that a run declares.

    Args:
        declared: The target, its text, or the parts of its text. None: only the version of the
            installed megatron-core is known.

    Raises:
        RunConfigError: The text does not describe a target.
    """
    if declared is None:
        return Target(mcore=get_installed_version("mcore"))
    if isinstance(declared, Target):
        return declared
    return parse_target(format_target_text(declared))


def format_target_text(declared: str | Sequence[object]) -> str:
    """Return the text of a target that is declared as a text, or as the parts of one.

    On Hydra's command line, target=[h100x8,te2.8] needs no quotes, and is a list.
    """
    if isinstance(declared, Sequence) and not isinstance(declared, str):
        return ",".join(map(str, declared))
    return str(declared)


def _parse_part(part: str) -> dict[str, Any]:
    """Return the fields of `Target` that a part of the text states.

    The memory of the GPU has the key `MEMORY_KEY`, since `Target` has no field for it.

    Raises:
        RunConfigError: The part is neither a GPU, nor a version, nor a memory size.
    """
    if len(part) > MAX_PART_LENGTH:
        raise _make_error(_PART_RULE, part, f"Write {TARGET_EXAMPLE}, for example.")
    if part in ("te-none", "tenone", "no-te"):
        return {"te": None, "has_te": False}
    product = re.fullmatch(r"(mcore|te|cuda|cudnn|torch)[-=]?v?(\d[\d.]*\w*)", part)
    if product is not None:
        return _parse_product(part, product[1], parse_version(product[2]))
    memory = re.fullmatch(r"memory=(\d+)(gib|gb)", part)
    if memory is not None and int(memory[1]):
        return {MEMORY_KEY: int(memory[1]) * MEMORY_UNITS[memory[2]] // 2**30}
    if part.startswith(MEMORY_KEY):
        raise _make_error("must give the memory of a GPU in GiB or GB", part, "Write memory=80GiB.")
    capability = re.fullmatch(r"sm_?(\d+)(\d)a?(?:x(\d+))?", part)
    if capability is not None:
        gpu = make_gpu_of_capability((int(capability[1]), int(capability[2])))
        return _parse_gpu_count(part, gpu, capability[3])
    return _parse_gpu(part)


def _parse_product(part: str, product: str, version: Version) -> dict[str, Any]:
    """Return the fields that the version of a product states, as in te2.8.

    Raises:
        RunConfigError: The product has no such version.
    """
    if version not in PLAUSIBLE_VERSIONS[product]:
        title = PRODUCT_TITLES[product]
        known = str(VersionRange(product=product, versions=PLAUSIBLE_VERSIONS[product]))
        remedy = f"Versions are{known.removeprefix(title)}."
        raise _make_error(f"there is no such version of {title}", part, remedy)
    fields: dict[str, Any] = {product: version}
    if product == "te":
        fields["has_te"] = True
    return fields


def _parse_gpu_count(part: str, gpu: Gpu, number: str | None) -> dict[str, Any]:
    """Return the fields that a GPU and its number state. The number can be absent.

    Raises:
        RunConfigError: The number is not plausible.
    """
    if not number:
        return {"gpu": gpu}
    count = int(number)
    if count > MAX_GPUS:
        raise _make_error(f"must have at most {MAX_GPUS:,} GPUs", part, "Use fewer.")
    return {"gpu": gpu, "count": count}


def _parse_gpu(part: str) -> dict[str, Any]:
    """Return the fields that the name of a GPU states, with or without its number.

    Raises:
        RunConfigError: No GPU has this name.
    """
    gpus_by_name = {}
    for gpu in GPUS.values():
        for name in (gpu.name, *gpu.aliases):
            gpus_by_name[name] = gpu
    letters = re.sub(r"[-_]", "", part)
    if letters in gpus_by_name:
        return {"gpu": gpus_by_name[letters]}
    name, _, number = letters.rpartition("x")
    if re.search(r"x[-_]\d+$", part):
        # h100x-8 is refused, since it looks like a negative number.
        corrected = re.sub(r"x[-_](\d+)$", r"x\1", part)
        raise _make_error(_PART_RULE, part, did_you_mean([corrected]), [corrected])
    if name in gpus_by_name and number.isdecimal() and int(number) > 0:
        return _parse_gpu_count(part, gpus_by_name[name], number)
    raise _make_unknown_error(part, letters, gpus_by_name)


def _make_unknown_error(part: str, letters: str, gpu_names: Iterable[str]) -> RunConfigError:
    """Return the error about a part of the text that is neither a GPU nor a version.

    Args:
        part: The part of the text.
        letters: The same without hyphens and underscores.
        gpu_names: The names of all GPUs.
    """
    if part in PRODUCTS:
        return _make_error(_PART_RULE, part, f"Give its version too, as in {TARGET_EXAMPLE}.")
    without_number = re.sub(r"x\d+$", "", letters)
    matches = close_matches(without_number, gpu_names)
    if not matches:
        matches = close_matches(re.sub(r"[\d.]+$", "", without_number), PRODUCTS)
    remedy = did_you_mean(matches) or f"GPUs: {', '.join(GPUS)}; products: {', '.join(PRODUCTS)}."
    return _make_error(_PART_RULE, part, remedy, matches)
