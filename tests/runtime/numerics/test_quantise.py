"""Special values, layouts and errors of the quantisers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bridge.errors import PrecisionConfigError, PrecisionTypeError
from bridge.precision.formats import FORMATS
from bridge.runtime.numerics import GemmPrecision, QuantSpec, pad_scales, quantise
from bridge.runtime.numerics.operand import choose_range_multiplier
from bridge.runtime.numerics.tiles import ScaleRange

FP32_MAX = FORMATS["fp32"].max


def spec(scheme: str, operand: str = "input") -> QuantSpec:
    formats = {"nvfp4": "e2m1", "blockwise": "e4m3", "mxfp8": "e4m3"}
    return GemmPrecision(scheme=scheme, format=formats.get(scheme, "hybrid")).spec(operand)


def one_tile(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([[*values, *[0.0] * (128 - len(values))]], dtype=dtype)


@pytest.mark.parametrize("scheme", ["tensorwise", "blockwise"])
def test_an_infinite_amax_means_scale_1_and_saturation(scheme: str, path: str) -> None:
    made = quantise(one_tile(math.inf, -math.inf, 3.0, 1e6), spec(scheme))
    assert made.scale_inv.flatten().tolist() == [1.0]
    assert made.dequantise()[0, :4].tolist() == [448.0, -448.0, 3.0, 448.0]
    assert made.amax.item() == math.inf


def test_an_infinite_amax_is_the_largest_mxfp8_scale(path: str) -> None:
    made = quantise(one_tile(math.inf, 3e38, 1.0), spec("mxfp8"))
    assert made.scale_inv[0].tolist() == [254, 0, 0, 0]
    assert made.codes[0, :3].tolist() == [0x7E, 0x3E, 0]


def test_an_infinite_amax_in_nvfp4_saturates_under_scale_1(path: str) -> None:
    made = quantise(one_tile(math.inf, 3.0), spec("nvfp4"), columnwise=False)
    assert made.scale_inv[0, 0].item() == 0x7E
    assert made.codes[0, 0].item() & 15 == 7
    assert made.amax.item() == math.inf


@pytest.mark.parametrize("scheme", ["tensorwise", "blockwise", "mxfp8"])
def test_nan_stays_nan_and_scales_nothing(scheme: str, path: str) -> None:
    made, clean = (quantise(one_tile(first, 3.0, -5.0), spec(scheme)) for first in (math.nan, 0.0))
    assert torch.equal(made.scale_inv, clean.scale_inv)
    assert made.dequantise()[0, 0].isnan()
    assert torch.equal(made.dequantise()[0, 1:], clean.dequantise()[0, 1:])
    assert made.codes[0, 0].item() == 0x7F


def test_nan_becomes_plus_six_in_nvfp4(path: str) -> None:
    made = quantise(one_tile(-math.nan, 3.0), spec("nvfp4"), columnwise=False)
    assert made.codes[0, 0].item() & 15 == 7


@pytest.mark.parametrize("scheme", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_minus_zero_keeps_its_sign(scheme: str, path: str) -> None:
    made = quantise(one_tile(-0.0, 1.0, -1e-30), spec(scheme, "weight"))
    assert made.dequantise()[0, :3].signbit().tolist() == [True, False, True]


@pytest.mark.parametrize(("scheme", "scale"), [("tensorwise", 1.0), ("blockwise", 1.0), ("mxfp8", 0), ("nvfp4", 0)])
def test_zeros_stay_zeros(scheme: str, scale: float, path: str) -> None:
    made = quantise(torch.zeros(16, 128), spec(scheme))
    assert not made.codes.any()
    assert (made.scale_inv == scale).all()
    assert torch.equal(made.dequantise(), torch.zeros(16, 128))


def test_a_scale_that_overflows_stops_at_fp32_max_for_a_tensor(path: str) -> None:
    made = quantise(one_tile(1e-45), spec("tensorwise"))
    assert made.scale_inv.item() == torch.tensor(1.0).div(FP32_MAX).item()


@pytest.mark.parametrize(
    ("dtype", "exponent"), [(torch.float32, -127), (torch.bfloat16, -127), (torch.float16, -15)], ids=str
)
def test_a_scale_that_overflows_stops_at_the_input_types_max_in_a_block(
    dtype: torch.dtype, exponent: int, path: str
) -> None:
    x = one_tile(1e-40, dtype=torch.float32).to(dtype) if dtype != torch.float16 else None
    if x is None:  # no FP16 value is small enough; the rule itself is still there
        return
    assert quantise(x, spec("blockwise")).scale_inv.item() == 2.0**exponent


def test_values_near_fp32_max_survive(path: str) -> None:
    for scheme in ("tensorwise", "blockwise", "mxfp8"):
        back = quantise(one_tile(3e38, -1e38), spec(scheme)).dequantise()[0, :2]
        assert torch.allclose(back, torch.tensor([3e38, -1e38]), rtol=2**-4)


def test_eps_is_a_floor_of_the_amax(path: str) -> None:
    made = quantise(one_tile(0.25), replace(spec("tensorwise"), eps=2.0))
    assert made.scale_inv.item() == torch.tensor(1.0).div(224.0).item()


def test_both_copies_of_a_whole_tensor_are_the_same_bytes(path: str) -> None:
    made = quantise(torch.randn(48, 80), spec("tensorwise"))
    assert torch.equal(made.codes_t, made.codes.T)
    assert torch.equal(made.scale_inv_t, made.scale_inv)


@pytest.mark.parametrize(
    ("scheme", "operand", "compact", "padded"),
    [
        ("tensorwise", "input", ((1,), (1,)), ((1,), (1,))),
        ("blockwise", "input", ((130, 2), (200, 2)), ((2, 132), (2, 200))),
        ("blockwise", "weight", ((2, 2), (2, 2)), ((2, 4), (2, 4))),
        ("mxfp8", "input", ((130, 7), (5, 200)), ((256, 8), (8, 256))),
        ("nvfp4", "weight", ((130, 13), (200, 9)), ((256, 16), (256, 12))),
    ],
)
def test_scales_have_transformer_engines_shapes(
    scheme: str, operand: str, compact: tuple[tuple[int, ...], ...], padded: tuple[tuple[int, ...], ...]
) -> None:
    made = quantise(torch.randn(130, 200), spec(scheme, operand))
    assert (made.scale_inv.shape, made.scale_inv_t.shape) == compact
    assert (pad_scales(made).shape, pad_scales(made, columnwise=True).shape) == padded


def test_only_the_copies_asked_for_are_made() -> None:
    made = quantise(torch.randn(32, 32), spec("mxfp8"), columnwise=False)
    assert made.codes_t is None
    with pytest.raises(PrecisionTypeError, match="the column-wise copy was not made"):
        made.dequantise(columnwise=True)
    assert quantise(torch.randn(32, 32), spec("mxfp8"), rowwise=False).codes is None


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(PrecisionTypeError, match="float32, bfloat16 or float16, got torch.int32"):
        quantise(torch.zeros(2, 2, dtype=torch.int32), spec("tensorwise"))
    with pytest.raises(PrecisionTypeError, match="got a scalar"):
        quantise(torch.tensor(1.0), spec("tensorwise"))
    with pytest.raises(PrecisionTypeError, match="delayed scaling quantises with a stored scale"):
        quantise(torch.zeros(2, 2), spec("delayed"))


def test_a_recipe_that_cannot_be_run_lists_every_fault() -> None:
    with pytest.raises(PrecisionConfigError) as caught:
        GemmPrecision(scheme="mxfp8", format="e2m1", disable_stochastic_rounding=True, amax_history_len=0)
    paths = [finding.path for finding in caught.value.findings]
    assert paths == ["format", "amax_history_len", "disable_stochastic_rounding"]
    with pytest.raises(PrecisionConfigError, match="Did you mean 'tensorwise'"):
        GemmPrecision(scheme="tensorwize")


def test_the_range_multiplier_keeps_operands_inside_bf16() -> None:
    e4m3, e5m2 = FORMATS["e4m3"], FORMATS["e5m2"]
    assert choose_range_multiplier(ScaleRange(2.0**-117, 2.0**119), e4m3) == 1.0
    assert choose_range_multiplier(ScaleRange(2.0**-118, 1.0), e4m3) == 2.0
    assert choose_range_multiplier(ScaleRange(1.0, 2.0**127), e4m3) == 2.0**-8
    assert choose_range_multiplier(ScaleRange(2.0**-127, 2.0**127), e4m3) == 2.0**-8
    assert choose_range_multiplier(ScaleRange(2.0**-127, 2.0**-127), e5m2) == 2.0**17


@pytest.mark.parametrize(("scheme", "differing"), [("mxfp8", 384), ("blockwise", 0)])
def test_weights_quantised_from_their_bf16_values_keep_the_values_and_not_always_the_scales(scheme, differing):
    """A checkpoint holds stored weights in BF16; 52 of 1024 scales differed on a GB300 (Megatron-LM, issue 6666)."""
    spec = GemmPrecision(scheme=scheme, format="e4m3").spec("weight")
    first = quantise(0.02 * torch.randn(128, 2048, generator=torch.Generator().manual_seed(0)), spec)
    again = quantise(first.dequantise(torch.bfloat16).float(), spec)
    assert torch.equal(first.dequantise(torch.bfloat16), again.dequantise(torch.bfloat16))
    assert int((first.get_copy(False)[1] != again.get_copy(False)[1]).sum()) == differing
