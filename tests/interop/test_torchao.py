"""torchao's configs as data; the real classes are in test_real_libraries."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.errors import BackendUnavailableError, BridgeError
from bridge.interop.pytorch import torchao
from bridge.pytorch import float8_linear_config_for
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.interop.properties import reasons


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_rowwise_is_not_blockwise(recipe: str) -> None:
    imported = torchao.import_({"float8": {"recipe_name": recipe}})
    assert imported.config.fp8 is None
    assert reasons(imported, "float8.recipe_name") == ["unsupported"]


def test_e4m3_gradients_are_the_format_e4m3() -> None:
    casts = {f"cast_config_{name}": {"target_dtype": "e4m3"} for name in ("input", "weight", "grad_output")}
    assert torchao.import_({"float8": casts}).config.fp8 == "e4m3"
    assert torchao.import_({"float8": {"recipe_name": "tensorwise"}}).config.fp8 == "hybrid"


def test_float8_all_gather_is_near_stored_fp8_and_no_more() -> None:
    imported = torchao.import_({"float8": {"recipe_name": "tensorwise", "enable_fsdp_float8_all_gather": True}})
    assert imported.config.fp8_param_gather is True
    assert reasons(imported, "float8.enable_fsdp_float8_all_gather") == ["approximated"]


def test_all_gather_needs_tensorwise_weights() -> None:
    with pytest.raises(BridgeError, match="needs tensorwise scaling of weights"):
        torchao.import_({"float8": {"recipe_name": "rowwise", "enable_fsdp_float8_all_gather": True}})


def test_high_precision_weight_gradients_are_dead_in_transformer_engine() -> None:
    imported = torchao.import_({"mxfp8": {"recipe": "mxfp8_rceil_wgrad_with_hp"}})
    assert (imported.config.fp8_recipe, imported.config.fp8_wgrad) == ("mxfp8", False)
    assert "dead knob" in reasons(imported, "mxfp8.recipe")


@pytest.mark.parametrize(
    ("settings", "field", "reason"),
    [
        ({"emulate": True}, "float8.emulate", "unsupported"),
        ({"pad_inner_dim": True}, "float8.pad_inner_dim", "unsupported"),
        ({"gemm_config_output": {"use_fast_accum": False}}, "float8.gemm_config_output", "unsupported"),
        ({"module_filter_fn": len}, "float8.module_filter_fn", "unsupported"),
    ],
    ids=str,
)
def test_what_has_no_field_is_reported(settings: dict[str, Any], field: str, reason: str) -> None:
    assert reasons(torchao.import_({"float8": {"recipe_name": "tensorwise", **settings}}), field) == [reason]


def test_the_mode_is_the_trainers() -> None:
    assert reasons(torchao.import_("tensorwise"), "mode") == ["implied default"]
    assert torchao.import_("tensorwise", mode="fp16").config.mode == "fp16"
    assert reasons(torchao.export(REGISTRY.get("bf16_mixed")), "bf16") == ["unsupported"]


@pytest.mark.parametrize(
    "payload",
    [
        "delayed",
        {"float8": {"recipe_name": "delayed"}},
        {"float8": {"cast_config_input": {"scaling_type": "off"}}},
        {"float8": {"cast_config_weight": {"target_dtype": "e5m2"}}},
        3,
    ],
)
def test_nonsense_is_one_sentence(payload: Any) -> None:
    with pytest.raises(BridgeError) as caught:
        torchao.import_(payload)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["delayed", "blockwise"])
def test_schemes_it_does_not_have_make_no_object(scheme: str) -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe=scheme)
    assert torchao.export(config).payload == {}
    with pytest.raises(BackendUnavailableError, match=f"torchao has no {scheme} scaling"):
        float8_linear_config_for(config)
    assert float8_linear_config_for(REGISTRY.get("bf16_mixed")) is None


def test_what_is_not_read_is_recorded_and_no_recipe_is_named_beside_it() -> None:
    imported = torchao.import_({"float8": {"recipe_name": "tensorwise", "foo_dtype": "bf16"}, "mxfp8": {"recipe": "x"}})
    assert imported.recipe is None
    assert [reasons(imported, name) for name in ("float8.foo_dtype", "mxfp8")] == [["unsupported"]] * 2
    assert torchao.import_({"float8": {"recipe_name": "rowwise"}}).recipe is None


def test_a_format_may_have_torchs_own_name() -> None:
    casts = {"cast_config_grad_output": {"target_dtype": "float8_e4m3fn"}}
    assert torchao.import_({"float8": casts}).config.fp8 == "e4m3"
