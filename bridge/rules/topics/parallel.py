"""Tensor, pipeline, context and sequence parallelism, as far as they meet a precision."""

from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, PARSER, Rule, mcore, target_rule
from bridge.rules.topics.alignment import tokens, widths


def _shards_weights(s: RuleContext) -> bool:
    """Megatron's generalised tensor parallelism: weights are gathered when they are used."""
    model = s.model
    return any(
        (size or 1) > 1
        for size in (
            model.gtp_weight_remat_size,
            model.expert_gtp_weight_remat_size,
            model.tensor_parallel_num_weight_shards,
            model.expert_tensor_parallel_num_weight_shards,
        )
    )


def _broken_replicas(s: RuleContext) -> Any:
    count, dense, experts = s.target.count, s.tp * s.pp * s.cp, s.etp * s.ep * s.pp
    if count is None or count < 1:
        return None
    if count % dense:
        return {"value": count, "what": f"TP {s.tp} x PP {s.pp} x CP {s.cp} = {dense}"}
    if s.is_moe and count % experts:
        return {"value": count, "what": f"expert TP {s.etp} x EP {s.ep} x PP {s.pp} = {experts}"}
    return None


def _odd_for_user_buffers(s: RuleContext) -> Any:
    sizes = [size for size in (s.model.hidden_size, s.model.ffn_hidden_size) if size]
    return s.model.tp_comm_overlap and any(size % 128 for size in sizes) and not s.is_emulated


def _blockwise_gather(s: RuleContext) -> Any:
    if not s.sp or s.is_emulated:
        return None
    sizes = [size for _, _, size in widths(s)] + [size for size in (tokens(s),) if size is not None]
    odd = any(size % 128 for size in sizes)
    return {"align": "make tokens per rank and widths multiples of 128" if odd or not sizes else ""}


def _indivisible(s: RuleContext) -> list[dict[str, Any]]:
    """Return sizes that are cut over ranks and do not divide by their number."""
    model = s.model
    heads, groups = model.num_attention_heads or 0, model.num_query_groups or 0
    cut = [
        ("model.num_attention_heads", heads, f"TP {s.tp}", s.tp),
        ("model.num_query_groups", 0 if groups and not s.tp % groups else groups, f"TP {s.tp}", s.tp),
        ("model.ffn_hidden_size", model.ffn_hidden_size or 0, f"TP {s.tp}", s.tp),
        ("model.moe_ffn_hidden_size", (s.is_moe and model.moe_ffn_hidden_size) or 0, f"expert TP {s.etp}", s.etp),
    ]
    seq = s.data.seq_length or model.seq_length or 0
    ranks, names = (s.cp * s.tp, f"CP {s.cp} x TP {s.tp}") if s.sp else (s.cp, f"CP {s.cp}")
    cut.append(("data.seq_length" if s.data.seq_length else "model.seq_length", seq, names, ranks))
    return [{"path": path, "value": size, "by": by} for path, size, by, number in cut if size > 0 and size % number]


TWO_STAGES = Rule(
    heading="PB407: two interleaved stages without overlapped messages",
    predicate=lambda s: s.vpp > 1 and s.pp == 2 and not s.model.overlap_p2p_comm,
    error="model.overlap_p2p_comm: two interleaved pipeline stages send activations and gradients between the same "
    "two ranks in one batch, where they are taken for each other: the run goes on, and does not learn",
    remedies=("set overlap_p2p_comm=True and batch_p2p_comm=False", "use more than two stages", "do not interleave"),
    verified=f"{PARSER}; a BF16 run on megatron-core 0.16.1 and gloo, whose loss rose",
    gate="has_model",
)

RULES = (
    target_rule(
        heading="PB401: blockwise scaling under sequence parallelism",
        predicate=_blockwise_gather,
        warning="fp8_recipe: gathering blockwise tensors over TP {s.tp} with sequence parallelism was reported to fail "
        "(all-gather requires a quantizable tensor)",
        remedies=("{align}", "use TP 1", "use fp8_recipe='tensorwise'"),
        reported="NVIDIA/TransformerEngine issue 2393, 2025-11-17",
        gate="is_blockwise",
    ),
    Rule(
        heading="PB402: tensor-parallel overlap that is turned off",
        predicate=lambda s: s.model.tp_comm_overlap and not s.sp,
        warning="model.tp_comm_overlap: needs TP above 1 and sequence parallelism: Megatron-LM refuses it, Megatron "
        "Bridge sets it to False",
        remedies=("set sequence_parallel=True", "set it to False, as it will be"),
        verified=f"{PARSER}; Megatron Bridge training/comm_overlap.py, 2026-08-22",
    ),
    target_rule(
        heading="PB403: tensor-parallel overlap under MXFP8",
        predicate=_odd_for_user_buffers,
        warning="model.tp_comm_overlap: MXFP8 user buffers were made for widths that are multiples of 128",
        remedies=("choose widths that are multiples of 128", "set tp_comm_overlap=False"),
        reported="NVIDIA/TransformerEngine pull request 1711",
        gate="is_mxfp8",
    ),
    Rule(
        heading="PB404: sharded weights and FP4 without FP4 weights",
        predicate=lambda s: _shards_weights(s) and not s.gathers_fp4,
        error="fp4_param_gather: weights sharded for tensor parallelism are gathered in FP4, so they have to be stored "
        "in it",
        remedies=("set fp4_param_gather=True", "set the number of weight shards to 1"),
        verified=PARSER,
        gate="fp4",
        versions=(mcore(since="0.19"),),
    ),
    Rule(
        heading="PB405: sharded weights and MXFP8 without MXFP8 weights",
        predicate=lambda s: _shards_weights(s) and not (s.gathers_fp8 and s.reuses_buffer),
        error="fp8_param_gather: weights sharded for tensor parallelism keep no {s.mode} copy: stored otherwise they "
        "are never updated",
        remedies=(
            "set fp8_param_gather=True and reuse_grad_buf_for_mxfp8_param_ag=True",
            "set the number of weight shards to 1",
        ),
        verified=PARSER,
        gate="is_mxfp8",
        versions=(mcore(since="0.19"),),
    ),
    target_rule(
        heading="PB406: not a whole number of model replicas",
        predicate=_broken_replicas,
        error="target.count: the GPUs of the run must be a multiple of {what}",
        remedies=("ask for another number of GPUs", "change the parallel sizes"),
        verified="megatron-core 0.16.1 parallel_state.initialize_model_parallel",
        gate="has_model",
    ),
    TWO_STAGES,
    Rule(
        heading="PB408: size that does not divide by its ranks",
        predicate=_indivisible,
        error="model.num_attention_heads: does not divide by {by}: each rank has to get the same part",
        remedies=("choose a multiple", "change the parallel sizes"),
        verified=f"{MODEL_CHECK}, tensor_parallel/utils.py divide; pipeline_parallel/schedules.py",
    ),
)
