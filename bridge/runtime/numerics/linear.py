# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""`scaled_linear`: a linear layer whose three GEMMs run in low precision, as a `LinearCall` states.

    forward    x_row, w_row  -> y_MN  = x w^T          keep x_col for the backward pass
    backward   dy_row, w_col -> dx_MK = dy w
               dy_col, x_col -> dw_NK = dy^T x

`_row` and `_col` are the row-wise and the column-wise copy of a tensor. The row of a scheme in
`bridge.precision.schemes` has format and tile of each copy.

A BF16 layer keeps x for the backward pass. Here the forward pass keeps the column-wise operand of x
instead, a BF16 matrix of the same size. The weight is not kept a second time. The backward pass
rounds it again. Under a scheme with a single scale it uses the scale of the forward pass. A
`WeightCache` keeps the weight's operands from micro-batch to micro-batch.

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
from bridge.runtime.numerics.gemm import multiply_operands
from bridge.runtime.numerics.operand import GemmOperand, make_operand, make_stored_operand
from bridge.runtime.numerics.quantise import as_matrix
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.spec import GemmPrecision


class Observer:
    """Base class of observers of operands and GEMMs. It does nothing.

    Telemetry and the audit derive from it.
    """

    def after_quantisation(self, source: torch.Tensor, operand: GemmOperand) -> None:
        """Observe an operand and the high-precision matrix from which it was made.

        An observer must not keep the tensors.
        """

    def before_gemm(self, gemm: str, left: GemmOperand, right: GemmOperand) -> None:
        """Observe a GEMM (fprop, dgrad, wgrad) before it runs."""

    def after_gemm(self, gemm: str, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Observe the result of the GEMM that `before_gemm` announced, with its bias.

        An observer must not keep the tensors after the step.
        """


_GLOBAL_OBSERVERS: list[Observer] = []
"""Observers of all calls."""
_NO_VALUES = torch.empty(0)
"""Replaces an operand's values while autograd keeps them."""


@contextmanager
def observe_calls(observer: Observer) -> Iterator[None]:
    """Let an observer see every call in a ``with`` block, on all threads.

    A call with a `LinearCall.observer` reports to both.
    """
    _GLOBAL_OBSERVERS.append(observer)
    try:
        yield
    finally:
        _GLOBAL_OBSERVERS.remove(observer)


@dataclass(kw_only=True, slots=True, eq=False)
class WeightCache:
    """A weight's operands, kept from the first micro-batch of a step to the last."""

    rowwise: GemmOperand | None = None
    columnwise: GemmOperand | None = None

    def get(self, *, columnwise: bool) -> GemmOperand | None:
        """Return the row-wise or the column-wise operand, or None if it is not kept."""
        if columnwise:
            return self.columnwise
        return self.rowwise

    def put(self, operand: GemmOperand) -> None:
        """Keep an operand. It is kept as both copies if these have the same values."""
        if operand.columnwise or operand.spec.copies_share_values:
            self.columnwise = operand
        if not operand.columnwise or operand.spec.copies_share_values:
            self.rowwise = operand

    def clear(self) -> None:
        """Drop both copies."""
        self.rowwise = None
        self.columnwise = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearCall:
    """The precision of one call of `scaled_linear`, and all other arguments except its tensors.

    Its methods make the operands of the call, run its GEMMs, and report both to the observers.
    """

    precision: GemmPrecision
    """Recipe of the three GEMMs."""
    state: DelayedScaling | None = None
    """Scales and histories of delayed scaling. None: another scheme. The caller updates them."""
    cache: WeightCache | None = None
    """Cache of the weight's operands between micro-batches. None: no cache."""
    first_microbatch: bool = True
    """Whether the weight is quantised and put into the cache, or read from the cache."""
    stored_weight: Quantised | None = None
    """Codes and scales of a stored weight, quantised by `precision.spec("weight")`."""
    observer: Observer | None = None
    """Observer of the operands and GEMMs of this call."""
    after_backward: Callable[[], None] | None = None
    """Called after the backward pass of this call."""

    def require_matching_state(self) -> None:
        """Refuse a state or a stored weight that does not fit the precision.

        Raises:
            PrecisionTypeError: Delayed scaling has no state, another scheme has a state, or the
                stored weight is quantised by another rule.
        """
        scheme = self.precision.scheme
        if (self.state is not None) != (scheme == "delayed"):
            kind = type(self.state).__name__
            raise PrecisionTypeError(
                f"state: delayed scaling keeps state, and no other scheme does, got {kind} for "
                f"{scheme}. Give delayed a DelayedScaling."
            )
        stored = self.stored_weight
        if stored is not None and stored.spec != self.precision.spec("weight"):
            raise PrecisionTypeError(
                "stored_weight: must be quantised by the recipe's own rule, got "
                f'{stored.spec!r}. Quantise it with precision.spec("weight").'
            )

    def make_activation_operand(
        self, x_MK: torch.Tensor, role: str, *, columnwise: bool = False
    ) -> GemmOperand:
        """Return the operand of the input or of the gradient of the output, quantised now.

        Args:
            x_MK: FP32, BF16 or FP16.
            role: input or grad_output.
            columnwise: Whether the column-wise copy is made.
        """
        tensor_scale = None
        if self.state is not None:
            tensor_scale = self.state.get_scale(role)
        spec = self.precision.spec(role)
        operand = make_operand(x_MK, spec, role, columnwise=columnwise, tensor_scale=tensor_scale)
        self._record_amax(operand)
        self._report_operand(x_MK, operand)
        return operand

    def make_weight_operand(
        self,
        w_NK: torch.Tensor | None,
        *,
        columnwise: bool = False,
        tensor_scale: float | None = None,
    ) -> GemmOperand:
        """Return the weight's operand: cached, decoded from stored codes, or quantised now.

        Args:
            w_NK: The weight. None: a stored weight.
            columnwise: Whether the column-wise copy is returned. fprop reads the row-wise copy, and
                dgrad the column-wise copy.
            tensor_scale: Scale of the forward pass, for the backward pass. None: the forward pass.
        """
        if self.cache is not None:
            if self.first_microbatch and not columnwise:
                self.cache.clear()
            cached = self.cache.get(columnwise=columnwise)
            if cached is not None:
                return cached
        if self.stored_weight is not None:
            operand = make_stored_operand(self.stored_weight, "weight", columnwise=columnwise)
        else:
            plain_NK = _require_plain_weight(w_NK)
            operand = self._quantise_weight(
                plain_NK, columnwise=columnwise, tensor_scale=tensor_scale
            )
        if self.cache is not None:
            self.cache.put(operand)
        return operand

    def _quantise_weight(
        self, w_NK: torch.Tensor, *, columnwise: bool, tensor_scale: float | None
    ) -> GemmOperand:
        """Return the weight's operand, quantised now. `make_weight_operand` has the arguments."""
        if tensor_scale is None and self.state is not None:
            tensor_scale = self.state.get_scale("weight")
        spec = self.precision.spec("weight")
        operand = make_operand(
            w_NK, spec, "weight", columnwise=columnwise, tensor_scale=tensor_scale
        )
        if not columnwise:  # the forward pass has recorded the amax already
            self._record_amax(operand)
        self._report_operand(w_NK, operand)
        return operand

    def get_backward_weight(
        self, w_NK: torch.Tensor | None, dtype: torch.dtype, tensor_scale: float | None
    ) -> torch.Tensor:
        """Return the weight that dgrad multiplies under a `backward_override`, (N, K).

        It is the original or the dequantised weight. A stored weight has no original and is
        dequantised.

        Args:
            w_NK: The weight. None: a stored weight.
            dtype: Dtype of the result.
            tensor_scale: Scale of the forward pass. None: the scheme has a scale per tile.
        """
        if self.stored_weight is not None:
            return make_stored_operand(self.stored_weight, "weight").dequantise(dtype)
        plain_NK = _require_plain_weight(w_NK)
        if self.precision.backward_override == "high_precision":
            return plain_NK.to(dtype)
        w_row = None
        if self.cache is not None:
            w_row = self.cache.get(columnwise=False)
        if w_row is None:
            spec = self.precision.spec("weight")
            w_row = make_operand(plain_NK, spec, "weight", tensor_scale=tensor_scale)
        return w_row.dequantise(dtype)

    def multiply(
        self, gemm: str, left: GemmOperand, right: GemmOperand, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a GEMM like `multiply_operands`, and report it to the observers."""
        observers = self._list_observers()
        for observer in observers:
            observer.before_gemm(gemm, left, right)
        out = multiply_operands(gemm, left, right, bias)
        for observer in observers:
            observer.after_gemm(gemm, out, bias)
        return out

    def _list_observers(self) -> list[Observer]:
        """Return the observer of this call, if there is one, and the observers of all calls."""
        if self.observer is None:
            return _GLOBAL_OBSERVERS
        return [self.observer, *_GLOBAL_OBSERVERS]

    def _record_amax(self, operand: GemmOperand) -> None:
        """Record the amax of a new operand for delayed scaling."""
        if self.state is not None and operand.amax is not None:
            self.state.record(operand.role, operand.amax)

    def _report_operand(self, source: torch.Tensor, operand: GemmOperand) -> None:
        """Report a new operand and its source to the observers."""
        for observer in self._list_observers():
            observer.after_quantisation(source, operand)


def _require_plain_weight(w_NK: torch.Tensor | None) -> torch.Tensor:
    """Return the weight of a call without a stored weight, which autograd has kept."""
    if w_NK is None:
        raise PrecisionTypeError("weight: a call without stored_weight needs it, got None.")
    return w_NK


class ScaledLinearFunction(torch.autograd.Function):
    """The three GEMMs as a differentiable function, which `scaled_linear` calls."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LinearCall
    ) -> torch.Tensor:
        """Compute y = x w^T + bias, and keep the tensors of the backward pass."""
        x_MK = as_matrix(x)
        x_row = call.make_activation_operand(x_MK, "input")
        w_row = call.make_weight_operand(weight)
        y_MN = call.multiply("fprop", x_row, w_row, bias)
        ctx.call, ctx.x_shape, ctx.x_dtype = call, x.shape, x.dtype
        ctx.weight_scale, ctx.weight_dtype = w_row.tensor_scale, weight.dtype
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
        if call.precision.backward_override is None:
            dx, dw_NK = _compute_low_precision_grads(ctx, dy_MN, x_values, weight)
        else:
            dx, dw_NK = _compute_high_precision_grads(ctx, dy_MN, x_values, weight)
        db_N = None
        if ctx.needs_input_grad[2]:
            db_N = dy_MN.sum(0)
        if call.after_backward is not None:
            call.after_backward()
        return dx, dw_NK, db_N, None


def _choose_saved_input(ctx: Any, x_MK: torch.Tensor, x_row: GemmOperand) -> torch.Tensor:
    """Return the matrix of the input that the backward pass needs.

    It is the input itself, or the values of an operand. Autograd keeps only the values, so the rest
    of the operand is put into `ctx`.
    """
    call: LinearCall = ctx.call
    override = call.precision.backward_override
    if override == "high_precision":
        return x_MK
    if override == "dequantized":
        x_operand = x_row
    elif x_row.spec.copies_share_values:
        x_operand = replace(x_row, columnwise=True)
    else:
        x_operand = call.make_activation_operand(x_MK, "input", columnwise=True)
    ctx.x_operand = replace(x_operand, values=_NO_VALUES)
    return x_operand.values


def _compute_low_precision_grads(
    ctx: Any, dy_MN: torch.Tensor, x_values: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x and weight by GEMMs in low precision.

    Args:
        ctx: The context that the forward pass has filled.
        dy_MN: Gradient of the output.
        x_values: (M, K) BF16, values of the column-wise operand of x, for dw.
        weight: (N, K), for dx. None: a stored weight.

    Returns:
        dx in the shape and dtype of x, and dw_NK in the dtype of the weight. A gradient is None if
        it is not needed.
    """
    call: LinearCall = ctx.call
    dx = dw_NK = None
    dy_row = None
    if ctx.needs_input_grad[0]:
        dy_row = call.make_activation_operand(dy_MN, "grad_output")
        w_col = call.make_weight_operand(weight, columnwise=True, tensor_scale=ctx.weight_scale)
        dx = call.multiply("dgrad", dy_row, w_col).to(ctx.x_dtype).view(ctx.x_shape)
        del w_col  # freed before the next operand is made
    if ctx.needs_input_grad[1]:
        dy_col = None
        if call.precision.spec("grad_output").copies_share_values:
            dy_col = dy_row
        dy_row = None  # freed before a second copy is made
        if dy_col is None:
            dy_col = call.make_activation_operand(dy_MN, "grad_output", columnwise=True)
        x_col = replace(ctx.x_operand, values=x_values)
        dw_NK = call.multiply("wgrad", dy_col, x_col).to(ctx.weight_dtype)
    return dx, dw_NK


def _compute_high_precision_grads(
    ctx: Any, dy_MN: torch.Tensor, x_values: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x and weight under a `backward_override`.

    The GEMMs multiply in the dtype of x. Arguments and results are the same as for
    `_compute_low_precision_grads`, except `x_values`. They are the input itself under
    high_precision, and the values of its row-wise operand under dequantized.

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
        if call.precision.backward_override == "dequantized":
            x_MK = replace(ctx.x_operand, values=x_values).dequantise(dtype)
        else:
            x_MK = x_values.to(dtype)
        dw_NK = torch.mm(dy_MN.to(dtype).T, x_MK).to(ctx.weight_dtype)
    return dx, dw_NK


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    call: LinearCall,
) -> torch.Tensor:
    """Return x w^T + bias, with all three GEMMs in low precision.

    Args:
        x: (..., K) FP32, BF16 or FP16. If autocast is on, it is cast to autocast's dtype first.
        weight: (N, K). Its gradient has the same dtype. With `call.stored_weight` its values are
            not read.
        bias: (N,), added to the FP32 product. None: no bias.
        call: Precision, state and cache of this call.

    Returns:
        (..., N) in the dtype of x. NaN reaches the result in all FP8 schemes, and infinity
        saturates as in Transformer Engine. `quantise.py` has the table.

    Raises:
        PrecisionTypeError: The state or the stored weight does not fit the precision.
    """
    call.require_matching_state()
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(x.device.type))
    result: torch.Tensor = ScaledLinearFunction.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
    return result
