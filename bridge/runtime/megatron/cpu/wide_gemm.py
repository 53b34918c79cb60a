"""`widen_gemms`: 16-bit matrix multiplication in FP32, on a CPU without a fast 16-bit kernel.

Without AVX-512 (or an Arm core with BF16) PyTorch multiplies 16-bit matrices with a scalar loop,
thirty to fifty times slower than in FP32. The following steps give the values of a 16-bit GEMM with
FP32 accumulation:

1. Widen both operands to FP32. This is exact, since every BF16 and FP16 value is an FP32 value.
2. Multiply in FP32. The product of two BF16 values has at most 16 significant bits, and of two FP16
   values 22, so that each product is exact in FP32 (24 bits) and only the sum rounds.
3. Round the result once to the 16-bit type. A result beyond its range becomes infinite, so that the
   FP16 loss scale sees overflows.

In a `widen_gemms` block the rows of `WIDENED_OPERATORS` replace the CPU kernels of these operators,
and widen only operands of the slow types. A CPU with a kernel for BF16 and not for FP16 multiplies
BF16 with its kernel. FP32, and the code above the kernels (autograd, autocast, Megatron's autograd
functions), are not changed.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_widened_dtypes: dict[torch.dtype, Any] = {}
"""Type that is widened now -> the library of the kernels."""


def find_slow_dtypes() -> tuple[torch.dtype, ...]:
    """Return the 16-bit types for which oneDNN has no kernel on this CPU."""
    has_kernel = {
        torch.bfloat16: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        torch.float16: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
    }
    return tuple(dtype for dtype, fast in has_kernel.items() if not fast)


def _widen_operands(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands in FP32 if both have the same widened type, or else unchanged."""
    if first.dtype is second.dtype and first.dtype in _widened_dtypes:
        return first.float(), second.float()
    return first, second


def _allocate_product(first: Tensor, second: Tensor) -> Tensor:
    """Return an uninitialised tensor of the shape of a product."""
    return torch.empty(
        (*first.shape[:-1], second.shape[-1]), dtype=first.dtype, device=first.device
    )


def _multiply(operator: Callable[..., Tensor], first: Tensor, second: Tensor) -> Tensor:
    """Return the product in the operands' type.

    The ``out`` overload of an operator has a separate kernel, which is not replaced.
    """
    wide = _widen_operands(first, second)
    return operator(*wide, out=_allocate_product(*wide)).to(first.dtype)


def _multiply_and_add(
    operator: Callable[..., Tensor],
    added: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """Return beta * added + alpha * product in the operands' type.

    If beta is 0, `added` is not read.
    """
    wide = _widen_operands(first, second)
    out = _allocate_product(*wide)
    summand = added
    if beta == 0:
        summand = out
    if summand.dtype is first.dtype:
        summand = summand.to(out.dtype)
    return operator(summand, *wide, beta=beta, alpha=alpha, out=out).to(first.dtype)


WIDENED_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "mm": partial(_multiply, _aten.mm.out),
    "bmm": partial(_multiply, _aten.bmm.out),
    "addmm": partial(_multiply_and_add, _aten.addmm.out),
    "baddbmm": partial(_multiply_and_add, _aten.baddbmm.out),
}
"""Operator of `torch.ops.aten` -> the kernel that replaces its CPU kernel."""


def is_widened(dtype: torch.dtype) -> bool:
    """Return whether operands of a type are widened now."""
    return dtype in _widened_dtypes


@contextmanager
def widen_gemms(slow: tuple[torch.dtype, ...]) -> Iterator[bool]:
    """Replace the GEMM kernels of some types in a ``with`` block, and yield whether any is widened."""
    if not slow or _widened_dtypes:
        yield bool(_widened_dtypes)
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=r"(?s).*previously registered kernel", category=UserWarning
            )
            for name, kernel in WIDENED_OPERATORS.items():
                library.impl(name, kernel, "CPU")
        _widened_dtypes.update(dict.fromkeys(slow, library))
        yield True
    finally:
        _widened_dtypes.clear()
        library._destroy()
