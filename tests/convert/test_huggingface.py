"""TrainingArguments."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.convert import huggingface
from bridge.errors import BridgeError
from bridge.precision.mode import get_mode
from bridge.read.text.document import Document
from bridge.registry.registry import REGISTRY
from tests.read.properties import check_import, check_nothing_dropped, reasons

SAMPLES = Path(__file__).parents[1] / "read" / "samples" / "huggingface"
SAMPLE = SAMPLES / "arguments.json"
OTHER = ("output_dir", "per_device_train_batch_size")


def test_bf16_is_autocast_over_fp32_weights_unless_they_were_loaded_otherwise() -> None:
    imported = huggingface.import_({"bf16": True})
    assert (imported.semantics, imported.recipe) == ("amp_o1", "bf16_autocast_mixed")
    assert reasons(imported, "weights_dtype") == ["implied default"]
    loaded = huggingface.import_({"bf16": True}, weights_dtype="bf16")
    assert (loaded.semantics, get_mode(loaded.config)) == ("true", "bf16")
    assert reasons(loaded, "weights_dtype") == ["semantics"]


def test_deepspeed_decides_where_no_switch_is_on() -> None:
    for arguments in ({"bf16": False}, {"torch_dtype": "bfloat16"}, {}):
        imported = huggingface.import_({**arguments, "deepspeed": "zero2.json", "output_dir": "x"})
        assert (imported.decided_by, imported.semantics) == ("DeepSpeed's own configuration", "unstated")
    imported = huggingface.import_({"bf16": True, "torch_dtype": "bfloat16", "deepspeed": "zero2.json"})
    assert (get_mode(imported.config), imported.semantics) == ("bf16", "megatron_o2")


def test_fp16_has_torchs_scaler_and_not_megatrons() -> None:
    config = huggingface.import_({"fp16": True}).config
    assert (config.initial_loss_scale, config.loss_scale_window, config.hysteresis) == (65536, 2000, 1)
    exported = huggingface.export(REGISTRY.get("fp16_mixed").override(initial_loss_scale=2.0**32, loss_scale=None))
    assert reasons(exported, "initial_loss_scale") == ["unsupported"]


@pytest.mark.parametrize("value", ["false", "full", "auto", 1])
def test_a_word_or_a_number_for_a_switch_is_refused(value: Any) -> None:
    with pytest.raises(BridgeError, match="bf16: must be true or false"):
        huggingface.import_({"bf16": value})


@pytest.mark.parametrize(
    ("payload", "name"),
    [({"bf16": True, "use_cpu": "yes"}, "use_cpu"), ({"bf16": True, "fp16": "false"}, "fp16")],
)
def test_every_switch_is_refused_in_every_mode(payload: dict[str, Any], name: str) -> None:
    with pytest.raises(BridgeError, match=f"{name}: must be true or false"):
        huggingface.import_(payload)


@pytest.mark.parametrize("value", [16, "bf16-mixed"])
def test_a_word_of_lightnings_is_no_dtype(value: Any) -> None:
    assert huggingface.import_({"torch_dtype": value}).semantics == "unstated"


def test_a_file_is_read_whole() -> None:
    payload = json.loads(SAMPLE.read_text())
    imported = huggingface.import_(payload)
    check_nothing_dropped(payload, imported, beside=OTHER)
    for name in ("bf16_full_eval", "torch_compile", "optim", "fp16_opt_level", "half_precision_backend"):
        assert reasons(imported, name) == ["unsupported"]


def test_arguments_that_transformers_5_removed_are_reported() -> None:
    for name in ("fp16_backend", "half_precision_backend", "fp16_opt_level"):
        (loss,) = (loss for loss in huggingface.import_({"fp16": True, name: "apex"}).unmapped if loss.field == name)
        assert loss.reason == "unsupported"
        assert loss.detail.startswith("in transformers 4 ")
        assert loss.detail.endswith("5 has no such argument and refuses it")


def test_the_sharding_of_the_launcher_counts() -> None:
    payload = {"accelerate_launch_args": {"use_fsdp": True, "fp8_backend": "TE", "num_processes": 2}}
    sharded = huggingface.import_({**payload, "bf16": True})
    assert (sharded.semantics, sharded.config.grad_reduce_in_fp32) == ("fsdp_policy", False)
    assert reasons(sharded, "accelerate_launch_args.use_fsdp") == ["unsupported"]
    assert reasons(sharded, "accelerate_launch_args.fp8_backend") == ["unsupported"]
    deepspeed = huggingface.import_({"accelerate_launch_args": {"use_deepspeed": True}, "bf16": True})
    assert (deepspeed.semantics, deepspeed.recipe) == ("megatron_o2", None)


@pytest.mark.parametrize("switches", [{"bf16": False}, {"fp16": False}, {"bf16": False, "fp16": False}])
def test_switches_that_are_off_state_no_mode(switches: dict[str, bool]) -> None:
    decides = "the environment's ACCELERATE_MIXED_PRECISION, and without it the dtype that the model is loaded in,"
    imported = huggingface.import_(switches)
    assert (imported.decided_by, imported.semantics, imported.recipe) == (decides, "unstated", None)
    assert imported.config.stated == frozenset()
    assert set(imported.mapped) == set(switches)
    assert reasons(imported, "mode") == ["unsupported"]
    assert imported.assume_default().recipe == "fp32"
    assert huggingface.import_(switches, weights_dtype="fp32").recipe == "fp32"
    decides = "the dtype that the model is loaded in, since ACCELERATE_MIXED_PRECISION=no only means no autocast,"
    assert huggingface.import_(switches, accelerate_mixed_precision="no").decided_by == decides


def test_no_argument_states_fp32() -> None:
    exported = huggingface.export(REGISTRY.get("fp32"))
    assert exported.payload == {"bf16": False, "fp16": False}
    assert reasons(exported, "fp32") == ["implied default"]


def test_compiling_turns_tf32_on_unless_it_is_written() -> None:
    assert huggingface.import_({"bf16": True, "torch_compile": True}).config.tf32 is True
    assert huggingface.import_({"bf16": True, "torch_compile": True, "tf32": False}).config.tf32 is False
    assert huggingface.import_({"fp16": True, "torch_compile": True}).config.tf32 is None


def test_fp16_without_cuda_is_fp32_and_said_so() -> None:
    assert "semantics" in reasons(huggingface.import_({"fp16": True, "use_cpu": True}), "use_cpu")


@pytest.mark.parametrize(
    ("environment", "mode", "autocast"), [("no", "fp32", False), ("fp16", "fp16", True), ("bf16", "fp32", True)]
)
def test_the_environment_decides_where_no_switch_does(environment: str, mode: str, autocast: bool) -> None:
    config = huggingface.import_({}, accelerate_mixed_precision=environment).config
    assert (get_mode(config), config.autocast_enabled) == (mode, autocast)


def test_a_switch_kills_the_environments_fp8() -> None:
    imported = huggingface.import_({"bf16": True}, accelerate_mixed_precision="fp8")
    assert reasons(imported, "ACCELERATE_MIXED_PRECISION") == ["dead knob"]


# -- arguments of the model in the same file ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch_dtype", "dtype", "model_dtype", "model_init_kwargs.torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16", "bf16"])
def test_the_file_says_what_the_weights_are_loaded_in(name: str, value: str) -> None:
    outer, _, inner = name.partition(".")
    payload = {"bf16": True, outer: {inner: value} if inner else value}
    imported = huggingface.import_(payload)
    assert (imported.semantics, get_mode(imported.config)) == ("true", "bf16")
    assert reasons(imported, name) == ["semantics"]
    assert imported.mapped[name] == ("params_dtype",)
    assert reasons(imported, "weights_dtype") == []


def test_fp32_weights_make_it_amp_and_say_so() -> None:
    imported = huggingface.import_({"bf16": True, "torch_dtype": "float32"})
    assert (imported.semantics, imported.recipe) == ("amp_o1", "bf16_autocast_mixed")
    assert "torch_dtype" in imported.mapped
    assert reasons(imported, "weights_dtype") == []


@pytest.mark.parametrize(
    ("payload", "context", "field", "reason"),
    [
        ({"torch_dtype": "auto"}, {}, "torch_dtype", "implied default"),
        ({"torch_dtype": "float64"}, {}, "torch_dtype", "unsupported"),
        ({"torch_dtype": "bfloat16"}, {"weights_dtype": "fp32"}, "torch_dtype", "dead knob"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, {}, "dtype", "dead knob"),
        ({"torch_dtype": "float16"}, {}, "torch_dtype", "unsupported"),
        ({}, {}, "weights_dtype", "implied default"),
    ],
)
def test_a_dtype_that_does_not_decide_is_reported(
    payload: dict[str, Any], context: dict[str, str], field: str, reason: str
) -> None:
    imported = huggingface.import_({"bf16": True, **payload}, **context)
    assert imported.semantics == "amp_o1"
    assert reasons(imported, field) == [reason]


def test_fp16_weights_under_a_scaler_do_not_train() -> None:
    losses = huggingface.import_({"fp16": True, "torch_dtype": "float16"}).unmapped
    details = [loss.detail for loss in losses if loss.field == "torch_dtype"]
    assert "torch's GradScaler refuses gradients in FP16, and the run stops at its first step" in details


def test_torchs_scaler_does_refuse_fp16_gradients() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    weight.grad = torch.ones(1, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.unscale_(torch.optim.SGD([weight], lr=1.0))


@pytest.mark.parametrize("adapter", [{"use_peft": True}, {"train_type": "lora"}, {"tuner_type": "lora"}])
def test_an_adapter_over_bf16_weights_is_trained_in_fp32(adapter: dict[str, Any]) -> None:
    imported = huggingface.import_({"bf16": True, "dtype": "bfloat16", **adapter})
    assert (imported.semantics, imported.recipe) == ("amp_o1", "bf16_autocast_mixed")
    assert reasons(imported, next(iter(adapter))) == ["semantics"]


@pytest.mark.parametrize(
    ("sharding", "semantics"),
    [
        ({"fsdp": "full_shard auto_wrap"}, "fsdp_policy"),
        ({"deepspeed": "z3.json"}, "megatron_o2"),
        ({"fsdp": ""}, "true"),
    ],
)
def test_sharding_keeps_fp32_masters(sharding: dict[str, str], semantics: str) -> None:
    imported = huggingface.import_({"bf16": True, "torch_dtype": "bfloat16", **sharding})
    assert (imported.semantics, get_mode(imported.config)) == (semantics, "bf16")


def test_the_settings_of_fsdp_need_fsdp() -> None:
    imported = huggingface.import_({"bf16": True, "fsdp_config": {"fsdp_version": 2}})
    assert reasons(imported, "fsdp_config") == ["dead knob"]
    assert reasons(huggingface.import_({"bf16": True}), "fsdp_config") == []


@pytest.mark.parametrize(
    "setting",
    [
        {"load_in_4bit": True},
        {"load_in_8bit": True},
        {"quantization_bit": 4},
        {"quant_method": "fp8"},
        {"quant_config": {"name": "bnb", "quantization_bit": 4}},
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"export_quantization_bit": 4},
        {"ref_model_quantization_bit": 8},
        {"upcast_layernorm": True},
        {"upcast_lmhead_output": True},
        {"cast_lm_head_to_fp32": True},
        {"lora_dtype": "fp32"},
        {"vllm_kv_cache_dtype": "fp8"},
        {"mixed_precision": "bf16"},
        {"optim": "adamw_anyprecision"},
        {"model_init_kwargs": '{"torch_dtype": "bfloat16"}'},
    ],
    ids=str,
)
def test_what_has_no_field_is_reported(setting: dict[str, Any]) -> None:
    assert reasons(huggingface.import_({"bf16": True, **setting}), next(iter(setting))) == ["unsupported"]


def test_options_of_a_quantisation_are_reported_unless_they_are_off() -> None:
    option = {"bnb_4bit_compute_dtype": "bfloat16", "double_quantization": False}
    beside = huggingface.import_({"bf16": True, "load_in_4bit": True, **option})
    assert reasons(beside, "bnb_4bit_compute_dtype") == ["unsupported"]
    assert "double_quantization" in beside.mapped


def test_blocks_that_somebody_else_reads_are_looked_into() -> None:
    imported = huggingface.import_({"bf16": True, "peft": {"lora_dtype": "fp32", "r": 8}})
    assert reasons(imported, "peft.lora_dtype") == ["unsupported"]


DTYPE = st.sampled_from(["bfloat16", "float16", "float32", "auto", "float64", None])
ON = st.booleans() | st.none()
MODEL: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("torch_dtype", "dtype", "model_dtype", "lora_dtype", "compute_dtype"), DTYPE),
    **dict.fromkeys(("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "vllm_dtype"), DTYPE),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "use_bnb_nested_quant", "double_quantization"), ON),
    **dict.fromkeys(("upcast_layernorm", "upcast_lmhead_output", "cast_lm_head_to_fp32"), ON),
    **dict.fromkeys(("fp8", "fp8_enable_fsdp_float8_all_gather"), ON),
    "quantization_bit": st.sampled_from([4, 8, None]),
    "quantization_method": st.sampled_from(["bnb", "hqq"]),
    "quant_config": st.sampled_from([None, {"name": "bnb", "quantization_bit": 4}]),
    "quant_method": st.sampled_from([None, "fp8", "bnb"]),
    "bnb_4bit_quant_type": st.just("nf4"),
    "model_init_kwargs": st.fixed_dictionaries({}, optional={"torch_dtype": DTYPE, "load_in_4bit": ON}),
    "mixed_precision": st.sampled_from(["bf16", "no"]),
    "optim": st.sampled_from(["adamw_8bit", "adamw_anyprecision"]),
    "deepspeed": st.just("z3.json"),
    "fsdp": st.just("full_shard"),
    "fsdp_config": st.just({"fsdp_version": 2}),
    "bf16": ON,
    "fp16": ON,
}


@given(
    payload=st.fixed_dictionaries({}, optional=MODEL),
    adapter=st.sampled_from([{}, {"use_peft": True}, {"tuner_type": "lora"}, {"tuner_type": "full"}]),
    stated=st.sampled_from([None, "fp32", "bf16", "fp16"]),
)
def test_no_setting_of_the_model_is_dropped(
    payload: dict[str, Any], adapter: dict[str, Any], stated: str | None
) -> None:
    try:
        imported = huggingface.import_({**payload, **adapter}, weights_dtype=stated)
    except BridgeError:
        return  # both modes at once
    check_import(imported)
    check_nothing_dropped(payload, imported)


@pytest.mark.parametrize(
    "setting", [{"fp8": True}, {"fp8_backend": "te"}, {"pure_bf16": True}, {"infer_dtype": "bfloat16"}]
)
def test_arguments_of_another_program_are_reported_and_change_nothing(setting: dict[str, Any]) -> None:
    imported = huggingface.import_({"bf16": True, **setting})
    assert reasons(imported, next(iter(setting))) == ["unsupported"]
    assert imported.config == huggingface.import_({"bf16": True}).config


def test_a_file_with_quantised_weights_is_read_whole() -> None:
    payload = Document.load(SAMPLES / "qlora.yaml").content
    imported = huggingface.import_(payload)
    beside = [name for name in payload if name.startswith(("lora", "per_", "output", "model_name", "learning"))]
    check_nothing_dropped(payload, imported, beside=beside)
    assert imported.semantics == "amp_o1"


@pytest.mark.parametrize("payload", [{"bf16": True, "fp16": True}, ["--bf16"], {"bf16": {}}, 3])
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


def test_deepspeeds_file_decides_about_the_reduction_so_that_no_recipe_is_named() -> None:
    imported = huggingface.import_({"bf16": True, "deepspeed": "z3.json"})
    assert (imported.recipe, imported.config.to_dict()) == (None, {"bf16": True, "params_dtype": "bf16"})


def test_another_letter_case_is_pointed_out() -> None:
    assert reasons(huggingface.import_({"BF16": True}), "BF16") == ["unsupported"]


def test_arguments_of_the_accelerator_that_are_defaults_are_carried() -> None:
    usual = {"even_batches": True, "split_batches": False, "dispatch_batches": None, "use_configured_state": False}
    usual |= {"non_blocking": False, "gradient_accumulation_kwargs": None, "use_seedable_sampler": True}
    assert "accelerator_config" in huggingface.import_({"accelerator_config": usual}).mapped
    assert reasons(huggingface.import_({"accelerator_config": {"x": 1}}), "accelerator_config") == ["unsupported"]
