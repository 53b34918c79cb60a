"""Autocast, a loss scaler and TF32 in one mapping, as tutorials of mixed precision have them."""

from __future__ import annotations

import pytest
import torch

from bridge.errors import PayloadError
from bridge.interop.pytorch import loop
from tests.interop.properties import reasons


def test_fp16_with_a_scaler_is_fp16_autocast_over_fp32_weights() -> None:
    imported = loop.import_({"autocast": {"dtype": "fp16"}, "grad_scaler": {"init_scale": 1024, "enabled": True}})
    assert imported.semantics == "amp_o1"
    stated = {"fp16": True, "params_dtype": "fp32", "autocast_enabled": True, "autocast_dtype": "fp16"}
    assert imported.config.to_dict() == {**stated, "initial_loss_scale": 1024.0}


def test_fp16_without_a_scale_is_pointed_out() -> None:
    assert reasons(loop.import_({"autocast": {"dtype": "fp16"}}), "grad_scaler") == ["semantics"]


def test_a_scaler_around_bf16_is_dead() -> None:
    imported = loop.import_({"autocast": {"dtype": "bf16"}, "grad_scaler": {"enabled": True}})
    assert reasons(imported, "grad_scaler") == ["dead knob"]


@pytest.mark.parametrize(("device", "mode"), [("cpu", "bf16"), ("cuda", "fp16")])
def test_autocast_without_a_dtype_is_another_one_per_device(device: str, mode: str) -> None:
    imported = loop.import_({"autocast": {"device_type": device, "enabled": True}})
    assert imported.config.reading("autocast_dtype") == mode


def test_another_part_is_converted_by_itself() -> None:
    imported = loop.import_({"autocast": {"dtype": "bf16"}, "fsdp": {"param_dtype": "bf16"}})
    assert reasons(imported, "fsdp") == ["unsupported"]


def test_autocast_to_fp8_is_refused() -> None:
    with pytest.raises(PayloadError, match="must be bfloat16 or float16"):
        loop.import_({"autocast": {"dtype": torch.float8_e4m3fn}})
