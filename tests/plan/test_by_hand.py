"""Three published models, counted by hand: their parameters, and the bytes of one rank of a published recipe.

Each term stands in words beside its product. Of the bytes, padding is left out by hand, which is less than one in a
thousand. Nothing here asks the plan for a size.
"""

import pytest

from bridge.model.layout import ParallelLayout
from bridge.plan.memory_report import build_memory_report
from bridge.plan.precision_plan import precision_plan
from bridge.registry.registry import REGISTRY
from tests.model.test_shape import LLAMA_3_70B

PADDING = 1e-3
SHARDED = {"use_distributed_optimizer": True}
DEEPSEEK_V3 = {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "share_embeddings_and_output_weights": False,
    "num_moe_experts": 256,
    "moe_layer_freq": [0] * 3 + [1] * 58,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
    "mtp_num_layers": 1,
}
NEMOTRON_3_SUPER = {
    "num_layers": 88,
    "hidden_size": 4096,
    "ffn_hidden_size": 2688,
    "num_attention_heads": 32,
    "num_query_groups": 2,
    "kv_channels": 128,
    "hybrid_layer_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "mtp_hybrid_override_pattern": "*E",
    "mtp_num_layers": 2,
    "mtp_use_repeated_layer": True,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
    "num_moe_experts": 512,
    "moe_router_topk": 22,
    "moe_ffn_hidden_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
    "vocab_size": 131072,
    "normalization": "RMSNorm",
    "gated_linear_unit": False,
    "add_bias_linear": False,
    "share_embeddings_and_output_weights": False,
    "position_embedding_type": "none",
}


def rank(recipe, model, *, world_size, stage=0, **optimizer):
    """Return the parameters of the model, and a rank of a stage, as the plan counts them."""
    precision = REGISTRY.get(recipe).override(grad_reduce_in_fp32=False)
    parallel = ParallelLayout.from_model(model).fit_to_world_size(world_size)
    plan = precision_plan(precision, model, parallel, optimizer={**SHARDED, **optimizer}, ddp=SHARDED)
    report = build_memory_report(plan, ddp=SHARDED, capability=(10, 0))
    return report.parameters, report.ranks[stage]


def compare(found, *, weights, gradients, masters, states):
    by_hand = {"weights": weights, "gradients": gradients, "master weights": masters, "optimizer state": states}
    for kind, size in by_hand.items():
        assert found.bytes_of[kind] == pytest.approx(size, rel=PADDING), kind


def test_llama_3_70b_on_64_b200():
    hidden, ffn, head = 8192, 28672, 128
    qkv = hidden * (64 + 2 * 8) * head  # 64 heads of queries, and keys and values of 8 groups
    matrices = qkv + hidden * hidden + 2 * hidden * ffn + ffn * hidden  # gate and up, then down
    layer = matrices + 2 * hidden  # two norms
    ends = 2 * 128256 * hidden + hidden  # embedding, output layer, last norm
    # TP 2, PP 4: 8 data-parallel ranks; BF16 weights and gradients, an eighth of FP32 masters and two moments.
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}
    parameters, found = rank("bf16_mixed", {**LLAMA_3_70B, **layout}, world_size=64, stage=1)
    assert parameters == 80 * layer + ends == 70_553_706_496
    own = 20 * (matrices // 2 + 2 * hidden)
    assert found.parameters == own
    compare(found, weights=2 * own, gradients=2 * own, masters=4 * own / 8, states=8 * own / 8)


def test_deepseek_v3_on_1024_h100():
    hidden, heads = 7168, 128
    to_latents = hidden * 1536 + 1536 + hidden * (512 + 64) + 512  # each with its norm; every rank holds these
    from_latents = 1536 * heads * (128 + 64) + 512 * heads * (128 + 128) + heads * 128 * hidden
    attention, norms = to_latents + from_latents, 2 * hidden
    dense = 3 * hidden * 18432
    expert, router = 3 * hidden * 2048, 256 * hidden
    sparse = attention + norms + router + 257 * expert  # 256, and the shared one
    ends = 2 * 129280 * hidden + hidden
    prediction = sparse + 3 * hidden + 2 * hidden * hidden  # norms of embedding, hidden state and output; projection
    # TP 2 x PP 8 x EP 64: 64 data-parallel ranks and 2 of each expert. A stage in the middle has 8 layers of experts.
    layout = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 8,
        "expert_model_parallel_size": 64,
        "expert_tensor_parallel_size": 1,
        "num_layers_in_first_pipeline_stage": 7,
        "num_layers_in_last_pipeline_stage": 6,
    }
    moments = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    moments["fp8_recipe"] = "tensorwise"  # as Megatron Bridge writes it in BF16 runs too
    parameters, found = rank("bf16_mixed", {**DEEPSEEK_V3, **layout}, world_size=1024, stage=1, **moments)
    assert parameters == 3 * (attention + norms + dense) + 58 * sparse + ends + prediction == 682_636_472_320
    own_dense = 8 * (to_latents + from_latents // 2 + norms + router + expert // 2)
    own_experts = 8 * 256 // 64 * expert
    assert found.parameters == own_dense + own_experts
    whole, shard = own_dense + own_experts, own_dense / 64 + own_experts / 2
    # Megatron keeps FP32 masters, and the precision-aware optimizer two moments in BF16.
    compare(found, weights=2 * whole, gradients=2 * whole, masters=4 * shard, states=4 * shard)
    del moments["fp8_recipe"]
    # Without that value the fused Adam holds the 16 bits that a BF16 weight lacks.
    _, found = rank("bf16_mixed", {**DEEPSEEK_V3, **layout}, world_size=1024, stage=1, **moments)
    compare(found, weights=2 * whole, gradients=2 * whole, masters=2 * shard, states=4 * shard)


def test_nemotron_3_super_on_64_b200():
    hidden, inner, groups, state, heads = 4096, 128 * 64, 8, 128, 128
    scanned = inner + 2 * groups * state  # what the convolution reads: x, B and C
    mamba = (
        hidden  # norm
        + hidden * (2 * inner + 2 * groups * state + heads)  # z, x, B, C and a step for each head
        + scanned * (4 + 1)  # convolution of width 4, with a bias
        + 3 * heads  # A, D and the bias of the steps
        + inner  # gated norm
        + inner * hidden
    )
    attention = hidden + hidden * (32 + 2 * 2) * 128 + 32 * 128 * hidden
    expert = 2 * 1024 * 2688  # up and down, in the latent width
    outside = hidden + 512 * hidden + 2 * hidden * 1024 + 2 * hidden * 5376  # norm, router, latent, shared expert
    experts = outside + 512 * expert
    prediction = attention + experts + 3 * hidden + 2 * hidden * hidden  # one layer for both depths
    ends = 2 * 131072 * hidden + hidden
    # EP 64 on 64 ranks: each holds 8 experts of a layer alone, and all the rest, whose masters are shared by 64.
    layout = {"expert_model_parallel_size": 64, "expert_tensor_parallel_size": 1}
    parameters, found = rank("bf16_mixed", {**NEMOTRON_3_SUPER, **layout}, world_size=64)
    kinds = NEMOTRON_3_SUPER["hybrid_layer_pattern"]
    count = {letter: kinds.count(letter) for letter in "M*E"}
    assert count == {"M": 40, "*": 8, "E": 40}
    assert parameters == 40 * mamba + 8 * attention + 40 * experts + prediction + ends == 123_611_012_096
    own_experts = 41 * 8 * expert
    own_dense = parameters - 41 * 512 * expert
    assert found.parameters == own_dense + own_experts
    whole, shard = own_dense + own_experts, own_dense / 64 + own_experts
    compare(found, weights=2 * whole, gradients=2 * whole, masters=4 * shard, states=8 * shard)
