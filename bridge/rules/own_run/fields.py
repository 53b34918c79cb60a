"""The fields of Megatron's configs, by their effect on a run that `bridge.training` starts.

`HONOURED` are read by the modules, schedules, optimizers and buffers of this build. `WITHOUT_EFFECT` change no number
here, each for its reason. The others are refused where they differ from the default of Megatron's class, so that no run
silently trains another model than the one in its config: `REFUSED` in every run, `REFUSED_WITHOUT_TE` where the layers
are not Transformer Engine's, `REFUSED_ON_CPU` where its Python runs without its GPU. A field that is in no table is one
of a release that this build was not tried with, and is refused like them. A test changes each field alone and compares
two steps with those of an unchanged run.

Source: megatron-core 0.16.1, its readers of each field.
"""

import math

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
num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
moe_router_load_balancing_type moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype moe_router_enable_expert_bias
moe_router_bias_update_rate moe_router_force_load_balancing moe_router_padding_for_quantization
moe_router_padding_for_fp8 moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dispatcher_type
moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_apply_probs_on_input
mtp_num_layers mtp_loss_scaling_factor
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

REFUSED: dict[str, dict[str, str]] = {
    "model": {
        "the layers of a run are all of one config": "heterogeneous_block_specs hetereogenous_dist_checkpoint",
        "layers have attention and an MLP or experts": "experimental_attention_variant linear_attention_freq",
        "a run builds a GPTModel, and Mamba layers need the GPU kernels of mamba_ssm": "is_hybrid_model",
        "the library is not a backend of a run": "use_kitchen use_kitchen_attention",
        "context-parallel ranks of a run share each sequence alike, in one step": """
            hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel
            """,
        "Megatron Core reads it nowhere": """
            apply_residual_connection_post_layernorm moe_router_topk_limited_devices moe_extended_tp moe_token_dropping
            """,
        "the step takes the mean of each micro-batch": "calculate_per_token_loss",
        "the step clips no weights of queries and keys, and logs no logits": "qk_clip log_max_attention_logit",
        "the run logs no losses of single layers": "moe_per_layer_logging",
        "the step records no routes": "moe_enable_routing_replay",
        "the step passes no such switch to a micro-batch": "num_microbatches_with_partial_activation_checkpoints",
        "the step has no schedule for it": """
            overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
            defer_embedding_wgrad_compute wgrad_deferral_limit
            """,
        "the run captures no graphs": "enable_cuda_graph external_cuda_graph cuda_graph_impl",
        "the run has its own hook": """
            finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
            """,
        "the run has Megatron's own random states": "use_te_rng_tracker inference_rng_tracker",
        "the process groups of a run take no such choice": "pipeline_model_parallel_comm_backend",
        "weights are made with values at once": "init_model_with_meta_device",
        "Megatron's distributed checkpoints cannot hold Transformer Engine's activations": "use_te_activation_func",
        "this torch has no ring exchange": "use_ring_exchange_p2p",
        "its experts are one matrix, which no plan and no format knows": "moe_use_legacy_grouped_gemm",
        "it belongs to inference, and training refuses it": "cache_mla_latents flash_decode batch_invariant_mode",
    },
    "optimizer": {
        "no parameter of the model is marked for a rate of its own": "decoupled_lr decoupled_min_lr",
        "the run records no number of zeros": "log_num_zeros_in_grad",
        "the step has no order for it": "overlap_param_gather_with_optimizer_step",
    },
    "ddp": {
        "the run shards with the distributed optimizer only": """
            use_megatron_fsdp use_custom_fsdp use_torch_fsdp2 data_parallel_sharding_strategy outer_dp_sharding_strategy
            """,
        "the process groups of a run have one instance": "num_distributed_optimizer_instances",
        "the step has no schedule for it": "delay_wgrad_compute",
    },
}
"""Section -> reason -> fields that no run honours."""

REFUSED_WITHOUT_TE: dict[str, dict[str, str]] = {
    "model": {
        "Megatron's local layers keep residual and norm in one dtype": "fp32_residual_connection",
        "Megatron's local norm has no such form": "layernorm_zero_centered_gamma memory_efficient_layer_norm",
        "its kernel is Transformer Engine's": """
            fused_single_qkv_rope moe_permute_fusion moe_router_fusion moe_latent_size symmetric_ar_type
            activation_func_fp8_input_store
            """,
        "Transformer Engine moves the tensors": "cpu_offloading fine_grained_activation_offloading",
        "Transformer Engine overlaps the two": "tp_comm_overlap moe_shared_expert_overlap",
    },
    "optimizer": {"it moves tensors between a GPU and its host": "optimizer_cpu_offload"},
    "ddp": {"the buffers are registered with NCCL": "nccl_ub"},
}
"""Section -> reason -> fields that need Transformer Engine's layers, or the GPU that these run on."""

REFUSED_ON_CPU: dict[str, dict[str, str]] = {
    "model": {
        "Transformer Engine's kernel has no CPU version": """
            fused_single_qkv_rope moe_permute_fusion moe_router_fusion symmetric_ar_type
            """,
        "attention in FP8 has no CPU version": "fp8_dot_product_attention fp8_multi_head_attention",
        "userbuffers have no CPU version": "tp_comm_overlap",
        "there is no GPU to move tensors from": "cpu_offloading fine_grained_activation_offloading",
        "Transformer Engine's norms take residuals in the dtype of their weights": "fp32_residual_connection",
    },
    "optimizer": REFUSED_WITHOUT_TE["optimizer"],
    "ddp": REFUSED_WITHOUT_TE["ddp"],
}
"""Section -> reason -> fields that need more than Transformer Engine's Python (`precision_backend=te_cpu`)."""

WITH_TE = ("te", "te_cpu")
"""Backends whose linear layers are Transformer Engine's."""

ACCEPTED: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {
        "position_embedding_type": ("rope", "learned_absolute", "none"),
        "moe_token_dispatcher_type": ("allgather", "alltoall"),
        "transformer_impl": ("transformer_engine", "local"),
        "normalization": ("LayerNorm", "RMSNorm"),
        "rope_type": ("rope", "yarn"),
    },
    "optimizer": {"optimizer": ("adam", "sgd")},
    "ddp": {},
}
"""Section -> field -> the only values that a run can have."""
ACCEPTED_WITHOUT_TE = {"attention_backend": ("auto", "local", "unfused")}
"""Field of the model -> the only values without Transformer Engine's layers."""

COMMUNICATION = {"te": ("p2p", "all_gather", "a2a"), "te_cpu": ("all_gather", "a2a")}
"""Backend -> values of `cp_comm_type` under context parallelism; any other has `all_gather` alone."""
PLAIN_ATTENTION = {"attention_dropout": 0.0, "window_size": None, "softmax_type": "vanilla"}
PLAIN_LOCAL_ATTENTION = {"apply_query_key_layer_scaling": False, "attention_softmax_in_fp32": True}
"""Field of the model -> the only value under context parallelism without a GPU, and without Transformer Engine."""

WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "model": {
        "precision_backend chooses the layers, and attention follows them": "transformer_impl attention_backend",
        "switched off or on for this machine, with a note": """
            bias_activation_fusion bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion
            masked_softmax_fusion persist_layer_norm moe_grouped_gemm cross_entropy_loss_fusion use_cpu_initialization
            """,
        "read only together with a field that is refused": """
            kitchen_attention_backend dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
            dsa_indexer_use_sparse_loss linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
            linear_num_key_heads linear_num_value_heads mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
            use_mamba_mem_eff_path qk_clip_alpha qk_clip_threshold mrope_section
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

BETWEEN: tuple[tuple[str, float, float], ...] = (
    ("rotary_percent", 0, 1),
    ("embedding_init_method_std", 0, math.inf),
    ("num_attention_heads", 1, math.inf),
    ("mtp_loss_scaling_factor", 0, math.inf),
    ("moe_z_loss_coeff", 0, math.inf),
)
"""Field of the model, and the least and the most that it can be; None is left to the field's own meaning."""

UNKNOWN = "this build was not tried with a Megatron Core that has it"


def by_field(rows: dict[str, str]) -> dict[str, str]:
    """Return field -> reason."""
    return {name: reason for reason, names in rows.items() for name in names.split()}


KNOWN = {
    section: frozenset(
        name
        for names in (HONOURED[section], *REFUSED[section].values(), *REFUSED_WITHOUT_TE[section].values())
        for name in names.split()
    )
    | frozenset(by_field(WITHOUT_EFFECT[section]))
    for section in HONOURED
}
"""Section -> fields that are in a table."""
