"""NeMo 1.x: the gate, the flipped defaults, O1 and O2."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from bridge.errors import PayloadError
from bridge.precision.mode import get_mode
from bridge.read.nemo import nemo1
from bridge.read.text.document import Document
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.read.properties import check_export, check_return, configs, reasons

SAMPLES = Path(__file__).parent / "samples"
FP8 = {"transformer_engine": True, "fp8": True, "fp8_hybrid": True}


def read(precision: Any = "bf16", **model: Any):
    return nemo1.import_({"trainer": {"precision": precision}, "model": {"megatron_amp_O2": True, **model}})


@given(config=configs())
def test_what_is_exported_is_carried_or_reported_and_returns(config: MixedPrecisionConfig) -> None:
    exported = nemo1.export(config)
    check_export(config, exported)
    check_return(config, exported, nemo1.import_(exported.payload))


@pytest.mark.parametrize(
    "name", ["fp32", "bf16_mixed", "fp16_mixed", "bf16_autocast_mixed", "bf16_with_fp8_delayed_scaling_mixed"]
)
def test_what_nemo_can_say_returns_by_name_through_omegaconf(name: str) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    text = nemo1.SYSTEM.write(nemo1.export(REGISTRY.get(name)).payload)
    read_back = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(text), resolve=True)
    assert nemo1.import_(read_back).recipe == name


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        (16, "fp16"),
        ("16", "fp16"),
        ("16-mixed", "fp16"),
        ("bf16", "bf16"),
        ("bf16-mixed", "bf16"),
        (32, "fp32"),
        ("32-true", "fp32"),
        (16.0, "fp16"),
    ],
)
def test_precisions_are_those_nemo_takes(said: Any, mode: str) -> None:
    assert get_mode(read(said).config) == mode


@pytest.mark.parametrize("said", ["bf16-true", "64", "fp8", True])
def test_other_precisions_raise_as_in_nemo(said: Any) -> None:
    with pytest.raises(PayloadError, match="trainer.precision: NeMo takes"):
        read(said)


def test_a_second_precision_is_reported_unless_it_agrees() -> None:
    for second, expected in ((16, ["dead knob"]), ("bf16-mixed", []), ("${trainer.precision}", [])):
        payload = {"trainer": {"precision": "bf16"}, "model": {"precision": second, "megatron_amp_O2": True}}
        assert reasons(nemo1.import_(payload), "model.precision") == expected


@pytest.mark.parametrize(
    ("precision", "model"),
    [(16, {"sample_rate": 16000}), ("bf16-true", {"perception": {}, "data": {}}), (32, {"compute_dtype": "bf16"})],
)
def test_a_model_that_is_not_megatrons_is_refused(precision: Any, model: dict[str, Any]) -> None:
    rule = "model: must be a model of Megatron's, and no key of one is in the file; Lightning trains others, without"
    with pytest.raises(PayloadError, match=rule):
        nemo1.import_({"trainer": {"precision": precision}, "model": model})


@pytest.mark.parametrize(
    "key",
    ["data", "megatron_amp_O2", "tensor_model_parallel_size", "micro_batch_size", "mcore_gpt", "native_amp_init_scale"],
)
def test_one_key_of_megatrons_is_enough(key: str) -> None:
    value = {"megatron_amp_O2": False, "mcore_gpt": False, "native_amp_init_scale": 2**32}.get(key, 1)
    payload = {"trainer": {"precision": 16}, "model": {key: value}}
    assert nemo1.import_(payload).config.initial_loss_scale == 2**32


@pytest.mark.parametrize("trainer", [{"amp_level": "O1"}, {"amp_level": "O1", "amp_backend": "native"}])
def test_settings_of_apex_are_named(trainer: dict[str, Any]) -> None:
    imported = nemo1.import_({"trainer": {"precision": 16, **trainer}, "model": {"megatron_amp_O2": True}})
    assert reasons(imported, "trainer.amp_level") == ["dead knob"]
    assert reasons(imported, "trainer.amp_backend") == []


def test_a_model_section_alone_leaves_the_mode_to_the_trainer() -> None:
    imported = nemo1.import_({"megatron_amp_O2": True, "mcore_gpt": True})
    assert imported.decided_by == "the section trainer of another file"
    assert nemo1.import_({"megatron_amp_O2": True, "trainer": {}}).config.fp32


def test_o1_keeps_fp32_weights_under_autocast() -> None:
    imported = read("bf16", megatron_amp_O2=False)
    assert (imported.semantics, imported.recipe) == ("amp_o1", "bf16_autocast_mixed")
    assert read("bf16").semantics == "megatron_o2"
    half = read(16, megatron_amp_O2=False)
    assert (half.semantics, half.config.to_dict()["params_dtype"], half.config.autocast_enabled) == (
        "amp_o1",
        "fp32",
        True,
    )


def test_torch_fsdp_switches_o2_off() -> None:
    imported = read("bf16", fsdp=True)
    assert imported.semantics == "fsdp_policy"
    assert reasons(imported, "model.megatron_amp_O2") == ["dead knob"]


def test_everything_fp8_is_ignored_without_transformer_engine() -> None:
    imported = read(**{**FP8, "transformer_engine": False}, fp8_params=True)
    assert imported.config.fp8 is None
    assert reasons(imported, "model.fp8") == reasons(imported, "model.fp8_params") == ["dead knob"]


@pytest.mark.parametrize("core", [True, False])
def test_fp8_runs_in_the_layers_of_transformer_engine_alone_as_in_2_0(core: bool) -> None:
    imported = read(**{**FP8, "transformer_engine": False}, mcore_gpt=core)
    assert (imported.config.fp8, imported.mapped["model.transformer_engine"]) == (None, ())
    (loss,) = (loss for loss in imported.unmapped if loss.field == "model.fp8")
    assert loss.detail == (
        "NeMo 2.0 runs FP8 in the layers of Transformer Engine alone, and transformer_engine is not true"
    )
    assert read(**FP8, mcore_gpt=core).config.fp8 == "hybrid"
    unsaid = read(fp8=True, fp8_hybrid=True, mcore_gpt=core)
    assert unsaid.config.fp8 is None
    assert reasons(unsaid, "model.transformer_engine") == ["implied default"]


def test_the_boolean_fp8_becomes_a_format() -> None:
    assert read(**FP8).config.fp8 == "hybrid"
    both = read(**FP8, fp8_e4m3=True)
    assert both.config.fp8 == "e4m3"
    assert reasons(both, "model.fp8_hybrid") == ["dead knob"]


def test_fp8_without_a_format_raises_as_in_nemo() -> None:
    with pytest.raises(PayloadError) as caught:
        read(transformer_engine=True, fp8=True)
    assert str(caught.value) == (
        "nemo1: model.fp8: NeMo raises on fp8 with neither fp8_e4m3 nor fp8_hybrid, got True. "
        "Set model.fp8_hybrid=True."
    )


def test_the_scheme_is_delayed_unless_the_key_is_there() -> None:
    imported = read(**FP8)
    assert imported.config.fp8_recipe == "delayed"
    assert reasons(imported, "model.fp8_recipe") == ["implied default"]
    assert read(**FP8, fp8_recipe="tensorwise").config.fp8_recipe == "tensorwise"


@pytest.mark.parametrize(
    ("model", "amax"),
    [
        ({"mcore_gpt": True}, (1, "most_recent")),
        ({"mcore_gpt": False}, (1024, "max")),
        ({"fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}, (16, "max")),
    ],
)
def test_absent_amax_settings_are_those_of_the_transformer(model: dict, amax: tuple) -> None:
    imported = read(**FP8, **model)
    assert (imported.config.fp8_amax_history_len, imported.config.fp8_amax_compute_algo) == amax
    expected = [] if "fp8_amax_history_len" in model else ["implied default"]
    assert reasons(imported, "model.fp8_amax_history_len") == expected


def test_amax_reduction_off_is_reported_and_on_is_not() -> None:
    assert reasons(read(**FP8, reduce_amax=False), "model.reduce_amax") == ["unsupported"]
    assert reasons(read(**FP8, reduce_amax=True), "model.reduce_amax") == []


def test_weights_in_fp8_are_the_gather() -> None:
    assert read(**FP8, fp8_params=True).config.fp8_param_gather is True
    exported = nemo1.export(REGISTRY.get("bf16_with_fp8_current_scaling_mixed"))
    assert reasons(exported, "fp8_param_gather") == ["semantics"]
    assert reasons(read(**FP8, fp8_param=True), "model.fp8_param") == ["semantics"]


def test_the_scaler_is_carried() -> None:
    scaler = {"native_amp_init_scale": 65536, "native_amp_growth_interval": 500, "hysteresis": 3}
    config = read(16, **scaler).config
    assert (config.initial_loss_scale, config.loss_scale_window, config.hysteresis) == (65536, 500, 3)
    assert reasons(read(16), "model.native_amp_init_scale") == ["implied default"]


def test_quantisation_is_named_and_is_no_registered_recipe() -> None:
    section = {"algorithm": "int4", "num_calib_size": 512, "enable_kv_cache": True}
    payload = {"trainer": {"precision": "bf16"}, "model": {"megatron_amp_O2": True}, "quantization": section}
    finished = nemo1.import_(payload)
    assert finished.recipe is None
    assert reasons(finished, "quantization.algorithm") == reasons(finished, "quantization.enable_kv_cache")
    (said,) = (loss.detail for loss in finished.unmapped if loss.field == "quantization.algorithm")
    assert said == "weights, and with most algorithms activations, are quantised (int4), in training or after it"
    none = nemo1.import_({**payload, "quantization": {"algorithm": None}})
    assert none.recipe == "bf16_mixed"


@pytest.mark.parametrize(
    ("precision", "mcore", "reason"),
    [("bf16", True, "dead knob"), (32, True, "dead knob"), (16, True, None), ("bf16", False, None)],
)
def test_query_key_scaling_acts_in_fp16_only_on_megatron_core(precision: Any, mcore: bool, reason: str | None) -> None:
    imported = read(precision, apply_query_key_layer_scaling=True, mcore_gpt=mcore)
    assert reasons(imported, "model.apply_query_key_layer_scaling") == ([reason] if reason else [])
    assert imported.config.apply_query_key_layer_scaling is (reason is None)


def test_query_key_scaling_that_is_off_is_met() -> None:
    imported = read(apply_query_key_layer_scaling=False)
    assert "model.apply_query_key_layer_scaling" in imported.mapped


def test_gradients_are_synchronised_in_what_is_said() -> None:
    assert read("bf16", optim={"grad_sync_dtype": "bf16"}).config.grad_reduce_in_fp32 is False
    assert read("bf16", optim={"grad_sync_dtype": "fp32"}).config.grad_reduce_in_fp32 is True
    assert reasons(read("bf16"), "model.optim.grad_sync_dtype") == ["implied default"]
    assert reasons(read("bf16", fsdp_grad_reduce_dtype="bf16"), "model.fsdp_grad_reduce_dtype") == ["dead knob"]


def test_references_are_followed() -> None:
    payload = {
        "trainer": {"precision": "bf16"},
        "model": {"precision": "${trainer.precision}", "megatron_amp_O2": True},
    }
    assert nemo1.import_({**payload, "trainer": {}} | {"trainer": {"precision": "bf16"}}).recipe == "bf16_mixed"
    payload["trainer"] = {"precision": "${precision}"}
    payload["precision"] = 16
    assert nemo1.import_(payload).config.fp16
    payload["precision"] = "${precision}"
    with pytest.raises(PayloadError, match="must be written out, got"):
        nemo1.import_(payload)


@pytest.mark.parametrize(
    ("written", "dtype"), [("${base}", "bf16"), ("${ base }", "bf16"), ("${.other}", "fp16"), ("${..base}", "bf16")]
)
def test_references_come_to_what_omegaconf_makes_of_them(written: str, dtype: str) -> None:
    payload = {
        "base": "bf16",
        "trainer": {"precision": written, "other": "16-mixed"},
        "model": {"megatron_amp_O2": True},
    }
    assert get_mode(nemo1.import_(payload).config) == dtype
    omegaconf = pytest.importorskip("omegaconf", reason="needs omegaconf")
    real = omegaconf.OmegaConf.create(payload).trainer.precision
    assert get_mode(nemo1.import_({**payload, "trainer": {"precision": real}}).config) == dtype


@pytest.mark.parametrize("written", ["${oc.env:PRECISION,bf16}", "${multiply:8,2}", "${exp.precision}", "???"])
def test_what_no_file_can_answer_is_one_sentence(written: str) -> None:
    rule = "must be written out"
    with pytest.raises(PayloadError) as caught:
        read(written)
    assert str(caught.value) == f"trainer.precision: {rule}, got {written!r}. Write the value that it comes to."
    with pytest.raises(PayloadError, match=rf"^model.optim.grad_sync_dtype: {rule}"):
        read(optim={"grad_sync_dtype": written})


def test_what_nobody_reads_may_be_left_open() -> None:
    imported = read("bf16", fp8_margin="${oc.env:MARGIN}", fp8=False)
    assert imported.recipe == "bf16_mixed"
    assert "model.fp8_margin" in imported.mapped


def test_the_shipped_files_are_read() -> None:
    new = nemo1.import_(Document.load(SAMPLES / "megatron_gpt_config_new.yaml").content)
    assert new.recipe == "bf16_with_fp8_delayed_scaling_mixed"
    assert {loss.field for loss in new.unmapped} == {
        "model.fp8_recipe",
        "model.grad_allreduce_chunk_size_mb",
        "model.grad_div_ar_fusion",
        "model.fp8_interval",
    }
    old = nemo1.import_(Document.load(SAMPLES / "megatron_gpt_config_old.yaml").content)
    assert (old.semantics, get_mode(old.config), old.config.fp8) == ("amp_o1", "fp16", None)


def test_every_setting_of_the_shipped_files_that_bears_on_precision_is_accounted_for() -> None:
    content = Document.load(SAMPLES / "megatron_gpt_config_new.yaml").content
    imported = nemo1.import_(content)
    known = {*imported.mapped, *(loss.field for loss in imported.unmapped)}
    beside = {"micro_batch_size", "mcore_gpt", "data", "optim"}
    assert {f"model.{key}" for key in content["model"] if key not in beside} <= known


def test_torch_fsdp_reduces_in_the_dtype_of_the_policy_unless_said() -> None:
    imported = read("bf16", megatron_amp_O2=False, fsdp=True)
    assert (imported.semantics, imported.config.grad_reduce_in_fp32) == ("fsdp_policy", False)
    assert reasons(imported, "model.fsdp_grad_reduce_dtype") == ["implied default"]
    assert read("bf16", fsdp=True, fsdp_grad_reduce_dtype=32).config.grad_reduce_in_fp32 is True


def test_the_dtypes_of_the_optimizers_states_are_reported() -> None:
    imported = read(optim={"dtype": "bf16", "param_sync_dtype": "fp8", "with_scaled_states": True})
    for key in ("dtype", "param_sync_dtype", "with_scaled_states"):
        assert reasons(imported, f"model.optim.{key}") == ["unsupported"]


@pytest.mark.parametrize("key", ["FP8", "fp8_Hybrid"])
def test_another_letter_case_is_not_read(key: str) -> None:
    imported = read(mcore_gpt=True, **{key: True})
    assert reasons(imported, f"model.{key}") == ["unsupported"]
    assert imported.config.fp8 is None
