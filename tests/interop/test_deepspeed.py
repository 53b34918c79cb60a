"""DeepSpeed's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError
from bridge.interop import deepspeed
from bridge.precision.config import MixedPrecisionConfig
from bridge.precision.registry import REGISTRY
from tests.interop.crossings import check_nothing_dropped, reasons

SAMPLE = Path(__file__).parent / "samples" / "deepspeed" / "zero2_fp16_auto.json"


def test_bf16_alone_reduces_in_bf16() -> None:
    imported = deepspeed.import_({"bf16": {"enabled": True}})
    assert imported.semantics == "megatron_o2"
    assert imported.config.grad_reduce_in_fp32 is False
    assert reasons(imported, "communication_data_type") == ["implied default"]
    assert reasons(imported, "data_types.grad_accum_dtype") == ["implied default"]


def test_fp32_reduction_takes_two_settings() -> None:
    payload = deepspeed.export(REGISTRY.get("bf16_mixed")).payload
    assert payload["data_types"] == {"grad_accum_dtype": "fp32"}
    assert payload["communication_data_type"] == "fp32"
    one = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    assert deepspeed.import_(one).config.grad_reduce_in_fp32 is False
    assert reasons(deepspeed.import_(one), "communication_data_type") == ["approximated"]


@pytest.mark.parametrize(("auto", "mode"), [(None, "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")])
def test_auto_is_what_stands_above(auto: str | None, mode: str) -> None:
    payload = json.loads(SAMPLE.read_text())
    imported = deepspeed.import_(payload, auto=auto)
    assert imported.config.mode == mode
    if auto is None:
        assert reasons(imported, "bf16.enabled") == ["implied default"]
    precision = {name: payload[name] for name in ("fp16", "bf16")}
    check_nothing_dropped(precision, imported)


def test_the_loss_scale_is_a_power_of_two_with_its_own_default() -> None:
    imported = deepspeed.import_({"fp16": {"enabled": True}})
    assert imported.config.initial_loss_scale == 65536
    assert reasons(imported, "fp16.initial_scale_power") == ["implied default"]
    odd = MixedPrecisionConfig(fp16=True, initial_loss_scale=1000.0)
    assert reasons(deepspeed.export(odd), "initial_loss_scale") == ["approximated"]
    assert deepspeed.export(odd).payload["fp16"]["initial_scale_power"] == 9


def test_zero_is_a_dynamic_scale() -> None:
    assert deepspeed.import_({"fp16": {"enabled": True, "loss_scale": 0}}).config.loss_scale is None
    assert deepspeed.import_({"fp16": {"enabled": True, "loss_scale": 128}}).config.loss_scale == 128
    assert deepspeed.export(MixedPrecisionConfig(fp16=True)).payload["fp16"]["loss_scale"] == 0


def test_half_a_minimum_is_not_a_whole_number() -> None:
    config = MixedPrecisionConfig(fp16=True, min_loss_scale=0.5)
    assert reasons(deepspeed.export(config), "min_loss_scale") == ["approximated"]
    with pytest.raises(BridgeError, match=r"fp16\.min_loss_scale: must be a whole number"):
        deepspeed.import_({"fp16": {"enabled": True, "min_loss_scale": 0.5}})


@pytest.mark.parametrize(
    ("payload", "field", "reason"),
    [
        ({"fp16": {"enabled": True, "consecutive_hysteresis": True}}, "fp16.consecutive_hysteresis", "unsupported"),
        ({"fp16": {"enabled": True, "min_loss_scale": 1}}, "fp16.min_loss_scale", "semantics"),
        ({"fp16": {"enabled": False, "loss_scale": 8}}, "fp16.loss_scale", "dead knob"),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "bf16.immediate_grad_update", "unsupported"),
        ({"fp8": {"enabled": True}}, "fp8", "dead knob"),
        (
            {"zero_optimization": {"zero_quantized_weights": 1}},
            "zero_optimization.zero_quantized_weights",
            "unsupported",
        ),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype", "implied default"),
        ({"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "fp32"}}, "data_types.buffer_dtype", "unsupported"),
    ],
    ids=str,
)
def test_what_has_no_field_is_reported(payload: dict[str, Any], field: str, reason: str) -> None:
    assert reason in reasons(deepspeed.import_(payload), field)


def test_low_memory_switches_leave_nothing_in_fp32() -> None:
    payload = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert deepspeed.import_(payload).semantics == "true"


def test_torch_autocast_is_amp() -> None:
    imported = deepspeed.import_({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    assert (imported.semantics, imported.recipe) == ("amp_o1", "bf16_autocast_mixed")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"amp": {"enabled": True}}, "removed Apex"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, r"bf16\.enabled: must be off where fp16 is on"),
        ({"communication_data_type": "float32"}, "communication_data_type: must be fp32, fp16, bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp8"}}, r"torch_autocast\.dtype: must be"),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, "must be the dtype of the mode, bf16"),
        ({"fp16": {"enabled": "perhaps"}}, r"fp16\.enabled: must be true or false, got 'perhaps'"),
        ({"fp16": [1]}, r"DeepSpeed: fp16: must be a mapping of settings, got \[1\]"),
        ([], r"DeepSpeed: must be a mapping of settings, got \[\]"),
    ],
)
def test_what_deepspeed_refuses_is_refused(payload: Any, message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        deepspeed.import_(payload)
