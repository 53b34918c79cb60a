"""Model shapes from config values, against the config classes of the installed Megatron Core."""

import subprocess
import sys

import pytest

from bridge.errors import RunConfigError
from bridge.model.list_expression import parse_list_expression
from bridge.model.modules import (
    list_embedding_modules,
    list_layer_modules,
    list_mtp_modules,
    list_output_modules,
)
from bridge.model.shape import ModelShape
from bridge.model.shape_reader import read_shape, require_shape

DENSE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
HYBRID = {**DENSE, "num_layers": 5, "hybrid_override_pattern": "M-M*-", "mamba_num_heads": 8}
LLAMA_3_70B = {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "vocab_size": 128256,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
DEEPSEEK_V3 = {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "num_moe_experts": 256,
    "moe_layer_freq": "([0]*3+[1]*58)",
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
}


def parameters(shape: ModelShape) -> int:
    modules = [*list_embedding_modules(shape), *list_output_modules(shape)]
    for kind in shape.kinds:
        modules += list_layer_modules(shape, kind)
    return sum(module.parameters for module in modules)


def test_what_megatron_derives_is_derived_here(megatron_owners):
    for given in (DENSE, {**DENSE, "num_query_groups": 2}, {**DENSE, "kv_channels": 32, "ffn_hidden_size": 96}):
        config = megatron_owners(**given)["model"]
        shape = require_shape(given)
        for name in ("ffn_hidden_size", "kv_channels", "num_query_groups", "gated_linear_unit", "add_bias_linear"):
            assert getattr(shape, name) == getattr(config, name), name
        assert shape.layer_norm_bias == (config.normalization == "LayerNorm")
        assert require_shape(config) == shape


def test_published_models_have_their_published_sizes():
    assert parameters(require_shape(LLAMA_3_70B)) == 70_553_706_496
    assert round(parameters(require_shape(DEEPSEEK_V3)) / 1e9, 1) == 671.0


def test_a_frequency_of_expert_layers_is_a_number_a_list_or_its_expression():
    experts = {**DENSE, "num_moe_experts": 8}
    wanted = ("transformer", "transformer_moe", "transformer", "transformer_moe")
    for frequency in ([0, 1, 0, 1], "[0,1]*2", "([0]+[1])*2"):
        assert require_shape({**experts, "moe_layer_freq": frequency}).kinds == wanted
    for every_second in (2, "2"):
        assert require_shape({**experts, "moe_layer_freq": every_second}).kinds == wanted[::-1]
    assert require_shape({**experts, "moe_layer_freq": -2}).kinds == wanted[::-1]
    assert set(require_shape({**experts, "moe_layer_freq": -1}).kinds) == {"transformer_moe"}
    assert parse_list_expression("([0]*2+[1])") == [0, 0, 1]
    assert parse_list_expression("2") is None
    assert set(require_shape(experts).kinds) == {"transformer_moe"}


def test_each_letter_of_a_hybrid_pattern_is_a_layer():
    shape = require_shape(HYBRID)
    assert shape.kinds == ("mamba", "mlp", "mamba", "attention", "mlp")
    assert shape.state_space is not None
    assert shape.state_space.inner == 8 * 64
    names = [[module.name for module in list_layer_modules(shape, kind)] for kind in ("mamba", "attention", "mlp")]
    assert names == [
        ["norm", "in_proj", "conv1d", "ssm", "gated_norm", "out_proj"],
        ["input_layernorm", "linear_qkv", "core_attention", "linear_proj"],
        ["pre_mlp_layernorm", "linear_fc1", "linear_fc2"],
    ]


def test_a_prediction_layer_is_a_projection_and_a_layer_of_the_model():
    shape = require_shape({**DENSE, "mtp_num_layers": 1})
    names = [module.name for module in list_mtp_modules(shape)]
    assert names[:3] == ["enorm", "hnorm", "eh_proj"]
    assert names[3:-1] == [module.name for module in list_layer_modules(shape, "transformer")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "model.num_layers: must be at least 1, got 0. Use 1 or more."),
        ({**DENSE, "hidden_size": "wide"}, "model.hidden_size: must be a whole number, got 'wide'. Correct it."),
        (
            {**DENSE, "multi_latent_attention": True, "qk_l2_norm": True},
            "model.qk_l2_norm: must be off with multi-latent attention, as Megatron asserts, got True. Set it to "
            "false.",
        ),
        (
            {**DENSE, "num_query_groups": 3},
            "model.num_query_groups: must divide the 4 attention heads, got 3. Use a divisor.",
        ),
        (
            {**DENSE, "hybrid_override_pattern": "M-M"},
            "model.hybrid_override_pattern: must have a letter for each of the 4 layers, got 3. Correct it or "
            "num_layers.",
        ),
        (
            {**DENSE, "num_moe_experts": 8, "moe_layer_freq": "__import__('os')"},
            "model.moe_layer_freq: must be a number, or a list with an item for each of the 4 layers, got "
            "\"__import__('os')\". Correct it.",
        ),
        (
            {**DENSE, "num_moe_experts": 8, "moe_layer_freq": "[0]*99999*99999"},
            "model.moe_layer_freq: must be a number, or a list with an item for each of the 4 layers, got "
            "'[0]*99999*99999'. Correct it.",
        ),
    ],
)
def test_an_impossible_shape_is_one_sentence_per_fault(given, message):
    with pytest.raises(RunConfigError) as raised:
        require_shape(given)
    assert str(raised.value).splitlines()[0] == message


def test_shapes_need_neither_torch_nor_megatron():
    code = (
        "import sys\nfrom bridge.plan.precision_plan import precision_plan\n"
        f"precision_plan(None, {DENSE!r})\n"
        "print([m for m in ('torch', 'megatron', 'hydra', 'yaml', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_size_that_two_modules_need_is_one_fault():
    _, faults = read_shape({**DENSE, "tensor_model_parallel_size": 0, "experimental_attention_variant": "gdn"})
    assert [fault.path for fault in faults].count("model.tensor_model_parallel_size") == 1
