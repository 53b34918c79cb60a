"""Round trips against DeepSpeed itself, as those of `test_real_libraries`."""

from typing import Any

import pytest
from hypothesis import given

from bridge.errors import BridgeError
from bridge.precision.mode import get_mode
from bridge.read import deepspeed
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from tests.read.properties import check_export, check_return, configs
from tests.read.test_real_libraries import MANY, library

pytestmark = pytest.mark.filterwarnings("ignore")


def held(payload: dict[str, Any]) -> dict[str, Any]:
    """What the real DeepSpeedConfig holds of a configuration, in the words of the JSON."""
    from deepspeed.runtime.config import DeepSpeedConfig

    made = DeepSpeedConfig({"train_batch_size": 1, **payload})
    short = {None: None, "torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    return {
        "fp16": made.float16_config.model_dump(),
        "bf16": made.bfloat16_config.model_dump(),
        "torch_autocast": {"enabled": made.torch_autocast_enabled, "dtype": _short(made.torch_autocast_dtype)},
        "data_types": {"grad_accum_dtype": made.grad_accum_dtype, "param_dtype": made.param_dtype},
        "communication_data_type": short[made.communication_data_type and str(made.communication_data_type)],
    }


def _short(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


@library("deepspeed")
class TestDeepSpeed:
    @MANY
    @given(config=configs())
    def test_blocks_return_from_the_real_config(self, version: str, config: MixedPrecisionConfig) -> None:
        exported = deepspeed.export(config)
        check_export(config, exported)
        if "torch_autocast" not in exported.payload:  # written and not read
            check_return(config, exported, deepspeed.import_(held(exported.payload)))

    def test_auto_is_off_without_a_layer_above(self, version: str) -> None:
        assert held({"bf16": {"enabled": "auto"}})["bf16"]["enabled"] is False
        assert get_mode(deepspeed.import_({"bf16": {"enabled": "auto"}}).config) == "fp32"
        assert get_mode(deepspeed.import_({"bf16": {"enabled": "auto"}}, auto="bf16").config) == "bf16"

    def test_unknown_blocks_are_ignored_without_a_word(self, version: str) -> None:
        assert held({"fp8": {"enabled": True}})["bf16"]["enabled"] is False
        imported = deepspeed.import_({"fp8": {"enabled": True}})
        assert imported.config.fp8 is None
        assert [loss.reason for loss in imported.unmapped if loss.field == "fp8"] == ["dead knob"]

    @pytest.mark.parametrize(
        "payload",
        [
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            {"communication_data_type": "float32"},
            {"fp16": {"enabled": True, "min_loss_scale": 0}},
            {"fp16": {"enabled": True, "loss_scale": -1}},
        ],
        ids=str,
    )
    def test_what_it_refuses_is_refused_here(self, version: str, payload: dict[str, Any]) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011  assertion, pydantic and own errors alike
            held(payload)
        with pytest.raises(BridgeError):
            deepspeed.import_(payload)

    def test_apart_from_the_legacy_name_of_the_block(self, version: str) -> None:
        assert held({"bfloat16": {"enabled": True}})["bf16"]["enabled"] is True
        assert get_mode(deepspeed.import_({"bfloat16": {"enabled": True}}).config) == "bf16"
