"""A precision that names no recipe is shown by the recipe that it is nearest to."""

from __future__ import annotations

import pytest

from bridge.precision.mode import format_label
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.nearest_recipe import find_nearest_recipe, format_nearest_label
from bridge.registry.registry import REGISTRY


def spelled_out(name: str, **changes: object) -> MixedPrecisionConfig:
    """Return a recipe as another program saves it: every field, and no name."""
    return MixedPrecisionConfig.from_dict({**REGISTRY.get(name).to_dict(full=True), **changes})


def test_every_recipe_spelled_out_is_named_by_itself_or_by_one_that_reads_the_same() -> None:
    for name in REGISTRY.names():
        nearest = find_nearest_recipe(spelled_out(name))
        assert nearest is not None
        assert format_nearest_label(spelled_out(name)) == nearest


def test_differing_fields_follow_the_name() -> None:
    changes = {"first_last_layers_bf16": False, "grad_reduce_in_fp32": False, "fp8_param": False}
    found = format_nearest_label(spelled_out("bf16_with_fp8_current_scaling_mixed", **changes, fp8_param_gather=False))
    assert found.startswith("bf16_with_fp8_current_scaling_mixed, but grad_reduce_in_fp32=False, ")
    assert "first_last_layers_bf16=False" in found
    assert "fp8_param=" not in found


def test_a_field_without_effect_makes_no_difference() -> None:
    assert format_nearest_label(spelled_out("bf16_mixed", fp8_amax_history_len=7)) == "bf16_mixed"


@pytest.mark.parametrize("config", [MixedPrecisionConfig(bf16=True), REGISTRY.get("bf16_mixed")])
def test_a_named_and_a_short_config_keep_their_own_label(config: MixedPrecisionConfig) -> None:
    assert format_nearest_label(config) == format_label(config)


def test_a_precision_that_no_recipe_computes_in_keeps_its_own_label() -> None:
    config = spelled_out("bf16_mixed", fp8="e4m3", fp8_recipe="custom", fp8_quantizer_factory="lab.make")
    assert format_nearest_label(config) == format_label(config)
