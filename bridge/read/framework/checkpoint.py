"""`checkpoint_settings`: the settings of a model that a checkpoint of Hugging Face decides, where nothing states them.

A framework that converts such a checkpoint makes the model's config of the checkpoint's own `config.json`. So its sizes
are not known from the framework's file, and neither are the fields that a converter sets for one family of models.

Source: Megatron Bridge 8c46dc42, src/megatron/bridge/models: the fields of Megatron Core that its bridges and providers
set; mcore-bridge 1.6.5 config/parser.py sets a part of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

FIELDS = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
    ),
    *(
        "vocab_size",
        "make_vocab_size_divisible_by",
        "max_position_embeddings",
        "position_embedding_type",
    ),
    *(
        "share_embeddings_and_output_weights",
        "normalization",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
    ),
    *("activation_func", "activation_func_clamp_value", "gated_linear_unit", "glu_linear_offset"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "attention_output_gate"),
    *(
        "hidden_dropout",
        "attention_dropout",
        "softmax_scale",
        "softmax_type",
        "window_size",
        "window_attn_skip_freq",
    ),
    *(
        "rotary_base",
        "rotary_percent",
        "rotary_interleaved",
        "rotary_scaling_factor",
        "rope_type",
        "mscale",
    ),
    *(
        "multi_latent_attention",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
    ),
    *(
        "experimental_attention_variant",
        "linear_attention_freq",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
    ),
    *(
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "dsa_indexer_n_heads",
    ),
    *(
        "is_hybrid_model",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "hybrid_attention_ratio",
    ),
    *(
        "hybrid_mlp_ratio",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "mamba_state_dim",
    ),
    *(
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_latent_size",
        "moe_grouped_gemm",
    ),
    *(
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_router_topk",
        "moe_router_num_groups",
    ),
    *(
        "moe_router_group_topk",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_dtype",
    ),
    *(
        "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias",
        "moe_router_load_balancing_type",
    ),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_num_layers", "mtp_use_repeated_layer"),
    *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "fp32_residual_connection"),
    *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *(
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "cross_entropy_loss_fusion",
    ),
)
"""Fields of a model that depend on its family or its checkpoint."""


def checkpoint_settings(
    source: str, model: Mapping[str, object], known: Collection[str] = ()
) -> dict[str, str]:
    """Return each setting that a checkpoint decides -> the checkpoint, as a noun.

    Args:
        source: The checkpoint.
        model: The fields that the file states.
        known: Other fields whose values the framework sets itself.
    """
    return {f"model.{name}": source for name in FIELDS if name not in model and name not in known}
