# ruff: noqa: N803  (shape suffixes are capitals)
"""Dispatch of a pass: the C kernel where it takes the tensor, else plain torch. Both give the same bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from bridge.numerics import hadamard as _hadamard
from bridge.numerics import native, tiles

if TYPE_CHECKING:
    from bridge.numerics.tiles import TilePass, TileResult


def amax(x_MK: torch.Tensor) -> float:
    """Return the largest magnitude of a matrix. NaN does not count; an empty matrix has 0."""
    kernel = native.kernel_for(x_MK)
    if kernel is not None:
        return kernel.amax(x_MK)
    if not x_MK.numel():
        return 0.0
    low, high = x_MK.aminmax()  # several times faster than abs().amax(), but NaN hides everything else
    most = max(-low.item(), high.item())
    if not math.isnan(low.item()):
        return most
    found = [tiles.amax_of(x_MK[start:end], (0, 1)) for start, end in tiles.chunk_rows(x_MK, 1)]
    return torch.stack(found).amax().item()


def run(x_MK: torch.Tensor, todo: TilePass) -> TileResult:
    """Run one quantisation pass over a matrix."""
    kernel = native.kernel_for(x_MK)
    if kernel is not None and kernel.takes(todo):
        return kernel.run(x_MK, todo)
    return tiles.run(x_MK, todo)


def hadamard(x_MK: torch.Tensor) -> torch.Tensor:
    """Return the random Hadamard transform of each group of 16 rows, in BF16."""
    kernel = native.kernel_for(x_MK)
    return kernel.hadamard(x_MK) if kernel is not None else _hadamard.hadamard_columns(x_MK)
