"""Megatron's per-module file: read and written without loss, and refused where Megatron refuses it."""

import itertools
from pathlib import Path

import pytest
import yaml
from megatron.core.quantization.quant_config import MatchContext, RecipeConfig

from bridge import get_mixed_precision_config, synchronize
from bridge.convert.conversion import ImportedRun, convert, import_runs
from bridge.errors import PayloadError
from bridge.plan.precision_plan import precision_plan
from bridge.precision.foreign_names import DENSE_LAYERS
from bridge.precision.module_schemes import ModuleSchemes, make_shared_recipe
from bridge.precision.statements import get_recipe_name
from bridge.precision.yaml_text import to_yaml
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.megatron_bridge import importer as megatron_bridge
from bridge.read.megatron_lm import exporter
from bridge.read.megatron_lm.te_precision_file import parse, read
from bridge.read.text.document import Document
from tests.read.properties import reasons

HERE = Path(__file__).parent
HYBRID = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "hybrid_override_pattern": "M*-M",
    "is_hybrid_model": True,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
}


@pytest.mark.parametrize("name", ["te_quant.cfg", "samples/te_precision.yaml"])
def test_a_file_is_read_and_written_without_loss(name: str) -> None:
    content = read(HERE / name)
    assert content == yaml.safe_load((HERE / name).read_text())
    assert parse(as_yaml(content), name) == content
    assert list(parse(as_yaml(content), name)["matchers"]) == list(content["matchers"])


def test_a_hybrids_file_is_read_and_planned() -> None:
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    content = read(HERE / "te_quant.cfg")
    plan = precision_plan(precision, {**HYBRID, "quant_recipe": content})
    kinds = {(layer.label, module.name): module.scheme for layer in plan.layers for module in layer.modules}
    assert kinds["1", "out_proj"] == kinds["1", "in_proj"] == "mxfp8"
    assert kinds["2", "linear_qkv"] is kinds["2", "linear_proj"] is None


def test_keys_of_a_later_release_are_kept() -> None:
    content = read(HERE / "te_quant.cfg")
    content["configs"]["mx"]["training_recipe"]["hadamard_width"] = 16
    assert parse(as_yaml(content), "te.yaml") == content


def test_every_fault_of_a_file_is_a_line() -> None:
    with pytest.raises(PayloadError) as caught:
        parse(
            "configs:\n"
            "  a: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_recipe: mxfp8}}\n"
            "  b: {transformer_engine_config_type: TEQuantizationParams, training_recipe: "
            "{fp8_quantization_recipe: delayed}}\n"
            "matchers:\n"
            '  one: {type: glob, pattern: "*", config: c, enabled: true}\n'
            '  two: {type: regex, pattern: "*", config: a, enabled: true}\n',
            "te.yaml",
        )
    assert str(caught.value).splitlines() == [
        "te.yaml: configs.a.training_recipe.fp8_recipe: Transformer Engine's recipes have no such key, got 'mxfp8'. "
        "Did you mean 'fp8_quantization_recipe'?",
        "te.yaml: configs.b.training_recipe.fp8_quantization_recipe: delayed scaling cannot be chosen per module, got "
        "'delayed'. Use 'tensorwise', 'blockwise' or 'mxfp8'.",
        "te.yaml: matchers.one.config: no payload has this name, got 'c'. Add it.",
        "te.yaml: matchers.two.type: must be glob, got 'regex'. Correct it.",
    ]


def test_megatron_lm_gets_the_flag_and_the_file() -> None:
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    precision.modules = [{"select": "*.linear_qkv", "precision": "bf16"}]
    exported = exporter.export(precision)
    at = exported.payload.index("--te-precision-config-file")
    text = exported.files[exported.payload[at + 1]]
    assert parse(text, "te.yaml") == make_shared_recipe(precision)
    assert exported.mapped["modules"] == ("--te-precision-config-file",)


def test_rows_that_name_layers_are_reported_by_both() -> None:
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    precision.modules = [{"select": {"layers": [0], "module": "linear_qkv"}, "precision": "bf16"}]
    for exported in (exporter.export(precision), megatron_bridge.export(precision)):
        (entry,) = [one for one in exported.unmapped if one.field == "modules"]
        assert entry.reason == "unsupported"
        assert "quant_recipe" not in str(exported.payload)


STAGED = [
    {"select": {"layers": [0, -1], "module": "linear_fc2"}, "precision": "bf16"},
    {"select": "*layers.5.*", "precision": "tensorwise"},
    {"select": "*.linear_qkv", "precision": "bf16"},
]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_files_of_the_stages_take_in_megatron_what_the_rows_say(stages: int) -> None:
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    precision.modules = STAGED
    layout = {"num_layers": 8, "pipeline_model_parallel_size": stages}
    exported = exporter.export(precision, **layout)
    texts = [exported.files["te_precision.yaml"]] if stages == 1 else list(exported.files.values())
    assert len(texts) == stages
    recipe = megatron_bridge.export(precision, **layout)
    assert ("quant_recipe" in str(recipe.payload)) == (stages == 1)
    assert reasons(exported, "modules") == reasons(recipe, "modules") == ["unsupported"] * (stages > 1)
    schemes = ModuleSchemes.from_precision(precision, 8)
    for stage, text in enumerate(texts):
        content = parse(text, "te.yaml")
        real = RecipeConfig.from_config_dict(content)
        for layer, name in itertools.product(range(8 // stages), DENSE_LAYERS):
            path = f"decoder.layers.{layer}.{name}"
            key = real.match_to_config_key(MatchContext(module_path=path, layer_number=layer))
            training = {} if key is None else content["configs"][key]["training_recipe"]
            found = "mxfp8" if key is None else training.get("fp8_quantization_recipe")
            wanted = schemes.chosen(stage * (8 // stages) + layer, name)
            assert found == (wanted.scheme if wanted is not None else None), (stage, path)


@pytest.mark.parametrize(
    ("layout", "detail"),
    [
        ({}, "its patterns count layers within a pipeline stage, and the layout is not stated"),
        (
            {"num_layers": 8, "pipeline_model_parallel_size": 3},
            "model.num_layers: must be a multiple of the 3 pipeline stages, got 8",
        ),
        ({"num_layers": 4}, "num_layers: *layers.5.* names a layer beyond the last, got 4"),
        (
            {"num_layers": 8, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size: the model chunks of stage 0 need different files, and a stage has "
            "one, got 2",
        ),
    ],
)
def test_a_layout_that_has_no_files_is_one_sentence(layout: dict[str, int], detail: str) -> None:
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    precision.modules = STAGED
    for one in (exporter.export(precision, **layout), megatron_bridge.export(precision, **layout)):
        (entry,) = [entry for entry in one.unmapped if entry.field == "modules"]
        assert entry.detail.startswith(detail)
        assert not one.files


def _run_of(text: str, name: str) -> ImportedRun:
    (one,) = import_runs(Document.from_text(text, name))
    return one


def test_convert_keeps_the_rows_of_our_own_yaml() -> None:
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    precision.modules = [{"select": "*.linear_qkv", "precision": "bf16"}]
    one = _run_of(to_yaml(precision), "mine.yaml")
    assert one.imported.config.to_dict() == precision.to_dict()
    assert one.imported.unmapped == ()
    assert "--te-precision-config-file" in convert(one, "megatron-lm").payload
    assert "quant_recipe" in convert(one, "megatron-bridge").payload["model"]


def test_convert_keeps_rows_and_recipe_of_a_run() -> None:
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    precision.modules = [{"select": {"layers": [0], "module": "linear_qkv"}, "precision": "bf16"}]
    run = {
        "mixed_precision": {"_recipe_": get_recipe_name(precision)} | precision.to_dict(),
        "model": {"num_layers": 4, "quant_recipe": "ModuleRecipe"},
    }
    one = _run_of(as_yaml(run), "config.yaml")
    assert one.imported.config.to_dict() == precision.to_dict()
    assert one.imported.recipe == get_recipe_name(precision)
    assert not [entry for entry in one.imported.unmapped if entry.reason == "dead knob"]


def test_convert_reads_the_recipe_of_a_run_of_megatron_bridge(megatron_owners) -> None:
    """Its container writes Megatron's objects as the arguments of their constructors."""
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed").override(fp8_param_gather=False)
    precision.modules = [
        {"select": "*.linear_qkv", "precision": "bf16"},
        {"select": "*.linear_fc1", "fp8": "e4m3", "fp8_recipe": "mxfp8", "evaluation": {"precision": "bf16"}},
    ]
    owners = megatron_owners(num_layers=4)
    synchronize(precision, **owners)
    recipe = owners["model"].quant_recipe.to_cfg_dict()
    model = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", "num_layers": 4}
    run = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "mixed_precision": megatron_bridge.export(precision).payload["mixed_precision"],
        "model": {**model, "quant_recipe": recipe},
    }
    one = _run_of(as_yaml(run), "run_config.yaml")
    assert one.system.name == "megatron-bridge"
    assert reasons(one.imported, "model.quant_recipe") == ["unsupported"]
    assert one.imported.config.fp8_recipe == "mxfp8"
    fields = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    plans = [precision_plan(precision, {**fields, "quant_recipe": held}) for held in (None, recipe)]
    precision.modules = None
    plans.append(precision_plan(precision, {**fields, "quant_recipe": recipe}))
    assert plans[0].layers == plans[1].layers == plans[2].layers


def test_convert_reports_a_file_and_leaves_the_mode_open() -> None:
    precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    precision.modules = [{"select": "*.linear_qkv", "precision": "bf16"}]
    one = _run_of(as_yaml(make_shared_recipe(precision)), "te.yaml")
    assert one.system.name == "megatron-lm"
    assert one.imported.config.to_dict() == {}
    assert [entry.field for entry in one.imported.unmapped] == ["matchers", "mode"]
    assert one.imported.decided_by == "the command line that names this file"
