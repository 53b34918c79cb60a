"""The emulated GEMM next to the bits of a tensor core, which truncates where it adds.

mmaemu computes the bits that an H100 PCIe returns for an FP8 GEMM (measured there by its author with cuBLASLt
12.8.3.14). What it shows about tensorwise and delayed scaling is written down in docs/explain/low-precision.md.
"""

from __future__ import annotations

import mmaemu
import pytest
import torch

from bridge.runtime.numerics import GemmPrecision, make_operand, quantise
from bridge.runtime.numerics.gemm import multiply_operands

PRECISION = GemmPrecision(scheme="tensorwise", format="hybrid")


def both(
    k: int, *, fast: bool, dtype: torch.dtype = torch.bfloat16, positive: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y = x w^T of the same codes: exact, as emulated in BF16, and as an H100 returns it in `dtype`."""
    torch.manual_seed(k)
    x, w = torch.randn(32, k, dtype=torch.bfloat16), torch.randn(32, k, dtype=torch.bfloat16)
    if positive:
        x, w = x.abs(), w.abs()
    specs = PRECISION.spec("input"), PRECISION.spec("weight")
    ours = multiply_operands("fprop", make_operand(x, specs[0], "input"), make_operand(w, specs[1], "weight"))
    held = [quantise(tensor, spec) for tensor, spec in zip((x, w), specs, strict=True)]
    codes, scales = [one.codes.view(torch.float8_e4m3fn) for one in held], [one.scale_inv for one in held]
    theirs = mmaemu.scaled_mm(codes[0], codes[1].t(), *scales, out_dtype=dtype, use_fast_accum=fast, splitk=1)
    exact = codes[0].double() @ codes[1].double().t() * scales[0].double() * scales[1].double()
    return exact, ours.double(), theirs.double()


def distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


@pytest.mark.parametrize("k", [64, 256, 1024])
def test_a_split_accumulator_differs_by_less_than_the_rounding_of_its_result(k: int) -> None:
    """dgrad and wgrad: the sums of a tensor core are moved to FP32 registers every 128 products."""
    exact, ours, theirs = both(k, fast=False)
    assert distance(theirs, ours) < distance(ours, exact)
    assert (theirs == ours).double().mean() > 0.9


def test_the_fast_accumulator_of_fprop_truncates_more_the_longer_the_sum() -> None:
    short, long = (both(k, fast=True) for k in (64, 4096))
    assert distance(short[2], short[0]) < 1.1 * distance(short[1], short[0])
    assert 1.2 < distance(long[2], long[0]) / distance(long[1], long[0]) < 2


def test_sums_of_a_tensor_core_are_truncated_towards_zero() -> None:
    exact, _, sums = both(1024, fast=True, dtype=torch.float32, positive=True)
    assert (sums < exact).double().mean() > 0.99
