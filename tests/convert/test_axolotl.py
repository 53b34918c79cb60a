"""Axolotl's YAML: detection for a stated GPU, what its schema refuses, and what no setting says."""

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from bridge.cli.main import main
from bridge.convert import axolotl
from bridge.errors import BridgeError
from bridge.precision.mode import get_mode
from bridge.read.text.document import Document
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.read.properties import check_import, check_nothing_dropped, reasons

SAMPLES = Path(__file__).parents[1] / "read" / "samples" / "axolotl"


def sample(name: str) -> Any:
    return Document.load(SAMPLES / name).content


@pytest.mark.parametrize(
    ("payload", "gpu", "mode"),
    [
        ({"bf16": "auto"}, "h100", "bf16"),
        ({"bf16": "auto"}, "v100", "bf16"),  # torch counts emulation as support
        ({"bf16": "auto"}, "cpu", "fp16"),  # what Axolotl falls back to without BF16
        ({"bf16": "auto", "fp16": False}, "cpu", "fp32"),
        ({"bf16": "auto", "float16": True}, "cpu", "fp16"),
        ({"bf16": "auto", "fp16": True}, "h100", "fp16"),
        ({"bf16": True, "fp16": True}, "h100", "bf16"),
        ({"bf16": False, "fp16": True}, "h100", "fp16"),
        ({"bf16": False}, "h100", "fp32"),
        ({"bf16": None}, "h100", "fp32"),  # written and empty is not the default
        ({}, "h100", "bf16"),  # not written is "auto"
        ({"bfloat16": True, "bf16": False}, "h100", "bf16"),
        ({"bf16": False, "load_in_8bit": True}, "h100", "fp16"),
    ],
)
def test_the_detection_is_replayed(payload: dict[str, Any], gpu: str, mode: str) -> None:
    assert get_mode(axolotl.import_(payload, gpu=gpu).config) == mode


def test_auto_without_a_gpu_is_a_reported_guess() -> None:
    imported = axolotl.import_({"bf16": "auto", "adapter": "lora"})
    assert get_mode(imported.config) == "bf16"
    assert reasons(imported, "bf16") == ["implied default"]
    assert "bf16" not in imported.mapped


@pytest.mark.parametrize(
    ("payload", "gpu", "message"),
    [
        ({"bf16": "full"}, None, "Axolotl: bf16: is in Axolotl's documentation, and its schema refuses it"),
        ({"fp16": "auto"}, None, "Axolotl: fp16: must be true or false, got 'auto'"),
        ({"fp8": True}, "rtx4090", r"fp8: needs compute capability 9\.0 or later"),
        ({"fp8": True}, "a100", r"fp8: needs compute capability 9\.0 or later"),
        ({"bf16": True}, "h1000", "gpu: must be a GPU as in a target"),
    ],
)
def test_what_axolotl_refuses_is_refused(payload: dict[str, Any], gpu: str | None, message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        axolotl.import_(payload, gpu=gpu)


@pytest.mark.parametrize(
    ("around", "semantics"),
    [
        ({}, "true"),
        ({"adapter": "lora"}, "amp_o1"),
        ({"adapter": "lora", "peft_autocast_adapter_dtype": False}, "true"),
        ({"deepspeed": "deepspeed_configs/zero3_bf16.json"}, "megatron_o2"),
        ({"fsdp": ["full_shard", "auto_wrap"]}, "fsdp_policy"),
        ({"fsdp_config": {"offload_params": True}}, "fsdp_policy"),
    ],
)
def test_one_switch_means_four_things(around: dict[str, Any], semantics: str) -> None:
    assert axolotl.import_({"bf16": True, **around}).semantics == semantics


def test_bfloat16_is_not_without_amp() -> None:
    losses = axolotl.import_({"bf16": False, "bfloat16": True}).unmapped
    told = [(loss.value, loss.detail) for loss in losses if loss.field == "bfloat16"]
    assert told == [
        (True, "documented as no AMP; the builder turns autocast on all the same"),
        (True, "weights are loaded in bf16 and the optimizer steps on them, without FP32 masters"),
    ]


def test_a_qlora_file_is_read_whole() -> None:
    imported = axolotl.import_(sample("qlora.yml"), gpu="a100")
    check_import(imported)
    assert (get_mode(imported.config), imported.config.tf32, imported.semantics) == ("bf16", False, "amp_o1")
    assert reasons(imported, "load_in_4bit") == ["unsupported"]


def test_the_documented_fp8_sample_names_what_stops_it() -> None:
    imported = axolotl.import_(sample("fp8_fsdp2.yaml"), gpu="h100")
    config = imported.config
    assert (config.fp8, config.fp8_recipe, config.fp8_param_gather, config.tf32) == ("hybrid", "tensorwise", True, True)
    assert reasons(imported, "fsdp_config.cpu_ram_efficient_loading") == ["unsupported"]
    assert reasons(imported, "fsdp_config.mixed_precision_policy") == ["dead knob"]
    assert reasons(imported, "fp8_enable_fsdp_float8_all_gather") == ["approximated"]
    assert reasons(imported, "torch_compile") == ["unsupported"]


def test_rowwise_is_reported_and_not_called_tensorwise() -> None:
    imported = axolotl.import_({"bf16": True, "fp8": True, "fp8_config": {"recipe": "rowwise"}})
    assert imported.config.fp8 is None
    assert reasons(imported, "fp8_config.recipe") == ["unsupported"]
    rows = {"bf16": True, "fp8": True, "fp8_config": {"recipe": "rowwise"}, "fp8_enable_fsdp_float8_all_gather": False}
    assert reasons(axolotl.import_(rows), "fp8_enable_fsdp_float8_all_gather") == ["unsupported"]
    sharded = {"bf16": True, "fp8": True, "deepspeed": "zero3.json"}
    assert axolotl.import_({**sharded, "fp8": False}).recipe is None  # DeepSpeed's file decides about the reduction
    assert axolotl.import_({**sharded, "fp8_config": {"recipe": "rowwise"}}).recipe is None


def test_settings_of_fp8_without_it_are_dead() -> None:
    imported = axolotl.import_({"fp8_config": {"recipe": "rowwise"}, "fp8_enable_fsdp_float8_all_gather": True})
    for name in ("fp8_config", "fp8_enable_fsdp_float8_all_gather"):
        assert reasons(imported, name) == ["dead knob"]


def test_an_unknown_name_that_looks_like_precision_is_not_dropped() -> None:
    assert reasons(axolotl.import_({"float8": True}), "float8") == ["dead knob"]
    assert reasons(axolotl.import_({"fsdp_config": {"param_dtype": "bf16"}}), "fsdp_config.param_dtype") == [
        "dead knob"
    ]


@pytest.mark.parametrize(
    "optimizer",
    ["adamw_bnb_8bit", "ao_adamw_4bit", "ao_adamw_fp8", "q_galore_adamw8bit", "flash_adamw", "optimi_adamw"],
)
def test_optimizers_that_keep_less_than_fp32_are_reported(optimizer: str) -> None:
    assert reasons(axolotl.import_({"optimizer": optimizer}), "optimizer") == ["unsupported"]


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "paged_adamw_32bit", "lion_32bit", "muon"])
def test_other_optimizers_are_not(optimizer: str) -> None:
    assert reasons(axolotl.import_({"optimizer": optimizer}), "optimizer") == []


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ({"optim_args": {"bf16_stochastic_round": True}}, "optim_args.bf16_stochastic_round"),
        ({"gptq": True, "gptq_disable_exllama": True}, "gptq_disable_exllama"),
        ({"flex_attn_compile_kwargs": {"dynamic": False}}, "flex_attn_compile_kwargs"),
        ({"cut_cross_entropy": True}, "cut_cross_entropy"),
        ({"attn_implementation": "sage", "adapter": "lora"}, "attn_implementation"),
        ({"sage_attention": True}, "sage_attention"),
    ],
    ids=str,
)
def test_what_has_no_field_is_reported(payload: dict[str, Any], field: str) -> None:
    assert reasons(axolotl.import_(payload), field) == ["unsupported"]


def test_settings_of_the_kernels_plugin_act_where_it_is_named() -> None:
    plugin = {"plugins": ["axolotl.integrations.kernels.KernelsPlugin"]}
    setting = {"dsv4_fp4_grouped_mode": "nvfp4"}
    assert reasons(axolotl.import_(plugin | setting), "dsv4_fp4_grouped_mode") == ["unsupported"]
    assert reasons(axolotl.import_(setting), "dsv4_fp4_grouped_mode") == ["dead knob"]
    assert "nvfp4_merge_aware" in axolotl.import_(plugin | {"nvfp4_merge_aware": False}).mapped


@pytest.mark.parametrize(
    ("around", "told"),
    [
        ({"adapter": "lora", "deepspeed": "zero3.json"}, {"adapter": ["semantics"], "deepspeed": ["unsupported"]}),
        (
            {"adapter": "qlora", "fsdp": ["full_shard"], "fsdp_config": {"offload_params": True}},
            {"adapter": ["semantics"], "fsdp_config": ["implied default"]},
        ),
        ({"fsdp": ["full_shard"]}, {"fsdp": ["implied default"]}),
        ({"fsdp": [], "fsdp_config": {}, "deepspeed": ""}, {"bf16": ["semantics"]}),  # empty is not there
        ({"bf16": False, "adapter": "lora", "fsdp": ["full_shard"]}, {}),
    ],
)
def test_every_setting_around_the_mode_is_accounted_for(around: dict[str, Any], told: dict[str, list[str]]) -> None:
    payload = {"bf16": True, "fp16": False, "tf32": False, **around}
    imported = axolotl.import_(payload)
    found = {name: reasons(imported, name) for name in payload if reasons(imported, name)}
    assert found == told
    check_nothing_dropped({name: value for name, value in payload.items() if value}, imported)


@pytest.mark.parametrize("payload", [{}, {"fp16": True}, {"bf16": "auto", "fp16": True}, {"fp8": True}])
def test_without_a_gpu_no_message_speaks_of_one_that_is_none(payload: dict[str, Any]) -> None:
    for loss in axolotl.import_(payload).unmapped:
        assert "gpu=None" not in str(loss)


def test_fp16_turns_the_automatic_bf16_off() -> None:
    losses = axolotl.import_({"fp16": True}).unmapped
    details = [loss.detail for loss in losses if loss.field == "bf16"]
    assert details == ["auto is the default in Axolotl 0.19.0; fp16 is on, which turns it off"]


def test_full_says_what_it_meant_in_older_releases() -> None:
    with pytest.raises(BridgeError) as caught:
        axolotl.import_({"bf16": "full"})
    assert str(caught.value) == (
        "Axolotl: bf16: is in Axolotl's documentation, and its schema refuses it (0.18 and 0.19), got 'full'. "
        "Up to 0.4.0, which had no schema, it meant BF16 weights without autocast and evaluation in BF16; "
        "bf16: true is the nearest today and adds autocast."
    )


def test_tf32_is_auto_unless_written() -> None:
    assert axolotl.import_({}, gpu="a100").config.tf32 is True
    assert axolotl.import_({}, gpu="v100").config.tf32 is False
    assert axolotl.import_({}).config.tf32 is None
    assert reasons(axolotl.import_({}), "tf32") == ["implied default"]


def test_every_default_of_auto_is_written_out() -> None:
    payload = axolotl.export(MixedPrecisionConfig(fp32=True)).payload
    assert payload == {"bf16": False, "fp16": False, "tf32": False}


@pytest.mark.parametrize("recipe", ["bf16_with_fp8_delayed_scaling_mixed", "bf16_with_mxfp8_mixed", "nvfp4"])
def test_schemes_it_does_not_have_are_not_called_fp8(recipe: str) -> None:
    exported = axolotl.export(REGISTRY.get(recipe))
    assert "fp8" not in exported.payload
    assert {"unsupported"} == set(reasons(exported, "fp8") + reasons(exported, "fp4"))


def test_another_letter_case_is_pointed_out() -> None:
    assert reasons(axolotl.import_({"BF16": True, "bf16": False, "fp16": False}), "BF16") == ["dead knob"]


def test_the_context_that_a_remedy_asks_for_is_one_that_convert_takes(tmp_path: Path) -> None:
    text = Path(str(resources.files("bridge.read") / "foreign/tables/axolotl.yaml")).read_text(encoding="utf-8")
    asked = set(re.findall(r"--context (\w+=\w+)", text))
    assert asked == {"gpu=h100", "sharding=fsdp"}
    file = tmp_path / "run.yaml"
    file.write_text("base_model: x\nbf16: auto\n")
    assert main(["convert", str(file), "--from", "axolotl", "--context", "gpu=h100"]) == 0
    to = ["--to", "axolotl", "--assume-defaults", "--context", "gpu=h100", "sharding=fsdp"]
    assert main(["convert", str(file), "--from", "axolotl", *to]) == 0
