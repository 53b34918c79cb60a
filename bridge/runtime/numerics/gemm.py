"""The emulated GEMM: one native BF16 product of two operands, accumulated in FP32, times one factor.

    result = bf16( factor * sum over k of left * right + bias )

The factor multiplies the FP32 sum, the bias is added to it, and the result is rounded once, because they go in as
`alpha` and summand of `addmm`: on the BF16 result both would round again, and read and write it again.

For NVFP4 the factor is amax_left * amax_right / (6 * 448)^2, in this order. With an infinite amax it is infinite, and
so is the result: the one place where infinity in a tensor shows after quantisation.

*Differs*: cuBLAS multiplies block scales into partial sums of 128 or 32 products; here they are in the operands. The
sums are those of the machine's BF16 GEMM, where Hopper and Ada truncate (docs/explain/low-precision.md). Results for
FP32 and FP16 tensors pass through BF16.

Source: Transformer Engine 2.20 common/gemm/cublaslt_gemm.cu:364-385,446, common/recipe/nvfp4.cu:72-79.
"""

from contextlib import nullcontext

import torch

from bridge.precision.schemes import GEMMS
from bridge.runtime.numerics.operand import GemmOperand
from bridge.runtime.numerics.scaling import NVFP4_MAX, fp32

_NVFP4 = fp32(1.0 / NVFP4_MAX**2)


def output_factor(left: GemmOperand, right: GemmOperand) -> float:
    """Return the factor of the FP32 sums, an FP32 number."""
    factor = fp32(left.factor * right.factor)
    return fp32(factor * _NVFP4) if left.spec.scheme == "nvfp4" else factor


def operand_factor(operand: GemmOperand) -> float:
    """Return the factor that makes an operand's values the dequantised tensor."""
    return fp32(operand.factor / NVFP4_MAX) if operand.spec.scheme == "nvfp4" else operand.factor


def multiply(
    gemm: str, left: GemmOperand, right: GemmOperand, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Run a GEMM of `GEMMS` and return its result in BF16; `left` has its first axis, `right` its last one.

    The bias has one value per column, rounded to BF16 before it is added, as Transformer Engine's are. The result is
    NaN where a NaN takes part, infinity where it exceeds BF16, and zeros where the factor is zero, as cuBLAS leaves the
    operands unread then, or where nothing is summed.
    """
    row = GEMMS[gemm]
    a = left.values.T if row.left_columnwise else left.values
    b = right.values if row.right_columnwise else right.values.T
    factor = output_factor(left, right)
    if factor == 0 or a.numel() == 0 or b.numel() == 0:
        zeros = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
        return zeros if bias is None else zeros + bias.to(torch.bfloat16)
    on = torch.is_autocast_enabled(
        a.device.type
    )  # FP16 autocast would cast the operands, and change them
    with torch.autocast(a.device.type, enabled=False) if on else nullcontext():
        if factor == 1.0 and bias is None:
            return torch.mm(a, b)
        summand = (
            a.new_zeros(()) if bias is None else bias.to(torch.bfloat16)
        )  # `addmm` leaves it unread with beta=0
        return torch.addmm(
            summand.expand(a.shape[0], b.shape[1]),
            a,
            b,
            beta=0 if bias is None else 1,
            alpha=factor,
        )
