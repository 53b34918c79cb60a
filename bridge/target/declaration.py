"""`parse_target`: the target that a user declares as text.

    parse_target("h100x8,te2.8,cuda12.9,mcore0.16")
    parse_target("auto")  # this machine; imports torch

A text has parts, separated by commas. Each part states a GPU, a version or a memory size.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""The name before the memory of a GPU ("memory=288GiB")."""
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
NO_TE_PARTS = ("te-none", "tenone", "no-te")
"""Parts that state that Transformer Engine is not installed."""
PRODUCT_PATTERN = re.compile(r"(mcore|te|cuda|cudnn|torch)[-=]?v?(\d[\d.]*\w*)")
"""A product with its version: te2.8."""
MEMORY_PATTERN = re.compile(r"memory=(\d+)(gib|gb)")
"""The memory of the GPU: memory=288gib."""
CAPABILITY_PATTERN = re.compile(r"sm_?(\d+)(\d)a?(?:x(\d+))?")
"""A GPU by its compute capability, with or without its number: sm90x8."""
_make_error = partial(RunConfigError.of, "target")
"""Returns the error about a target: rule, value, remedy, close matches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _DeclaredPart:
    """The values that one part of the text states."""

    subject: str
    """What the part is about: gpu, memory or a product. A text states each subject once."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Field of `Target` -> value."""
    memory_gib: int | None = None
    """The memory of the GPU. None: the part does not state it."""


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
    part_of_subject: dict[str, str] = {}
    memory_gib: int | None = None
    for part in parts:
        declared = _parse_part(part)
        subject = declared.subject
        if subject in part_of_subject:
            rule = f"must name {SINGLE_PARTS.get(subject, 'one GPU')}"
            raise _make_error(rule, f"{part_of_subject[subject]},{part}", "Drop one of the two.")
        part_of_subject[subject] = part
        if declared.memory_gib is not None:
            memory_gib = declared.memory_gib
        target = replace(target, **declared.fields)
    if memory_gib is None:
        return target
    if target.gpu is None:
        part = part_of_subject[MEMORY_KEY]
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


def _parse_part(part: str) -> _DeclaredPart:
    """Return the values that a part of the text states.

    Raises:
        RunConfigError: The part is neither a GPU, nor a version, nor a memory size.
    """
    if len(part) > MAX_PART_LENGTH:
        raise _make_error(_PART_RULE, part, f"Write {TARGET_EXAMPLE}, for example.")
    if part in NO_TE_PARTS:
        return _DeclaredPart(subject="te", fields={"te": None, "has_te": False})
    product = PRODUCT_PATTERN.fullmatch(part)
    if product is not None:
        return _parse_product(part, product[1], parse_version(product[2]))
    memory = MEMORY_PATTERN.fullmatch(part)
    if memory is not None and int(memory[1]):
        memory_gib = int(memory[1]) * MEMORY_UNITS[memory[2]] // 2**30
        return _DeclaredPart(subject=MEMORY_KEY, memory_gib=memory_gib)
    if part.startswith(MEMORY_KEY):
        raise _make_error("must give the memory of a GPU in GiB or GB", part, "Write memory=80GiB.")
    capability = CAPABILITY_PATTERN.fullmatch(part)
    if capability is not None:
        gpu = make_gpu_of_capability((int(capability[1]), int(capability[2])))
        return _parse_gpu_count(part, gpu, capability[3])
    return _parse_gpu(part)


def _parse_product(part: str, product: str, version: Version) -> _DeclaredPart:
    """Return the values that the version of a product states, as in te2.8.

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
    return _DeclaredPart(subject=product, fields=fields)


def _parse_gpu_count(part: str, gpu: Gpu, number: str | None) -> _DeclaredPart:
    """Return the values that a GPU and its number state. The number can be absent.

    Raises:
        RunConfigError: The number is not plausible.
    """
    if not number:
        return _DeclaredPart(subject="gpu", fields={"gpu": gpu})
    count = int(number)
    if count > MAX_GPUS:
        raise _make_error(f"must have at most {MAX_GPUS:,} GPUs", part, "Use fewer.")
    return _DeclaredPart(subject="gpu", fields={"gpu": gpu, "count": count})


def _parse_gpu(part: str) -> _DeclaredPart:
    """Return the values that the name of a GPU states, with or without its number.

    Raises:
        RunConfigError: No GPU has this name.
    """
    gpus_by_name = {}
    for gpu in GPUS.values():
        for name in (gpu.name, *gpu.aliases):
            gpus_by_name[name] = gpu
    compact_name = re.sub(r"[-_]", "", part)
    if compact_name in gpus_by_name:
        return _DeclaredPart(subject="gpu", fields={"gpu": gpus_by_name[compact_name]})
    name, _, number = compact_name.rpartition("x")
    if re.search(r"x[-_]\d+$", part):
        # h100x-8 is refused, since it looks like a negative number.
        corrected = re.sub(r"x[-_](\d+)$", r"x\1", part)
        raise _make_error(_PART_RULE, part, did_you_mean([corrected]), [corrected])
    if name in gpus_by_name and number.isdecimal() and int(number) > 0:
        return _parse_gpu_count(part, gpus_by_name[name], number)
    raise _make_unknown_error(part, compact_name, gpus_by_name)


def _make_unknown_error(part: str, compact_name: str, gpu_names: Iterable[str]) -> RunConfigError:
    """Return the error about a part of the text that is neither a GPU nor a version.

    Args:
        part: The part of the text.
        compact_name: The part without hyphens and underscores.
    """
    if part in PRODUCTS:
        return _make_error(_PART_RULE, part, f"Give its version too, as in {TARGET_EXAMPLE}.")
    without_number = re.sub(r"x\d+$", "", compact_name)
    matches = close_matches(without_number, gpu_names)
    if not matches:
        matches = close_matches(re.sub(r"[\d.]+$", "", without_number), PRODUCTS)
    remedy = did_you_mean(matches) or f"GPUs: {', '.join(GPUS)}; products: {', '.join(PRODUCTS)}."
    return _make_error(_PART_RULE, part, remedy, matches)
