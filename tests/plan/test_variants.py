"""Layers of gated delta net and of DeepSeek sparse attention in the plan."""

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer import TransformerConfig
from torch import nn

from bridge import get_mixed_precision_config
from bridge.errors import RunConfigError
from bridge.model.attention_variants import UNPLANNED_REMEDY
from bridge.model.modules import list_layer_modules, list_mtp_modules
from bridge.model.shape import ModelShape
from bridge.plan.alignment import build_alignment_report
from bridge.plan.memory_report import build_memory_report
from bridge.plan.precision_plan import precision_plan
from bridge.runtime.megatron.process import training_process

PLAIN = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "add_bias_linear": False, "vocab_size": 128}
DELTA = {
    **PLAIN,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "normalization": "RMSNorm",
}
SPARSE = {
    **PLAIN,
    "experimental_attention_variant": "dsa",
    "multi_latent_attention": True,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "dsa_indexer_n_heads": 8,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 4,
    "normalization": "RMSNorm",
}
ENDS = 2 * 128 * 64 + 64
"""Embedding, output layer and the last norm."""


class Linear(nn.Module):
    """A linear layer as wide as Megatron asks for."""

    def __init__(self, inputs, outputs, bias, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None


class Norm(nn.Module):
    """A norm as wide as Megatron asks for."""

    def __init__(self, hidden_size, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))


def test_the_parameters_of_a_gated_delta_net_are_those_of_megatrons_own_layer():
    config = TransformerConfig(**{name: value for name, value in DELTA.items() if name != "vocab_size"})
    config.perform_initialization = False
    parts = gated_delta_net.GatedDeltaNetSubmodules(in_proj=Linear, out_norm=Norm, out_proj=Linear)
    with training_process(config, seed=1):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        layer = gated_delta_net.GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
    theirs = {name.partition(".")[0]: 0 for name, _ in layer.named_parameters()}
    for name, parameter in layer.named_parameters():
        theirs[name.partition(".")[0]] += parameter.numel()
    planned = {module.name: module for module in list_layer_modules(ModelShape.from_model(DELTA), "delta_net")}
    ours = dict(planned["delta_rule"].vectors)
    ours |= {name: planned[name].parameters for name in ("in_proj", "conv1d", "out_norm", "out_proj")}
    assert ours == theirs
    assert list(theirs) == ["dt_bias", "A_log", "in_proj", "conv1d", "out_norm", "out_proj"]


@pytest.mark.parametrize(
    ("frequency", "linear"),
    [(4, "1110"), (2, "1010"), (1, "0000"), ([0, 1, 1, 0], "0110"), ("([1]*3+[0]*1)", "1110")],
)
def test_the_frequency_says_which_layers_are_linear_attention(frequency, linear):
    shape = ModelShape.from_model({**DELTA, "linear_attention_freq": frequency})
    assert "".join(str(int(kind == "delta_net")) for kind in shape.kinds) == linear


def test_attention_and_experts_of_a_layer_are_chosen_apart():
    shape = ModelShape.from_model({**DELTA, "num_moe_experts": 4, "moe_layer_freq": [0, 1, 1, 1], "mtp_num_layers": 1})
    assert shape.kinds == ("delta_net", "delta_net_moe", "delta_net_moe", "transformer_moe")
    assert [module.name for module in list_mtp_modules(shape)][3:5] == ["input_layernorm", "linear_qkv"]


def test_the_total_of_a_model_of_gated_delta_net_is_the_sum_by_hand():
    mlp = 2 * 64 * 256 + 64
    delta = 64 + 64 * (2 * 32 + 2 * 128 + 2 * 4) + 4 * (2 * 32 + 128) + 2 * 4 + 32 + 128 * 64
    softmax = 64 + 64 * 3 * 64 + 64 * 64
    memory = build_memory_report(precision_plan(None, DELTA))
    assert memory.parameters == ENDS + 4 * mlp + 3 * delta + softmax


def test_the_total_of_a_model_of_sparse_attention_is_the_sum_by_hand():
    mlp = 2 * 64 * 256 + 64
    latent = 64 + 64 * 48 + 48 * 4 * 24 + 64 * (32 + 8) + 32 * 4 * (16 + 16) + 4 * 16 * 64
    indexer = 48 * 8 * 16 + 64 * 16 + 2 * 16 + 64 * 8
    assert build_memory_report(precision_plan(None, SPARSE)).parameters == ENDS + 4 * (mlp + latent + indexer)
    shared = {**SPARSE, "dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 2}
    assert ModelShape.from_model(shared).kinds == ("sparse", "sparse", "sparse_shared", "sparse")
    assert build_memory_report(precision_plan(None, shared)).parameters == ENDS + 4 * (mlp + latent) + 3 * indexer


@pytest.mark.parametrize(
    ("recipe", "low"),
    [
        ("bf16_mixed", "bf16"),
        ("bf16_with_mxfp8_mixed", "e4m3"),
        ("bf16_with_fp8_current_scaling_mixed", "e4m3"),
        ("bf16_with_fp8_subchannel_scaling_mixed", "e4m3"),
        ("bf16_with_nvfp4_mixed", "e2m1"),
    ],
)
def test_only_the_linear_layers_of_a_variant_compute_in_the_scheme(recipe, low):
    delta, sparse = (precision_plan(get_mixed_precision_config(recipe), model) for model in (DELTA, SPARSE))
    for module in ("in_proj", "out_proj"):
        assert delta.get_format(2, module) == low
    for module in ("conv1d", "delta_rule", "out_norm"):
        assert delta.get_format(2, module, "forward") == "bf16"
    for module in ("linear_wq_b", "linear_wk", "linear_weights_proj"):
        assert sparse.get_format(2, f"indexer.{module}") == low
    assert sparse.get_format(2, "indexer.k_norm", "forward") == "bf16"
    assert sparse.get_format(2, "linear_q_up_proj") == low
    assert sparse.get_format(2, "linear_kv_up_proj") == "bf16"
    assert sparse.get_format(2, "core_attention", "qk") == "bf16"


def test_modules_of_the_variants_have_megatrons_names():
    delta, sparse = precision_plan(None, DELTA), precision_plan(None, SPARSE)
    assert delta.paths.path("1", 0, "in_proj") == "decoder.layers.0.self_attention.in_proj"
    assert delta.paths.path("1", 0, "out_norm") == "decoder.layers.0.self_attention.out_norm"
    wanted = "decoder.layers.0.self_attention.core_attention.indexer.linear_wk"
    assert sparse.paths.path("1", 0, "indexer.linear_wk") == wanted


def test_gemms_that_do_not_fit_the_scheme_name_the_fields_of_the_variant():
    plan = precision_plan(get_mixed_precision_config("bf16_with_mxfp8_mixed"), DELTA)
    found = {(misfit.module, misfit.dimension): misfit for misfit in build_alignment_report(plan).misfits}
    assert found["in_proj", "N"].field == "model.linear_num_value_heads"
    assert found["in_proj", "N"].size == 328
    plan = precision_plan(get_mixed_precision_config("bf16_with_mxfp8_mixed"), SPARSE)
    fields = {misfit.module: misfit.field for misfit in build_alignment_report(plan).misfits if misfit.dimension == "N"}
    assert fields["indexer.linear_wk"] == "model.dsa_indexer_head_dim"
    assert fields["indexer.linear_weights_proj"] == "model.dsa_indexer_n_heads"


@pytest.mark.parametrize(
    ("model", "changed", "message"),
    [
        (
            DELTA,
            {"linear_attention_freq": None},
            "model.linear_attention_freq: must be a number, or a list with an item for each of the 4 layers, got None. "
            "Correct it.",
        ),
        (
            DELTA,
            {"linear_num_value_heads": 3},
            "model.linear_num_value_heads: must be a multiple of the 2 key heads, got 3. Use a multiple.",
        ),
        (
            DELTA,
            {"tensor_model_parallel_size": 4},
            "model.linear_num_key_heads: must be a multiple of the 4 tensor-parallel ranks, got 2. Use a multiple.",
        ),
        (
            SPARSE,
            {"multi_latent_attention": False},
            "model.multi_latent_attention: must be on with experimental_attention_variant=dsa, which Megatron has for "
            "multi-latent attention, got False. Set it to true.",
        ),
        (SPARSE, {"dsa_indexer_topk": None}, "model.dsa_indexer_topk: must be at least 1, got 0. Use 1 or more."),
        (
            DELTA,
            {"experimental_attention_variant": "gdn2"},
            "model.experimental_attention_variant: cannot plan: layers of the second gated delta net, got 'gdn2'. "
            + UNPLANNED_REMEDY,
        ),
    ],
)
def test_a_variant_that_cannot_be_built_is_refused_with_its_field(model, changed, message):
    with pytest.raises(RunConfigError) as raised:
        ModelShape.from_model({**model, **changed})
    assert str(raised.value) == message
