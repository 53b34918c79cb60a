"""The fields of Megatron's configs that scripts/train.py supports, in five lists.

    SUPPORTED_FIELDS                 every run supports them
    FIELDS_WITHOUT_NUMERIC_EFFECT    they do not change the numbers of a run
    NEED_TE_LAYERS                   only Transformer Engine's layers support them
    NEED_TE_ON_A_GPU                 only Transformer Engine's and NCCL's kernels support them
    UNSUPPORTED_IN_HYBRIDS           supported fields that hybrid models do not read

A field that is on none of the first four lists is refused if it differs from Megatron's default. So
no run silently trains another model than the model in its config.

Source: megatron-core 0.16.1, its readers of each field. For the model's fields on the first list,
tests/runtime/megatron/test_run_fields.py shows that another value changes a measured number or a
module that runs. The exceptions are fields of the precision and of the messages between processes,
which other tests cover.
"""

from collections.abc import Mapping

FieldsBySection = Mapping[str, frozenset[str]]
"""Section (model, optimizer, ddp) -> names of its fields."""


def _make_table(**sections: str) -> FieldsBySection:
    return {section: frozenset(names.split()) for section, names in sections.items()}


SUPPORTED_FIELDS = _make_table(
    model="""
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
        vocab_size seq_length make_vocab_size_divisible_by position_embedding_type rotary_base
        rotary_percent rotary_interleaved no_rope_freq share_embeddings_and_output_weights
        hidden_dropout attention_dropout layernorm_epsilon normalization qk_layernorm qk_l2_norm
        add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset
        activation_func_clamp_value attention_output_gate softmax_scale softmax_type window_size
        window_attn_skip_freq apply_query_key_layer_scaling attention_softmax_in_fp32 init_method
        output_layer_init_method init_method_std embedding_init_method embedding_init_method_std
        perform_initialization deterministic_mode

        multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
        rope_type rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow
        mscale mscale_all_dim

        experimental_attention_variant linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss

        num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size
        moe_shared_expert_gate moe_router_load_balancing_type moe_router_topk
        moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_aux_loss_coeff
        moe_z_loss_coeff moe_input_jitter_eps moe_token_dispatcher_type moe_expert_capacity_factor
        moe_pad_expert_input_to_capacity moe_token_drop_policy moe_apply_probs_on_input
        mtp_num_layers mtp_loss_scaling_factor

        is_hybrid_model hybrid_layer_pattern hybrid_override_pattern mamba_state_dim
        mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path

        tensor_model_parallel_size pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size sequence_parallel context_parallel_size cp_comm_type
        expert_model_parallel_size expert_tensor_parallel_size num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        microbatch_group_size_per_vp_stage variable_seq_lengths overlap_p2p_comm batch_p2p_comm
        batch_p2p_sync overlap_p2p_comm_warmup_flush deallocate_pipeline_outputs

        fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype fp8 fp8_recipe
        fp8_param fp8_margin fp8_amax_history_len fp8_amax_compute_algo tp_only_amax_red
        first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4
        fp4_recipe fp4_param quant_recipe fp8_quantizer_factory fp4_quantizer_factory
        fp8_dot_product_attention fp8_multi_head_attention

        recompute_granularity recompute_method recompute_num_layers recompute_modules
        moe_layer_recompute distribute_saved_activations
    """,
    optimizer="""
        lr min_lr weight_decay apply_wd_to_qk_layernorm optimizer adam_beta1 adam_beta2 adam_eps
        decoupled_weight_decay sgd_momentum clip_grad loss_scale initial_loss_scale min_loss_scale
        loss_scale_window hysteresis fp16 bf16 params_dtype fp8_recipe
        reuse_grad_buf_for_mxfp8_param_ag use_distributed_optimizer overlap_param_gather
        use_precision_aware_optimizer store_param_remainders main_grads_dtype main_params_dtype
        exp_avg_dtype exp_avg_sq_dtype
    """,
    ddp="""
        grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather
        use_distributed_optimizer check_for_nan_in_grad check_for_large_grads bucket_size
        pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation
        average_in_collective fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag
    """,
)
"""Fields that every run supports.

`choose_backend` refuses precision fields that a backend does not have.
"""

FIELDS_WITHOUT_NUMERIC_EFFECT = _make_table(
    model="""
        transformer_impl attention_backend bias_activation_fusion bias_dropout_fusion
        apply_rope_fusion gradient_accumulation_fusion masked_softmax_fusion persist_layer_norm
        moe_grouped_gemm cross_entropy_loss_fusion use_cpu_initialization
        cross_entropy_fusion_impl use_fused_weighted_squared_relu
        async_tensor_model_parallel_allreduce fp8_interval fp8_wgrad
        clone_scatter_output_in_embedding disable_parameter_transpose_cache
        disable_bf16_reduced_precision_matmul barrier_with_L1_time timers mtp_standalone
        moe_deepep_num_sms moe_hybridep_num_sms cuda_graph_use_single_mempool cuda_graph_scope
        cuda_graph_modules inference_cuda_graph_scope moe_enable_deepep
        moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
    """,
    optimizer="barrier_with_L1_time timers muon_tp_mode",
    ddp="",
)
"""Fields that do not change the numbers of a run.

`precision_backend` replaces the field that chooses the layers. Fusions are switched for the machine
with a note. Megatron computes some of these fields itself. The defaults of others differ between
releases.
"""

NEED_TE_LAYERS = _make_table(
    model="""
        layernorm_zero_centered_gamma memory_efficient_layer_norm moe_latent_size
        moe_shared_expert_overlap activation_func_fp8_input_store
    """,
    optimizer="",
    ddp="",
)
"""Fields that only Transformer Engine's layers support: precision_backend=te or te_cpu."""

NEED_TE_ON_A_GPU = _make_table(
    model="""
        fused_single_qkv_rope moe_permute_fusion moe_router_fusion symmetric_ar_type
        fp32_residual_connection cpu_offloading cpu_offloading_num_layers
        cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
        fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
    """,
    optimizer="""
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params
    """,
    ddp="nccl_ub",
)
"""Fields that only Transformer Engine's and NCCL's kernels support: precision_backend=te.

No test here has such a GPU."""

UNSUPPORTED_IN_HYBRIDS = _make_table(
    model="""
        virtual_pipeline_model_parallel_size pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        recompute_granularity qk_layernorm qk_l2_norm multi_latent_attention
        experimental_attention_variant
    """,
)
"""Supported fields of the model that Megatron Core's hybrid models (Mamba layers) do not read."""
