# ruff: noqa: N806  (cuBLAS's names, as in the extension)
"""GEMMs of the extension: `generic_gemm`, and the grouped one as a loop over it.

Transformer Engine names the operands as cuBLAS does, in column-major order:
`generic_gemm(A, transA, B, transB)` gives op(B) op(A) in row-major order. Its three layouts
are the three GEMMs of a linear layer:

    TN   fprop   A weight, row-wise       B input, row-wise
    NN   dgrad   A weight, column-wise    B grad_output, row-wise
    NT   wgrad   A input, column-wise     B grad_output, column-wise

`bridge.runtime.numerics` multiplies two quantised operands, as in the emulation. Where the
result is FP32, or is added to another one, the product stays in FP32 until then. What no layer
of Megatron asks for is not modelled.

Source: pytorch/csrc/extensions/gemm.cpp, common/gemm/cublaslt_gemm.cu (the
epilogue adds the bias in FP32).
"""

from typing import Any

import torch

from bridge.precision.schemes import GEMMS
from bridge.runtime.megatron.te_cpu.storage import operand_of, shape_of, torch_dtype
from bridge.runtime.numerics.gemm import multiply, output_factor
from bridge.runtime.pytorch.record.te import GEMM_OF_LAYOUT, is_quantised


def generic_gemm(
    *arguments: Any,
    comm_overlap: Any = None,
    extra_output: Any = None,
    alpha: float = 1.0,
    beta: Any = None,
    **_more: Any,
) -> list[Any]:
    """Return result, gradient of the bias, None for the input of a GELU, and extra output.

    An entry is None where nothing of its kind is asked for.
    """
    (
        A,
        transA,
        B,
        transB,
        D,
        quantizer,
        output_dtype,
        bias,
        _,
        gelu,
        _,
        grad,
        _,
        _,
        accumulate,
        _,
    ) = arguments
    features = {
        "overlap with communication (userbuffers)": comm_overlap is not None,
        "a fused GELU": gelu,
        "a quantised result": quantizer is not None,
        "a factor": alpha != 1.0 or beta not in (None, 0.0, 1.0),
    }
    _require_none_of(features)
    dtype = _dtype_of_result(output_dtype, D, A)
    added, bias_gradient = None, None
    if bias is not None and bias.numel() > 0:
        if grad:
            bias_gradient = _bias_gradient(B).to(dtype)
        else:
            added = bias.detach()
    gemm = GEMM_OF_LAYOUT[transA, transB]
    in_fp32 = dtype == torch.float32 or accumulate
    out = _product(gemm, B, A, added, in_fp32=in_fp32)
    if not transB:
        out = out.reshape(*shape_of(B)[:-1], out.shape[-1])
    if accumulate:
        out = out + D.reshape(out.shape).float()
    out = out.to(dtype)
    if D is not None:
        out = D.copy_(out.reshape(D.shape))
    return [out, bias_gradient, None, extra_output]


def _require_none_of(features: dict[str, bool]) -> None:
    """Refuse a feature that is asked for; none of them has a CPU version."""
    for name, is_asked_for in features.items():
        if is_asked_for:
            raise NotImplementedError(f"generic_gemm: {name} has no CPU version")


def _dtype_of_result(output_dtype: Any, out: Any, left: Any) -> torch.dtype:
    """Return the dtype that is stated, else that of the tensor to write to, else an operand's."""
    if output_dtype is not None:
        return torch_dtype(output_dtype)
    dtype: torch.dtype
    if out is not None:
        dtype = out.dtype
    else:  # an operand that is a storage of Transformer Engine's has none
        dtype = left.dtype
    return dtype


def _bias_gradient(grad_output: Any) -> torch.Tensor:
    source: torch.Tensor = grad_output
    if is_quantised(grad_output):
        source = grad_output.dequantize()
    return source.reshape(-1, source.shape[-1]).float().sum(0)


def _product(
    gemm: str, left: Any, right: Any, bias: torch.Tensor | None, *, in_fp32: bool
) -> torch.Tensor:
    """Return left right + bias; both operands are quantised, or neither."""
    row = GEMMS[gemm]
    factor = 1.0
    if is_quantised(left) != is_quantised(right):
        names = f"{type(left).__name__} and {type(right).__name__}"
        raise RuntimeError(
            f"generic_gemm: both operands must be quantised or none, got {names} in {gemm}"
        )
    if is_quantised(left):
        first = operand_of(left, row.left, columnwise=row.left_columnwise)
        second = operand_of(right, row.right, columnwise=row.right_columnwise)
        if not in_fp32:
            return multiply(gemm, first, second, bias)
        a = first.values
        b = second.values
        factor = output_factor(first, second)
    else:
        a = _as_matrix(left)
        b = _as_matrix(right)
    if row.left_columnwise:
        a = a.T
    if not row.right_columnwise:
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
    return tensor.detach().reshape(-1, tensor.shape[-1])


def te_general_grouped_gemm(*arguments: Any) -> Any:
    """Multiply each pair of a group.

    An expert without tokens leaves zeros, or with `accumulate` the sum as it is.
    """
    (
        A,
        transA,
        B,
        transB,
        D,
        _,
        m_splits,
        bias,
        bias_type,
        single_output,
        _,
        grad,
        _,
        _,
        accumulate,
        split,
        *_,
    ) = arguments
    outs = D
    if single_output:
        whole = D
        if not isinstance(D, torch.Tensor):
            whole = D[0]
        outs = list(torch.split(whole, m_splits))
    for index, (left, right) in enumerate(zip(A, B, strict=True)):
        added = None
        if bias:
            added = bias[index]
        results = generic_gemm(
            left, transA, right, transB, outs[index], None, None, added, bias_type, False, None,
            grad, None, 0, accumulate, split,
        )  # fmt: skip
        bias_gradient = results[1]
        if bias_gradient is not None and bias is not None:
            bias[index].copy_(bias_gradient)
    return bias
