"""Widened 16-bit GEMMs: the right values, rounded once, and no trace afterwards."""

import importlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge.runtime.megatron.wide_gemm import WIDENED_OPERATORS, find_slow_dtypes, is_widened, widen_gemms

HALF = (torch.bfloat16, torch.float16)


def exact(a, b, dtype):
    """The product in float64, rounded once."""
    return (a.double() @ b.double()).to(dtype)


@given(
    m=st.integers(1, 9), k=st.integers(0, 40), n=st.integers(1, 9), seed=st.integers(0, 99), half=st.sampled_from(HALF)
)
def test_product_is_the_exact_one_rounded_once(m, k, n, seed, half):
    torch.manual_seed(seed)
    a, b = torch.randn(m, k).to(half), torch.randn(k, n).to(half)
    with widen_gemms(HALF):
        out = a @ b
    # FP32 accumulation may land on the other side of a rounding boundary: at most one step of the 16-bit type
    assert out.dtype == half
    step = exact(a, b, half).double().abs() * torch.finfo(half).eps + 1e-6
    assert ((out.double() - exact(a, b, half).double()).abs() <= step).all()


def test_small_integers_multiply_exactly():
    a = torch.randint(-8, 8, (16, 32)).to(torch.bfloat16)
    b = torch.randint(-8, 8, (32, 8)).to(torch.bfloat16)
    with widen_gemms(HALF):
        assert torch.equal(a @ b, exact(a, b, torch.bfloat16))


@pytest.mark.parametrize("half", HALF)
def test_every_operator_agrees_with_torch(half):
    torch.manual_seed(0)
    a, b, c = (torch.randn(3, 4, 4).to(half) for _ in range(3))
    calls = {
        "mm": lambda: torch.mm(a[0], b[0]),
        "bmm": lambda: torch.bmm(a, b),
        "addmm": lambda: torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2.0),
        "baddbmm": lambda: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0),
    }
    assert set(calls) == set(WIDENED_OPERATORS)
    plain = {name: call() for name, call in calls.items()}
    with widen_gemms(HALF):
        for name, call in calls.items():
            torch.testing.assert_close(call(), plain[name], rtol=2e-2, atol=2e-2)


def test_summand_is_not_read_with_beta_zero():
    nan = torch.full((2, 3, 3), float("nan"), dtype=torch.bfloat16)
    a = torch.ones(2, 3, 3, dtype=torch.bfloat16)
    with widen_gemms(HALF):
        assert torch.equal(torch.baddbmm(nan, a, a, beta=0.0, alpha=0.5), torch.full_like(a, 1.5))


def test_summand_of_another_shape_is_broadcast():
    a, bias = torch.ones(2, 3).bfloat16(), torch.arange(3).bfloat16()
    with widen_gemms(HALF):
        assert torch.equal(torch.addmm(bias, a, torch.ones(3, 3).bfloat16()), bias.expand(2, 3) + 3)


def test_fp16_overflow_is_infinite():
    a = torch.full((1, 4), 300.0, dtype=torch.float16)
    with widen_gemms(HALF):
        assert torch.isinf(a @ a.T).all()


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_special_values_pass_through(special):
    a = torch.tensor([[special, 1.0]]).bfloat16()
    with widen_gemms(HALF):
        out = a @ torch.ones(2, 1).bfloat16()
    assert torch.equal(torch.isnan(out), torch.isnan(a[:, :1]))
    assert not torch.isfinite(out).any()


def test_fp32_keeps_its_bits():
    a, b = torch.randn(17, 33), torch.randn(33, 9)
    plain = a @ b
    with widen_gemms(HALF):
        assert torch.equal(a @ b, plain)


def test_gradients_are_products_too():
    a, b = torch.randn(4, 4).bfloat16().requires_grad_(), torch.randn(4, 4).bfloat16()
    with widen_gemms(HALF):
        (a @ b).backward(torch.ones(4, 4).bfloat16())
    assert a.grad.dtype == torch.bfloat16
    torch.testing.assert_close(a.grad, exact(torch.ones(4, 4), b.T, torch.bfloat16), rtol=1e-2, atol=1e-2)


def test_mixed_types_stay_an_error():
    with widen_gemms(HALF), pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(torch.ones(2, 2).bfloat16(), torch.ones(2, 2))


def test_block_without_dtypes_changes_nothing():
    with widen_gemms(()) as installed:
        assert not installed
        assert not is_widened(torch.bfloat16)


def test_type_with_a_fast_kernel_keeps_it():
    torch.manual_seed(0)
    a, b = torch.randn(64, 256).bfloat16(), torch.randn(256, 64).bfloat16()
    own = a @ b
    with widen_gemms((torch.float16,)):
        assert is_widened(torch.float16)
        assert not is_widened(torch.bfloat16)
        assert torch.equal(a @ b, own)


def test_kernels_are_gone_after_the_block():
    with widen_gemms(HALF):
        with widen_gemms(HALF):
            assert is_widened(torch.bfloat16)
        assert is_widened(torch.bfloat16)
    assert not is_widened(torch.bfloat16)
    with widen_gemms(HALF) as again:
        assert again


def test_slow_types_are_those_without_a_onednn_kernel():
    assert set(find_slow_dtypes()) <= set(HALF)


def test_the_benchmark_of_the_quantisers_multiplies_as_a_run_does(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    with importlib.import_module("benchmark_numerics").fast_gemm() as kind:
        assert kind in ("native", "widened")
