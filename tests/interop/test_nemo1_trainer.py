"""NeMo 1.x models that are not Megatron's: Lightning trains them, by its own words."""

from typing import Any

import pytest

from bridge.errors import PayloadError
from bridge.interop import nemo1
from tests.interop.properties import reasons


def lightnings(precision: Any, model: dict | None = None, **trainer: Any) -> dict:
    return {"trainer": {"precision": precision, "max_epochs": 3, **trainer}, "model": model or {"sample_rate": 16000}}


def test_a_model_that_is_not_megatrons_has_torchs_scaler() -> None:
    imported = nemo1.import_(lightnings(16))
    config = imported.config
    assert (config.initial_loss_scale, config.loss_scale_window, config.hysteresis) == (65536, 2000, 1)
    assert imported.semantics == "amp_o1"
    assert reasons(imported, "model.native_amp_init_scale") == reasons(imported, "model.megatron_amp_O2") == []
    assert reasons(imported, "model") == ["implied default"]


@pytest.mark.parametrize(
    "key",
    ["data", "megatron_amp_O2", "tensor_model_parallel_size", "micro_batch_size", "mcore_gpt", "native_amp_init_scale"],
)
def test_one_key_of_megatrons_is_enough(key: str) -> None:
    value = {"megatron_amp_O2": False, "mcore_gpt": False, "native_amp_init_scale": 2**32}.get(key, 1)
    assert nemo1.import_(lightnings(16, {key: value})).config.initial_loss_scale == 2**32


def test_lightnings_own_words_count_for_other_models() -> None:
    assert nemo1.import_(lightnings("bf16-true")).semantics == "true"
    assert nemo1.import_(lightnings("${p}") | {"p": "bf16"}).recipe == "bf16_autocast_mixed"
    assert nemo1.import_(lightnings(32)).recipe == "fp32"
    dtype = nemo1.import_(lightnings(32, {"sample_rate": 1, "compute_dtype": "bf16"}))
    assert reasons(dtype, "model.compute_dtype") == ["unsupported"]


@pytest.mark.parametrize(
    ("trainer", "level", "backend"),
    [
        ({"amp_level": "O1"}, ["dead knob"], []),
        ({"amp_level": "O1", "amp_backend": "native"}, ["dead knob"], []),
    ],
)
def test_apex_settings_are_named(trainer: dict, level: list, backend: list) -> None:
    imported = nemo1.import_(lightnings(16, **trainer))
    assert reasons(imported, "trainer.amp_level") == level
    assert reasons(imported, "trainer.amp_backend") == backend
    megatrons = nemo1.import_({"trainer": {"precision": 16, **trainer}, "model": {"megatron_amp_O2": True}})
    assert reasons(megatrons, "trainer.amp_level") == (["dead knob"] if "amp_level" in trainer else [])


def test_apex_is_refused_where_it_casts() -> None:
    with pytest.raises(PayloadError, match="trainer.amp_backend: must be native"):
        nemo1.import_(lightnings(16, amp_backend="apex", amp_level="O1"))
    unread = nemo1.import_(lightnings("bf16", amp_backend="apex", amp_level="O1"))
    assert unread.recipe == "bf16_autocast_mixed"
    assert reasons(unread, "trainer.amp_level") == reasons(unread, "trainer.amp_backend") == ["dead knob"]
