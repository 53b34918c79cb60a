"""DeepSpeed's JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError
from bridge.precision.mode import get_mode
from bridge.read import deepspeed
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.read.properties import check_nothing_dropped, reasons

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
    assert get_mode(imported.config) == mode
    if auto is None:
        assert (imported.mode_is_stated, imported.semantics) == (False, "unstated")
        assert reasons(imported, "bf16.enabled") == ["unsupported"]
    precision = {name: payload[name] for name in ("fp16", "bf16")}
    check_nothing_dropped(precision, imported)


@pytest.mark.parametrize("payload", [{}, {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}, {"bf16": {}}])
def test_without_a_block_the_trainer_decides(payload: dict[str, object]) -> None:
    imported = deepspeed.import_(payload)
    assert imported.decided_by == "the trainer that reads it (DeepSpeed 0.19.8 by itself keeps the model's own dtype)"
    assert get_mode(imported.assume_default().config) == "fp32"
    for mode in ("bf16", "fp16", "fp32"):
        filled = deepspeed.import_(payload, auto=mode)
        assert (get_mode(filled.config), filled.mode_is_stated) == (mode, True)


@pytest.mark.parametrize("block", ["fp16", "bf16", "torch_autocast"])
def test_blocks_that_are_off_state_no_mode(block: str) -> None:
    decides = "the dtype that the model is loaded in, which DeepSpeed 0.19.8 keeps with both blocks off,"
    imported = deepspeed.import_({block: {"enabled": False}, "zero_optimization": {"stage": 2}})
    assert (imported.decided_by, imported.semantics, imported.recipe) == (decides, "unstated", None)
    assert imported.config.stated == frozenset()
    assert f"{block}.enabled" in imported.mapped
    assert [loss.detail for loss in imported.unmapped if loss.field == "mode"] == [
        f"nothing in the file states it; {decides} decides"
    ]
    assert imported.assume_default().recipe == "fp32"


def test_the_dtype_of_the_weights_states_fp32() -> None:
    exported = deepspeed.export(REGISTRY.get("fp32"))
    assert exported.payload["data_types"] == {"param_dtype": "fp32"}
    imported = deepspeed.import_(exported.payload)
    assert (imported.mode_is_stated, imported.recipe) == (True, "fp32")


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
        ({"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "fp32"}}, "data_types.buffer_dtype", "unsupported"),
        ({"fp16": {"enabled": True, "auto_cast": "auto"}}, "fp16.auto_cast", "implied default"),
        ({"fp16": {"enabled": True, "opt_level": "O2"}}, "fp16.opt_level", "dead knob"),
        ({"bf16": {"enabled": True, "loss_scale": 0}}, "bf16.loss_scale", "dead knob"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "unsupported"),
        ({"optimizer": {"type": "ZeroOneAdam"}}, "optimizer.type", "unsupported"),
        ({"optimizer": {"type": "OneBitLamb"}}, "optimizer.type", "unsupported"),
        (
            {"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}},
            "optimizer.params.fp32_optimizer_states",
            "unsupported",
        ),
        (
            {"zero_optimization": {"zero_quantized_gradients": "auto"}},
            "zero_optimization.zero_quantized_gradients",
            "implied default",
        ),
        (
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "unsupported",
        ),
        (
            {"zero_optimization": {"load_from_fp32_weights": False}},
            "zero_optimization.load_from_fp32_weights",
            "unsupported",
        ),
        ({"zero_optimization": {"zeropp_loco_param": {}}}, "zero_optimization.zeropp_loco_param", "unsupported"),
        ({"compression_training": {"weight_quantization": {}}}, "compression_training", "unsupported"),
        ({"quantize_training": {"enabled": True}}, "quantize_training", "unsupported"),
        ({"weight_quantization": {"post_init_quant": {}}}, "weight_quantization", "unsupported"),
        ({"prescale_gradients": True}, "prescale_gradients", "unsupported"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor", "unsupported"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile", "unsupported"),
        ({"tensor_parallel": {"dtype": "torch.bfloat16"}}, "tensor_parallel.dtype", "unsupported"),
        ({"seq_parallel_communication_data_type": "bf16"}, "seq_parallel_communication_data_type", "unsupported"),
        ({"communication_data_type": "fp16"}, "communication_data_type", "unsupported"),
        ({"float8": {"enabled": True}}, "float8", "dead knob"),
        ({"amp": {"enabled": False}}, "amp", "dead knob"),
        ({"amp": {"enabled": True}}, "amp", "dead knob"),
        ({"amp": {"enabled": "auto", "opt_level": "auto"}}, "amp", "dead knob"),
    ],
    ids=str,
)
def test_what_has_no_field_is_reported(payload: dict[str, Any], field: str, reason: str) -> None:
    assert reason in reasons(deepspeed.import_(payload), field)


@pytest.mark.parametrize(
    ("payload", "name"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": False}},
            "zero_optimization.zero_quantized_weights",
        ),
        ({"zero_optimization": {"load_from_fp32_weights": True}}, "zero_optimization.load_from_fp32_weights"),
        ({"prescale_gradients": False}, "prescale_gradients"),
        ({"gradient_predivide_factor": 1.0}, "gradient_predivide_factor"),
        ({"communication_data_type": "fp32"}, "communication_data_type"),
        ({"seq_parallel_communication_data_type": "fp32"}, "seq_parallel_communication_data_type"),
        ({"optimizer": {"params": {"fp32_optimizer_states": True}}}, "optimizer.params.fp32_optimizer_states"),
    ],
    ids=str,
)
def test_what_is_off_agrees_with_ours(payload: dict[str, Any], name: str) -> None:
    imported = deepspeed.import_(payload)
    assert name in imported.mapped
    assert reasons(imported, name) == []


@pytest.mark.parametrize("written", ["fp32", "float32", "float", "torch.float32"])
def test_dtypes_are_spelled_as_torch_spells_them(written: str) -> None:
    payload = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": written},
        "communication_data_type": "FP32",
    }
    imported = deepspeed.import_(payload)
    assert imported.config.grad_reduce_in_fp32 is True
    assert reasons(imported, "data_types.grad_accum_dtype") == []


@pytest.mark.parametrize("recipe", ["bf16_mixed", "fp16_mixed"])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_an_export_brings_the_zero_that_its_gradients_need(recipe: str, in_fp32: bool) -> None:
    config = REGISTRY.get(recipe).override(grad_reduce_in_fp32=in_fp32)
    exported = deepspeed.export(config)
    assert exported.payload.get("zero_optimization") == ({"stage": 1} if in_fp32 else None)
    imported = deepspeed.import_(exported.payload)
    assert imported.config.grad_reduce_in_fp32 is in_fp32
    assert reasons(imported, "data_types.grad_accum_dtype") == []
    lost = [loss for loss in exported.unmapped if loss.field == "grad_reduce_in_fp32"]
    assert ("grad_reduce_in_fp32" in exported.mapped) is not in_fp32
    assert [str(loss) for loss in lost] == (
        [
            "grad_reduce_in_fp32=True (approximated): DeepSpeed 0.19.8 raises on FP32 accumulation of half-precision "
            "gradients without ZeRO, so zero_optimization.stage=1 was written: optimizer state is sharded as under "
            "Megatron's distributed optimizer, and the numbers do not change. Raise the stage, or reduce in half "
            "precision."
        ]
        * in_fp32
    )


@pytest.mark.parametrize("written", [True, "auto", "true", "false"])
def test_the_engines_autocast_is_not_mapped(written: object) -> None:
    imported = deepspeed.import_({"torch_autocast": {"enabled": written, "dtype": "bfloat16"}})
    decides = "the engine's autocast over the dtype that the model is loaded in, which is not read,"
    assert (imported.semantics, imported.decided_by, imported.recipe) == ("unstated", decides, None)
    assert reasons(imported, "torch_autocast.enabled") == reasons(imported, "torch_autocast.dtype") == ["unsupported"]


def test_low_memory_switches_leave_nothing_in_fp32() -> None:
    payload = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert deepspeed.import_(payload).semantics == "true"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, r"bf16\.enabled: must be off where fp16 is on"),
        ({"communication_data_type": "float32"}, "must be fp32, fp16, bf16, got 'float32'. Write 'fp32'"),
        ({"communication_data_type": ""}, "communication_data_type: must be fp32, fp16, bf16"),
        ({"communication_data_type": "bfp16"}, "communication_data_type: must be fp32, fp16, bf16"),
        ({"data_types": {"grad_accum_dtype": "FP32"}}, r"grad_accum_dtype: must be 'fp32'.*got 'FP32'\. Did you mean"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, r"data_types\.grad_accum_dtype: must be 'fp32', 'float32'"),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, "must be the dtype of the mode, bf16"),
        ({"fp16": {"enabled": "perhaps"}}, r"fp16\.enabled: must be true or false, got 'perhaps'"),
        ({"fp16": [1]}, r"DeepSpeed: fp16: must be a mapping of settings, got \[1\]"),
        ([], r"DeepSpeed: must be a mapping of settings, got \[\]"),
    ],
)
def test_what_deepspeed_refuses_is_refused(payload: Any, message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        deepspeed.import_(payload)


class TestTheRealConfig:
    """The same facts from the library itself."""

    @staticmethod
    def made(payload: dict[str, Any]) -> Any:
        pytest.importorskip("deepspeed", reason="needs deepspeed: pip install precision-bridge[interop]")
        from deepspeed.runtime.config import DeepSpeedConfig

        return DeepSpeedConfig({"train_batch_size": 1, **payload})

    @pytest.mark.parametrize("block", [{"enabled": False}, {"enabled": "auto"}, {"enabled": True}])
    def test_apex_is_refused_on_or_off(self, block: dict[str, Any]) -> None:
        with pytest.raises(Exception, match="Apex AMP integration has been removed"):
            self.made({"amp": block})

    @pytest.mark.parametrize(
        "payload",
        [{"compression_training": {}}, {"quantize_training": {}}, {"zero_optimization": {"zeropp_loco_param": {}}}],
    )
    def test_what_it_has_removed_is_refused(self, payload: dict[str, Any]) -> None:
        with pytest.raises(Exception, match="removed"):
            self.made(payload)

    @pytest.mark.parametrize("mode", ["fp16", "bf16"])
    def test_blocks_forbid_what_they_do_not_know(self, mode: str) -> None:
        with pytest.raises(ValueError, match="not permitted"):
            self.made({mode: {"enabled": True, "x": 1}})
        self.made({mode: {"enabled": True, "x": "auto"}})

    def test_any_word_enables_autocast(self) -> None:
        assert self.made({"torch_autocast": {"enabled": "auto", "dtype": "bfloat16"}}).torch_autocast_enabled
        assert self.made({"torch_autocast": {"enabled": True}}).torch_autocast_dtype is None

    @pytest.mark.parametrize("recipe", ["fp32", "bf16_mixed", "fp16_mixed", "bf16_autocast_mixed"])
    @pytest.mark.parametrize("in_fp32", [True, False])
    def test_its_engine_takes_what_is_exported(
        self, recipe: str, in_fp32: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = pytest.importorskip("deepspeed.runtime.engine", reason="needs deepspeed")
        monkeypatch.setattr(engine, "is_zero_supported_optimizer", lambda _: True)  # asks for a process group
        payload = deepspeed.export(REGISTRY.get(recipe).override(grad_reduce_in_fp32=in_fp32)).payload
        self.chosen(payload)
        if payload.pop("zero_optimization", None):
            with pytest.raises(NotImplementedError, match="unsupported mix of model_dtype"):
                self.chosen(payload)

    def chosen(self, payload: dict[str, Any]) -> Any:
        """Return the optimizer that the real engine chooses for a configuration; raises as it does."""
        config = self.made(payload)
        import torch
        from deepspeed.runtime.engine import DeepSpeedEngine

        engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
        torch.nn.Module.__init__(engine)
        engine._config, engine.pipeline_parallelism = config, False
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
        return engine._do_optimizer_sanity_check(optimizer)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_its_engine_keeps_the_models_dtype_with_both_blocks_off(self, dtype: str) -> None:
        config = self.made({"fp16": {"enabled": False}, "bf16": {"enabled": False}})
        import torch
        from deepspeed.runtime.engine import DeepSpeedEngine

        engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
        torch.nn.Module.__init__(engine)
        engine._config = config
        assert engine._mixed_precision_dtypes() == (None, None)
        engine.dont_change_device, engine.mpu, engine._autoep_folding_spec = True, None, None
        model = torch.nn.Linear(1, 1, dtype=getattr(torch, dtype))
        engine._set_client_model(model)
        engine._DeepSpeedEngine__check_params(model, torch.float)
        assert model.weight.dtype is getattr(torch, dtype)

    def test_spellings_of_dtypes_are_its_own(self) -> None:
        self.made({})
        from deepspeed.runtime.config import DtypeEnum

        from bridge.read.deepspeed import DTYPE_NAMES

        for written, ours in DTYPE_NAMES.items():
            assert DtypeEnum(written).name == ours

    def test_the_name_of_an_optimizer_is_not_checked_before_the_engine(self) -> None:
        import torch

        assert self.made({"optimizer": {"type": "OneBitAdam"}}).optimizer_name == "OneBitAdam"
        assert not hasattr(torch.optim, "OneBitAdam")


def test_another_letter_case_and_ms_amp_are_reported() -> None:
    on = {"msamp": {"enabled": True, "opt_level": "O3"}, "BF16": {"enabled": True}}
    assert reasons(deepspeed.import_(on), "msamp.enabled") == ["unsupported"]
    assert reasons(deepspeed.import_(on), "BF16") == ["dead knob"]
    assert reasons(deepspeed.import_({"msamp": {"enabled": False}}), "msamp.enabled") == []
