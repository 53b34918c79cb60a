"""Reference, plain torch and C kernel compared bit for bit, over shapes, dtypes and values that nobody would pick."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import reference_quantisers as reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.precision.formats import FORMATS
from bridge.runtime.numerics import GemmPrecision, QuantSpec, dispatch, make_operand, quantise, use
from bridge.runtime.numerics.hadamard import HADAMARD_SIGNS
from bridge.runtime.numerics.quantised import pack_nibbles

SPECS = {
    "tensorwise": GemmPrecision(scheme="tensorwise").spec("input"),
    "tensorwise-e5m2-pow2": QuantSpec(scheme="tensorwise", format="e5m2", power_of_two_scale=True),
    "tensorwise-eps": QuantSpec(scheme="tensorwise", format="e4m3", eps=0.5),
    "blockwise-1x128": GemmPrecision(scheme="blockwise", format="e4m3").spec("input"),
    "blockwise-128x128": GemmPrecision(scheme="blockwise", format="e4m3").spec("weight"),
    "blockwise-e5m2": GemmPrecision(scheme="blockwise", format="hybrid").spec("grad_output"),
    "blockwise-fp32-scales": QuantSpec(
        scheme="blockwise", format="e4m3", rowwise_tile=(1, 128), columnwise_tile=(128, 1)
    ),
    "mxfp8": GemmPrecision(scheme="mxfp8", format="e4m3").spec("input"),
    "mxfp8-e5m2": GemmPrecision(scheme="mxfp8", format="hybrid").spec("grad_output"),
    "mxfp8-32x32": QuantSpec(
        scheme="mxfp8", format="e4m3", rowwise_tile=(32, 32), columnwise_tile=(32, 32), power_of_two_scale=True
    ),
    "nvfp4-rht": GemmPrecision(scheme="nvfp4", format="e2m1").spec("input"),
    "nvfp4-16x16": GemmPrecision(scheme="nvfp4", format="e2m1").spec("weight"),
    "nvfp4-1x16": QuantSpec(scheme="nvfp4", format="e2m1", rowwise_tile=(1, 16), columnwise_tile=(16, 1)),
}

SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-45, 1.2e-38, 3e38, -3e38, 448.0, 464.0, 6.0, 65504.0]


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Draw a matrix of random scale, with zeros, whole zero tiles and special values put in."""
    rows, columns = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(rows, columns, generator=generator)
    spread = draw(st.sampled_from([0, 4, 60]))
    x = x * torch.exp2(torch.randint(-spread, spread + 1, x.shape, generator=generator).float())
    x = x * 2.0 ** draw(st.sampled_from([0, 0, -120, -140, 100]))
    if draw(st.booleans()):
        x[: rows // 2 + 1, : columns // 2 + 1] = 0.0
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=4)):
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = value
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits, every NaN made the same."""
    if not tensor.is_floating_point():
        return tensor
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def of_reference(x: torch.Tensor, spec: QuantSpec, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales in the layout of `Quantised`, and code * scale, by the slow reference."""
    dtype = str(x.dtype).removeprefix("torch.")
    made = reference.quantise_copy(x.float().numpy(), spec, columnwise=columnwise, dtype=dtype)
    codes, scales, tile = torch.from_numpy(made.codes), torch.from_numpy(made.scale_inv), spec.tile(columnwise)
    if spec.scheme in ("mxfp8", "nvfp4") and tile[0] == tile[1]:
        axis = int(columnwise)
        scales = scales.repeat_interleave(tile[0], axis).narrow(axis, 0, codes.shape[axis])
    if columnwise and spec.scheme != "mxfp8":
        codes, scales = codes.T, scales if spec.has_single_scale else scales.T
    return (pack_nibbles(codes) if spec.format == "e2m1" else codes), scales, torch.from_numpy(made.values)


@pytest.mark.parametrize("name", SPECS)
@given(x=matrices())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reference_torch_and_kernel_agree_bit_for_bit(name: str, x: torch.Tensor, both_paths: tuple[str, str]) -> None:
    spec = SPECS[name]
    for path in both_paths:
        use(path)
        made = quantise(x, spec)
        for columnwise in (False, True):
            codes, scales, values = of_reference(x, spec, columnwise)
            found_codes, found_scales = made.get_copy(columnwise)
            assert torch.equal(found_codes, codes), path
            assert torch.equal(bits(found_scales), bits(scales)), path
            if spec.scheme != "nvfp4":
                back = made.dequantise(torch.float32, columnwise=columnwise)
                assert torch.equal(bits(back), bits(values.view_as(back))), path


@pytest.mark.parametrize("name", [name for name in SPECS if name != "blockwise-fp32-scales"])
@given(x=matrices())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_operands_are_the_dequantised_values(name: str, x: torch.Tensor, both_paths: tuple[str, str]) -> None:
    spec = SPECS[name]
    for columnwise in (False, True):
        operands = []
        for path in both_paths:
            use(path)
            operands.append(make_operand(x, spec, "input", columnwise=columnwise))
        assert torch.equal(bits(operands[0].values), bits(operands[1].values))
        assert operands[0].factor == operands[1].factor
        assert operands[0].nvfp4_amax == operands[1].nvfp4_amax
        _, _, values = of_reference(x, spec, columnwise)
        factor = 1.0 if spec.scheme == "nvfp4" else operands[0].factor
        found = operands[0].values.float() * factor
        magnitude = values.abs().nan_to_num(nan=0.0, posinf=3e38).double()
        representable = (magnitude >= magnitude.max() * 2.0**-200) | (values == 0) | values.isnan()
        assert torch.equal(bits(found)[representable], bits(values)[representable])


def test_every_bf16_number_becomes_the_same_operand(both_paths: tuple[str, str]) -> None:
    """In order, a tile holds near numbers; shuffled, it also holds Inf, NaN and numbers far below its scale.

    The last matrix has Inf in one row, and numbers in the others that are beyond the maximum of its tile.
    """
    ordered = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    shuffled = ordered.flatten()[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].view(256, 256)
    one_inf = torch.full((256, 256), 1000.0, dtype=torch.bfloat16)
    one_inf[3, 3] = math.inf
    for name in (name for name in SPECS if name.startswith(("blockwise", "mxfp8"))):
        for x in (ordered, shuffled, one_inf):
            for columnwise in (False, True):
                operands = []
                for path in both_paths:
                    use(path)
                    operands.append(bits(make_operand(x, SPECS[name], "input", columnwise=columnwise).values))
                assert torch.equal(*operands), (name, columnwise)


def test_a_tile_of_nan_alone_has_the_scale_of_a_tile_of_zeros(both_paths: tuple[str, str]) -> None:
    x = torch.randn(64, 512).bfloat16()
    x[3, :64] = x[16:32, 100] = x[5] = math.nan
    for name, spec in SPECS.items():
        found = []
        for path in both_paths:
            use(path)
            found.append(quantise(x, spec))
        for copy in ("codes", "scale_inv", "codes_t", "scale_inv_t"):
            assert torch.equal(getattr(found[0], copy), getattr(found[1], copy)), (name, copy)


def test_the_largest_magnitude_of_the_transform_is_found_wherever_it_is(both_paths: tuple[str, str]) -> None:
    """Columns that are the transform's signs have all of their sum in one result: no bound below it may skip a tile."""
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32)[:, None]
    growing = signs.repeat(6, 1) * torch.arange(1, 257)
    one_column = torch.randn(96, 256)
    one_column[32:48, 200:201] = signs
    half_of_a_group = torch.full((1096, 70), 0.125)
    for x in (growing, growing.flip(1), one_column, half_of_a_group, half_of_a_group * math.inf):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            amaxes = []
            for path in both_paths:
                use(path)
                amaxes.append(dispatch.compute_amax(x.to(dtype), hadamard=True))
            assert amaxes[0] == amaxes[1]


def test_a_scale_that_is_not_positive_and_finite_gives_the_same(both_paths: tuple[str, str]) -> None:
    x = torch.tensor([[0.0, -0.0, 1.0, -2.0, math.inf, math.nan]]).bfloat16()
    spec = GemmPrecision(scheme="delayed").spec("input")
    for scale in (-2.0, math.inf, math.nan):
        found = []
        for path in both_paths:
            use(path)
            found.append(quantise(x, spec, tensor_scale=scale))
        assert torch.equal(found[0].codes, found[1].codes), scale
        assert torch.equal(found[0].codes_t, found[1].codes_t), scale


def test_any_leading_shape_and_empty_tensors(path: str) -> None:
    for shape in ((0,), (0, 8), (8, 0), (3, 0, 4), (5,), (2, 3, 4, 33)):
        x = torch.randn(shape).bfloat16()
        for name, spec in SPECS.items():
            made = quantise(x, spec)
            back = made.dequantise()
            found = (back.shape, back.dtype, made.amax.shape)
            assert found == (x.shape, x.dtype, (1,)), f"{name} of {shape}"


def test_strides_do_not_matter(path: str) -> None:
    x = torch.randn(96, 64).bfloat16()
    for name, spec in SPECS.items():
        straight, turned = quantise(x, spec), quantise(x.T.contiguous().T, spec)
        assert torch.equal(straight.codes, turned.codes), name
        assert torch.equal(straight.codes_t, turned.codes_t), name


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_do_not_matter(both_paths: tuple[str, str], threads_restored: None) -> None:
    x = torch.randn(300, 700).bfloat16()
    for spec in SPECS.values():
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(quantise(x, spec))
        assert all(torch.equal(found[0].codes, other.codes) for other in found[1:])
        assert all(torch.equal(found[0].amax, other.amax) for other in found[1:])


def test_reference_table_has_every_magnitude() -> None:
    assert len(reference.value_table(FORMATS["e4m3"])) == 127
    assert len(reference.value_table(FORMATS["e5m2"])) == 124
    assert reference.value_table(FORMATS["e2m1"]) == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert np.isnan(reference.round_codes(np.array([np.nan], np.float32), FORMATS["e4m3"])).sum() == 0
