"""The fields of a precision by subject: the order in which `show`, `explain` and the reference page list them."""

import textwrap
from types import MappingProxyType

_FIELDS = {
    "Mode": "fp32 fp16 bf16",
    "Compute": """
        autocast_enabled autocast_dtype tf32 disable_bf16_reduced_precision_matmul fp32_residual_connection
        mamba_training_ssm_states_dtype
        """,
    "Parameters and gradients": "params_dtype grad_reduce_in_fp32 param_name_patterns_for_fp32_local_accumulation",
    "Optimizer state": """
        use_precision_aware_optimizer main_params_dtype main_grads_dtype exp_avg_dtype exp_avg_sq_dtype
        store_param_remainders muon_fp32_matmul_prec
        """,
    "Communication": "pipeline_dtype reduce_scatter_with_fp32_accumulation",
    "Megatron-FSDP": """
        megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
        megatron_fsdp_use_decoupled_grad keep_fp8_transpose_cache
        """,
    "Attention": """
        attention_softmax_in_fp32 apply_query_key_layer_scaling dsa_indexer_k_norm_fp32 fp8_dot_product_attention
        fp8_multi_head_attention
        """,
    "Mixture of experts": """
        moe_router_dtype moe_router_padding_for_quantization moe_dispatch_fwd_dtype moe_combine_bwd_dtype
        """,
    "FP8": """
        fp8 fp8_recipe fp8_param fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag fp8_output_proj fp8_wgrad
        fp8_margin fp8_amax_history_len fp8_amax_compute_algo tp_only_amax_red fp8_quantizer_factory
        activation_func_fp8_input_store
        """,
    "FP4": "fp4 fp4_recipe fp4_param fp4_param_gather fp4_quantizer_factory",
    "Layers in BF16": "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    "Single modules": "modules",
    "Loss scale": "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
}
GROUPS = MappingProxyType({subject: tuple(names.split()) for subject, names in _FIELDS.items()})
"""Subject -> its fields; each field is in one."""


def by_subject() -> str:
    """Return the names of the fields as a list for a command's help, a paragraph for each subject."""
    lines = ["fields by subject:"]
    for subject, names in GROUPS.items():
        lines.extend(textwrap.wrap(f"  {subject}: {', '.join(names)}", 110, subsequent_indent="    "))
    return "\n".join(lines)
