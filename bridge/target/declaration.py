"""`parse_target`: the target that a user declares in words.

parse_target("h100x8,te2.8,cuda12.9,mcore0.16")
parse_target("auto")              # this machine; imports torch
"""

import re
from collections.abc import Sequence
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

_WORD_RULE = "must be a GPU such as h100x8 or a version such as te2.8"
PLAUSIBLE_VERSIONS = {
    "mcore": SpecifierSet("<3"),
    "te": SpecifierSet("<6"),
    "cuda": SpecifierSet(">=10,<16"),
    "cudnn": SpecifierSet(">=7,<15"),
    "torch": SpecifierSet(">=1,<6"),
}
"""Product -> versions that exist or may soon; any other version is taken for a typing error."""
TARGET_EXAMPLE = "h100x8,te2.8,cuda12.9,mcore0.16"
MEMORY_KEY = "memory"
MEMORY_UNITS = {"gib": 2**30, "gb": 10**9}
MAX_WORD_LENGTH = 60
"""The most characters of a word."""
MAX_GPUS = 10**7
"""More GPUs than any run has; a larger number is taken for a typing error."""
_ONE_VERSION = {name: f"one version of {title}" for name, title in PRODUCT_TITLES.items()}
SINGLE_PARTS = {MEMORY_KEY: "one memory size", **_ONE_VERSION}
"""Part of a target that a text names at most once -> its words in the error about two."""
_make_error = partial(RunConfigError.of, "target")


def parse_target(text: str) -> Target:
    """Return the target that `text` declares.

    Args:
        text: Words separated by commas: a GPU with or without its number ("h100x8"; or "sm90",
            "cpu"), and products with their versions ("te2.8", "cuda12.9", "cudnn9.13.1",
            "mcore0.16", "torch2.9", "te-none"), and the memory of a GPU ("memory=288GiB") where it
            is not the known one. "auto" is this machine; words after it replace values of it.

    Raises:
        RunConfigError: A word that is neither a GPU nor a version (the error names the nearest);
            two GPUs, or two versions of a product.
    """
    words = re.split(r"[,\s]+", text.strip().strip("[]").lower())
    words = [word for word in words if word]
    if not words:
        raise _make_error(
            "must name a GPU or a version", text, f"Write {TARGET_EXAMPLE}, for example."
        )
    target = Target()
    if words[0] == "auto":
        target = detect_target()
        words = words[1:]
    word_of: dict[str, str] = {}
    memory_gib: int | None = None
    for word in words:
        fields = _parse_word(word)
        for name in fields:
            if name in word_of:
                rule = f"must name {SINGLE_PARTS.get(name, 'one GPU')}"
                raise _make_error(rule, f"{word_of[name]},{word}", "Drop one of the two.")
            word_of[name] = word
        memory_gib = fields.pop(MEMORY_KEY, memory_gib)
        target = replace(target, **fields)
    if memory_gib is None:
        return target
    if target.gpu is None:
        word = word_of[MEMORY_KEY]
        raise _make_error("must name the GPU of this memory", word, f"Write h100x8,{word}.")
    return replace(target, gpu=replace(target.gpu, memory_gib=memory_gib))


def make_target(declared: Target | str | Sequence[str] | None) -> Target:
    """Return a target in any form in which a run states it.

    Without a statement the target has the installed megatron-core, and nothing else.
    """
    if declared is None:
        return Target(mcore=get_installed_version("mcore"))
    if isinstance(declared, Target):
        return declared
    if isinstance(declared, str):
        return parse_target(declared)
    # Hydra takes target=[h100x8,te2.8] without quotes.
    return parse_target(",".join(map(str, declared)))


def _parse_word(word: str) -> dict[str, Any]:
    """Return the fields of a target that a word states; `MEMORY_KEY` is the memory of its GPU."""
    if len(word) > MAX_WORD_LENGTH:
        raise _make_error(_WORD_RULE, word, f"Write {TARGET_EXAMPLE}, for example.")
    if word in ("te-none", "tenone", "no-te"):
        return {"te": None, "has_te": False}
    product = re.fullmatch(r"(mcore|te|cuda|cudnn|torch)[-=]?v?(\d[\d.]*\w*)", word)
    if product is not None:
        return _parse_product(word, product[1], parse_version(product[2]))
    memory = re.fullmatch(r"memory=(\d+)(gib|gb)", word)
    if memory is not None and int(memory[1]):
        return {MEMORY_KEY: int(memory[1]) * MEMORY_UNITS[memory[2]] // 2**30}
    if word.startswith(MEMORY_KEY):
        raise _make_error("must give the memory of a GPU in GiB or GB", word, "Write memory=80GiB.")
    capability = re.fullmatch(r"sm_?(\d+)(\d)a?(?:x(\d+))?", word)
    if capability is not None:
        gpu = make_gpu_of_capability((int(capability[1]), int(capability[2])))
        return _parse_gpu_count(word, gpu, capability[3])
    return _parse_gpu(word)


def _parse_product(word: str, product: str, version: Version) -> dict[str, Any]:
    if version not in PLAUSIBLE_VERSIONS[product]:
        title = PRODUCT_TITLES[product]
        known = str(VersionRange(product=product, versions=PLAUSIBLE_VERSIONS[product]))
        remedy = f"Versions are{known.removeprefix(title)}."
        raise _make_error(f"there is no such version of {title}", word, remedy)
    fields: dict[str, Any] = {product: version}
    if product == "te":
        fields["has_te"] = True
    return fields


def _parse_gpu_count(word: str, gpu: Gpu, number: str | None) -> dict[str, Any]:
    if not number:
        return {"gpu": gpu}
    count = int(number)
    if count > MAX_GPUS:
        raise _make_error(f"must have at most {MAX_GPUS:,} GPUs", word, "Use fewer.")
    return {"gpu": gpu, "count": count}


def _parse_gpu(word: str) -> dict[str, Any]:
    row_of = {}
    for row in GPUS.values():
        for name in (row.name, *row.aliases):
            row_of[name] = row
    letters = re.sub(r"[-_]", "", word)
    if letters in row_of:
        return {"gpu": row_of[letters]}
    name, _, number = letters.rpartition("x")
    if re.search(r"x[-_]\d+$", word):  # h100x-8
        meant = re.sub(r"x[-_](\d+)$", r"x\1", word)
        raise _make_error(_WORD_RULE, word, did_you_mean([meant]), [meant])
    if name in row_of and number.isdecimal() and int(number) > 0:
        return _parse_gpu_count(word, row_of[name], number)
    if word in PRODUCTS:
        raise _make_error(_WORD_RULE, word, f"Give its version too, as in {TARGET_EXAMPLE}.")
    stem = letters
    if number.isdecimal():
        stem = re.sub(r"x\d+$", "", letters)
    matches = close_matches(stem, row_of)
    if not matches:
        matches = close_matches(re.sub(r"[\d.]+$", "", stem), PRODUCTS)
    remedy = did_you_mean(matches) or f"GPUs: {', '.join(GPUS)}; products: {', '.join(PRODUCTS)}."
    raise _make_error(_WORD_RULE, word, remedy, matches)
