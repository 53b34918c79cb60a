"""What a sync warns of and what it refuses."""

import pytest

from bridge import MixedPrecisionConfig, get_mixed_precision_config, synchronize
from bridge.errors import PrecisionConfigError, SyncCheckError

pytestmark = pytest.mark.filterwarnings("ignore::bridge.errors.BridgeWarning")


def test_a_stated_value_that_megatron_replaces_is_a_finding(megatron_owners) -> None:
    owners = megatron_owners()
    owners["model"].apply_query_key_layer_scaling = True
    config = get_mixed_precision_config("fp16_mixed").override(attention_softmax_in_fp32=False)
    report = synchronize(config, **owners)
    assert owners["model"].attention_softmax_in_fp32 is True
    assert [(found.severity, str(found)) for found in report.findings] == [
        (
            "warning",
            "model.attention_softmax_in_fp32: Megatron's own __post_init__ sets it to True, got False. "
            "Drop it, or set apply_query_key_layer_scaling=False.",
        )
    ]
    owners["model"].apply_query_key_layer_scaling = False
    assert not synchronize(config, **owners).findings


def test_an_owner_that_megatron_refused_before_is_a_warning(megatron_owners) -> None:
    owners = megatron_owners()
    owners["optimizer"].use_precision_aware_optimizer = True  # needs Transformer Engine
    report = synchronize("bf16_mixed", **owners)
    assert [(f.severity, f.path) for f in report.findings] == [("warning", "optimizer")]
    assert "as it was before the recipe, too" in str(report.findings[0])


@pytest.mark.parametrize(
    ("fields", "path", "part"),
    [
        (
            {"fp8": "hybrid", "fp8_wgrad": False},
            "fp8_wgrad",
            "Transformer Engine 2.0 and later run the weight gradient in FP8 too",
        ),
        ({"fp8": "hybrid", "fp8_margin": 2}, "fp8_margin", "tensorwise scaling does not read it (only delayed)"),
        ({"fp8_margin": 2}, "fp8_margin", "no FP8 in this BF16 run"),
        (
            {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_dot_product_attention": True},
            "fp8_dot_product_attention",
            "blockwise scaling does not read it (only delayed, mxfp8, nvfp4, tensorwise)",
        ),
        (
            {"fp8": "hybrid", "num_layers_at_end_in_bf16": 2},
            "num_layers_at_end_in_bf16",
            "first_last_layers_bf16 is off",
        ),
        ({"first_last_layers_bf16": True}, "first_last_layers_bf16", "every layer of this run is in BF16"),
        ({"hysteresis": 4}, "hysteresis", "a BF16 run has no dynamic loss scale"),
        ({"autocast_dtype": "fp16"}, "autocast_dtype", "autocast is off"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_stated_field_without_effect_is_a_finding(fields, path, part, megatron_owners) -> None:
    report = synchronize(MixedPrecisionConfig(bf16=True, **fields), **megatron_owners())
    assert [(f.path, f.severity) for f in report.findings] == [(f"mixed_precision.{path}", "warning")]
    assert part in report.findings[0].rule


def test_a_loss_scale_that_megatrons_fp32_optimizer_ignores_is_a_finding(megatron_owners) -> None:
    config = MixedPrecisionConfig(fp32=True, loss_scale=8.0)
    assert [f.path for f in synchronize(config, **megatron_owners(sharded=False)).findings] == [
        "mixed_precision.loss_scale"
    ]
    assert synchronize(config, **megatron_owners()).findings == ()


def test_weights_in_fp8_without_a_sharded_optimizer_are_refused_where_it_counts(megatron_owners) -> None:
    owners = megatron_owners(sharded=False)
    report = synchronize("bf16_with_fp8_current_scaling_mixed", **owners)
    assert [(f.path, f.severity) for f in report.findings] == [("mixed_precision.fp8_param_gather", "error")]
    with pytest.raises(SyncCheckError):
        synchronize("bf16_with_fp8_current_scaling_mixed", **megatron_owners(sharded=False), strict=True)


def test_mxfp8_weights_without_the_reused_buffer_are_refused_where_it_counts(megatron_owners) -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", fp8_param=True)
    with pytest.raises(SyncCheckError, match="MXFP8 weights need reuse_grad_buf_for_mxfp8_param_ag"):
        synchronize(config, **megatron_owners(), strict=True)


def test_a_config_that_can_never_be_right_changes_nothing(megatron_owners) -> None:
    owners = megatron_owners()
    before = dict(vars(owners["model"]))
    with pytest.raises(PrecisionConfigError):
        synchronize(MixedPrecisionConfig(bf16=True, fp16=True), **owners)
    assert vars(owners["model"]) == before


def test_more_layers_in_bf16_than_the_model_has_is_megatrons_own_error_in_one_sentence(megatron_owners) -> None:
    config = get_mixed_precision_config("fp8_current").override(num_layers_at_end_in_bf16=99)
    with pytest.raises(SyncCheckError) as caught:
        synchronize(config, **megatron_owners())
    assert "num_layers_at_end_in_bf16" in str(caught.value)
    assert str(caught.value).count("\n") == 1


def test_a_model_whose_layers_all_stay_in_bf16_is_a_finding_of_the_sync(megatron_owners) -> None:
    owners = megatron_owners()
    layers = owners["model"].num_layers
    config = get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed").override(
        first_last_layers_bf16=True, num_layers_at_start_in_bf16=layers, num_layers_at_end_in_bf16=0
    )
    found = [one for one in synchronize(config, **owners).findings if one.id == "PB266"]
    assert [one.severity for one in found] == ["error"]
