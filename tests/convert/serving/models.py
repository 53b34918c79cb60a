"""Small models of each family: Megatron's fields, and the Hugging Face config that has the same layers."""

from typing import Any

from bridge import get_mixed_precision_config
from bridge.convert.serving.manifest import Manifest
from bridge.plan.precision_plan import PrecisionPlan, precision_plan

SCHEMES = {
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
MEGATRON: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "vocab_size": 256,
}
MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
SHARED = {"moe_shared_expert_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "nemotron": {"gated_linear_unit": False},
    "qwen3_moe": MOE,
    "olmoe": MOE,
    "mixtral": MOE,
    "qwen2_moe": {**MOE, **SHARED, "moe_shared_expert_gate": True},
    "deepseek_v3": {**MOE, **SHARED, **LATENT, "moe_layer_freq": [0, 1, 1, 1]},
    "glm4_moe": {**MOE, **SHARED, "moe_layer_freq": [0, 1, 1, 1]},
}
"""model_type -> Megatron's fields over `MEGATRON`."""
HUGGING_FACE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""Fields of transformers' configs for the same shapes; each class takes its own."""


def manifest(model_type: str = "llama", recipe: str = SCHEMES["blockwise"], **fields: Any) -> Manifest:
    """Return the manifest of a small model; further fields are the precision's."""
    return Manifest.from_plan(planned(model_type, recipe, **fields), model_type=model_type)


def planned(model_type: str, recipe: str, **fields: Any) -> PrecisionPlan:
    """Return the plan of a small model."""
    precision = get_mixed_precision_config(recipe)
    for name, value in fields.items():
        setattr(precision, name, value)
    precision.finalize()
    return precision_plan(precision, {**MEGATRON, **FAMILIES[model_type]})


def names(of: Manifest) -> set[str]:
    """Return the name of every module in the checkpoint."""
    return {name for row in of.rows for name in row.iterate_served_names()}
