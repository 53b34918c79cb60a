"""`modules`: what a row may say, the form it is kept in, and Megatron's recipe that it becomes."""

import json
from typing import Any

import pytest
from hypothesis import given
from omegaconf import OmegaConf

from bridge import MixedPrecisionConfig
from bridge.errors import PrecisionTypeError
from bridge.precision.mode import format_label
from bridge.precision.module_row import parse_module_rows
from bridge.precision.module_schemes import make_chunk_recipes, make_stage_recipes
from bridge.precision.statements import get_field_value, is_stated
from bridge.registry.nearest_recipe import format_nearest_label
from tests.precision.module_lists import module_lists

ROWS: list[dict[str, Any]] = [
    {"select": "*.linear_qkv", "precision": "bf16"},
    {"select": {"layers": [0, 1, -1], "module": "linear_fc2"}, "fp8_recipe": "mxfp8", "fp8_param": False},
]
PATH = "mixed_precision.modules"
WRONG = [
    ("*", f"{PATH}: must be a list of rows, got '*'. Write [{{select: \"*.linear_qkv\", precision: bf16}}]."),
    (
        [{"select": "*", "precisoin": "bf16"}],
        f"{PATH}: row 0: a row has no such key, got 'precisoin'. Did you mean 'precision'?",
    ),
    (
        [{"precision": "bf16"}],
        f"{PATH}: row 0: has no `select`, got {{'precision': 'bf16'}}. Say which modules: select: \"*.linear_qkv\".",
    ),
    (
        [{"select": "*"}],
        f"{PATH}: row 0: must choose one of precision, fp8_recipe and fp4_recipe, got {{}}. State precision: bf16 for "
        "no FP8 and FP4.",
    ),
    (
        [{"select": "*", "fp8_recipe": "delayed"}],
        f"{PATH}: row 0: `fp8_recipe` cannot be delayed scaling, which Transformer Engine does not run for single "
        "modules, got 'delayed'. Use 'tensorwise', 'blockwise', 'mxfp8' or 'custom'.",
    ),
    (
        [{"select": "*", "precision": "mxfp8", "fp8": "hybrid"}],
        f"{PATH}: row 0: `fp8` must be 'e4m3' under mxfp8, got 'hybrid'. Use 'e4m3'.",
    ),
    (
        [{"select": "*", "precision": "bf16", "fp8_param": True}],
        f"{PATH}: row 0: `fp8_param` has no meaning in a module in bf16, got True. Drop it.",
    ),
    (
        [{"select": "*", "fp4_recipe": "nvfp4", "fp8": "e4m3"}],
        f"{PATH}: row 0: `fp8` has no meaning in a module in nvfp4, got 'e4m3'. Drop it.",
    ),
    (
        [{"select": "*", "fp4_recipe": "custom", "fp8_quantizer_factory": "team.factories.make"}],
        f"{PATH}: row 0: `fp8_quantizer_factory` has no meaning in a module in custom, got 'team.factories.make'. "
        "Drop it.",
    ),
    (
        [{"select": "*", "fp8_recipe": "custom"}],
        f"{PATH}: row 0: the scheme custom needs `fp8_quantizer_factory`, got None. Give the factory's import path.",
    ),
    (
        [{"select": "*.1.mlp.*", "precision": "bf16"}],
        f"{PATH}: row 0: `select` may name the number of a layer as `layers.N.` alone, since globs match digits, got "
        "'*.1.mlp.*'. Use {layers: [N], module: NAME}, or write out layers.N.",
    ),
    (
        [{"select": "*layers.1*", "precision": "bf16"}],
        f"{PATH}: row 0: `select` may name the number of a layer as `layers.N.` alone, since globs match digits, got "
        "'*layers.1*'. Use {layers: [N], module: NAME}, or write out layers.N.",
    ),
    (
        [{"select": {"layers": [], "module": "linear_qkv"}, "precision": "bf16"}],
        f"{PATH}: row 0: `select.layers` must name a layer, got []. Drop it to mean every layer.",
    ),
    (
        [{"select": {"layers": [1.5], "module": "linear_qkv"}, "precision": "bf16"}],
        f"{PATH}: row 0: `select.layers` must be whole numbers, from 0, got 1.5. Write [0, 1, -1].",
    ),
]


@pytest.mark.parametrize(("rows", "message"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_row_is_one_sentence_and_changes_nothing(rows: Any, message: str) -> None:
    config = MixedPrecisionConfig(bf16=True, modules=ROWS)
    with pytest.raises(PrecisionTypeError) as caught:
        config.modules = rows
    assert str(caught.value) == message
    assert config.modules == ROWS


def test_every_wrong_row_has_its_line() -> None:
    with pytest.raises(PrecisionTypeError) as caught:
        MixedPrecisionConfig(modules=[{"select": ""}, ROWS[0], {"select": "*", "precision": "fp9"}])
    first, second = str(caught.value).splitlines()
    assert first == f"{PATH}: row 0: `select` must not be empty, got ''. Use \"*\" for every module."
    assert second.startswith(f"{PATH}: row 2: `precision` must be one of bf16, tensorwise, blockwise, mxfp8, nvfp4, ")


def test_the_rows_of_a_config_are_its_own() -> None:
    given = json.loads(json.dumps(ROWS))
    config = MixedPrecisionConfig(bf16=True, modules=given)
    given[0]["precision"] = "mxfp8"
    config.modules[0]["precision"] = "mxfp8"
    config.to_dict()["modules"][0]["precision"] = "mxfp8"
    assert config.modules == ROWS


def test_the_label_names_each_choice() -> None:
    assert format_label(MixedPrecisionConfig(bf16=True, modules=ROWS)) == (
        "bf16=True, modules=[*.linear_qkv bf16, layers 0, 1, -1: linear_fc2 mxfp8]"
    )


def test_the_label_of_the_nearest_recipe_names_each_choice_too() -> None:
    fields = {"bf16": True, "params_dtype": "bf16", "pipeline_dtype": "bf16", "grad_reduce_in_fp32": True}
    assert format_nearest_label(MixedPrecisionConfig.from_dict({**fields, "modules": ROWS})) == (
        "bf16_mixed, but modules=[*.linear_qkv bf16, layers 0, 1, -1: linear_fc2 mxfp8]"
    )


def test_omegaconfs_lists_are_taken() -> None:
    assert MixedPrecisionConfig(modules=OmegaConf.create(ROWS)).modules == ROWS


def test_none_takes_the_statement_back_and_an_empty_list_is_one() -> None:
    config = MixedPrecisionConfig(bf16=True, modules=ROWS)
    config.modules = []
    assert (config.modules, is_stated(config, "modules")) == ([], True)
    config.modules = None
    assert (config.modules, is_stated(config, "modules")) == (None, False)


def test_layers_become_those_of_each_stage() -> None:
    chunks = [(0, 1), (2, 3), (4, 5), (6, 7)]
    rows = parse_module_rows([{"select": {"layers": [0, 3, -1], "module": "linear_fc2"}, "precision": "bf16"}])
    files = make_chunk_recipes(rows, chunks, run="e4m3")
    patterns = [[row["pattern"] for row in file["matchers"].values()] for file in files]
    assert patterns == [
        ["decoder.layers.0.linear_fc2", "decoder.layers.0.*.linear_fc2"],
        ["decoder.layers.1.linear_fc2", "decoder.layers.1.*.linear_fc2"],
        [],
        ["decoder.layers.1.linear_fc2", "decoder.layers.1.*.linear_fc2"],
    ]
    assert make_stage_recipes(files, 4) == files
    assert make_stage_recipes(files, 2) == [None, files[1]]


def test_a_payload_says_everything_that_its_modules_need() -> None:
    rows = parse_module_rows([{"select": "*.linear_fc1", "precision": "mxfp8", "evaluation": "bf16"}])
    (in_fp8,) = make_chunk_recipes(rows, [()], run="hybrid")
    (in_bf16,) = make_chunk_recipes(rows, [()], run=None)
    mxfp8 = {"fp8_quantization_recipe": "mxfp8", "fp8_format": "e4m3"}
    kind = {"transformer_engine_config_type": "TEQuantizationParams"}
    assert in_fp8["configs"] == {"mxfp8": {**kind, "training_recipe": mxfp8, "evaluation_recipe": {}}}
    acting = {**mxfp8, "override_nonquantized_autocast": True}
    assert in_bf16["configs"] == {"mxfp8": {**kind, "training_recipe": acting, "evaluation_recipe": {}}}
    assert in_bf16["matchers"] == {
        "row_0": {"config": "mxfp8", "type": "glob", "pattern": "*.linear_fc1", "enabled": True}
    }


@given(rows=module_lists())
def test_rows_of_one_precision_share_a_payload(rows: list[dict[str, Any]]) -> None:
    config = MixedPrecisionConfig(modules=rows)
    (file,) = make_chunk_recipes(parse_module_rows(get_field_value(config, "modules")), [range(8)], run="e4m3")
    payloads = list(file["configs"].values())
    assert all(payloads.count(payload) == 1 for payload in payloads)
    assert {row["config"] for row in file["matchers"].values()} <= set(file["configs"])
