"""`optimizer.fp8_recipe`, which the precision-aware optimizer reads in runs without FP8 too."""

from typing import Any

import pytest

from bridge.errors import SyncCheckError
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.synchronize import synchronize
from bridge.sync.prediction import predict
from bridge.target.fields import FUSED_ADAM_RECIPES

SWITCH = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""Megatron's derived switch: the fused Adam holds the masters."""
MODES = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "nvfp4": {"bf16": True, "fp4": "e2m1"}}


def precision_aware(fp8_recipe: str | None) -> Any:
    """Return Megatron's optimizer config as one that built it by hand holds it."""
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(use_distributed_optimizer=True, fp8_recipe=fp8_recipe)
    config.use_precision_aware_optimizer = True  # without a constructor that asks for Transformer Engine
    setattr(config, SWITCH, fp8_recipe in FUSED_ADAM_RECIPES)
    return config


@pytest.mark.parametrize("held", [None, "delayed", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_without_fp8_leaves_the_recipe_that_the_optimizer_reads_as_it_was(mode: str, held: str | None) -> None:
    optimizer = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True, "fp8_recipe": held}
    prediction = predict(MixedPrecisionConfig(**MODES[mode]), {"optimizer": optimizer})
    assert prediction.values["optimizer"]["fp8_recipe"] == held


@pytest.mark.parametrize("held", [None, "tensorwise"])
def test_a_sync_leaves_the_switch_that_megatron_derives_as_it_was(held: str | None) -> None:
    optimizer = precision_aware(held)
    before = getattr(optimizer, SWITCH)
    for _ in range(2):
        synchronize(MixedPrecisionConfig(bf16=True), optimizer=optimizer)
        assert (optimizer.fp8_recipe, getattr(optimizer, SWITCH)) == (held, before)


def test_the_report_says_what_the_kept_recipe_costs() -> None:
    optimizer = {"use_precision_aware_optimizer": True, "fp8_recipe": "tensorwise"}
    rows = predict(MixedPrecisionConfig(bf16=True), {"optimizer": optimizer}).rows
    (row,) = (row for row in rows if row.path == "optimizer.fp8_recipe")
    assert row.verdict == "keep"
    assert row.why == (
        "the precision-aware optimizer reads it: FP32 masters take 4 bytes a parameter, and None would change that"
    )


def test_weights_stored_in_fp4_get_masters_that_megatron_keeps() -> None:
    config = MixedPrecisionConfig(bf16=True, fp4="e2m1", fp4_param_gather=True)
    rows = predict(config, {"optimizer": {"use_precision_aware_optimizer": True}}).rows
    (row,) = (row for row in rows if row.path == "optimizer.fp8_recipe")
    assert (row.new, row.verdict) == ("tensorwise", "derive")
    assert "FP32 masters take 4 bytes a parameter" in row.why
    optimizer = {"use_precision_aware_optimizer": True, "fp8_recipe": "delayed"}
    assert predict(config, {"optimizer": optimizer}).values["optimizer"]["fp8_recipe"] == "delayed"  # PB356


@pytest.mark.parametrize("stated", [None, "delayed"])
def test_a_stated_recipe_with_which_fp4_weights_cannot_be_updated_is_not_replaced(stated: str | None) -> None:
    config = MixedPrecisionConfig(bf16=True, fp4="e2m1", fp4_param_gather=True, fp8_recipe=stated)
    prediction = predict(config, {"optimizer": {"use_precision_aware_optimizer": True}})
    assert prediction.values["optimizer"]["fp8_recipe"] is None


def test_without_the_precision_aware_optimizer_no_recipe_is_left_in_a_run_without_fp8() -> None:
    prediction = predict(MixedPrecisionConfig(bf16=True), {"optimizer": {"fp8_recipe": "tensorwise"}})
    assert prediction.values["optimizer"]["fp8_recipe"] is None


def test_the_report_of_an_fp8_run_says_what_the_derived_switch_changes() -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise")
    row = synchronize(config, optimizer=precision_aware(None)).row(f"optimizer.{SWITCH}")
    assert (row.old, row.new) == (True, False)
    assert row.why == "Megatron holds FP32 masters: 4 bytes a parameter, before 2 of a BF16 one with param remainders"


def test_a_run_whose_first_step_would_fail_on_fp4_weights_is_refused_where_it_begins() -> None:
    config = MixedPrecisionConfig(bf16=True, fp4="e2m1", fp4_param_gather=True, fp8_recipe=None)
    with pytest.raises(SyncCheckError, match="the first step ends in an AttributeError, got None"):
        synchronize(config, optimizer=precision_aware(None), strict=True)
    synchronize(config.override("test", fp8_recipe="tensorwise"), optimizer=precision_aware(None), strict=True)
