"""Hybrid models: the layers of a pattern, its pipeline chunks and its prediction layers, against Megatron's classes.

Mamba layers need mamba_ssm, which has no CPU build: their modules are compared with counts derived from the source.
"""

import inspect

import pytest
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from bridge.errors import RunConfigError
from bridge.model.attention_variants import UNPLANNED_REMEDY
from bridge.model.layout import ParallelLayout
from bridge.model.modules import list_layer_modules, list_output_modules
from bridge.model.shape_reader import require_shape
from bridge.plan.memory_parameters import list_chunk_parameters
from bridge.plan.memory_report import build_memory_report
from bridge.plan.precision_plan import precision_plan
from bridge.plan.workload import Workload
from bridge.preflight.check_context import CheckContext
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.runtime.megatron.model.gpt import GPTConfig
from bridge.runtime.megatron.process.training_process import training_process
from bridge.target.versions import Version

NEMOTRON_3_SUPER = {
    "num_layers": 88,
    "hidden_size": 4096,
    "ffn_hidden_size": 2688,
    "num_attention_heads": 32,
    "num_query_groups": 2,
    "kv_channels": 128,
    "hybrid_layer_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    "/*E/*E",
    "mamba_num_heads": 128,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "num_moe_experts": 512,
    "moe_router_topk": 22,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "vocab_size": 131072,
}
"""Source: Megatron-LM main of 2026-08-22 tests/functional_tests/test_cases/nemotron/nemotron3_super_release_gb200."""
SMALL = {
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "hybrid_layer_pattern": "*-E*-",
}
FP8 = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}
NVFP4 = {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"}


def kept(fields, start, end):
    """A precision that keeps layers at the start and at the end in BF16."""
    counts = {"num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}
    return MixedPrecisionConfig(**fields, first_last_layers_bf16=True, **counts)


# -- modules ----------------------------------------------------------------------------------------------------------


def local_stack():
    """The layers of a hybrid model, out of Megatron's local modules."""
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    return MambaStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(
                    module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=get_mlp_module_spec(use_te=False), mlp_bda=get_bias_dropout_add
            ),
        ),
        moe_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=get_mlp_module_spec(use_te=False, num_experts=4),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    )


def layers_argument(pattern):
    """The argument of Megatron's stack that says which layers it has: a pattern, or a list in newer releases."""
    takes_list = "layer_type_list" in inspect.signature(MambaStack).parameters
    return {"layer_type_list": list(pattern)} if takes_list else {"hybrid_override_pattern": pattern}


def sizes_of(modules):
    """Name -> shapes of the parameters that the plan expects."""
    found = {}
    for module in modules:
        if module.kind == "attention":
            continue
        shapes = [(module.outputs,)] if module.kind == "norm" else [(module.outputs, module.inputs)]
        found[module.name] = (module.count, shapes + ([(module.outputs,)] if module.bias else []))
    return found


@pytest.mark.parametrize(
    "changes",
    [{"moe_shared_expert_intermediate_size": None}, {"add_bias_linear": False, "gated_linear_unit": True}],
    ids=["bias", "gated"],
)
def test_the_layers_of_a_hybrid_have_the_modules_of_megatrons_stack(changes):
    model = {**SMALL, **changes}
    pattern = model.pop("hybrid_layer_pattern")
    config = GPTConfig(num_layers=len(pattern), **model)
    config.use_cpu_initialization = True
    shape = require_shape({**model, "hybrid_layer_pattern": pattern})
    with training_process(config, seed=1):
        stack = MambaStack(
            config,
            local_stack(),
            **layers_argument(pattern),
            post_layer_norm=False,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    assert len(stack.layers) == len(shape.kinds)
    for layer, kind in zip(stack.layers, shape.kinds, strict=True):
        built = {}
        for path, parameter in layer.named_parameters():
            name = path.replace("self_attention.", "").replace("mlp.", "").replace("local_experts.", "")
            parts = [part for part in name.split(".") if not part.isdecimal()]
            built.setdefault(".".join(parts[:-1]), []).append(tuple(parameter.shape))
        planned = {name: shapes * count for name, (count, shapes) in sizes_of(list_layer_modules(shape, kind)).items()}
        assert {name: sorted(shapes) for name, shapes in built.items()} == {
            name: sorted(shapes) for name, shapes in planned.items()
        }


def test_a_mamba_layer_has_the_dimensions_of_megatrons_mixer():
    """Source: megatron-core 0.16.1 ssm/mamba_mixer.py, lines 268-292: in_proj of z, x, B, C, dt; conv1d of x, B, C."""
    shape = require_shape(NEMOTRON_3_SUPER)
    inner, groups, state, heads = 128 * 64, 8, 128, 128
    sizes = {module.name: (module.outputs, module.inputs) for module in list_layer_modules(shape, "mamba")}
    assert sizes["in_proj"] == (2 * inner + 2 * groups * state + heads, 4096)
    assert sizes["conv1d"] == (inner + 2 * groups * state, 4)
    assert sizes["out_proj"] == (4096, inner)


def test_a_hybrid_ends_in_its_own_norm():
    assert [module.name for module in list_output_modules(require_shape(SMALL))] == [
        "final_norm",
        "output_layer",
    ]


def test_experts_at_a_latent_width_have_the_sizes_of_megatrons_experts(megatron_owners):
    model = {**SMALL, "moe_latent_size": 16}
    shape = require_shape(model)
    sizes = {module.name: module for module in list_layer_modules(shape, "moe")}
    given = {name: value for name, value in model.items() if name != "hybrid_layer_pattern"}
    config = megatron_owners(num_layers=5, **given)["model"]
    config.use_cpu_initialization = True
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    with training_process(config, seed=1):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        experts = SequentialMLP(4, config, submodules, pg_collection=groups)
    built = experts.local_experts[0]
    for name in ("linear_fc1", "linear_fc2"):
        planned = sizes[f"experts.{name}"]
        assert (planned.outputs, planned.inputs) == tuple(getattr(built, name).weight.shape)
    # megatron-core 0.16.1 transformer/moe/moe_layer.py lines 170-191: hidden -> latent and back, on every rank
    assert (sizes["fc1_latent_proj"].outputs, sizes["fc1_latent_proj"].inputs) == (16, 64)
    assert (sizes["fc2_latent_proj"].outputs, sizes["fc2_latent_proj"].inputs) == (64, 16)
    assert {sizes[name].split for name in ("fc1_latent_proj", "fc2_latent_proj")} == {""}
    assert sizes["shared_experts.linear_fc1"].inputs == 64


def test_a_published_hybrid_has_its_published_size_and_linear_layers():
    precision = kept(FP8, 0, 14)
    plan = precision_plan(precision, NEMOTRON_3_SUPER)
    assert plan.linears() == (298, 355)
    decoder = {**NEMOTRON_3_SUPER, "hybrid_layer_pattern": NEMOTRON_3_SUPER["hybrid_layer_pattern"].partition("/")[0]}
    assert build_memory_report(precision_plan(precision, decoder)).parameters == pytest.approx(120.6e9, rel=1e-3)
    assert plan.format_of(2, "experts.linear_fc1") == "e4m3"
    assert plan.format_of(88, "experts.linear_fc1") == "bf16"


# -- pipeline ---------------------------------------------------------------------------------------------------------


def test_the_bars_of_a_pattern_are_its_pipeline_chunks():
    model = {**SMALL, "hybrid_layer_pattern": "*-|E*|-|*E-", "pipeline_model_parallel_size": 2}
    parallel = ParallelLayout.from_model(model)
    assert parallel.virtual == 2
    places = parallel.split_layers(8)
    assert [(place.stage, place.chunk, len(place.layers)) for place in places] == [
        (0, 0, 2),
        (1, 0, 2),
        (0, 1, 1),
        (1, 1, 3),
    ]
    assert [place.embedding for place in places] == [True, False, False, False]
    assert [place.output for place in places] == [False, False, False, True]


def test_a_pattern_without_bars_is_split_evenly():
    model = {**SMALL, "hybrid_layer_pattern": "*-E-*-E-", "pipeline_model_parallel_size": 4}
    assert [len(place.layers) for place in ParallelLayout.from_model(model).split_layers(8)] == [2, 2, 2, 2]


# -- prediction layers ------------------------------------------------------------------------------------------------

PREDICTING = {**SMALL, "hybrid_layer_pattern": "*-E*-E/*E-/*E-"}


def test_a_prediction_layer_holds_the_layers_of_its_pattern():
    plan = precision_plan(None, PREDICTING)
    labels = [layer.label for layer in plan.layers if layer.is_mtp]
    assert labels == ["mtp 1", "mtp 1.1", "mtp 1.2", "mtp 1.3", "mtp 2", "mtp 2.1", "mtp 2.2", "mtp 2.3"]
    by_label = {layer.label: [module.name for module in layer.modules] for layer in plan.layers}
    assert by_label["mtp 1"] == ["enorm", "hnorm", "eh_proj", "final_layernorm"]
    assert by_label["mtp 1.1"] == by_label["1"]
    assert by_label["mtp 1.2"] == by_label["3"]


def test_the_legacy_pattern_of_prediction_layers_is_read_with_their_number():
    legacy = {**SMALL, "hybrid_override_pattern": "*-E*-E", "mtp_hybrid_override_pattern": "*E-", "mtp_num_layers": 2}
    del legacy["hybrid_layer_pattern"]
    assert require_shape(legacy) == require_shape(PREDICTING)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 5), (2, 2), (6, 6)])
def test_prediction_layers_of_a_hybrid_are_in_fp8_whatever_the_counts(start, end):
    plan = precision_plan(kept(FP8, start, end), PREDICTING)
    assert plan.format_of("mtp 1", "eh_proj") == "e4m3"
    assert plan.format_of("mtp 1.3", "linear_fc2") == "e4m3"
    assert plan.format_of("mtp 2.1", "linear_qkv") == "e4m3"


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 3), (1, 0), (2, 2), (0, 6)])
def test_layers_inside_a_prediction_layer_enter_fp4_by_their_number_there(start, end, megatron_owners):
    """Megatron asks its function with the number inside the stack; the projection before it ignores FP4."""
    plan = precision_plan(kept(NVFP4, start, end), PREDICTING)
    given = {name: value for name, value in PREDICTING.items() if name != "hybrid_layer_pattern"}
    config = megatron_owners(num_layers=6, **given)["model"]
    config.first_last_layers_bf16 = True
    config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16 = start, end
    assert plan.format_of("mtp 1", "eh_proj") == "bf16"
    for inner, module in enumerate(("linear_qkv", "experts.linear_fc1", "linear_fc1")):
        wanted = "bf16" if is_first_last_bf16_layer(config, inner) else "e2m1"
        assert plan.format_of(f"mtp 1.{inner + 1}", module) == wanted


@pytest.mark.parametrize(
    "model", [PREDICTING, {**PREDICTING, "hybrid_layer_pattern": "*-E*-E/*E-"}], ids=["two", "one"]
)
def test_a_repeated_prediction_layer_is_built_once_and_runs_at_each_depth(model):
    repeated = {**model, "mtp_use_repeated_layer": True, "mtp_num_layers": 2}
    twice = precision_plan(None, PREDICTING)
    once = precision_plan(None, repeated)
    assert [layer.label for layer in once.layers if layer.label in ("mtp 1", "mtp 2")] == ["mtp 1"]
    (place,) = once.parallel.split_layers(6)
    own = [parameter for parameter in list_chunk_parameters(once, place) if parameter.layer.startswith("mtp")]
    both = [parameter for parameter in list_chunk_parameters(twice, place) if parameter.layer.startswith("mtp")]
    assert 2 * sum(parameter.numel for parameter in own) == sum(parameter.numel for parameter in both)
    load = Workload(seq_length=64)
    kept_once, kept_twice = (
        build_memory_report(plan, workload=load).ranks[0].bytes_of["activations"] for plan in (once, twice)
    )
    assert kept_once == kept_twice


def test_a_repeated_prediction_layer_of_a_gpt_is_listed_once():
    model = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "mtp_num_layers": 2}
    assert precision_plan(None, model).linears()[1] == 4 * 4 + 2 * 5 + 1
    assert precision_plan(None, {**model, "mtp_use_repeated_layer": True}).linears()[1] == 4 * 4 + 5 + 1


def test_the_layer_inside_a_prediction_layer_of_a_gpt_is_like_the_last():
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "mtp_num_layers": 1, "num_moe_experts": 4}
    plan = precision_plan(None, {**model, "moe_layer_freq": [1, 0]})
    assert "linear_fc1" in [module.name for module in plan.layers[-2].modules]


# -- versions and faults ----------------------------------------------------------------------------------------------


def test_a_hybrid_ignores_fp4_before_megatron_core_0_17():
    old = precision_plan(MixedPrecisionConfig(**NVFP4), SMALL, mcore=Version("0.16.1"))
    assert old.linears()[0] == 0
    assert precision_plan(MixedPrecisionConfig(**NVFP4), SMALL, mcore=Version("0.17.1")).linears()[0] == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hybrid_layer_pattern": "MGM*"},
            f"model.hybrid_layer_pattern: cannot plan: layers of gated delta net, got 'G'. {UNPLANNED_REMEDY}",
        ),
        (
            {"hybrid_layer_pattern": "M?*"},
            "model.hybrid_layer_pattern: must consist of M * + - E, got '?'. Correct it.",
        ),
        (
            {"hybrid_layer_pattern": "*-/*/-"},
            "model.hybrid_layer_pattern: must have the same pattern at each multi-token-prediction depth, got '*/-'. "
            "Correct it.",
        ),
        (
            {"num_moe_experts": None},
            "model.num_moe_experts: must be stated where hybrid_layer_pattern has the letter E, got None. State the "
            "number of experts.",
        ),
        (
            {"num_layers": 4},
            "model.hybrid_layer_pattern: must have a letter for each of the 4 layers, got 5. Correct it or num_layers.",
        ),
        (
            {"mtp_num_layers": 1},
            "model.mtp_num_layers: must be the number of multi-token-prediction depths in hybrid_layer_pattern, which "
            "is 0, got 1. Write a / and the pattern for each depth, or correct mtp_num_layers.",
        ),
        (
            {"hybrid_layer_pattern": None, "is_hybrid_model": True, "num_layers": 4},
            "model.is_hybrid_model: cannot plan: a hybrid model needs a letter for each of its layers, got True. "
            "State hybrid_layer_pattern, M-M*- say.",
        ),
        (
            {"hybrid_layer_pattern": "*+-"},
            "model.hybrid_layer_pattern: must not have both * and +, which Megatron refuses, got '*+-'. Use one of "
            "them.",
        ),
    ],
)
def test_a_pattern_that_no_model_has_is_one_sentence(changes, message):
    with pytest.raises(RunConfigError) as raised:
        precision_plan(None, {**SMALL, **changes})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "changes",
    [
        {"virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_layout": "Et|t|t|tL"},
        {"hybrid_layer_pattern": "*|-|E|*-"},
    ],
    ids=["field", "layout", "pattern"],
)
def test_interleaving_is_seen_wherever_it_is_stated(changes):
    model = {**SMALL, "hybrid_layer_pattern": None, "num_layers": 4, "pipeline_model_parallel_size": 2, **changes}
    model["num_layers"] = 5 if model["hybrid_layer_pattern"] else 4
    for overlaps, found in ((False, {"PB407"}), (True, set())):
        setup = CheckContext(
            Run.from_configs(
                "bf16_mixed", model={**model, "overlap_p2p_comm": overlaps, "batch_p2p_comm": not overlaps}
            )
        )
        assert {finding.id for finding in check(setup.run).findings if finding.id == "PB407"} == found
    if "pipeline_model_parallel_layout" in changes:
        single = CheckContext(
            Run.from_configs("bf16_mixed", model={**model, "pipeline_model_parallel_layout": "Ett|ttL"})
        )
        assert "PB407" not in {finding.id for finding in check(single.run).findings}
