"""`modules` in the plan: what Megatron's own matcher selects in real models, under every pipeline layout."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.extensions.transformer_engine import (
    TEQuantizationParams,
    _get_should_context_be_quantized_params,
)
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer import TransformerConfig

from bridge import MixedPrecisionConfig, get_mixed_precision_config
from bridge.model.modules import ModulePaths
from bridge.plan.alignment import build_alignment_report
from bridge.plan.memory_report import build_memory_report
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.precision.linear_names import LINEAR_NAMES
from bridge.precision.mode import get_low_precision_format, get_scheme
from bridge.precision.module_row import parse_module_rows
from bridge.precision.module_schemes import make_chunk_recipes
from bridge.precision.statements import get_field_value
from tests import warm
from tests.plan.built_names import LAYOUTS, MODELS, SHAPE
from tests.precision.module_lists import module_lists

NUM_LAYERS = SHAPE["num_layers"]
RUNS = (
    {"bf16": True},
    {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
    {"bf16": True, "fp8": "e4m3", "fp8_recipe": "blockwise", "first_last_layers_bf16": False},
    {"bf16": True, "fp4": "e2m1", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2},
)


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, Any]]]:
    """Module names of real models: "dense 4 2" -> the chunks of its stages."""
    script = Path(__file__).parents[1] / "plan" / "built_names.py"
    done = warm.run(["python", "-W", "ignore", script])
    assert done.returncode == 0, done.stderr
    names: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return names


def fields_of(model: str, pipeline: int, virtual: int | None) -> dict[str, Any]:
    sizes = {"pipeline_model_parallel_size": pipeline, "virtual_pipeline_model_parallel_size": virtual}
    return {**SHAPE, **MODELS[model], **sizes, "vocab_size": 128}


def scheme_of_megatron(recipe: RecipeConfig, name: str, run: str | None, *, low: bool) -> str | None:
    """Return the scheme that Megatron's own classes give to a module whose layer is, or is not, in low precision."""
    found = get_quant_config_or_none(name, recipe)
    if found is None:
        return run if low else None
    params = TEQuantizationParams.parse_from_config(found)
    if not _get_should_context_be_quantized_params(params, training=True, is_context_quantized=low):
        return None
    chosen = params.training_recipe
    acts = chosen.override_quantized_autocast if low else chosen.override_nonquantized_autocast
    return (chosen.fp8_quantization_recipe or chosen.fp4_quantization_recipe) if acts else run


def planned_schemes(plan: PrecisionPlan, model: dict[str, Any]) -> dict[tuple[int, int, str], str | None]:
    """Return (stage, chunk, name within the chunk) -> scheme of every linear layer of the plan."""
    paths = ModulePaths.from_model(model)
    first: dict[tuple[int, int], int] = {}
    found = {}
    for layer in plan.layers:
        place = layer.stage, layer.chunk
        index = layer.number - first.setdefault(place, layer.number) if layer.number is not None else 0
        for module in layer.modules:
            if module.kind == "linear":
                found[(*place, paths.path(layer.label, index, module.name))] = module.scheme
    return found


def without_other_experts(names: list[str]) -> list[str]:
    """Return the names of the modules that a plan has: the first expert stands for all, the head reads no recipe."""
    return [name for name in names if ".local_experts.1." not in name and name != "output_layer"]


@given(
    rows=module_lists(NUM_LAYERS),
    run=st.sampled_from(RUNS),
    model=st.sampled_from(sorted(MODELS)),
    layout=st.sampled_from(LAYOUTS),
)
@settings(deadline=None)
def test_the_plan_has_the_modules_that_megatrons_own_matcher_selects(
    rows: list[dict[str, Any]], run: dict[str, Any], model: str, layout: tuple[int, int | None], built: Any
) -> None:
    fields = fields_of(model, *layout)
    config = MixedPrecisionConfig(**run, modules=rows)
    plan = precision_plan(config, fields)
    chunks = built[f"{model} {layout[0]} {layout[1] or 1}"]
    in_order = sorted(chunks, key=lambda one: (one["chunk"], one["stage"]))
    parsed = parse_module_rows(get_field_value(config, "modules"))
    files = make_chunk_recipes(parsed, [one["layers"] for one in in_order], run=get_low_precision_format(config))
    written = TransformerConfig(**{**SHAPE, **run})
    expected = {}
    for chunk, file in zip(in_order, files, strict=True):
        recipe = RecipeConfig.from_config_dict(file)
        for name in without_other_experts(chunk["names"]):
            if name.startswith("mtp."):
                low = config.fp8 is not None
            else:
                number = chunk["layers"][int(name.split(".")[2])]
                low = get_scheme(config) is not None and not is_first_last_bf16_layer(written, number)
            scheme = scheme_of_megatron(recipe, name, get_scheme(config), low=low)
            expected[chunk["stage"], chunk["chunk"], name] = scheme
    assert planned_schemes(plan, fields) == expected


@given(rows=module_lists(NUM_LAYERS), layout=st.sampled_from(LAYOUTS))
@settings(deadline=None)
def test_a_row_means_the_same_layers_under_every_layout(
    rows: list[dict[str, Any]], layout: tuple[int, int | None]
) -> None:
    """The slow reference: each row's globs over the names in the whole model, which no layout changes."""
    config = MixedPrecisionConfig(bf16=True, modules=rows)
    fields = fields_of("dense", *layout)
    selection = precision_plan(config, fields).selection
    single = fields_of("dense", 1, None)
    names = [one.path for row in selection.rows for one in row.taken] + [one.path for one in selection.unselected]
    parsed = parse_module_rows(get_field_value(config, "modules"))
    expected: dict[str, int | None] = {}
    for name in names:
        hits = [at for at, row in enumerate(parsed) if any(fnmatchcase(name, one) for one in row.patterns(NUM_LAYERS))]
        expected[name] = hits[0] if hits else None
    assert {one.path: int(row.matcher.name) for row in selection.rows for one in row.taken} == {
        name: at for name, at in expected.items() if at is not None
    }
    schemes = {path[2]: scheme for path, scheme in planned_schemes(precision_plan(config, single), single).items()}
    for name, at in expected.items():
        assert schemes[name] == (parsed[at].precision.scheme if at is not None else None)


FILE = {
    "configs": {"bf16": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}},
    "matchers": {"first": {"config": "bf16", "type": "glob", "pattern": "*layers.0.*", "enabled": True}},
}


def test_a_foreign_file_counts_layers_within_a_stage() -> None:
    precision = get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed")
    precision.first_last_layers_bf16 = False
    model = {"num_layers": 80, "hidden_size": 64, "num_attention_heads": 4, "quant_recipe": FILE}
    plan = precision_plan(precision, {**model, "pipeline_model_parallel_size": 4})
    high = [layer.number - 1 for layer in plan.layers if layer.number and not any(one.scheme for one in layer.modules)]
    assert high == [0, 20, 40, 60]
    (found,) = plan.selection.other_stages
    assert (found.row.matcher.name, found.row.numbers) == ("first", (0, 20, 40, 60))
    assert (found.stages, found.numbers) == (1, (0,))


def test_a_file_that_forces_every_module_to_bf16_leaves_no_fp8_in_the_plan() -> None:
    everything = {**FILE, "matchers": {"all": {"config": "bf16", "type": "glob", "pattern": "*", "enabled": True}}}
    model = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "quant_recipe": everything}
    assert precision_plan(get_mixed_precision_config("bf16_with_mxfp8_mixed"), model).linears() == (0, 17)


def test_a_matcher_without_enabled_is_off() -> None:
    row = {"config": "bf16", "type": "glob", "pattern": "*"}
    model = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    off = {**model, "quant_recipe": {**FILE, "matchers": {"all": row}}}
    assert precision_plan(precision, off).linears() == precision_plan(precision, model).linears() == (16, 17)


def test_the_plan_counts_the_linears_of_each_scheme() -> None:
    precision = get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed")
    precision.first_last_layers_bf16 = False
    precision.modules = [
        {"select": "*.linear_qkv", "precision": "bf16"},
        {"select": {"layers": [-1], "module": "linear_fc2"}, "precision": "mxfp8"},
    ]
    plan = precision_plan(precision, {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4})
    assert plan.schemes() == {"tensorwise": 11, "mxfp8": 1}
    assert plan.get_format(1, "linear_qkv") == "bf16"
    assert plan.row(4, "linear_fc2").scale == "1x32 / 32x1"


def test_memory_and_alignment_follow_each_module() -> None:
    model = {"num_layers": 4, "hidden_size": 96, "ffn_hidden_size": 144, "num_attention_heads": 4, "seq_length": 128}
    precision = get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed")
    precision.first_last_layers_bf16 = precision.fp8_param_gather = False
    plans = {}
    for name, rows in {
        "run": None,
        "high": [{"select": "*", "precision": "bf16"}],
        "mixed": [{"select": "*.linear_fc2", "precision": "mxfp8"}],
    }.items():
        precision.modules = rows
        plans[name] = precision_plan(precision, model)
    copies = {name: build_memory_report(plan).largest.bytes_of["low-precision copies"] for name, plan in plans.items()}
    assert copies["high"] == 0 < copies["run"] < copies["mixed"]
    assert build_alignment_report(plans["run"]).misfits == ()
    (misfit,) = build_alignment_report(
        plans["mixed"]
    ).misfits  # 144 is a multiple of 16, which current scaling takes, not of 32
    assert (misfit.module, misfit.dimension, misfit.multiple) == ("linear_fc2", "K", 32)
    assert build_alignment_report(plans["mixed"]).scheme == "mxfp8"


def test_every_linear_layer_of_a_real_model_has_a_name_that_a_sync_knows(built: Any) -> None:
    numbers = re.compile(r"\b(layers|local_experts)\.\d+")
    for chunks in built.values():
        for chunk in chunks:
            names = {numbers.sub(r"\1.0", name) for name in chunk["names"] if name != "output_layer"}
            assert names <= set(LINEAR_NAMES)
