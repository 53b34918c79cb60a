"""The three GEMMs and their gradients, what is kept between them, and how much memory they take."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bridge.errors import PrecisionConfigError, PrecisionTypeError
from bridge.runtime.numerics import (
    DelayedScaling,
    GemmOperand,
    GemmPrecision,
    LinearCall,
    Observer,
    WeightCache,
    make_operand,
    make_stored_operand,
    quantise,
    scaled_linear,
    use,
)
from bridge.runtime.numerics.gemm import compute_output_factor

FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3", "nvfp4": "e2m1"}


def precision(scheme: str) -> GemmPrecision:
    return GemmPrecision(scheme=scheme, format=FORMATS[scheme])


def state_of(scheme: str) -> DelayedScaling | None:
    return DelayedScaling(precision(scheme)) if scheme == "delayed" else None


def tensors(m: int = 64, k: int = 96, n: int = 80, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(m, k).to(dtype).requires_grad_()
    w = (torch.randn(n, k) * 0.1).to(dtype).requires_grad_()
    return x, w, (torch.randn(m, n) * 1e-3).to(dtype)


def results(
    x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, scheme: str, **options: Any
) -> tuple[torch.Tensor, ...]:
    options.setdefault("state", state_of(scheme))
    torch.manual_seed(5)  # of stochastic rounding
    y = scaled_linear(x, w, call=LinearCall(precision=precision(scheme), **options))
    return (y.detach(), *torch.autograd.grad(y, (x, w), dy))


def wide(operand: GemmOperand) -> torch.Tensor:
    """Return values and factor of an operand multiplied in FP64."""
    factor = operand.factor
    if operand.nvfp4_amax is not None:
        factor = operand.nvfp4_amax / 2688  # the factor is rounded to FP32
    return operand.values.double() * factor


@pytest.mark.parametrize("scheme", FORMATS)
def test_results_are_products_of_the_operands_the_scheme_prescribes(scheme: str, path: str) -> None:
    x, w, dy = tensors()
    p, state = precision(scheme), state_of(scheme)
    generator = torch.Generator().manual_seed(5)

    def operand(tensor: torch.Tensor, role: str, columnwise: bool = False) -> torch.Tensor:
        scale = None if state is None else state.get_scale(role)
        options = {"columnwise": columnwise, "tensor_scale": scale, "generator": generator}
        return wide(make_operand(tensor.detach(), p.spec(role), role, **options))

    y, dx, dw = results(x, w, dy, scheme)
    wanted = [
        operand(x, "input") @ operand(w, "weight").T,
        operand(dy, "grad_output") @ operand(w, "weight", columnwise=True),
    ]
    if p.spec("grad_output").copies_share_values:
        wanted.append(operand(dy, "grad_output").T @ operand(x, "input", columnwise=True))
    else:
        wanted.append(operand(dy, "grad_output", columnwise=True).T @ operand(x, "input", columnwise=True))
    for found, product in zip((y, dx, dw), wanted, strict=True):
        assert found.dtype == torch.bfloat16
        error = (found.double() - product).abs()
        assert (error <= product.abs() * 2**-8 + product.abs().max() * 2**-20).all()


def test_the_factor_is_applied_to_the_fp32_sum_and_rounded_once(path: str) -> None:
    torch.manual_seed(0)
    x = torch.randint(-16, 17, (32, 32)).bfloat16()
    w = torch.randint(-16, 17, (48, 32)).bfloat16()
    p = GemmPrecision(scheme="tensorwise")
    left, right = (make_operand(t, p.spec(role), role) for t, role in ((x, "input"), (w, "weight")))
    exact = left.values.double() @ right.values.double().T  # integers below 2^24: exact in FP32 in any order
    factor = compute_output_factor(left, right)
    wanted = (exact.float() * factor).bfloat16()
    assert torch.equal(scaled_linear(x, w, call=LinearCall(precision=p)), wanted)
    twice = (exact.bfloat16() * factor).bfloat16()
    assert not torch.equal(wanted, twice)


@pytest.mark.parametrize("scheme", FORMATS)
def test_both_implementations_give_the_same_bits(scheme: str, both_paths: tuple[str, str]) -> None:
    x, w, dy = tensors(70, 130, 50)
    found = []
    for path in both_paths:
        use(path)
        found.append(results(x, w, dy, scheme))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_get_results_and_gradients_in_their_own(scheme: str, dtype: torch.dtype, path: str) -> None:
    x, w, dy = tensors(dtype=dtype)
    y, dx, dw = results(x.view(4, 16, 96), w, dy.view(4, 16, 80), scheme)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype,) * 3
    assert y.shape == (4, 16, 80)
    plain = torch.nn.functional.linear(x.float(), w.float())
    limit = {"nvfp4": 0.2, "delayed": 0.08}.get(scheme, 0.05)
    assert (y.view(64, 80).float() - plain).norm() < limit * plain.norm()


@pytest.mark.parametrize("scheme", FORMATS)
def test_gradients_are_only_computed_where_asked_for(scheme: str) -> None:
    x, w, dy = tensors()
    _, dx, dw = results(x, w, dy, scheme)
    state = state_of(scheme)
    torch.manual_seed(5)
    frozen = scaled_linear(x, w.detach(), call=LinearCall(precision=precision(scheme), state=state))
    assert torch.equal(torch.autograd.grad(frozen, x, dy)[0], dx)
    first = scaled_linear(x.detach(), w, call=LinearCall(precision=precision(scheme), state=state_of(scheme)))
    (alone,) = torch.autograd.grad(first, w, dy)
    if scheme != "nvfp4":  # whose gradient is rounded with other random numbers
        assert torch.equal(alone, dw)


def test_bias_is_added_before_the_result_is_rounded_and_gets_its_gradient() -> None:
    x, w, dy = tensors()
    bias = torch.randn(80).bfloat16().requires_grad_()
    p = precision("tensorwise")
    y = scaled_linear(x, w, bias, call=LinearCall(precision=p))
    x_row, w_row = (make_operand(one, p.spec(role), role) for one, role in ((x, "input"), (w, "weight")))
    exact = x_row.values.double() @ w_row.values.double().T * compute_output_factor(x_row, w_row) + bias
    assert (y == exact.bfloat16()).float().mean() > 0.999
    assert (
        scaled_linear(x, w, call=LinearCall(precision=p)) + bias == exact.bfloat16()
    ).float().mean() < 0.99  # rounded twice
    (db,) = torch.autograd.grad(y, bias, dy)
    assert torch.equal(db, dy.sum(0))


@pytest.mark.parametrize("scheme", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("where", ["x", "w", "dy"])
def test_nan_reaches_every_result_it_takes_part_in(scheme: str, where: str, path: str) -> None:
    named = dict(zip(("x", "w", "dy"), (t.detach().clone() for t in tensors()), strict=True))
    named[where][3, 5] = math.nan
    x, w = named["x"].requires_grad_(), named["w"].requires_grad_()
    y, dx, dw = results(x, w, named["dy"], scheme)
    shown = {"x": (y[3], dw[:, 5]), "w": (y[:, 3], dx[:, 5]), "dy": (dx[3], dw[5])}[where]
    assert all(result.isnan().all() for result in shown)
    others = {"x": dx, "w": dw, "dy": y}[where]
    assert others.isfinite().all()


@pytest.mark.parametrize("scheme", ["delayed", "tensorwise", "blockwise"])
def test_infinity_saturates_as_in_transformer_engine(scheme: str, path: str) -> None:
    x, w, dy = (t.detach().clone() for t in tensors())
    x[3, 5] = math.inf
    y, _, _ = results(x.requires_grad_(), w.requires_grad_(), dy, scheme)
    assert y.isfinite().all()


def test_infinity_shows_in_the_result_of_nvfp4(path: str) -> None:
    x, w, dy = (t.detach().clone() for t in tensors())
    x[3, 5] = math.inf
    y, _, _ = results(x.requires_grad_(), w.requires_grad_(), dy, "nvfp4")
    assert not y.isfinite().any()


@pytest.mark.parametrize("scheme", ["blockwise", "mxfp8"])
@pytest.mark.parametrize(("x_log2", "w_log2"), [(-118, 118), (127, -100), (-118, 30), (100, -100)])
def test_tensors_at_the_ends_of_the_exponent_range_are_multiplied_exactly(
    scheme: str, x_log2: int, w_log2: int, path: str
) -> None:
    x, w, _ = (t.detach().float() for t in tensors())
    x = (x / x.abs().max() * 1.94).bfloat16().float()
    middle = scaled_linear(x, w, call=LinearCall(precision=precision(scheme)))
    outer = scaled_linear(x * 2.0**x_log2, w * 2.0**w_log2, call=LinearCall(precision=precision(scheme)))
    assert torch.equal(outer, middle * 2.0 ** (x_log2 + w_log2))


@pytest.mark.parametrize("scheme", [name for name in FORMATS if name != "delayed"])
def test_stored_codes_serve_as_the_weight(scheme: str, path: str) -> None:
    x, w, dy = tensors()
    stored = quantise(w, precision(scheme).spec("weight"))
    handle = torch.empty(1, dtype=torch.bfloat16).expand(w.shape).requires_grad_()
    plain, from_codes = results(x, w, dy, scheme), results(x, handle, dy, scheme, stored_weight=stored)
    assert all(torch.equal(a, b) for a, b in zip(plain, from_codes, strict=True))


@pytest.mark.parametrize("scheme", [name for name in FORMATS if name != "delayed"])
def test_stored_operands_equal_fresh_ones(scheme: str, path: str) -> None:
    w = torch.randn(50, 70).bfloat16()
    spec = precision(scheme).spec("weight")
    stored = quantise(w, spec)
    for columnwise in (False, True):
        fresh = make_operand(w, spec, "weight", columnwise=columnwise)
        decoded = make_stored_operand(stored, "weight", columnwise=columnwise)
        assert torch.equal(wide(fresh), wide(decoded))


@pytest.mark.parametrize("scheme", FORMATS)
def test_the_factor_gives_the_dequantised_tensor_under_every_scheme(scheme: str, path: str) -> None:
    w = torch.randn(64, 96).bfloat16() * 3e-3
    spec = precision(scheme).spec("weight")
    scale = 100.0 if scheme == "delayed" else None
    stored = quantise(w, spec, tensor_scale=scale)
    for columnwise in (False, True):
        expected = stored.dequantise(torch.float32, columnwise=columnwise)
        fresh = make_operand(w, spec, "weight", columnwise=columnwise, tensor_scale=scale)
        decoded = make_stored_operand(stored, "weight", columnwise=columnwise)
        for operand in (fresh, decoded):
            # NVFP4's three factors are rounded in another order.
            torch.testing.assert_close(operand.dequantise(torch.float32), expected, rtol=2**-22, atol=0)


def test_kernel_and_torch_decode_every_code_in_every_layout_alike(both_paths: tuple[str, str]) -> None:
    formats = [("tensorwise", "hybrid"), ("blockwise", "hybrid"), ("mxfp8", "e5m2"), ("nvfp4", "e2m1")]
    for (scheme, number_format), shape, gain in itertools.product(
        formats, [(1, 1), (17, 33), (300, 5), (64, 257)], [1e-38, 1.0]
    ):
        for role in ("input", "weight", "grad_output"):
            stored = quantise(torch.randn(shape) * gain, GemmPrecision(scheme=scheme, format=number_format).spec(role))
            for codes in (stored.codes, stored.codes_t):
                if codes is not None and stored.spec.format != "e2m1":
                    codes.random_(256)  # all of them, with infinity and each NaN
            for held, columnwise in ((stored, False), (stored, True), (replace(stored, codes=None), True)):
                found = []
                for path in both_paths:
                    use(path)
                    found.append(make_stored_operand(held, role, columnwise=columnwise))
                assert found[0].factor == found[1].factor
                torch.testing.assert_close(found[0].values, found[1].values, rtol=0, atol=0, equal_nan=True)


class Counter(Observer):
    """An observer that remembers what it saw."""

    def __init__(self) -> None:
        self.operands: list[tuple[str, bool]] = []
        self.gemms: list[tuple[str, str, str]] = []

    def after_quantisation(self, source: torch.Tensor, operand: GemmOperand) -> None:
        assert source.shape[1] == operand.values.shape[1]
        self.operands.append((operand.role, operand.columnwise))

    def before_gemm(self, gemm: str, left: GemmOperand, right: GemmOperand) -> None:
        self.gemms.append((gemm, f"{left.role} {left.spec.format}", f"{right.role} {right.spec.format}"))


def test_an_observer_sees_every_operand_and_gemm() -> None:
    x, w, dy = tensors()
    seen = Counter()
    results(x, w, dy, "tensorwise", observer=seen)
    assert seen.gemms == [
        ("fprop", "input e4m3", "weight e4m3"),
        ("dgrad", "grad_output e5m2", "weight e4m3"),
        ("wgrad", "grad_output e5m2", "input e4m3"),
    ]
    assert seen.operands == [("input", False), ("weight", False), ("grad_output", False), ("weight", True)]
    seen = Counter()
    results(x, w, dy, "mxfp8", observer=seen)
    assert seen.operands.count(("input", True)) == seen.operands.count(("grad_output", True)) == 1


@pytest.mark.parametrize("scheme", FORMATS)
def test_a_cached_weight_is_quantised_once_per_step(scheme: str) -> None:
    x, w, dy = tensors()
    cache, seen, state = WeightCache(), Counter(), state_of(scheme)
    common = {"cache": cache, "observer": seen, "state": state}
    plain = results(x, w, dy, scheme)
    first = results(x, w, dy, scheme, first_microbatch=True, **common)
    copies = 1 if precision(scheme).spec("weight").copies_share_values else 2
    again = results(x, w, dy, scheme, first_microbatch=False, **common)
    assert sum(role == "weight" for role, _ in seen.operands) == copies
    for found in (first, again):
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    with torch.no_grad():
        w.mul_(2.0)
    stale = results(x, w, dy, scheme, first_microbatch=False, **common)
    assert torch.equal(stale[0], plain[0])
    fresh = results(x, w, dy, scheme, first_microbatch=True, **common)
    assert not torch.equal(fresh[0], plain[0])


def test_delayed_scales_of_the_forward_pass_serve_its_backward_pass(path: str) -> None:
    x, w, dy = tensors()
    state, other = state_of("delayed"), state_of("delayed")
    assert state is not None
    y = scaled_linear(x, w, call=LinearCall(precision=state.precision, state=state))
    state.update("forward")
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], results(x, w, dy, "delayed", state=other)[1])


def test_autocast_decides_the_dtype_of_the_result() -> None:
    x, w, _ = tensors(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = scaled_linear(x, w, call=LinearCall(precision=precision("tensorwise")))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 96)])
def test_no_tokens_give_no_output_and_zero_gradients(shape: tuple[int, ...]) -> None:
    _, w, _ = tensors()
    for scheme in FORMATS:
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        y, dx, dw = results(x, w, torch.empty(*shape[:-1], 80).bfloat16(), scheme)
        assert y.shape == (*shape[:-1], 80)
        assert dx.shape == shape
        assert not dw.any()


def test_recomputation_by_checkpointing_changes_nothing() -> None:
    x, w, dy = tensors()
    y, dx, dw = results(x, w, dy, "blockwise")
    again = torch.utils.checkpoint.checkpoint(
        lambda a: scaled_linear(a, w, call=LinearCall(precision=precision("blockwise"))), x, use_reentrant=False
    )
    assert torch.equal(again, y)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(again, (x, w), dy), (dx, dw), strict=True))


class Allocations(TorchDispatchMode):
    """Remembers the element counts of every FP32 tensor that an operator returns in memory of its own."""

    def __init__(self, own: list[torch.Tensor]) -> None:
        super().__init__()
        self.fp32 = 0
        self.own = {tensor.untyped_storage().data_ptr() for tensor in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            wide = isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.float64)
            if wide and tensor.untyped_storage().data_ptr() not in self.own:
                self.fp32 = max(self.fp32, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("scheme", FORMATS)
def test_no_fp32_copy_of_an_activation_or_weight_is_ever_held(scheme: str, path: str) -> None:
    x, w, dy = tensors(1024, 768, 768)
    with Allocations([x, w, dy]) as seen:
        results(x, w, dy, scheme)
    assert seen.fp32 * 2 <= min(x.numel(), w.numel(), dy.numel())  # a few rows at a time


@pytest.mark.parametrize("scheme", FORMATS)
def test_what_is_kept_for_the_backward_pass_is_one_bf16_operand_beside_the_weight(scheme: str) -> None:
    x, w, _ = tensors(64, 96, 80)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        scaled_linear(x, w, call=LinearCall(precision=precision(scheme), state=state_of(scheme)))
    own = [t for t in kept if t.data_ptr() != w.data_ptr()]
    assert [(t.dtype, t.numel()) for t in own] == [(torch.bfloat16, x.numel())]


def test_shapes_and_states_that_do_not_fit_are_refused() -> None:
    x, w, _ = tensors()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        scaled_linear(x, w.T, call=LinearCall(precision=precision("tensorwise")))
    with pytest.raises(PrecisionTypeError, match="keeps state, and no other scheme does, got NoneType for delayed"):
        scaled_linear(x, w, call=LinearCall(precision=precision("delayed")))
    with pytest.raises(PrecisionTypeError, match="got DelayedScaling for tensorwise"):
        scaled_linear(x, w, call=LinearCall(precision=precision("tensorwise"), state=state_of("delayed")))
    stored = quantise(w, precision("mxfp8").spec("weight"))
    with pytest.raises(PrecisionTypeError, match="must be quantised by the recipe's own rule"):
        scaled_linear(x, w, call=LinearCall(precision=precision("tensorwise"), stored_weight=stored))


BLOCK_AND_TENSOR = [scheme for scheme in FORMATS if scheme != "delayed"]


@pytest.mark.parametrize("scheme", BLOCK_AND_TENSOR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_backward_override_multiplies_the_tensors_that_it_names(scheme: str, dtype: torch.dtype) -> None:
    x, w, dy = tensors(dtype=dtype)
    plain = scaled_linear(x, w, call=LinearCall(precision=precision(scheme)))
    row_x = wide(make_operand(x.detach(), precision(scheme).spec("input"), "input")).float().to(dtype)
    row_w = wide(make_operand(w.detach(), precision(scheme).spec("weight"), "weight")).float().to(dtype)
    for override, (kept_x, kept_w) in {"high_precision": (x, w), "dequantized": (row_x, row_w)}.items():
        y = scaled_linear(x, w, call=LinearCall(precision=replace(precision(scheme), backward_override=override)))
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        assert torch.equal(y, plain)
        torch.testing.assert_close(dx, dy @ kept_w.detach(), rtol=1e-2 if scheme == "nvfp4" else 0, atol=0)
        torch.testing.assert_close(dw, dy.T @ kept_x.detach(), rtol=1e-2 if scheme == "nvfp4" else 0, atol=0)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_override_takes_cached_and_stored_weights(override: str) -> None:
    x, w, dy = tensors()
    own = replace(precision("tensorwise"), backward_override=override)
    cache = WeightCache()
    first = scaled_linear(x, w, call=LinearCall(precision=own, cache=cache))
    second = scaled_linear(x, w, call=LinearCall(precision=own, cache=cache, first_microbatch=False))
    assert torch.equal(torch.autograd.grad(first, x, dy)[0], torch.autograd.grad(second, x, dy)[0])
    stored = quantise(w.detach(), own.spec("weight"))
    (dx,) = torch.autograd.grad(scaled_linear(x, w, call=LinearCall(precision=own, stored_weight=stored)), x, dy)
    assert torch.equal(dx, dy @ stored.dequantise().to(dx.dtype))


def test_delayed_scaling_refuses_a_backward_override() -> None:
    with pytest.raises(PrecisionConfigError, match="backward_override: is refused by the recipe of delayed scaling"):
        GemmPrecision(scheme="delayed", backward_override="dequantized")
    with pytest.raises(PrecisionConfigError, match="must be high_precision or dequantized"):
        GemmPrecision(scheme="mxfp8", format="e4m3", backward_override="low")
