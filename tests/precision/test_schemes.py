"""The scheme table: complete, consistent with itself and with the format table."""

import pytest

from bridge.precision.formats import FORMATS
from bridge.precision.schemes import (
    FP4_SCHEMES,
    FP8_SCHEMES,
    GEMMS,
    OPERAND_FORMATS,
    SCHEMES,
    WHOLE_TENSOR,
    Scheme,
)

ROWS = [scheme for scheme in SCHEMES if scheme.operands]
ids = [scheme.name for scheme in ROWS]


def test_names_are_those_of_megatron() -> None:
    assert set(FP8_SCHEMES) == {"delayed", "tensorwise", "blockwise", "mxfp8", "custom"}
    assert set(FP4_SCHEMES) == {"nvfp4", "custom"}


@pytest.mark.parametrize("scheme", ROWS, ids=ids)
def test_every_fact_is_stated(scheme: Scheme) -> None:
    assert [operand.name for operand in scheme.operands] == ["input", "weight", "grad_output"]
    assert scheme.scale_format in FORMATS
    assert scheme.split_accumulator is not None
    assert scheme.alignment is not None
    assert scheme.min_compute_capability is not None
    assert scheme.min_cuda
    assert scheme.min_transformer_engine
    assert scheme.source


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.family}-{scheme.name}")
def test_formats_are_known(scheme: Scheme) -> None:
    for name in scheme.formats:
        forward, backward = OPERAND_FORMATS[name]
        assert {forward, backward} <= set(FORMATS)


@pytest.mark.parametrize("scheme", ROWS, ids=ids)
def test_each_copy_is_scaled_along_the_dimension_its_gemm_sums_over(scheme: Scheme) -> None:
    axes = {"input": ("M", "K"), "weight": ("N", "K"), "grad_output": ("M", "N")}
    contracts = {"fprop": "K", "dgrad": "N", "wgrad": "M"}
    for gemm in GEMMS.values():
        for name, columnwise in ((gemm.left, gemm.left_columnwise), (gemm.right, gemm.right_columnwise)):
            operand = scheme.operand(name)
            rows, columns = operand.columnwise_tile if columnwise else operand.rowwise_tile
            assert axes[name][0 if columnwise else 1] == contracts[gemm.name]
            assert (rows, columns) == WHOLE_TENSOR or (rows if columnwise else columns) > 1


@pytest.mark.parametrize("scheme", ROWS, ids=ids)
def test_alignment_covers_the_tiles_that_cannot_be_ragged(scheme: Scheme) -> None:
    assert scheme.alignment is not None
    if scheme.scale_format == "e8m0" or scheme.family == "fp4":
        assert all(size % max(scheme.operand("input").rowwise_tile) == 0 for size in scheme.alignment)
    assert scheme.alignment[2] % 16 == 0


def test_only_delayed_scaling_keeps_no_layers_in_bf16() -> None:
    assert {scheme.name for scheme in SCHEMES if not scheme.first_last_layers_bf16} == {"delayed"}


def test_only_the_gradient_of_nvfp4_is_rounded_stochastically() -> None:
    random = [(scheme.name, operand.name) for scheme in ROWS for operand in scheme.operands if operand.stochastic]
    assert random == [("nvfp4", "grad_output")]
    mixed = [(scheme.name, operand.name) for scheme in ROWS for operand in scheme.operands if operand.hadamard]
    assert mixed == [("nvfp4", "input"), ("nvfp4", "grad_output")]
