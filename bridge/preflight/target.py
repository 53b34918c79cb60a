"""The target: on which GPUs, and with which versions, a run is meant to happen.

    parse_target("h100x8,te2.8,cuda12.9,mcore0.16")
    parse_target("auto")              # this machine; imports torch

What a target does not say is unknown, and a rule that needs it says so instead of guessing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.rules.gpus import CPU, GPUS, Gpu, gpu_of_capability
from bridge.rules.versions import TITLES, Version, installed, parse_version, shown

__all__ = ["EXAMPLE", "Target", "detect_target", "parse_target"]

PRODUCTS = tuple(TITLES)
EXAMPLE = "h100x8,te2.8,cuda12.9,mcore0.16"
"""A target, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a run is going to find. None means unknown."""

    gpu: Gpu | None = None
    """The GPU; the row "cpu" where there is none."""
    count: int | None = None
    """GPUs of the whole run."""
    mcore: Version | None = None
    """megatron-core."""
    te: Version | None = None
    """Transformer Engine."""
    cuda: Version | None = None
    """CUDA."""
    cudnn: Version | None = None
    """cuDNN."""
    torch: Version | None = None
    """PyTorch."""
    has_te: bool | None = None
    """Whether Transformer Engine is there at all; None: unknown."""
    is_detected: bool = False
    """Read off this machine rather than declared."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU, or None."""
        return self.gpu.capability if self.gpu is not None else None

    def __str__(self) -> str:
        parts = []
        if self.gpu is not None:
            parts.append(self.gpu.name + (f"x{self.count}" if self.count is not None else ""))
        for product in PRODUCTS:
            version: Version | None = getattr(self, product)
            if version is not None:
                parts.append(f"{product}{shown(version)}")
        if self.has_te is False:
            parts.append("te-none")
        return ",".join(parts) or "nothing declared"

    def with_installed(self) -> Target:
        """Return the target with the versions installed here where it names none."""
        found: dict[str, Any] = {name: installed(name) for name in ("mcore", "te") if getattr(self, name) is None}
        return replace(self, **found)


def parse_target(text: str) -> Target:
    """Return the target that `text` declares.

    Args:
        text: Words separated by commas: a GPU with or without its number ("h100x8"; or "sm90", "cpu"), and products
            with their versions ("te2.8", "cuda12.9", "cudnn9.13.1", "mcore0.16", "torch2.9", "te-none"). "auto" is
            this machine; words after it override what was found.

    Raises:
        RunConfigError: A word that is neither; the nearest are named.
    """
    words = [word for word in re.split(r"[,\s]+", text.strip().strip("[]").lower()) if word]
    if not words:
        raise RunConfigError(f"target: must name a GPU or a version, got {text!r}. Write {EXAMPLE}, say.")
    target = Target()
    if words[0] == "auto":
        target = detect_target()
        words = words[1:]
    for word in words:
        target = replace(target, **_meaning(word))
    return target


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
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return replace(
        base,
        gpu=gpu or _detected(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)),
        count=count,
        cuda=parse_version(torch.version.cuda) if torch.version.cuda else None,
        cudnn=(cudnn // 10000, cudnn // 100 % 100, cudnn % 100) if cudnn else None,
    )


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
        return {"has_te": False, "te": None}
    product = re.fullmatch(r"(mcore|te|cuda|cudnn|torch)[-=]?v?(\d[\d.]*\w*)", word)
    if product is not None:
        found: dict[str, Any] = {product[1]: parse_version(product[2])}
        return found | {"has_te": True} if product[1] == "te" else found
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
    if name in names and number.isdecimal() and int(number) > 0:
        return {"gpu": names[name], "count": int(number)}
    near = re.sub(r"x\d+$", "", squeezed) if number.isdecimal() else squeezed
    matches = close_matches(near, names) or close_matches(re.sub(r"[\d.]+$", "", near), PRODUCTS)
    remedy = did_you_mean(matches) or f"GPUs: {', '.join(GPUS)}; products: {', '.join(PRODUCTS)}."
    raise RunConfigError(
        f"target: must be a GPU such as h100x8 or a version such as te2.8, got {word!r}. {remedy}", matches
    )
