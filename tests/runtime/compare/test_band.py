"""Bounds on the errors of one batch, written out, and the verdicts on them."""

from __future__ import annotations

import math

import pytest

from bridge.runtime.compare.band import GemmLocation, compute_band, compute_rounding_error


def place(layer: int, gemm: str) -> GemmLocation:
    return GemmLocation(layer=layer, module="mlp.linear_fc1", gemm=gemm)


def test_the_bound_grows_with_the_layers_that_an_error_went_through() -> None:
    errors = {place(layer, gemm): 0.0 for gemm in ("fprop", "dgrad", "wgrad") for layer in (1, 6)}
    found = compute_band(errors, errors, num_layers=6, forward=2**-4, backward=2**-3)
    bounds = {(row.layer, row.gemm): row.bound for row in found.rows}
    assert bounds[1, "fprop"] == pytest.approx(4 * 1.03 * 2**-4)
    assert bounds[6, "fprop"] == pytest.approx(4 * 1.03**6 * 2**-4)
    assert bounds[1, "dgrad"] == bounds[1, "wgrad"] == pytest.approx(4 * 1.03**6 * 2**-3)
    assert bounds[6, "dgrad"] == pytest.approx(4 * 1.03 * 2**-3)
    assert [
        compute_rounding_error(["bf16"]),
        compute_rounding_error(["bf16", "e4m3"]),
        compute_rounding_error(["e4m3", "e5m2"]),
    ] == [2**-8, 2**-4, 2**-3]


def test_the_first_error_outside_in_the_order_of_execution_is_named() -> None:
    errors = {place(1, "fprop"): 0.01, place(2, "fprop"): math.nan, place(2, "dgrad"): 9.0, place(1, "dgrad"): 9.0}
    control = dict.fromkeys(errors, 1.3)
    found = compute_band(errors, control, num_layers=2, forward=2**-4, backward=2**-4)
    assert found.verdict == "outside"
    assert found.first_outside is not None
    assert (found.first_outside.layer, found.first_outside.gemm) == (2, "fprop")
    assert found.blind == ()


def test_bounds_that_do_not_notice_another_batch_cannot_tell() -> None:
    errors = {place(layer, "fprop"): 0.1 for layer in (1, 2, 3)}
    control = dict(zip(errors, (1.3, 0.5, 0.5), strict=True))
    coarse = compute_band(errors, control, num_layers=3, forward=2**-2, backward=2**-2)
    assert (coarse.verdict, len(coarse.blind)) == ("cannot tell", 2)
    assert compute_band(errors, control, num_layers=3, forward=2**-4, backward=2**-4).verdict == "inside"
    assert compute_band({}, {}, num_layers=3, forward=1, backward=1).verdict == "cannot tell"
