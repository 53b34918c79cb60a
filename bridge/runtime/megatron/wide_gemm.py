"""16-bit matrix multiplication on a CPU that has no fast one.

Without AVX-512 (or an Arm core with BF16) PyTorch multiplies 16-bit matrices with a scalar loop, thirty to fifty times
slower than FP32. There is an exact alternative, and the hardware units do the same:

1. widen both operands to FP32; every BF16 and FP16 value is an FP32 value, so this is exact;
2. multiply in FP32. The product of two BF16 values has at most 16 significant bits and of two FP16 values 22, so each
   product is exact in FP32 (24 bits) and only the sum rounds, as in a 16-bit GEMM with FP32 accumulation;
3. round the result once to the 16-bit type. Above its range it becomes infinite, so FP16 loss scaling sees overflows.

While installed, the rows of `OPERATORS` replace the CPU kernels of those operators for operands of the slow types only:
AVX-512 with BF16 but without FP16 multiplies BF16 itself. FP32 and everything above the kernels (autograd, autocast,
Megatron's own autograd functions) are untouched.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_installed: dict[torch.dtype, Any] = {}
"""Each type that is widened now, with the library that holds the kernels."""


def slow_dtypes() -> tuple[torch.dtype, ...]:
    """Return the 16-bit types whose CPU GEMM is a scalar loop here; empty where oneDNN has kernels for both."""
    has_kernel = {
        torch.bfloat16: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        torch.float16: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
    }
    return tuple(dtype for dtype, fast in has_kernel.items() if not fast)


def _wide(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands in FP32 if they are of one type that is widened, else as they are."""
    if first.dtype is second.dtype and first.dtype in _installed:
        return first.float(), second.float()
    return first, second


def _empty_product(first: Tensor, second: Tensor) -> Tensor:
    return torch.empty(
        (*first.shape[:-1], second.shape[-1]), dtype=first.dtype, device=first.device
    )


def _product(operator: Callable[..., Tensor], first: Tensor, second: Tensor) -> Tensor:
    """Return the product in the operands' type, through the operator's ``out`` overload, which has its own kernel."""
    wide = _wide(first, second)
    return operator(*wide, out=_empty_product(*wide)).to(first.dtype)


def _sum(
    operator: Callable[..., Tensor],
    added: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """Return beta * added + alpha * product in the operands' type; with beta 0 the summand is not read."""
    wide = _wide(first, second)
    out = _empty_product(*wide)
    start = out if beta == 0 else added
    if start.dtype is first.dtype:
        start = start.to(out.dtype)
    return operator(start, *wide, beta=beta, alpha=alpha, out=out).to(first.dtype)


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "mm": partial(_product, _aten.mm.out),
    "bmm": partial(_product, _aten.bmm.out),
    "addmm": partial(_sum, _aten.addmm.out),
    "baddbmm": partial(_sum, _aten.baddbmm.out),
}
"""Operator of `torch.ops.aten` -> the kernel that takes its place on the CPU."""


def is_widened(dtype: torch.dtype) -> bool:
    """Return whether operands of a type are multiplied in FP32 now."""
    return dtype in _installed


@contextmanager
def widened(slow: tuple[torch.dtype, ...]) -> Iterator[bool]:
    """Replace the GEMM kernels of some types for a ``with`` block; yields whether they are in place."""
    if not slow or _installed:
        yield bool(_installed)
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=r"(?s).*previously registered kernel", category=UserWarning
            )
            for name, kernel in OPERATORS.items():
                library.impl(name, kernel, "CPU")
        _installed.update(dict.fromkeys(slow, library))
        yield True
    finally:
        _installed.clear()
        library._destroy()
