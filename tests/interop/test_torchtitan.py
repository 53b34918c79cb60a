"""torchtitan, both eras."""

from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError
from bridge.interop import torchtitan
from bridge.interop.reading.document import Document
from bridge.interop.systems import detect
from bridge.precision.mode import mode_of, scheme_of
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.interop.properties import reasons

SAMPLE = Path(__file__).parent / "samples" / "torchtitan" / "llama3.toml"


def test_the_blocks_of_quantisation_are_reported_and_the_rest_is_read() -> None:
    document = Document.load(SAMPLE)
    assert torchtitan.SYSTEM.recognise is not None
    assert torchtitan.SYSTEM.recognise(document) is not None
    imported = torchtitan.import_(document.content)
    assert (mode_of(imported.config), imported.config.fp8, imported.recipe) == ("bf16", None, None)
    assert reasons(imported, "quantize") == ["unsupported"]
    (loss,) = (loss for loss in imported.unmapped if loss.field == "quantize")
    assert loss.remedy == "Choose bf16_with_fp8_current_scaling_mixed for float8, bf16_with_mxfp8_mixed for mx."


@pytest.mark.parametrize(("named", "reason"), [(["float8"], "unsupported"), ([], "dead knob")])
def test_a_block_counts_where_the_converters_name_it(named: list[str], reason: str) -> None:
    imported = torchtitan.import_({"model": {"converters": named}, "float8": {"filter_fqns": ["output"]}})
    assert reasons(imported, "float8") == [reason]
    assert reasons(imported, "model.converters") == ["unsupported"] * bool(named)
    assert imported.recipe == (None if named else "bf16_mixed")


def test_the_third_era_dropped_tensorwise() -> None:
    exported = torchtitan.export(REGISTRY.get("bf16_with_fp8_current_scaling_mixed"))
    assert "converters" not in exported.payload
    assert reasons(exported, "fp8") == ["unsupported"]


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
    assert (imported.semantics, mode_of(imported.config)) == (semantics, mode)


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
        ({"mixed_precision_reduce": "float32"}, False, True, ["dead knob"]),
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
    config = REGISTRY.get("bf16_mixed").override(grad_reduce_in_fp32=False)
    assert reasons(torchtitan.export(config), "grad_reduce_in_fp32") == ["unsupported"]


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ({"optimizer": {"state_dtype": "bfloat16"}}, "optimizer.state_dtype"),
        ({"checkpoint": {"export_dtype": "float16"}}, "checkpoint.export_dtype"),
        ({"optimizer": {"implementation": "fused_opt_states_bf16"}}, "optimizer.implementation"),
        ({"optimizer": {"name": "AdamW8bit"}}, "optimizer.name"),
        ({"quantize": {"linear": {"fp8": {"filter_fqns": []}}}}, "quantize"),
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
    assert exported.payload["converters"] == [{converter: {"fqns": ["attention.", "feed_forward.", "shared_experts."]}}]
    back = torchtitan.import_(exported.payload)
    assert (scheme_of(back.config), back.recipe) == (None, None)
    assert reasons(back, "converters") == ["unsupported"]


ROWS = [
    {"select": "*.linear_qkv", "precision": "bf16"},
    {"select": {"layers": [0, -1], "module": "linear_fc2"}, "precision": "bf16"},
    {"select": {"module": "linear_fc1"}, "precision": "nvfp4"},
]


def test_rows_become_lists_of_modules() -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", modules=ROWS)
    config.first_last_layers_bf16 = True
    exported = torchtitan.export(config, num_layers=4)
    assert exported.mapped["modules"] == exported.mapped["first_last_layers_bf16"] == ("converters.fqns",)
    names = {name: block["fqns"] for one in exported.payload["converters"] for name, block in one.items()}
    assert [one for one in names["MXFP8LinearConverter"] if "feed_forward" in one] == [
        "layers.1.feed_forward.w2",
        "layers.2.feed_forward.w2",
    ]
    assert "layers.1.feed_forward.w1" in names["NVFP4LinearConverter"]


def test_a_choice_without_the_number_of_layers_or_without_a_converter_is_reported() -> None:
    config = REGISTRY.get("bf16_with_mxfp8_mixed").override(modules=ROWS)
    (loss,) = (loss for loss in torchtitan.export(config).unmapped if loss.field == "modules")
    assert (loss.reason, loss.detail) == (
        "unsupported",
        "the precision chooses single layers, so the number of layers must be known, got num_layers=None",
    )
    config.modules = [{"select": "*.linear_fc1", "precision": "blockwise", "evaluation": "bf16"}]
    said = [str(loss).partition(" (")[2] for loss in torchtitan.export(config).unmapped if loss.field == "modules"]
    assert said == [
        "semantics): *.linear_fc1 is to run in blockwise, which torchtitan has no converter for; it is in BF16. "
        "BF16 there; drop the row for mxfp8 there.",
        "semantics): *.linear_fc1 is to run in bf16 outside of training, and keeps blockwise there. "
        "blockwise there; drop `evaluation` to mean that.",
    ]


def test_fp16_has_none() -> None:
    assert reasons(torchtitan.export(REGISTRY.get("fp16_mixed")), "fp16") == ["unsupported"]


def test_nonsense_is_one_sentence() -> None:
    with pytest.raises(BridgeError) as caught:
        torchtitan.import_({"training": {"dtype": "float16"}})
    assert "\n" not in str(caught.value)


def test_a_broken_toml_is_one_sentence() -> None:
    twice = Document.of_text("[training]\nsteps = 1\nsteps = 2\n", "x.toml")
    with pytest.raises(BridgeError, match=r"x\.toml: must be TOML; .* \(at line 3, "):
        detect(twice)


@pytest.mark.parametrize(
    ("degrees", "semantics", "field"),
    [
        ({}, "amp_o1", None),
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
