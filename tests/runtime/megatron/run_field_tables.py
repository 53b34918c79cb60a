"""The fields that a run honours, and those that change no number of it, each by its reason."""

HONOURED = {
    "model": """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size seq_length
make_vocab_size_divisible_by position_embedding_type rotary_base rotary_percent rotary_interleaved no_rope_freq
share_embeddings_and_output_weights hidden_dropout attention_dropout layernorm_epsilon normalization qk_layernorm
qk_l2_norm add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value
attention_output_gate softmax_scale softmax_type window_size window_attn_skip_freq apply_query_key_layer_scaling
attention_softmax_in_fp32 init_method output_layer_init_method init_method_std embedding_init_method
embedding_init_method_std perform_initialization deterministic_mode
multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
linear_num_key_heads linear_num_value_heads
dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
moe_router_load_balancing_type moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype moe_router_enable_expert_bias
moe_router_bias_update_rate moe_router_force_load_balancing moe_router_padding_for_quantization
moe_router_padding_for_fp8 moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dispatcher_type
moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_apply_probs_on_input
mtp_num_layers mtp_loss_scaling_factor
is_hybrid_model hybrid_layer_pattern hybrid_override_pattern mamba_state_dim mamba_head_dim mamba_num_groups
mamba_num_heads use_mamba_mem_eff_path
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size sequence_parallel
context_parallel_size cp_comm_type
expert_model_parallel_size expert_tensor_parallel_size num_layers_in_first_pipeline_stage
num_layers_in_last_pipeline_stage pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
account_for_loss_in_pipeline_split microbatch_group_size_per_vp_stage variable_seq_lengths overlap_p2p_comm
batch_p2p_comm batch_p2p_sync overlap_p2p_comm_warmup_flush deallocate_pipeline_outputs
fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype fp8 fp8_recipe fp8_param fp8_margin
fp8_amax_history_len fp8_amax_compute_algo tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
num_layers_at_end_in_bf16 fp4 fp4_recipe fp4_param quant_recipe
fp8_dot_product_attention fp8_multi_head_attention fp8_quantizer_factory fp4_quantizer_factory
recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute
distribute_saved_activations
""",
    "optimizer": """
lr min_lr weight_decay apply_wd_to_qk_layernorm optimizer adam_beta1 adam_beta2 adam_eps decoupled_weight_decay
sgd_momentum clip_grad loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis fp16 bf16 params_dtype
fp8_recipe reuse_grad_buf_for_mxfp8_param_ag use_distributed_optimizer overlap_param_gather
use_precision_aware_optimizer store_param_remainders main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
""",
    "ddp": """
grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer
check_for_nan_in_grad check_for_large_grads bucket_size pad_buckets_for_high_nccl_busbw
reduce_scatter_with_fp32_accumulation average_in_collective fp8_param_gather fp4_param_gather
reuse_grad_buf_for_mxfp8_param_ag
""",
}
"""Section -> fields that the build reads. Precision fields that a backend has not are refused by `choose_backend`."""

WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "model": {
        "precision_backend chooses the layers, and attention follows them": "transformer_impl attention_backend",
        "switched off or on for this machine, with a note": """
            bias_activation_fusion bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion
            masked_softmax_fusion persist_layer_norm moe_grouped_gemm cross_entropy_loss_fusion use_cpu_initialization
            """,
        "read only together with a field that is refused": """
            kitchen_attention_backend qk_clip_alpha qk_clip_threshold mrope_section
            cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
            offload_modules min_offloaded_tensor_size cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
            cuda_graph_warmup_steps cuda_graph_scope cuda_graph_modules
            moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms
            moe_hybridep_num_sms tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
            tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
            tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
            """,
        "the fusion runs the same arithmetic": "cross_entropy_fusion_impl use_fused_weighted_squared_relu",
        "Megatron Core reads it no longer": "async_tensor_model_parallel_allreduce",
        "Transformer Engine reads it no longer": "fp8_interval fp8_wgrad",
        "saves memory or waits": """
            clone_scatter_output_in_embedding disable_parameter_transpose_cache barrier_with_L1_time
            """,
        "writes files, checks or measures": "config_logger_dir test_mode timers",
        "a switch of cuBLAS, which widens an accumulator": "disable_bf16_reduced_precision_matmul",
        "Megatron computes it from the pipeline's layout": "mtp_standalone",
        "belongs to inference": """
            inference_sampling_seed use_inference_optimized_layers inference_fuse_tp_communication
            mlp_chunks_for_prefill inference_cuda_graph_scope
            """,
    },
    "optimizer": {
        "read only together with a field that is refused": """
            optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads
            pin_cpu_params muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec
            muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
            """,
        "writes files, waits or measures": "barrier_with_L1_time config_logger_dir timers",
    },
    "ddp": {
        "read only together with a field that is refused": """
            gradient_reduce_div_fusion suggested_communication_unit_size preserve_fp32_weights
            keep_fp8_transpose_cache fsdp_double_buffer disable_symmetric_registration fsdp_manual_registration
            """
    },
}
"""Section -> reason -> fields that change no number of a run."""
