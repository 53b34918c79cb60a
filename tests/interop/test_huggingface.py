"""TrainingArguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError
from bridge.interop import huggingface
from bridge.precision.registry import REGISTRY
from tests.interop.crossings import check_nothing_dropped, reasons

SAMPLE = Path(__file__).parent / "samples" / "huggingface" / "arguments.json"
OTHER = ("output_dir", "per_device_train_batch_size")


def test_bf16_is_autocast_over_fp32_weights_unless_they_were_loaded_otherwise() -> None:
    imported = huggingface.import_({"bf16": True})
    assert (imported.semantics, imported.recipe) == ("amp_o1", "bf16_autocast_mixed")
    assert reasons(imported, "weights_dtype") == ["implied default"]
    loaded = huggingface.import_({"bf16": True}, weights_dtype="bf16")
    assert (loaded.semantics, loaded.config.mode) == ("true", "bf16")
    assert reasons(loaded, "weights_dtype") == ["semantics"]


def test_fp16_has_torchs_scaler_and_not_megatrons() -> None:
    config = huggingface.import_({"fp16": True}).config
    assert (config.initial_loss_scale, config.loss_scale_window, config.hysteresis) == (65536, 2000, 1)
    exported = huggingface.export(REGISTRY.get("fp16_mixed").state(initial_loss_scale=2.0**32, loss_scale=None))
    assert reasons(exported, "initial_loss_scale") == ["unsupported"]


@pytest.mark.parametrize("value", ["false", "full", "auto", 1])
def test_words_are_true_however_they_read(value: Any) -> None:
    imported = huggingface.import_({"bf16": value})
    assert imported.config.autocast_enabled
    assert reasons(imported, "bf16") == ["semantics"]


def test_a_file_is_read_whole() -> None:
    payload = json.loads(SAMPLE.read_text())
    imported = huggingface.import_(payload)
    check_nothing_dropped(payload, imported, beside=OTHER)
    for name in ("bf16_full_eval", "torch_compile", "optim"):
        assert reasons(imported, name) == ["unsupported"]
    for name in ("fp16_opt_level", "half_precision_backend"):
        assert reasons(imported, name) == ["dead knob"]


def test_compiling_turns_tf32_on_unless_it_is_written() -> None:
    assert huggingface.import_({"bf16": True, "torch_compile": True}).config.tf32 is True
    assert huggingface.import_({"bf16": True, "torch_compile": True, "tf32": False}).config.tf32 is False
    assert huggingface.import_({"fp16": True, "torch_compile": True}).config.tf32 is None


def test_fp16_without_cuda_is_fp32_and_said_so() -> None:
    assert "semantics" in reasons(huggingface.import_({"fp16": True, "use_cpu": True}), "fp16")


@pytest.mark.parametrize(
    ("environment", "mode", "autocast"), [("no", "fp32", False), ("fp16", "fp16", True), ("bf16", "fp32", True)]
)
def test_the_environment_decides_where_no_switch_does(environment: str, mode: str, autocast: bool) -> None:
    config = huggingface.import_({}, accelerate_mixed_precision=environment).config
    assert (config.mode, config.autocast_enabled) == (mode, autocast)


def test_a_switch_kills_the_environments_fp8() -> None:
    imported = huggingface.import_({"bf16": True}, accelerate_mixed_precision="fp8")
    assert reasons(imported, "ACCELERATE_MIXED_PRECISION") == ["dead knob"]


@pytest.mark.parametrize("payload", [{"bf16": True, "fp16": True}, ["--bf16", "maybe"], ["--bf16", 3], {"bf16": {}}, 3])
def test_nonsense_is_one_sentence(payload: Any) -> None:
    with pytest.raises(BridgeError) as caught:
        huggingface.import_(payload)
    assert "\n" not in str(caught.value)


def test_megatrons_bf16_is_reported_as_another_computation() -> None:
    exported = huggingface.export(REGISTRY.get("bf16_mixed"))
    assert exported.payload == {"bf16": True, "fp16": False}
    assert reasons(exported, "bf16") == ["semantics"]
    assert reasons(exported, "params_dtype") == ["semantics"]


def test_fp8_has_no_argument() -> None:
    exported = huggingface.export(REGISTRY.get("bf16_with_fp8_delayed_scaling_mixed"))
    assert reasons(exported, "fp8") == ["unsupported"]
