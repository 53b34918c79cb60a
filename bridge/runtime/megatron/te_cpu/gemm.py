# ruff: noqa: N806  (cuBLAS's names, as in the extension)
"""GEMMs of the extension: `generic_gemm`, and the grouped GEMM as a loop over it.

Transformer Engine names the operands as cuBLAS does, in column-major order:
`generic_gemm(A, transA, B, transB)` gives op(B) op(A) in row-major order. Its three layouts
are the three GEMMs of a linear layer:

    TN   fprop   A weight, row-wise       B input, row-wise
    NN   dgrad   A weight, column-wise    B grad_output, row-wise
    NT   wgrad   A input, column-wise     B grad_output, column-wise

`bridge.runtime.numerics` multiplies two quantised operands, as in the emulation. The product stays in
FP32 if the result is FP32 or is added to another tensor. Features that no layer of Megatron uses are
refused.

Source: pytorch/csrc/extensions/gemm.cpp, common/gemm/cublaslt_gemm.cu (the
epilogue adds the bias in FP32).
"""

from typing import Any

import torch

from bridge.precision.schemes import GEMMS
from bridge.runtime.megatron.te_cpu.storage import get_shape, get_torch_dtype, make_storage_operand
from bridge.runtime.numerics.gemm import compute_output_factor, multiply_operands
from bridge.runtime.pytorch.record.operand_format import is_quantised
from bridge.runtime.pytorch.record.te_gemms import (
    GEMM_OF_LAYOUT,
    GenericGemmArguments,
    GroupedGemmArguments,
)


def generic_gemm(
    *arguments: Any,
    comm_overlap: Any = None,
    extra_output: Any = None,
    alpha: float = 1.0,
    beta: Any = None,
    **_more: Any,
) -> list[Any]:
    """Return result, gradient of the bias, None for the input of a GELU, and extra output.

    The gradient of the bias is None where `bias` is None or empty, and without `grad`.

    Raises:
        NotImplementedError: The call asks for a feature that no layer of Megatron uses on a CPU.
    """
    call = GenericGemmArguments(*arguments)
    features = {
        "overlap with communication (userbuffers)": comm_overlap is not None,
        "a fused GELU": call.gelu,
        "a quantised result": call.quantization_params is not None,
        "a factor": alpha != 1.0 or beta not in (None, 0.0, 1.0),
    }
    _refuse_features(features)
    dtype = _get_result_dtype(call)
    bias_to_add, bias_gradient = None, None
    if call.bias is not None and call.bias.numel() > 0:
        if call.grad:
            bias_gradient = _compute_bias_gradient(call.B).to(dtype)
        else:
            bias_to_add = call.bias.detach()
    gemm = GEMM_OF_LAYOUT[call.transa, call.transb]
    in_fp32 = dtype == torch.float32 or call.accumulate
    out = _multiply(gemm, call.B, call.A, bias_to_add, in_fp32=in_fp32)
    if not call.transb:
        out = out.reshape(*get_shape(call.B)[:-1], out.shape[-1])
    if call.accumulate:
        out = out + call.out.reshape(out.shape).float()
    out = out.to(dtype)
    if call.out is not None:
        out = call.out.copy_(out.reshape(call.out.shape))
    return [out, bias_gradient, None, extra_output]


def _refuse_features(features: dict[str, bool]) -> None:
    """Refuse a feature that is asked for; none of them has a CPU version."""
    for name, is_asked_for in features.items():
        if is_asked_for:
            raise NotImplementedError(f"generic_gemm: {name} has no CPU version")


def _get_result_dtype(call: GenericGemmArguments) -> torch.dtype:
    """Return the dtype that is stated, else that of the tensor to write to, else an operand's."""
    if call.out_dtype is not None:
        return get_torch_dtype(call.out_dtype)
    dtype: torch.dtype
    if call.out is not None:
        dtype = call.out.dtype
    else:  # an operand that is a storage of Transformer Engine's has none
        dtype = call.A.dtype
    return dtype


def _compute_bias_gradient(grad_output: Any) -> torch.Tensor:
    """Return the sum of a gradient over its tokens, (N,) in FP32."""
    source: torch.Tensor = grad_output
    if is_quantised(grad_output):
        source = grad_output.dequantize()
    return source.reshape(-1, source.shape[-1]).float().sum(0)


def _multiply(
    gemm: str, left: Any, right: Any, bias: torch.Tensor | None, *, in_fp32: bool
) -> torch.Tensor:
    """Return left right + bias; both operands are quantised, or neither.

    Args:
        gemm: fprop, dgrad or wgrad.
        left: Operand with the result's first axis.
        right: Operand with the result's last axis.
        bias: (N,), added before the result is rounded; or None.
        in_fp32: Whether the result stays in FP32; else it has the dtype of the operands.

    Raises:
        RuntimeError: One operand is quantised and the other is not.
    """
    sides = GEMMS[gemm]
    factor = 1.0
    if is_quantised(left) != is_quantised(right):
        names = f"{type(left).__name__} and {type(right).__name__}"
        raise RuntimeError(
            f"generic_gemm: both operands must be quantised or none, got {names} in {gemm}"
        )
    if is_quantised(left):
        left_operand = make_storage_operand(left, sides.left, columnwise=sides.left_columnwise)
        right_operand = make_storage_operand(right, sides.right, columnwise=sides.right_columnwise)
        if not in_fp32:
            return multiply_operands(gemm, left_operand, right_operand, bias)
        a = left_operand.values
        b = right_operand.values
        factor = compute_output_factor(left_operand, right_operand)
    else:
        a = _as_matrix(left)
        b = _as_matrix(right)
    if sides.left_columnwise:
        a = a.T
    if not sides.right_columnwise:
        b = b.T
    if in_fp32:
        out = torch.mm(a.float(), b.float()) * factor
        if bias is not None:
            out = out + bias.float()
        return out
    if bias is None:
        return torch.mm(a, b)
    return torch.addmm(bias.to(a.dtype), a, b)


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as (M, K), all leading axes taken together."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def te_general_grouped_gemm(*arguments: Any) -> Any:
    """Multiply each pair of a group and return the bias, with `grad` its gradient.

    An expert without tokens leaves zeros, or with `accumulate` the sum as it is.
    """
    group = GroupedGemmArguments.from_args(arguments)
    outs = group.outputs()
    for index, (A, B) in enumerate(zip(group.A, group.B, strict=True)):
        bias = None
        if group.bias:
            bias = group.bias[index]
        call = GenericGemmArguments(
            A=A,
            transa=group.transa,
            B=B,
            transb=group.transb,
            out=outs[index],
            quantization_params=None,
            out_dtype=None,
            bias=bias,
            bias_dtype=group.bias_dtype,
            gelu=False,
            gelu_in=None,
            grad=group.grad,
            workspace=None,
            workspace_size=0,
            accumulate=group.accumulate,
            use_split_accumulator=group.use_split_accumulator,
        )
        bias_gradient = generic_gemm(*call)[1]
        if bias_gradient is not None and bias is not None:
            bias.copy_(bias_gradient)
    return group.bias
