"""`multiply_operands`: the emulated GEMM, a BF16 product summed in FP32, times a factor.

    result = bf16( factor * sum over k of left * right + bias )

The factor is the `alpha` of `addmm`, and the bias is its summand. `addmm` applies both to the FP32
sum and rounds once. If they were applied to the BF16 result, it would be rounded a second time, and
read and written once more.

The factor is the product of the operands' factors. For NVFP4 it is
amax_left * amax_right * (1 / (6 * 448)^2), in this order, because another order rounds differently.
An infinite amax makes the factor infinite, and so the result. Only in this case is infinity in a
tensor visible after quantisation.

*Differs*: cuBLAS multiplies block scales into partial sums of 128 or 32 products, and here the
operands contain them. `torch.mm` computes the sums with this machine's BF16 GEMM, or in a training run
on a CPU without BF16 instructions with an FP32 GEMM of the same values (`megatron/cpu/wide_gemm.py`).
Hopper and Ada truncate their sums (docs/explain/low-precision.md). Results for FP32 and FP16 tensors
pass through BF16.

Source: Transformer Engine 2.20 common/gemm/cublaslt_gemm.cu:364-385,446,
common/recipe/nvfp4.cu:72-79.
"""

import torch

from bridge.precision.schemes import GEMMS
from bridge.runtime.numerics.operand import GemmOperand
from bridge.runtime.numerics.scaling import NVFP4_MAX, round_to_fp32

_NVFP4_FACTOR = round_to_fp32(1.0 / NVFP4_MAX**2)


def compute_output_factor(left: GemmOperand, right: GemmOperand) -> float:
    """Return the factor on the FP32 sums of a product, an FP32 number."""
    if left.nvfp4_amax is None or right.nvfp4_amax is None:
        return round_to_fp32(left.factor * right.factor)
    amax_product = round_to_fp32(left.nvfp4_amax * right.nvfp4_amax)
    return round_to_fp32(amax_product * _NVFP4_FACTOR)


def multiply_operands(
    gemm: str, left: GemmOperand, right: GemmOperand, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Run a GEMM of `GEMMS` and return its result in BF16.

    Args:
        gemm: fprop, dgrad or wgrad.
        left: Operand with the result's first axis.
        right: Operand with the result's last axis.
        bias: (N,), a value per column of the result. It is rounded to BF16 before it is added, as
            in Transformer Engine. None: no bias.

    Returns:
        The product. An element is NaN if a NaN is among its summands, and infinite beyond BF16's
        maximum. Without summands, or with a factor of zero, the product is zero, because cuBLAS
        does not read the operands of a zero factor.
    """
    sides = GEMMS[gemm]
    a = left.values
    if sides.left_columnwise:
        a = a.T
    b = right.values
    if not sides.right_columnwise:
        b = b.T
    factor = compute_output_factor(left, right)
    if factor == 0 or a.numel() == 0 or b.numel() == 0:
        zeros = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
        if bias is None:
            return zeros
        return zeros + bias.to(torch.bfloat16)
    device = a.device.type
    if not torch.is_autocast_enabled(device):
        return _multiply_matrices(a, b, factor, bias)
    # FP16 autocast would cast the operands, and change them.
    with torch.autocast(device, enabled=False):
        return _multiply_matrices(a, b, factor, bias)


def _multiply_matrices(
    a: torch.Tensor, b: torch.Tensor, factor: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return factor * a b + bias in BF16, rounded once."""
    if bias is None and factor == 1.0:
        return torch.mm(a, b)
    if bias is None:
        unread_summand = a.new_zeros(()).expand(a.shape[0], b.shape[1])
        return torch.addmm(unread_summand, a, b, beta=0, alpha=factor)
    summand = bias.to(torch.bfloat16).expand(a.shape[0], b.shape[1])
    return torch.addmm(summand, a, b, beta=1, alpha=factor)
