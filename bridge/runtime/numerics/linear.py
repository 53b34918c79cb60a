# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""A linear layer whose three GEMMs run in low precision.

    forward    x_row, w_row  -> y_MN  = x w^T          keep x_col for the backward pass
    backward   dy_row, w_col -> dx_MK = dy w
               dy_col, x_col -> dw_NK = dy^T x

The row of a scheme has format and tile of each copy (`bridge.precision.schemes`). The forward pass
keeps a BF16 matrix as large as x for the backward pass, the column-wise operand, where a BF16 layer
keeps x. The weight is not kept a second time: it is rounded again in the backward pass, with the
scale of the forward pass for a scheme with a single scale. A `WeightCache` keeps its operands from
microbatch to microbatch.

Under a `backward_override` the two GEMMs of the backward pass multiply in the dtype of x: the
original tensors (high_precision), or the dequantised operands of the forward GEMM (dequantized).

Shapes: M tokens (the product of all leading axes), K inputs, N outputs.
Source: Transformer Engine 2.20 pytorch/module/linear.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bridge.errors import PrecisionTypeError
from bridge.runtime.numerics.delayed import DelayedScaling
from bridge.runtime.numerics.gemm import compute_operand_factor, multiply_operands
from bridge.runtime.numerics.operand import GemmOperand, make_operand, make_stored_operand
from bridge.runtime.numerics.quantise import as_matrix
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.spec import GemmPrecision


class Observer:
    """Base of observers of operands and GEMMs, for telemetry and the audit; it ignores all of them."""

    def quantised(self, source: torch.Tensor, operand: GemmOperand) -> None:
        """Observe an operand and the high-precision matrix it was made from.

        An observer must not keep the tensors.
        """

    def multiplied(self, gemm: str, left: GemmOperand, right: GemmOperand) -> None:
        """Observe a GEMM (fprop, dgrad, wgrad) before it runs."""

    def finished(self, gemm: str, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Observe the result of the GEMM that `multiplied` announced, with its bias.

        An observer must not keep the tensors after the step.
        """


_GLOBAL_OBSERVERS: list[Observer] = []
"""Observers of all calls."""
_NO_VALUES = torch.empty(0)
"""Takes the place of an operand's values while autograd keeps them."""


@contextmanager
def observe_calls(observer: Observer) -> Iterator[None]:
    """Let an observer see every call in a ``with`` block, on all threads.

    The observer of a single call sees that call as well.
    """
    _GLOBAL_OBSERVERS.append(observer)
    try:
        yield
    finally:
        _GLOBAL_OBSERVERS.remove(observer)


@dataclass(kw_only=True, slots=True, eq=False)
class WeightCache:
    """A weight's operands, kept from the first microbatch of a step to the last."""

    row: GemmOperand | None = None
    column: GemmOperand | None = None

    def put(self, operand: GemmOperand) -> None:
        """Keep an operand; it is kept as both copies if these share their values."""
        if operand.columnwise or operand.spec.copies_share_values:
            self.column = operand
        if not operand.columnwise or operand.spec.copies_share_values:
            self.row = operand

    def clear(self) -> None:
        """Forget both copies."""
        self.row = self.column = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearCall:
    """The arguments of a call of `scaled_linear` that are not differentiable."""

    precision: GemmPrecision
    state: DelayedScaling | None = None
    """Scales and histories of delayed scaling, None for other schemes. The caller updates them."""
    cache: WeightCache | None = None
    """Cache of the weight's operands between microbatches."""
    first_microbatch: bool = True
    """Whether the weight is quantised and put into the cache, or read from the cache."""
    stored_weight: Quantised | None = None
    """Codes and scales of a stored weight, quantised by `precision.spec("weight")`."""
    observer: Observer | None = None
    """Gets every operand and GEMM."""
    after_backward: Callable[[], None] | None = None
    """Called once the backward pass of this call is done."""

    def require_matching_state(self) -> None:
        """Refuse a state or a stored weight that does not fit the precision.

        Raises:
            PrecisionTypeError: Delayed scaling has no state, another scheme has a state, or the
                stored weight is quantised in another way.
        """
        scheme, stored = self.precision.scheme, self.stored_weight
        if (self.state is not None) != (scheme == "delayed"):
            kind = type(self.state).__name__
            raise PrecisionTypeError(
                f"state: delayed scaling keeps state, and no other scheme does, got {kind} for "
                f"{scheme}. Give delayed a DelayedScaling."
            )
        if stored is not None and stored.spec != self.precision.spec("weight"):
            raise PrecisionTypeError(
                "stored_weight: must be quantised by the recipe's own rule, got "
                f'{stored.spec!r}. Quantise it with precision.spec("weight").'
            )

    def operand(self, x_MK: torch.Tensor, role: str, *, columnwise: bool = False) -> GemmOperand:
        """Quantise input or grad_output."""
        scale = None
        if self.state is not None:
            scale = self.state.get_scale(role)
        spec = self.precision.spec(role)
        made = make_operand(x_MK, spec, role, columnwise=columnwise, scale=scale)
        self._report_operand(x_MK, made)
        return made

    def make_weight_operand(
        self, w_NK: torch.Tensor, *, columnwise: bool = False, scale: float | None = None
    ) -> GemmOperand:
        """Return the weight's operand: cached, decoded from stored codes, or quantised now.

        Args:
            w_NK: The weight.
            columnwise: Which copy is returned. The backward pass reads the column-wise copy.
            scale: Scale of the forward pass, for the backward pass.
        """
        cache = self.cache
        if cache is not None:
            if self.first_microbatch and not columnwise:
                cache.clear()
            cached = cache.row
            if columnwise:
                cached = cache.column
            if cached is not None:
                return cached
        if self.stored_weight is not None:
            made = make_stored_operand(self.stored_weight, "weight", columnwise=columnwise)
        else:
            if scale is None and self.state is not None:
                scale = self.state.get_scale("weight")
            spec = self.precision.spec("weight")
            made = make_operand(w_NK, spec, "weight", columnwise=columnwise, scale=scale)
            self._report_operand(w_NK, made, record=not columnwise)
        if cache is not None:
            cache.put(made)
        return made

    def get_backward_weight(
        self, w_NK: torch.Tensor, dtype: torch.dtype, scale: float | None
    ) -> torch.Tensor:
        """Return the weight that dgrad multiplies under a `backward_override`.

        It is the original or the dequantised weight. A stored weight has no original: it is
        dequantised, and `w_NK` is not read.
        """
        if self.stored_weight is not None:
            return dequantise_operand(make_stored_operand(self.stored_weight, "weight"), dtype)
        if self.precision.backward_override == "high_precision":
            return w_NK.to(dtype)
        row = None
        if self.cache is not None:
            row = self.cache.row
        if row is None:
            row = make_operand(w_NK, self.precision.spec("weight"), "weight", scale=scale)
        return dequantise_operand(row, dtype)

    def multiply(
        self, gemm: str, left: GemmOperand, right: GemmOperand, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a GEMM, and show it to the observers."""
        observers = self._list_observers()
        for observer in observers:
            observer.multiplied(gemm, left, right)
        out = multiply_operands(gemm, left, right, bias)
        for observer in observers:
            observer.finished(gemm, out, bias)
        return out

    def _list_observers(self) -> list[Observer]:
        """Return the observers of this call: its own, and those of all calls."""
        if self.observer is None:
            return _GLOBAL_OBSERVERS
        return [self.observer, *_GLOBAL_OBSERVERS]

    def _report_operand(
        self, source: torch.Tensor, made: GemmOperand, *, record: bool = True
    ) -> None:
        """Record the amax of a new operand for delayed scaling, and show it to the observers."""
        if self.state is not None and made.amax is not None and record:
            self.state.record(made.role, made.amax)
        for observer in self._list_observers():
            observer.quantised(source, made)


class ScaledLinearFunction(torch.autograd.Function):
    """The three GEMMs as a differentiable function, which `scaled_linear` calls."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LinearCall
    ) -> torch.Tensor:
        """Compute y = x w^T + bias and keep the operands of the backward pass."""
        x_MK = as_matrix(x)
        x_row = call.operand(x_MK, "input")
        w_row = call.make_weight_operand(weight)
        y_MN = call.multiply("fprop", x_row, w_row, bias)
        ctx.call, ctx.x_shape, ctx.x_dtype = call, x.shape, x.dtype
        ctx.weight_scale, ctx.weight_dtype = w_row.scale, weight.dtype
        kept_input = kept_weight = None
        if ctx.needs_input_grad[1]:
            kept_input = _choose_saved_input(ctx, x_MK, x_row)
        if ctx.needs_input_grad[0] and call.stored_weight is None:
            kept_weight = weight
        ctx.save_for_backward(kept_input, kept_weight)
        return y_MN.to(x.dtype).view(*x.shape[:-1], y_MN.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of x, weight and bias."""
        call: LinearCall = ctx.call
        x_values, weight = ctx.saved_tensors
        dy_MN = as_matrix(grad_output)
        dx = dw_NK = db_N = None
        dy_row = None
        if call.precision.backward_override is not None:
            dx, dw_NK = _compute_high_precision_grads(ctx, dy_MN, x_values, weight)
        elif ctx.needs_input_grad[0]:
            dy_row = call.operand(dy_MN, "grad_output")
            w_col = call.make_weight_operand(weight, columnwise=True, scale=ctx.weight_scale)
            dx = call.multiply("dgrad", dy_row, w_col).to(ctx.x_dtype).view(ctx.x_shape)
            del w_col
        if ctx.needs_input_grad[1] and call.precision.backward_override is None:
            dy_col = None
            if call.precision.spec("grad_output").copies_share_values:
                dy_col = dy_row
            dy_row = None  # freed before a second copy is made
            if dy_col is None:
                dy_col = call.operand(dy_MN, "grad_output", columnwise=True)
            x_col = replace(ctx.x_col, values=x_values)
            dw_NK = call.multiply("wgrad", dy_col, x_col).to(ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            db_N = dy_MN.sum(0)
        if call.after_backward is not None:
            call.after_backward()
        return dx, dw_NK, db_N, None


def _choose_saved_input(ctx: Any, x_MK: torch.Tensor, x_row: GemmOperand) -> torch.Tensor:
    """Return the matrix that the backward pass needs of the input, and put its factor into `ctx`."""
    call: LinearCall = ctx.call
    override = call.precision.backward_override
    if override == "high_precision":
        return x_MK
    if override is not None:
        ctx.x_factor = compute_operand_factor(x_row)
        return x_row.values
    x_col = x_row
    if not x_row.spec.copies_share_values:
        x_col = call.operand(x_MK, "input", columnwise=True)
    ctx.x_col = replace(x_col, columnwise=True, values=_NO_VALUES)
    return x_col.values


def dequantise_operand(operand: GemmOperand, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that an operand stands for, rounded to a dtype."""
    return (operand.values.float() * compute_operand_factor(operand)).to(dtype)


def _compute_high_precision_grads(
    ctx: Any, dy_MN: torch.Tensor, x_values: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x and weight under a `backward_override`.

    The GEMMs multiply in the dtype of x. `x_values` and `weight` are the tensors that the forward
    pass kept; a tensor that no gradient needs is None.

    Source: Transformer Engine 2.20 pytorch/module/linear.py, `weight_for_dgrad` and
        `inputmat_total`.
    """
    call: LinearCall = ctx.call
    dtype = ctx.x_dtype
    dx = dw_NK = None
    if ctx.needs_input_grad[0]:
        w_NK = call.get_backward_weight(weight, dtype, ctx.weight_scale)
        dx = torch.mm(dy_MN.to(dtype), w_NK).view(ctx.x_shape)
    if ctx.needs_input_grad[1]:
        x_MK = x_values
        if call.precision.backward_override == "dequantized":
            x_MK = x_values.float() * ctx.x_factor
        dw_NK = torch.mm(dy_MN.to(dtype).T, x_MK.to(dtype)).to(ctx.weight_dtype)
    return dx, dw_NK


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    precision: GemmPrecision,
    state: DelayedScaling | None = None,
    cache: WeightCache | None = None,
    first_microbatch: bool = True,
    stored_weight: Quantised | None = None,
    observer: Observer | None = None,
    after_backward: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Return x w^T + bias, with all three GEMMs in low precision.

    `LinearCall` describes the arguments that have a name only.

    Args:
        x: (..., K) FP32, BF16 or FP16; cast to autocast's dtype first where autocast is on.
        weight: (N, K). Gets a gradient in its own dtype. With `stored_weight` its values are not
            read.
        bias: (N,), added to the FP32 product.
        precision: Recipe of the three GEMMs.
        state: Scales and histories, under delayed scaling alone.
        cache: Cache of the weight's operands.
        first_microbatch: Whether the weight is quantised and put into the cache, or read from it.
        stored_weight: Codes and scales of a stored weight.
        observer: Gets every operand and GEMM.
        after_backward: Called once the backward pass of this call is done.

    Returns:
        (..., N) in the dtype of x. NaN reaches the result in all FP8 schemes, and infinity saturates
        as in Transformer Engine; `quantise.py` has the table.

    Raises:
        PrecisionTypeError: The state or the stored weight does not fit the precision.
    """
    call = LinearCall(
        precision=precision,
        state=state,
        cache=cache,
        first_microbatch=first_microbatch,
        stored_weight=stored_weight,
        observer=observer,
        after_backward=after_backward,
    )
    call.require_matching_state()
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(x.device.type))
    result: torch.Tensor = ScaledLinearFunction.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
    return result
