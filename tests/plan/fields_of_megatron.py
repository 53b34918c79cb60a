"""Every field of Megatron's model config but those that the plan refuses, by what it changes."""

READ = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size seq_length
make_vocab_size_divisible_by normalization qk_layernorm qk_l2_norm gated_linear_unit add_bias_linear add_qkv_bias
attention_output_gate softmax_type position_embedding_type rotary_percent
share_embeddings_and_output_weights
linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
linear_value_head_dim dsa_indexer_head_dim dsa_indexer_n_heads dsa_indexer_topk dsa_indexer_topk_freq
dsa_indexer_skip_topk_offset
csa_compress_ratios csa_dense_mode o_groups o_lora_rank
enable_hyper_connections num_residual_streams enable_mhc_connections mhc_num_residual_streams
multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_dtype moe_latent_size
moe_shared_expert_intermediate_size moe_shared_expert_gate
hybrid_layer_pattern hybrid_override_pattern mtp_hybrid_override_pattern is_hybrid_model
hybrid_attention_ratio hybrid_mlp_ratio
mamba_num_heads mamba_head_dim mamba_state_dim mamba_num_groups mtp_num_layers mtp_use_repeated_layer
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
bf16 fp16 enable_autocast autocast_dtype fp32_residual_connection first_last_layers_bf16
num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp8 fp8_recipe fp8_param fp8_amax_history_len
fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention fp4 fp4_recipe fp4_param
keep_fp8_weight_transpose_cache
recompute_granularity recompute_method recompute_modules recompute_num_layers hidden_dropout
bias_activation_fusion use_fused_weighted_squared_relu cross_entropy_loss_fusion cross_entropy_fusion_impl
use_transformer_engine_op_fuser
transformer_impl attention_backend attention_dropout attention_softmax_in_fp32 masked_softmax_fusion
deallocate_pipeline_outputs microbatch_group_size_per_vp_stage overlap_moe_expert_parallel_comm
freeze_language_model freeze_moe_router
"""
"""Fields that the plan, its layout, its settings or the workload read."""

WITHOUT_MODULES = {
    "is read by nothing": "keep_mtp_spec_in_bf16",
    "freezes a part in front of the language model, which the plan does not have": """
        freeze_vision_model freeze_vision_projection freeze_audio_model freeze_sound_encoder
        """,
    "read only together with a field or a letter that is refused": """
        gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute gdp_num_householder
        use_kitchen_attention
        kitchen_attention_backend gtp_remat_opt_in_modules
        """,
    "changes a function, and no module with weights": """
        activation_func mhc_init_gating_factor mhc_recompute_layer_num mhc_sinkhorn_iterations
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_rope_interleaved
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_use_sparse_loss dsa_kernel_backend
        experimental_attention_variant_loss_scale_func
        activation_func_clamp_value glu_linear_offset apply_residual_connection_post_layernorm layernorm_epsilon
        layernorm_zero_centered_gamma softmax_scale window_size window_attn_skip_freq no_rope_freq
        mrope_section rotary_base rotary_interleaved rotary_scaling_factor rope_type original_max_position_embeddings
        max_position_embeddings beta_fast beta_slow mscale mscale_all_dim use_mup mup_attn_scale_power
        mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult qk_clip qk_clip_alpha
        qk_clip_threshold log_max_attention_logit deterministic_mode test_mode calculate_per_token_loss
        fp16_lm_cross_entropy
        """,
    "routes tokens or weighs losses; expert_bias is a buffer, and the router's bias follows add_bias_linear": """
        moe_apply_probs_on_input moe_aux_loss_coeff moe_enable_routing_replay moe_expert_capacity_factor
        moe_expert_rank_capacity_factor moe_grad_scale_func moe_input_jitter_eps moe_pad_expert_input_to_capacity
        moe_per_layer_logging moe_router_bias_update_rate moe_router_enable_expert_bias moe_router_force_biased
        moe_router_force_load_balancing moe_router_fusion moe_router_group_topk moe_router_load_balancing_type
        moe_router_num_groups moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_router_pre_softmax
        moe_router_quantile_balancing_ema moe_router_score_function moe_router_topk_limited_devices
        moe_router_topk_scaling_factor moe_token_drop_policy moe_token_dropping moe_z_loss_coeff
        mtp_detach_heads mtp_grad_scale_func mtp_hsm mtp_loss_scaling_factor mtp_standalone
        """,
    "runs the same weights in other kernels, or keeps them in one tensor": """
        apply_rope_fusion bias_dropout_fusion
        flash_attention_version fused_residual_rmsnorm fused_single_qkv_rope
        gradient_accumulation_fusion memory_efficient_layer_norm persist_layer_norm
        moe_grouped_gemm moe_mlp_glu_interleave_size moe_permute_fusion moe_permute_fusion_into_hybridep
        moe_shared_expert_glu_interleave_size moe_shared_expert_overlap moe_single_grouped_bias
        moe_single_grouped_weight moe_use_grouped_tensor
        use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_mamba_mem_eff_path
        use_te_activation_func mlp_chunks_for_training
        batch_invariant_backend batch_invariant_mode delay_wgrad_compute defer_embedding_wgrad_compute
        wgrad_deferral_limit overlap_dispatch_backward_with_experts_wgrad
        """,
    "sends or overlaps": """
        async_tensor_model_parallel_allreduce batch_p2p_comm batch_p2p_sync clone_scatter_output_in_embedding
        cp_comm_type ep_overlap_early_attn_memory_release
        hierarchical_context_parallel_sizes high_priority_a2a_comm_stream hybrid_context_parallel
        max_seqlen_per_dp_cp_rank moe_combine_bwd_dtype moe_deepep_num_sms
        moe_dispatch_fwd_dtype moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
        moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape
        moe_ncclep_zero_copy moe_token_dispatcher_type overlap_p2p_comm
        overlap_p2p_comm_warmup_flush pipeline_model_parallel_comm_backend symmetric_ar_type tp_comm_atomic_ag
        tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
        tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs use_ring_exchange_p2p variable_seq_lengths
        """,
    "moves tensors, captures graphs or recomputes; `memory` names what it does not count": """
        activation_offload_fraction cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering
        cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights cuda_graph_impl
        cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_warmup_steps delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        distribute_saved_activations enable_cuda_graph external_cuda_graph fine_grained_activation_offloading
        fine_grained_offloading_max_inflight_offloads min_offloaded_tensor_size moe_layer_recompute moe_paged_stash
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
        num_microbatches_with_partial_activation_checkpoints offload_modules
        """,
    "decides in which format a module computes, or how it is scaled": """
        activation_func_fp8_input_store apply_query_key_layer_scaling
        disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache fp4_quantizer_factory
        fp8_amax_compute_algo fp8_interval fp8_margin fp8_quantizer_factory fp8_wgrad mamba_training_ssm_states_dtype
        params_dtype pipeline_dtype quant_recipe tp_only_amax_red
        """,
    "initialises weights or belongs to the training loop": """
        barrier_with_L1_time config_logger_dir embedding_init_method embedding_init_method_std
        finalize_model_grads_func grad_scale_func grad_sync_func hetereogenous_dist_checkpoint init_method
        init_method_std init_model_with_meta_device no_sync_func output_layer_init_method param_sync_func
        perform_initialization timers use_cpu_initialization use_te_rng_tracker
        """,
    "belongs to inference": """
        cache_mla_latents flash_decode inference_cuda_graph_scope inference_disable_triton_nvls_kernels
        inference_fuse_tp_communication inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type inference_rng_tracker inference_sampling_seed mlp_chunks_for_prefill
        moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill use_inference_optimized_layers
        """,
}
"""Reason -> fields that change no module for it."""
