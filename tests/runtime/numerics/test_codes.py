"""Codes of the small formats, and rounding onto their grids, against torch's and ml_dtypes' casts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_quantisers as reference
import torch

from bridge.precision.formats import FORMATS
from bridge.runtime.numerics.grid import decode, draw_random_units, encode, list_code_values, round_to_grid

ml_dtypes = pytest.importorskip("ml_dtypes")

SMALL = ("e4m3", "e5m2", "e2m1")
ML = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def all_codes(name: str) -> torch.Tensor:
    return torch.arange(1 << FORMATS[name].bits, dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize("name", SMALL)
def test_every_code_stands_for_what_ml_dtypes_says(name: str) -> None:
    codes = all_codes(name).numpy()
    expected = codes.view(ML[name]).astype(np.float32)
    np.testing.assert_array_equal(np.array(list_code_values(FORMATS[name]), np.float32), expected)
    np.testing.assert_array_equal(decode(all_codes(name), FORMATS[name]).numpy(), expected)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_finite_code_round_trips(name: str, dtype: torch.dtype) -> None:
    element, codes = FORMATS[name], all_codes(name)
    values = decode(codes, element, dtype).float()
    finite = values.isfinite()
    rounded = round_to_grid(values[finite], element)
    assert torch.equal(rounded, values[finite])
    assert torch.equal(encode(rounded, element), codes[finite])
    np.testing.assert_array_equal(reference.round_codes(values[finite].numpy(), element), codes[finite].numpy())


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_nan_code_comes_back_as_the_canonical_nan(name: str) -> None:
    element = FORMATS[name]
    values = decode(all_codes(name), element)
    assert int(values.isnan().sum()) == {"e4m3": 2, "e5m2": 6}[name]
    assert set(encode(round_to_grid(values[values.isnan()], element), element).tolist()) == {element.nan}


@pytest.mark.parametrize("name", SMALL)
def test_ties_go_to_the_even_code(name: str) -> None:
    element = FORMATS[name]
    values = decode(all_codes(name)[: 1 << (element.bits - 1)], element)
    values = values[values.isfinite()]
    middle = (values[:-1] + values[1:]) / 2
    codes = encode(round_to_grid(middle, element), element).to(torch.int32)
    lower = torch.arange(len(middle), dtype=torch.int32)
    assert torch.equal(codes, lower + lower % 2)


@pytest.mark.parametrize("name", SMALL)
def test_special_values_saturate_or_keep_their_sign(name: str) -> None:
    element = FORMATS[name]
    most, step = element.max, 2.0 ** (element.min_exponent - element.mantissa_bits)
    x = torch.tensor([most, most * 1.01, 3e38, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, step, step / 2])
    expected = torch.tensor([most, most, most, most, -most, 0.0, -0.0, 0.0, -0.0, step, 0.0])
    rounded = round_to_grid(x, element)
    assert torch.equal(rounded.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(("name", "rounded"), [("e4m3", "nan"), ("e5m2", "nan"), ("e2m1", "6.0")])
def test_nan_stays_nan_where_the_format_has_it(name: str, rounded: str) -> None:
    assert str(round_to_grid(torch.tensor([math.nan]), FORMATS[name]).item()) == rounded


def random_bits(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_rounding_equals_torch_on_millions_of_bit_patterns(name: str) -> None:
    element = FORMATS[name]
    x = torch.cat([random_bits(1, 1 << 21), torch.randn(1 << 20) * element.max / 4])
    codes = encode(round_to_grid(x, element), element)
    cast = x.clamp(-element.max, element.max).to(TORCH[name]).view(torch.uint8)
    same = (codes == cast) | x.isnan()
    assert same.all()
    assert (codes[x.isnan()] == element.nan).all()


@pytest.mark.parametrize("name", SMALL)
def test_rounding_equals_ml_dtypes_on_millions_of_bit_patterns(name: str) -> None:
    element = FORMATS[name]
    x = torch.cat([random_bits(2, 1 << 21), torch.randn(1 << 20) * element.max / 4])
    x = x[~x.isnan()]
    codes = encode(round_to_grid(x, element), element)
    cast = x.clamp(-element.max, element.max).numpy().astype(ML[name]).view(np.uint8)
    assert torch.equal(codes, torch.from_numpy(cast) & (255 >> (8 - element.bits)))


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_rounds_like_the_grid(name: str) -> None:
    element = FORMATS[name]
    x = torch.cat([random_bits(3, 1 << 18), torch.randn(1 << 18) * element.max / 4])
    codes = encode(round_to_grid(x, element), element)
    np.testing.assert_array_equal(codes.numpy(), reference.round_codes(x.numpy(), element))


def test_random_units_do_not_depend_on_where_a_chunk_begins() -> None:
    cpu = torch.device("cpu")
    whole = draw_random_units(0, (100, 30), 7, cpu)
    assert torch.equal(draw_random_units(60, (40, 20), 7, cpu), whole[60:, :20])
    assert not torch.equal(draw_random_units(0, (100, 30), 8, cpu), whole)
    assert not torch.equal(draw_random_units(0, (100, 30), 7 + 2**40, cpu), whole)
    assert 0 <= whole.min() <= whole.max() < 1


def test_random_units_are_uniform_and_independent_of_their_neighbours() -> None:
    for shape in ((1, 1 << 20), (1 << 10, 1 << 10), (1 << 20, 1)):
        units = draw_random_units(0, shape, 2**40 + 3, torch.device("cpu"))
        counts = torch.histc(units, 64, 0, 1) / (1 << 14)
        assert (counts - 1).abs().max() < 5 / 2**7, shape  # five standard deviations of a bin
        centred = (units - 0.5) * 12**0.5
        others = [draw_random_units(0, shape, seed, torch.device("cpu")) for seed in (2**40 + 2, 2**41 + 3)]
        pairs = [(centred, (other - 0.5) * 12**0.5) for other in others]
        pairs += [(centred[distance:], centred[:-distance]) for distance in (1, 2, 16) if shape[0] > 1]
        pairs += [(centred[:, distance:], centred[:, :-distance]) for distance in (1, 2, 16) if shape[1] > 1]
        for first, second in pairs:
            assert (first * second).mean().abs() < 5 / 2**10, shape
