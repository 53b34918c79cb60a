"""Round trips against DeepSpeed and Lightning themselves, as those of `test_real_libraries`."""

from typing import Any

import pytest
from hypothesis import given

from bridge.errors import BridgeError
from bridge.interop import deepspeed, lightning
from bridge.precision.mode import mode_of
from bridge.registry.config import MixedPrecisionConfig
from tests.interop.properties import check_export, check_return, configs
from tests.interop.test_real_libraries import FEW, MANY, library

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
        assert mode_of(deepspeed.import_({"bf16": {"enabled": "auto"}}).config) == "fp32"
        assert mode_of(deepspeed.import_({"bf16": {"enabled": "auto"}}, auto="bf16").config) == "bf16"

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
        assert mode_of(deepspeed.import_({"bfloat16": {"enabled": True}}).config) == "bf16"


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@library("lightning")
class TestLightning:
    @pytest.mark.parametrize("word", ["32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true", 16, "bf16", 32])
    def test_strings_mean_what_the_trainer_makes_of_them(self, version: str, word: Any) -> None:
        from lightning.pytorch import Trainer

        plugin = Trainer(accelerator="cpu", precision=word, **QUIET).precision_plugin
        imported, again = lightning.import_(word, accelerator="cpu"), lightning.import_(plugin.precision)
        assert imported.semantics == again.semantics
        assert imported.config == again.config

    @pytest.mark.parametrize("word", ["fp8", "fp16-mixed", "BF16-mixed", "tf32", "bf16_mixed"])
    def test_other_strings_are_refused_by_both(self, version: str, word: str) -> None:
        from lightning.pytorch import Trainer

        with pytest.raises(ValueError, match="Precision"):
            Trainer(accelerator="cpu", precision=word, **QUIET)
        with pytest.raises(BridgeError, match="letter by letter"):
            lightning.import_(word)

    @FEW
    @given(config=configs().filter(lambda config: not (config.fp8 and config.fp8_recipe == "delayed")))
    def test_arguments_return_from_the_real_plugins(self, version: str, config: MixedPrecisionConfig) -> None:
        from lightning.pytorch.plugins import MixedPrecision, Precision
        from torch.amp import GradScaler

        exported = lightning.export(config)
        check_export(config, exported)
        if "plugins" in exported.payload:
            arguments = dict(exported.payload["plugins"][0]["init_args"])
            scaler: Any = GradScaler(**{**arguments.pop("scaler")["init_args"], "device": "cpu"})
            plugin: Any = MixedPrecision(**{**arguments, "device": "cpu"}, scaler=scaler)
            kept = {"init_scale": plugin.scaler._init_scale, "growth_interval": plugin.scaler._growth_interval}
            assert kept == {
                name: exported.payload["plugins"][0]["init_args"]["scaler"]["init_args"][name] for name in kept
            }
            return
        if exported.payload["precision"] == "32-true":
            read: dict[str, Any] = {"precision": Precision().precision}
        else:
            read = {"precision": MixedPrecision(exported.payload["precision"], device="cpu").precision}
        check_return(config, exported, lightning.import_(read))
