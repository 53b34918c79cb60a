"""DeepSeek-V4's hybrid attention and hyper-connections in the plan; tests/megatron has the live model."""

from typing import Any

import pytest

from bridge.errors import RunConfigError
from bridge.model.shape import ModelShape
from bridge.plan.memory_activations import list_uncounted_kernels
from bridge.plan.precision_plan import precision_plan

MODEL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "seq_length": 64,
    "multi_latent_attention": True,
    "q_lora_rank": 48,
    "v_head_dim": 64,
    "qk_layernorm": True,
    "o_groups": 2,
    "o_lora_rank": 32,
    "add_bias_linear": False,
    "experimental_attention_variant": "dsv4_hybrid",
    "csa_compress_ratios": "([0,4]+[128]+[0])",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 8,
    "mtp_num_layers": 1,
    "enable_hyper_connections": True,
    "num_residual_streams": 2,
    "bf16": True,
    "fp8": "e4m3",
    "fp8_recipe": "mxfp8",
    "fp8_param": True,
}


def test_each_layer_has_the_attention_of_its_ratio():
    shape = ModelShape.from_model(MODEL)
    assert shape.kinds == ("window", "compressed", "heavily_compressed")
    assert shape.mtp_kind == "window"
    dense = ModelShape.from_model({**MODEL, "csa_dense_mode": True})
    assert dense.kinds == ("window", "compressed_dense", "heavily_compressed")


def test_compressors_and_grouped_outputs_stay_out_of_fp8():
    plan = precision_plan(None, MODEL)
    quantised = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_proj", "indexer.linear_wq_b", "linear_proj")
    for module in quantised:
        assert plan.get_format(2, module) == "e4m3"
    kept = ("compressor.linear_wkv", "indexer.compressor.linear_wgate", "indexer.linear_weights_proj")
    for module in (*kept, "linear_o_group_proj"):
        row = plan.row(2, module)
        assert (plan.get_format(2, module), row.storage, row.master) == ("bf16", "bf16", "fp32")
    modules = [module.name for module in plan.by_label["3"].modules]
    assert "compressor.linear_wkv" in modules
    assert not any(name.startswith("indexer") for name in modules)
    window = [module.name for module in plan.by_label["1"].modules]
    assert not any("compressor" in name for name in window)


def test_what_megatron_keeps_in_fp32_has_no_master():
    plan = precision_plan(None, MODEL)
    places = (("self_attention_hyper_connection", "weight"), ("compressor", "weight"), ("core_attention", "attn_sink"))
    for module, item in places:
        row = plan.row(2, module, item)
        assert (row.storage, row.master, row.gradient) == ("fp32", "itself", "fp32")
    assert plan.get_format("output", "hc_head") == "fp32"


def test_a_plan_says_which_branch_of_megatron_builds_the_model():
    (note,) = precision_plan(None, MODEL).settings.notes
    assert note == (
        "model.experimental_attention_variant=dsv4_hybrid is in Megatron-LM's development branch alone "
        "(dev of 2026-08-21): no release of Megatron Core builds this model."
    )


def test_what_is_not_counted_of_activations_is_named():
    assert len(list_uncounted_kernels(precision_plan(None, MODEL))) == 2
    plain = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    assert list_uncounted_kernels(precision_plan(None, plain)) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"csa_compress_ratios": [0, 4, 128]}, "model.csa_compress_ratios: must be a list of 0, 4 or 128 for each of "),
        (
            {"csa_compress_ratios": [0, 4, 8, 0]},
            "model.csa_compress_ratios: must be a list of 0, 4 or 128 for each of ",
        ),
        ({"csa_compress_ratios": None}, "model.csa_compress_ratios: must be a list of 0, 4 or 128 for each of "),
        ({"tensor_model_parallel_size": 2}, "model.tensor_model_parallel_size: must be 1 with "),
        ({"multi_latent_attention": False}, "model.multi_latent_attention: must be on with "),
        ({"o_groups": 3}, "model.o_groups: must divide the 256 outputs of all heads, got 3. Use a divisor."),
        (
            {"mtp_num_layers": 2, "csa_compress_ratios": [0, 4, 128, 0, 4]},
            "model.csa_compress_ratios: cannot plan: prediction layers of several kinds, ",
        ),
    ],
)
def test_a_model_that_megatron_refuses_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(RunConfigError) as raised:
        precision_plan(None, {**MODEL, **change})
    assert str(raised.value).startswith(message)


def test_hyper_connections_of_a_hybrid_model_are_not_planned():
    hybrid = {"hidden_size": 64, "num_attention_heads": 4, "hybrid_layer_pattern": "*-", "enable_mhc_connections": True}
    with pytest.raises(RunConfigError, match="cannot plan: hyper-connections of a hybrid model"):
        precision_plan(None, hybrid)
