"""The fields of Megatron's configs that rules read, as rows: type, class default, and the versions that have them.

A default never differs between the versions that have the field; only presence does (megatron-core 0.16.1, 0.17.1,
0.18.2 and 0.19.2, read from the class definitions; a test compares the rows with the installed classes). What no class
of Megatron has (`seq_length`, `packing`, ...) stands here too, with None for "not said".
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from packaging.specifiers import SpecifierSet

from bridge.rules.versions import VersionRange

__all__ = ["DEFAULTS", "FIELDS", "OwnerField"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerField:
    """One row: a field of one of Megatron's configs."""

    name: str
    """Its name."""
    kind: str
    """bool, int, float, name, dtype (kept as a token such as "bf16") or any."""
    default: Any = None
    """What it holds where nobody sets it."""
    is_megatron: bool = True
    """Whether Megatron's own class has it; False for what stands beside it in a run's config."""
    has: VersionRange | None = None
    """Versions of megatron-core that have it; None: all."""


_MODEL = """
bool False | fp16 bf16 enable_autocast fp32_residual_connection apply_query_key_layer_scaling
bool False | disable_bf16_reduced_precision_matmul activation_func_fp8_input_store fp8_param first_last_layers_bf16
bool False | fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red use_kitchen fp4_param
bool False | sequence_parallel tp_comm_overlap overlap_moe_expert_parallel_comm deterministic_mode batch_invariant_mode
bool False | multi_latent_attention gated_linear_unit moe_grouped_gemm moe_router_padding_for_quantization
bool False | moe_router_padding_for_fp8 moe_pad_expert_input_to_capacity is_hybrid_model moe_shared_expert_overlap
bool False | heterogeneous_block_specs disable_parameter_transpose_cache moe_layer_recompute enable_cuda_graph
bool False | external_cuda_graph gradient_accumulation_fusion overlap_p2p_comm
bool True | fp8_wgrad attention_softmax_in_fp32 add_bias_linear
int 0 | num_layers hidden_size num_attention_heads fp8_margin
int 1 | tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
int 1 | fp8_amax_history_len fp8_interval num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
int 2 | moe_router_topk
int None | virtual_pipeline_model_parallel_size expert_tensor_parallel_size num_moe_experts num_query_groups
int None | ffn_hidden_size kv_channels moe_ffn_hidden_size moe_shared_expert_intermediate_size mtp_num_layers
int None | num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage mamba_num_heads
int 128 | mamba_state_dim
int 64 | mamba_head_dim
int 8 | mamba_num_groups
float None | moe_expert_capacity_factor
dtype fp32 | params_dtype
dtype None | autocast_dtype pipeline_dtype
name None | fp8 fp4 fp8_quantizer_factory fp4_quantizer_factory moe_router_dtype recompute_granularity
name delayed | fp8_recipe
name nvfp4 | fp4_recipe
name most_recent | fp8_amax_compute_algo
name transformer_engine | transformer_impl
name allgather | moe_token_dispatcher_type
name none | cuda_graph_impl
name deepep | moe_flex_dispatcher_backend
any None | recompute_modules quant_recipe activation_func pipeline_model_parallel_layout
any full | cuda_graph_scope
any 1 | moe_layer_freq
bool False 0.18 | fp8_output_proj moe_single_grouped_weight use_transformer_engine_op_fuser
any None 0.18 | inference_cuda_graph_scope
int 1 0.19 | gtp_weight_remat_size expert_gtp_weight_remat_size
int None 0.19 | tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
name bf16 0.20 | moe_dispatch_fwd_dtype moe_combine_bwd_dtype
int None beside | vocab_size seq_length
int 128 beside | make_vocab_size_divisible_by
bool False beside | fp16_lm_cross_entropy share_embeddings_and_output_weights torch_compile
any None beside | hybrid_override_pattern hybrid_layer_pattern
int 512 latent | q_lora_rank kv_lora_rank
int 128 latent | qk_head_dim v_head_dim
int 64 latent | qk_pos_emb_head_dim
"""

_OPTIMIZER = """
name adam | optimizer
name None | fp8_recipe
bool False | fp16 bf16 reuse_grad_buf_for_mxfp8_param_ag use_precision_aware_optimizer use_distributed_optimizer
bool False | overlap_param_gather overlap_param_gather_with_optimizer_step optimizer_cpu_offload
bool True | store_param_remainders
dtype fp32 | params_dtype main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
float None | lr loss_scale
float 4294967296 | initial_loss_scale
float 1.0 | min_loss_scale
float 1000 | loss_scale_window
int 2 | hysteresis
bool False 0.18 | use_layer_wise_distributed_optimizer
"""

_DDP = """
bool False | grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather use_distributed_optimizer
bool False | check_for_nan_in_grad reduce_scatter_with_fp32_accumulation fp8_param_gather
bool False | reuse_grad_buf_for_mxfp8_param_ag use_megatron_fsdp use_custom_fsdp keep_fp8_transpose_cache
bool False | average_in_collective
bool False 0.17.1 | fp4_param_gather
any () 0.17 | param_name_patterns_for_fp32_local_accumulation
dtype fp32 0.17 | megatron_fsdp_main_params_dtype
dtype None 0.17 | megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
bool False beside | use_torch_fsdp2
int 1 0.20 | megatron_fsdp_version
"""

_TRAIN = """
int None beside | micro_batch_size global_batch_size
bool True beside | check_for_nan_in_loss
bool False beside | torch_compile stream_ckpt_dequant
"""

_DATA = """
int None beside | seq_length pad_multiple
bool False beside | packing
"""

_PEFT = """
int None beside | rank dim
"""

_WORDS: dict[str, Any] = {"False": False, "True": True, "None": None, "()": ()}


def _value(word: str, kind: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    return {"int": int, "float": float}.get(kind, str)(word) if word != "1" or kind != "any" else 1


def _rows(table: str) -> dict[str, OwnerField]:
    """Return the rows of a table: kind, default, and optionally since when or "beside" Megatron's class | names."""
    rows = {}
    for line in table.strip().splitlines():
        head, _, names = line.partition(" | ")
        kind, default, *more = head.split()
        note = more[0] if more else ""
        has = VersionRange(product="mcore", versions=SpecifierSet(f">={note}")) if note[:1].isdecimal() else None
        for name in names.split():
            rows[name] = OwnerField(
                name=name,
                kind=kind,
                default=_value(default, kind),
                is_megatron=note not in ("beside", "latent"),
                has=has,
            )
    return rows


FIELDS = MappingProxyType(
    {
        "model": _rows(_MODEL),
        "optimizer": _rows(_OPTIMIZER),
        "ddp": _rows(_DDP),
        "train": _rows(_TRAIN),
        "data": _rows(_DATA),
        "peft": _rows(_PEFT),
    }
)
"""Section -> field -> row."""

DEFAULTS = MappingProxyType({role: {name: row.default for name, row in rows.items()} for role, rows in FIELDS.items()})
"""Section -> field -> default."""
