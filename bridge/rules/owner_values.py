"""The types of the fields that rules read: a misspelt field of `run.model` fails mypy.

A context has an `AttributeView` of each config, which looks a field up when it is read. These
classes exist only for the type checker: `ConfigFacts` casts a view to them. A view of `finalize` has
only the fields of a precision. Names, dtypes and fields without a class default can be None. A test
compares the types with the table of fields.
"""


class ModelValues:
    """Fields of the model config."""

    activation_func_fp8_input_store: bool
    add_bias_linear: bool
    apply_query_key_layer_scaling: bool
    attention_backend: object
    attention_dropout: float
    attention_softmax_in_fp32: bool
    autocast_dtype: str | None
    batch_invariant_mode: bool
    bf16: bool
    bias_activation_fusion: bool
    calculate_per_token_loss: bool
    context_parallel_size: int
    cp_comm_type: object
    cross_entropy_loss_fusion: bool
    cuda_graph_impl: str | None
    cuda_graph_modules: object
    cuda_graph_scope: object
    deterministic_mode: bool
    disable_bf16_reduced_precision_matmul: bool
    disable_parameter_transpose_cache: bool
    dsa_indexer_loss_coeff: float | None
    enable_autocast: bool
    enable_cuda_graph: bool
    enable_mhc_connections: bool
    experimental_attention_variant: str | None
    expert_gtp_weight_remat_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_num_weight_shards: int | None
    expert_tensor_parallel_size: int | None
    ffn_hidden_size: int | None
    first_last_layers_bf16: bool
    flash_attention_version: object
    fp16: bool
    fp16_lm_cross_entropy: bool
    fp32_residual_connection: bool
    fp4: str | None
    fp4_param: bool
    fp4_recipe: str | None
    fp8: str | None
    fp8_amax_compute_algo: str | None
    fp8_amax_history_len: int
    fp8_dot_product_attention: bool
    fp8_multi_head_attention: bool
    fp8_output_proj: bool
    fp8_param: bool
    fp8_quantizer_factory: str | None
    fp8_recipe: str | None
    fp8_wgrad: bool
    gated_linear_unit: bool
    gtp_weight_remat_size: int
    hidden_dropout: float
    hidden_size: int
    hybrid_layer_pattern: object
    hybrid_override_pattern: object
    inference_cuda_graph_scope: object
    is_hybrid_model: bool
    keep_mtp_spec_in_bf16: bool
    kv_channels: int | None
    linear_num_value_heads: int
    mamba_num_groups: int
    mamba_num_heads: int | None
    moe_combine_bwd_dtype: str | None
    moe_deepep_num_sms: int | None
    moe_dispatch_fwd_dtype: str | None
    moe_expert_capacity_factor: float | None
    moe_ffn_hidden_size: int | None
    moe_flex_dispatcher_backend: str | None
    moe_flex_dispatcher_num_sms: int | None
    moe_grouped_gemm: bool
    moe_hybridep_num_sms: int | None
    moe_pad_expert_input_to_capacity: bool
    moe_router_bias_update_rate: float
    moe_router_dtype: str | None
    moe_router_enable_expert_bias: bool
    moe_router_load_balancing_type: object
    moe_router_padding_for_fp8: bool
    moe_router_padding_for_quantization: bool
    moe_router_topk: int
    moe_shared_expert_intermediate_size: int | None
    moe_single_grouped_weight: bool
    moe_token_dispatcher_type: str | None
    mtp_num_layers: int | None
    multi_latent_attention: bool
    num_attention_heads: int
    num_layers: int
    num_layers_at_end_in_bf16: int
    num_layers_at_start_in_bf16: int
    num_moe_experts: int | None
    num_query_groups: int | None
    overlap_moe_expert_parallel_comm: bool
    overlap_p2p_comm: bool
    params_dtype: str | None
    pipeline_dtype: str | None
    pipeline_model_parallel_layout: object
    pipeline_model_parallel_size: int
    quant_recipe: object
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_modules: object
    seq_length: int | None
    sequence_parallel: bool
    tensor_model_parallel_size: int
    tensor_parallel_num_weight_shards: int | None
    tp_comm_overlap: bool
    transformer_impl: str | None
    use_cpu_initialization: bool
    use_te_activation_func: bool
    use_transformer_engine_op_fuser: bool
    virtual_pipeline_model_parallel_size: int | None


class OptimizerValues:
    """Fields of the optimizer config."""

    bf16: bool
    exp_avg_dtype: str | None
    exp_avg_sq_dtype: str | None
    fp16: bool
    fp8_recipe: str | None
    initial_loss_scale: float | None
    loss_scale: float | None
    loss_scale_window: float
    main_grads_dtype: str | None
    main_params_dtype: str | None
    min_loss_scale: float
    optimizer: str | None
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    overlap_param_gather: bool
    overlap_param_gather_with_optimizer_step: bool
    store_param_remainders: bool
    use_distributed_optimizer: bool
    use_layer_wise_distributed_optimizer: bool
    use_precision_aware_optimizer: bool


class DdpValues:
    """Fields of the DDP config."""

    average_in_collective: bool
    check_for_nan_in_grad: bool
    data_parallel_sharding_strategy: str | None
    fp4_param_gather: bool
    fp8_param_gather: bool
    grad_reduce_in_fp32: bool
    megatron_fsdp_grad_comm_dtype: str | None
    megatron_fsdp_main_grads_dtype: str | None
    megatron_fsdp_main_params_dtype: str | None
    megatron_fsdp_use_decoupled_grad: bool
    megatron_fsdp_version: int
    overlap_param_gather: bool
    param_name_patterns_for_fp32_local_accumulation: object
    reduce_scatter_with_fp32_accumulation: bool
    use_custom_fsdp: bool
    use_distributed_optimizer: bool
    use_megatron_fsdp: bool
    use_torch_fsdp2: bool


class TrainValues:
    """Fields of the training section."""

    check_for_nan_in_loss: bool
    global_batch_size: int | None
    micro_batch_size: int | None


class DataValues:
    """Fields of the data section."""

    dataset_kwargs: object
    defer_in_batch_packing_to_step: bool
    enable_in_batch_packing: bool
    enable_offline_packing: bool
    in_batch_packing_pad_to_multiple_of: int
    packed_sequence_specs: object
    seq_length: int | None


class PeftValues:
    """Fields of the adapter's section."""

    dim: int | None
    rank: int | None
    type: object
