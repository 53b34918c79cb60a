"""Codes, scales and values of stored weights after a second quantisation."""

from __future__ import annotations

import torch

from bridge.runtime.numerics.quantise import quantise
from bridge.runtime.numerics.round_trip import RoundTrip, measure_round_trips
from bridge.runtime.numerics.spec import GemmPrecision

NORMAL = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02


def measured(*weights: torch.Tensor) -> dict[tuple[str, str], RoundTrip]:
    return {(trip.scheme, trip.form): trip for trip in measure_round_trips(weights)}


def test_bf16_storage_changes_scales_of_mxfp8_and_no_value() -> None:
    """52 of 1024 scales on a GB300 (Megatron-LM issue 6666)."""
    trips = measured(NORMAL)
    mxfp8, blockwise = trips["mxfp8", "bf16"], trips["blockwise", "bf16"]
    assert (mxfp8.values_changed, mxfp8.largest_error) == (0, 0.0)
    assert 40 < 1024 * mxfp8.scales_changed / mxfp8.scales < 60
    assert 0.04 < mxfp8.codes_changed / mxfp8.codes < 0.06
    assert (blockwise.codes_changed, blockwise.scales_changed, blockwise.values_changed) == (0, 0, 0)
    spec = GemmPrecision(scheme="mxfp8", format="e4m3").spec("weight")
    before = quantise(NORMAL, spec, columnwise=False)
    after = quantise(before.dequantise(torch.bfloat16), spec, columnwise=False)
    changed = before.get_tile_scales() != after.get_tile_scales()
    assert torch.equal(after.get_tile_scales()[changed] * 2, before.get_tile_scales()[changed])
    doubled = before.expand_scales(changed.float()).bool()
    assert torch.equal(after.decode_codes()[doubled], before.decode_codes()[doubled] * 2)
    assert int(changed.sum()) == mxfp8.scales_changed


def test_values_under_a_scale_per_tensor_are_rounded_once() -> None:
    trips = measured(NORMAL)
    for scheme in ("tensorwise", "nvfp4"):
        trip = trips[scheme, "bf16"]
        assert trip.values_changed > trip.codes / 2
        assert 0 < trip.largest_error < 2**-8  # half a unit of BF16's 8 significant bits
        assert trip.codes_changed == 0


def test_weights_that_are_bf16_lose_nothing_in_bf16() -> None:
    trips = measured(NORMAL.bfloat16().float(), NORMAL[:16].bfloat16().float())
    for scheme in ("tensorwise", "blockwise", "mxfp8", "nvfp4"):
        trip = trips[scheme, "masters"]
        assert (trip.codes, trip.codes_changed, trip.scales_changed, trip.values_changed) == (272 * 512, 0, 0, 0)


def test_fp32_scales_of_blocks_move_codes_of_power_of_two_scales() -> None:
    trip = measured(NORMAL)["blockwise", "blocks"]
    assert 0.1 < trip.codes_changed / trip.codes < 0.5
    assert trip.values_changed == trip.codes_changed
    exact = torch.full((128, 128), 448.0)  # a scale of 1 in both
    assert measured(exact)["blockwise", "blocks"].codes_changed == 0


def test_a_matrix_of_zeros_has_no_error() -> None:
    assert {trip.largest_error for trip in measure_round_trips([torch.zeros(32, 32)])} == {0.0}
