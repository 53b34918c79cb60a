"""The fields of Megatron's configs that a run of `bridge.training` refuses.

A run honours the fields of the release that it was tried with: it reads them, or they change no number here; a test
changes each of them alone and compares two steps. The others are refused where they differ from the default of
Megatron's class, so that no run silently trains another model than the one in its config: `REFUSED` in every run,
`REFUSED_WITHOUT_TE` where the layers are not Transformer Engine's, `REFUSED_ON_CPU` where its Python runs without its
GPU, and a field of another release.

Source: megatron-core 0.16.1, its readers of each field.
"""

import math

from bridge.rules.fields import FIELDS
from bridge.rules.shape.variants import DELTA_NET, SPARSE
from bridge.rules.versions import parse_version

TRIED = parse_version("0.16.1")
"""The release of Megatron Core that each field was tried with."""
BUILT = (
    *("vocab_size", "seq_length", "make_vocab_size_divisible_by", "position_embedding_type"),
    *("hybrid_layer_pattern", "hybrid_override_pattern"),
)
"""Fields of the model that the build reads and no class of Megatron Core has."""
BUILT_LAYERS = frozenset("M*-E")
"""Letters of the layers of a hybrid model that megatron-core 0.16.1 has."""
LATER = ("cuda_graph_modules", "inference_cuda_graph_scope", "fp4_param_gather")
"""Fields of later releases that change no number here, or that another check refuses."""


def _by_field(**reasons: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return section -> field -> reason, of section -> reason -> fields."""
    rows = [(key, name, why) for key, of in reasons.items() for why, names in of.items() for name in names.split()]
    if len({row[:2] for row in rows}) < len(rows):
        raise ValueError("a field has two reasons")
    return {key: {name: why for section, name, why in rows if section == key} for key in reasons}


REFUSED = _by_field(
    model={
        "the layers of a run are all of one config": "heterogeneous_block_specs hetereogenous_dist_checkpoint",
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
    optimizer={
        "no parameter of the model is marked for a rate of its own": "decoupled_lr decoupled_min_lr",
        "the run records no number of zeros": "log_num_zeros_in_grad",
        "the step has no order for it": "overlap_param_gather_with_optimizer_step",
    },
    ddp={
        "the run shards with the distributed optimizer only": """
            use_megatron_fsdp use_custom_fsdp use_torch_fsdp2 data_parallel_sharding_strategy outer_dp_sharding_strategy
            """,
        "the process groups of a run have one instance": "num_distributed_optimizer_instances",
        "the step has no schedule for it": "delay_wgrad_compute",
    },
)
"""Section -> field that no run honours -> reason."""

REFUSED_WITHOUT_TE = _by_field(
    model={
        "Megatron's local layers keep residual and norm in one dtype": "fp32_residual_connection",
        "Megatron's local norm has no such form": "layernorm_zero_centered_gamma memory_efficient_layer_norm",
        "its kernel is Transformer Engine's": """
            fused_single_qkv_rope moe_permute_fusion moe_router_fusion moe_latent_size symmetric_ar_type
            activation_func_fp8_input_store
            """,
        "Transformer Engine moves the tensors": "cpu_offloading fine_grained_activation_offloading",
        "Transformer Engine overlaps the two": "tp_comm_overlap moe_shared_expert_overlap",
    },
    optimizer={"it moves tensors between a GPU and its host": "optimizer_cpu_offload"},
    ddp={"the buffers are registered with NCCL": "nccl_ub"},
)
"""Section -> field that needs Transformer Engine's layers, or the GPU that these run on -> reason."""

REFUSED_OF_HYBRIDS = _by_field(
    model={
        "Megatron Core interleaves no hybrid model": "virtual_pipeline_model_parallel_size",
        "the pipeline stages of a hybrid model have equal numbers of layers": """
            pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
            """,
        "Megatron Core before 0.18 recomputes no whole layer of a hybrid model": "recompute_granularity",
        "the attention layers of megatron-core 0.16.1's hybrid models are plain": """
            qk_layernorm qk_l2_norm multi_latent_attention experimental_attention_variant
            """,
    }
)["model"]
"""Field of the model that a hybrid does not honour -> reason."""

REFUSED_ON_CPU = _by_field(
    model={
        "Transformer Engine's kernel has no CPU version": """
            fused_single_qkv_rope moe_permute_fusion moe_router_fusion symmetric_ar_type
            """,
        "attention in FP8 has no CPU version": "fp8_dot_product_attention fp8_multi_head_attention",
        "userbuffers have no CPU version": "tp_comm_overlap",
        "there is no GPU to move tensors from": "cpu_offloading fine_grained_activation_offloading",
        "Transformer Engine's norms take residuals in the dtype of their weights": "fp32_residual_connection",
    },
)
REFUSED_ON_CPU |= {section: REFUSED_WITHOUT_TE[section] for section in ("optimizer", "ddp")}
"""Section -> field that needs more than Transformer Engine's Python (`precision_backend=te_cpu`) -> reason."""

WITH_TE = ("te", "te_cpu")
"""Backends whose linear layers are Transformer Engine's."""

ACCEPTED: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {
        "position_embedding_type": ("rope", "learned_absolute", "none"),
        "moe_token_dispatcher_type": ("allgather", "alltoall"),
        "transformer_impl": ("transformer_engine", "local"),
        "normalization": ("LayerNorm", "RMSNorm"),
        "rope_type": ("rope", "yarn"),
        "experimental_attention_variant": (*DELTA_NET, SPARSE),
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

BETWEEN: tuple[tuple[str, float, float], ...] = (
    ("rotary_percent", 0, 1),
    ("embedding_init_method_std", 0, math.inf),
    ("num_attention_heads", 1, math.inf),
    ("mtp_loss_scaling_factor", 0, math.inf),
    ("moe_z_loss_coeff", 0, math.inf),
)
"""Field of the model, and the least and the most that it can be; None is left to the field's own meaning."""

UNKNOWN = "this build was not tried with a Megatron Core that has it"


KNOWN = {
    section: frozenset(
        name
        for name, row in FIELDS[section].items()
        if name in (*BUILT, *LATER, "share_embeddings_and_output_weights", "use_torch_fsdp2")
        or (row.is_megatron and (row.has is None or row.has.holds(TRIED)))
    )
    for section in REFUSED
}
"""Section -> fields that a run was tried with."""
