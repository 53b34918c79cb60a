"""The compute capability of a stated GPU, which some systems ask for."""

from __future__ import annotations

import re

from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.rules.target import GPUS

CAPABILITIES = {
    "p100": (6, 0),
    "a40": (8, 6),
    "a6000": (8, 6),
    **{name: gpu.capability for gpu in GPUS.values() for name in (gpu.name, *gpu.aliases) if gpu.name != "mi300x"},
}
"""Name of a card -> its compute capability; None: no CUDA at all."""


def capability(gpu: object) -> tuple[int, int] | None:
    """Return the compute capability of "h100", "sm_90", "9.0" or (9, 0); None for "cpu".

    Raises:
        PayloadError: Nothing of the kind.
    """
    if isinstance(gpu, tuple | list) and len(gpu) == 2 and all(type(part) is int for part in gpu):
        return (gpu[0], gpu[1])
    name = re.sub(r"[\s_-]|nvidia|geforce", "", str(gpu).lower())
    if name in CAPABILITIES:
        return CAPABILITIES[name]
    number = re.fullmatch(r"(?:sm)?(\d{1,2})\.?(\d)a?", name)
    if number:
        return int(number[1]), int(number[2])
    remedy = did_you_mean(close_matches(name, CAPABILITIES)) or "Say h100, sm_90, 9.0 or cpu."
    raise PayloadError(f"gpu: must be a card or its compute capability, got {gpu!r:.60}. {remedy}")
