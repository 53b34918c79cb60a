"""torchtitan, both eras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError
from bridge.interop import torchtitan
from bridge.interop.reading.document import Document
from bridge.interop.systems import detect
from bridge.registry.registry import REGISTRY
from tests.interop.properties import check_nothing_dropped, reasons

SAMPLE = Path(__file__).parent / "samples" / "torchtitan" / "llama3.toml"


def test_a_toml_of_the_second_era_is_tensorwise_by_default() -> None:
    document = Document.of_text(SAMPLE.read_text(), "llama3.toml", kind="text")
    assert torchtitan.SYSTEM.recognise(document) is not None
    assert torchtitan.SYSTEM.read is not None
    payload = torchtitan.SYSTEM.read(document)
    imported = torchtitan.import_(payload)
    config = imported.config
    assert (config.mode, config.fp8_recipe, config.fp8_param_gather) == ("bf16", "tensorwise", True)
    check_nothing_dropped({"quantize": payload["quantize"]}, imported)
    assert reasons(imported, "quantize.linear.float8.filter_fqns") == ["unsupported"]


def test_the_third_era_dropped_tensorwise() -> None:
    imported = torchtitan.import_({"converters": [{"Float8LinearConverter": {}}]})
    assert imported.config.fp8 is None
    assert "unsupported" in reasons(imported, "converters.Float8LinearConverter.recipe_name")
    assert imported.recipe is None
    exported = torchtitan.export(REGISTRY.get("bf16_with_fp8_current_scaling_mixed"))
    assert "converters" not in exported.payload
    assert reasons(exported, "fp8") == ["unsupported"]


def test_emulation_is_a_setting_without_a_field() -> None:
    imported = torchtitan.import_({"converters": [{"Float8LinearConverter": {"emulate": True}}]})
    assert imported.config.fp8 is None
    assert reasons(imported, "converters.Float8LinearConverter.emulate") == ["unsupported"]


@pytest.mark.parametrize(
    ("training", "sharded", "semantics", "mode"),
    [
        ({"dtype": "bfloat16"}, True, "true", "bf16"),
        ({"mixed_precision_param": "bfloat16"}, True, "fsdp_policy", "bf16"),
        ({"mixed_precision_param": "bfloat16"}, False, "amp_o1", "fp32"),
        ({"mixed_precision_param": "float32"}, True, "fp32", "fp32"),
        ({}, True, "fsdp_policy", "bf16"),
    ],
)
def test_four_meanings(training: dict[str, Any], sharded: bool, semantics: str, mode: str) -> None:
    imported = torchtitan.import_({"training": training}, sharded=sharded)
    assert (imported.semantics, imported.config.mode) == (semantics, mode)


@pytest.mark.parametrize(
    ("training", "sharded", "in_fp32", "reason"),
    [
        ({}, True, True, ["implied default"]),
        ({"mixed_precision_reduce": "float32"}, True, True, []),
        ({"mixed_precision_reduce": "bfloat16"}, True, False, ["semantics"]),
        ({"mixed_precision_reduce": "float16"}, True, False, ["semantics"]),
        ({"dtype": "bfloat16"}, True, True, ["implied default"]),
        ({"dtype": "bfloat16", "mixed_precision_reduce": "bfloat16"}, True, False, ["semantics"]),
        ({"dtype": "bfloat16"}, False, False, []),
        ({"dtype": "bfloat16", "mixed_precision_reduce": "float32"}, False, False, ["dead knob"]),
        ({"mixed_precision_param": "float32", "mixed_precision_reduce": "bfloat16"}, True, True, ["semantics"]),
        ({"mixed_precision_reduce": "bfloat16"}, False, True, ["dead knob"]),
        ({"mixed_precision_reduce": "float32"}, False, True, []),
    ],
)
def test_gradients_are_reduced_in_what_a_file_says(
    training: dict[str, Any], sharded: bool, in_fp32: bool, reason: list[str]
) -> None:
    imported = torchtitan.import_({"training": training}, sharded=sharded)
    assert imported.config.grad_reduce_in_fp32 is in_fp32
    assert reasons(imported, "training.mixed_precision_reduce") == reason


def test_another_dtype_of_gradients_is_neither_refused_nor_exported() -> None:
    imported = torchtitan.import_({"training": {"mixed_precision_reduce": "bfloat16"}})
    (loss,) = (loss for loss in imported.unmapped if loss.field == "training.mixed_precision_reduce")
    assert loss.detail == (
        "torchtitan 0.1 to 0.3 declare float32 alone and take bfloat16 from a file all the same, with a warning of its "
        "parser; the command line refuses it"
    )
    assert imported.mapped[loss.field] == ("grad_reduce_in_fp32",)
    config = REGISTRY.get("bf16_mixed").state(grad_reduce_in_fp32=False)
    assert reasons(torchtitan.export(config), "grad_reduce_in_fp32") == ["unsupported"]


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ({"optimizer": {"state_dtype": "bfloat16"}}, "optimizer.state_dtype"),
        ({"checkpoint": {"export_dtype": "float16"}}, "checkpoint.export_dtype"),
        ({"optimizer": {"implementation": "fused_opt_states_bf16"}}, "optimizer.implementation"),
        ({"optimizer": {"name": "AdamW8bit"}}, "optimizer.name"),
        ({"quantize": {"linear": {"fp8": {"filter_fqns": []}}}}, "quantize.linear.fp8"),
        ({"quantize": {"linear": {"int": {"bits": 4}}}}, "quantize.linear.int"),
        ({"fault_tolerance": {"should_quantize": True}}, "fault_tolerance.should_quantize"),
        ({"compile": {"enable": True}}, "compile.enable"),
        ({"nested": {"deeper": {"logits_dtype": "float32"}}}, "nested.deeper.logits_dtype"),
    ],
)
def test_what_has_no_field_is_reported(payload: dict[str, Any], field: str) -> None:
    assert reasons(torchtitan.import_(payload), field) == ["unsupported"]


def test_settings_that_change_nothing_are_met() -> None:
    payload = {
        "checkpoint": {"export_dtype": "float32", "initial_load_in_hf_quantized": False},
        "optimizer": {"implementation": "foreach", "name": "AdamW"},
        "compile": {"enable": False},
        "job": {"description": "fp8 on H100"},
    }
    imported = torchtitan.import_(payload)
    assert {loss.field for loss in imported.unmapped} == {
        "training.mixed_precision_param",
        "training.mixed_precision_reduce",
    }
    assert "checkpoint.export_dtype" in imported.mapped


@pytest.mark.parametrize(
    ("recipe", "converter"), [("bf16_with_mxfp8_mixed", "MXFP8LinearConverter"), ("nvfp4", "NVFP4LinearConverter")]
)
def test_mx_and_nvfp4_have_a_form(recipe: str, converter: str) -> None:
    exported = torchtitan.export(REGISTRY.get(recipe))
    assert exported.payload["converters"] == [{converter: {"fqns": []}}]
    assert torchtitan.import_(exported.payload).config.scheme == REGISTRY.get(recipe).scheme


def test_fp16_has_none() -> None:
    assert reasons(torchtitan.export(REGISTRY.get("fp16_mixed")), "fp16") == ["unsupported"]


@pytest.mark.parametrize(
    "payload",
    [
        {"training": {"dtype": "float16"}},
        {"converters": [{"Nothing": {}}]},
        {"converters": {}},
        {"converters": [{"MXFP8LinearConverter": {}}, {"NVFP4LinearConverter": {}}]},
        {"float8": {"recipe_name": "delayed"}},
    ],
    ids=str,
)
def test_nonsense_is_one_sentence(payload: Any) -> None:
    with pytest.raises(BridgeError) as caught:
        torchtitan.import_(payload)
    assert "\n" not in str(caught.value)


def test_a_broken_toml_is_one_sentence() -> None:
    twice = Document.of_text("[training]\nsteps = 1\nsteps = 2\n", "x.toml")
    with pytest.raises(BridgeError, match=r"x\.toml: must be TOML; .* \(at line 3, "):
        detect(twice)
    document = Document.of_text("[training\n", "x.toml", kind="text")
    assert torchtitan.SYSTEM.read is not None
    with pytest.raises(BridgeError, match=r"x\.toml: must be TOML"):
        torchtitan.SYSTEM.read(document)


@pytest.mark.parametrize(
    ("degrees", "semantics", "field"),
    [
        ({}, "amp_o1", "parallelism.data_parallel_shard_degree"),
        ({"tensor_parallel_degree": 2}, "fp32", "training.mixed_precision_param"),
        ({"context_parallel_degree": 2}, "fsdp_policy", None),
    ],
)
def test_the_file_says_whether_fsdp_is_on(degrees: dict[str, int], semantics: str, field: str | None) -> None:
    parallelism = {"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1, **degrees}
    training = {"mixed_precision_param": "bfloat16"}
    imported = torchtitan.import_({"training": training, "parallelism": parallelism})
    assert imported.semantics == semantics
    assert field is None or reasons(imported, field)


@pytest.mark.parametrize("name", ["float8", "mx"])
def test_quantised_experts_make_no_recipe(name: str) -> None:
    path = f"quantize.grouped_mm.{name}"
    blocks = {"grouped_mm": {name: {"fqns": ["experts"]}}}
    imported = torchtitan.import_({"model": {"converters": [path]}, "quantize": blocks})
    assert (imported.config.fp8, imported.recipe) == (None, None)
    assert reasons(imported, path) == ["unsupported"]
    third = torchtitan.import_({"converters": [{"MXFP8GroupedExpertsConverter": {}}]})
    assert (third.config.fp8, third.recipe) == (None, None)
