# ruff: noqa: N806  (cuBLAS's names, as in the extension)
"""GEMMs of the extension: `generic_gemm`, and the grouped one as a loop over it.

Transformer Engine names the operands as cuBLAS does, in column-major order: `generic_gemm(A, transA, B, transB)` gives
op(B) op(A) in row-major order. Its three layouts are the three GEMMs of a linear layer:

    TN   fprop   A weight, row-wise       B input, row-wise
    NN   dgrad   A weight, column-wise    B grad_output, row-wise
    NT   wgrad   A input, column-wise     B grad_output, column-wise

`bridge.runtime.numerics` multiplies two quantised operands, as in the emulation. Where the result is FP32, or is added
to another one, the product stays in FP32 until then. What no layer of Megatron asks for is not modelled.

Source: pytorch/csrc/extensions/gemm.cpp, common/gemm/cublaslt_gemm.cu (the epilogue adds the bias in FP32).
"""

from typing import Any

import torch

from bridge.precision.schemes import GEMMS
from bridge.runtime.megatron.te_cpu.storage import operand_of, shape_of, torch_dtype
from bridge.runtime.numerics.gemm import multiply, output_factor
from bridge.runtime.pytorch.record.te import GEMM_OF_LAYOUT, is_quantised


def generic_gemm(
    *given: Any,
    comm_overlap: Any = None,
    extra_output: Any = None,
    alpha: float = 1.0,
    beta: Any = None,
    **_more: Any,
) -> list[Any]:
    """Return result, gradient of the bias, None for the input of a GELU, and extra output; None where there is none."""
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
    ) = given
    others = {
        "overlap with communication (userbuffers)": comm_overlap is not None,
        "a fused GELU": gelu,
        "a quantised result": quantizer is not None,
        "a factor": alpha != 1.0 or beta not in (None, 0.0, 1.0),
    }
    for name in (name for name, is_asked_for in others.items() if is_asked_for):
        raise NotImplementedError(f"generic_gemm: {name} has no CPU version")
    own = A if D is None else D
    dtype: torch.dtype = own.dtype if output_dtype is None else torch_dtype(output_dtype)
    has_bias = bias is not None and bias.numel() > 0
    added = bias.detach() if bias is not None and has_bias and not grad else None
    out = _product(
        GEMM_OF_LAYOUT[transA, transB], B, A, added, in_fp32=dtype == torch.float32 or accumulate
    )
    bias_gradient = _bias_gradient(B).to(dtype) if has_bias and grad else None
    if not transB:
        out = out.reshape(*shape_of(B)[:-1], out.shape[-1])
    if accumulate:
        out = out + D.reshape(out.shape).float()
    out = out.to(dtype)
    return [out if D is None else D.copy_(out.reshape(D.shape)), bias_gradient, None, extra_output]


def _bias_gradient(grad_output: Any) -> torch.Tensor:
    source: torch.Tensor = grad_output.dequantize() if is_quantised(grad_output) else grad_output
    return source.reshape(-1, source.shape[-1]).float().sum(0)


def _product(
    gemm: str, left: Any, right: Any, bias: torch.Tensor | None, *, in_fp32: bool
) -> torch.Tensor:
    """Return left right + bias; both operands are quantised, or neither."""
    row, factor = GEMMS[gemm], 1.0
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
        a, b, factor = first.values, second.values, output_factor(first, second)
    else:
        a, b = (tensor.detach().reshape(-1, tensor.shape[-1]) for tensor in (left, right))
    a, b = a.T if row.left_columnwise else a, b if row.right_columnwise else b.T
    if not in_fp32:
        return torch.mm(a, b) if bias is None else torch.addmm(bias.to(a.dtype), a, b)
    out = torch.mm(a.float(), b.float()) * factor
    return out if bias is None else out + bias.float()


def te_general_grouped_gemm(*given: Any) -> Any:
    """Multiply each pair of a group; an expert without tokens leaves zeros, or with `accumulate` the sum as it is."""
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
    ) = given
    outs = D
    if single_output:
        outs = list(torch.split(D if isinstance(D, torch.Tensor) else D[0], m_splits))
    for index, (left, right) in enumerate(zip(A, B, strict=True)):
        own = bias[index] if bias else None
        found = generic_gemm(
            left, transA, right, transB, outs[index], None, None, own, bias_type, False, None, grad, None, 0,
            accumulate, split,
        )  # fmt: skip
        if found[1] is not None and bias is not None:
            bias[index].copy_(found[1])
    return bias
