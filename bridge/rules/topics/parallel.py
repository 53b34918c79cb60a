"""Tensor, pipeline, context and sequence parallelism, as far as they meet a precision."""

from functools import partial
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.layout import Parallel
from bridge.model.shape import ModelShape
from bridge.precision.fields import COMMAND_LINE
from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, PARSER, error, mcore, te, warning
from bridge.rules.topics.alignment import tokens
from bridge.rules.violation import Violation, all_of


def weight_shards(run: RuleContext) -> str:
    """Return the setting that would shard no weight beyond tensor parallelism, where one is sharded; else "".

    Megatron's generalised tensor parallelism gathers such weights when they are used. A number of shards counts those
    of tensor parallelism too.
    """
    model, ranks = run.model, run.parallel
    sizes = (
        ("tensor_parallel_num_weight_shards", ranks.tensor),
        ("expert_tensor_parallel_num_weight_shards", ranks.expert_tensor),
        ("gtp_weight_remat_size", 1),
        ("expert_gtp_weight_remat_size", 1),
    )
    sharded = [f"model.{name}={least}" for name, least in sizes if (getattr(model, name) or least) > least]
    return " and ".join(sharded)


def _unstored_shards(run: RuleContext) -> list[Violation]:
    """Return the violation of sharded MXFP8 weights: the first of the two settings that is missing, and both."""
    held = {"fp8_param_gather": run.gathers_fp8, "reuse_grad_buf_for_mxfp8_param_ag": run.reuses_buffer}
    missing = [name for name, is_on in held.items() if not is_on]
    if not missing:
        return []
    needed = " and ".join(f"{name}=True" for name in missing)
    return [Violation(missing[0], needed=needed, unsharded=weight_shards(run))]


def _odd_gather(run: RuleContext) -> bool:
    """Return whether a size of the tensors that sequence parallelism gathers is known to be no multiple of 128."""
    return any(size % 128 for size in (run.model.hidden_size, tokens(run)) if size)


def _broken_replicas(run: RuleContext) -> list[Violation]:
    count, ranks = run.target.count or 0, run.parallel
    if count % ranks.replica:
        what = f"TP {ranks.tensor} x PP {ranks.pipeline} x CP {ranks.context} = {ranks.replica}"
        return [Violation(what=what, rests_on=_sizes_named(what))]
    what = f"expert TP {ranks.expert_tensor} x EP {ranks.expert} x PP {ranks.pipeline} = {ranks.expert_replica}"
    if run.model.num_moe_experts and run.shape.is_moe and count % ranks.expert_replica:
        return [Violation(what=what, rests_on=["model.num_moe_experts", *_sizes_named(what)])]
    return []


def _broken_batch(run: RuleContext) -> list[Violation]:
    """Return the global batch that is no whole number of micro-batches on every replica.

    A run of scripts/train.py is judged by its launch, which knows the ranks; configs whose model has no sequence length
    are not yet a run, and their batch is a class default.
    """
    whole, micro, replica = run.train.global_batch_size, run.train.micro_batch_size, run.parallel.replica
    is_run = run.has_model and run.model.seq_length and not run.is_own
    if not (is_run and whole and micro and run.target.count) or run.target.count % replica:
        return []
    data = run.target.count // replica
    return [Violation(micro=micro, data=data, step=micro * data)] if micro > 0 and whole % (micro * data) else []


def _two_lengths(run: RuleContext, *, is_bridge: bool) -> list[Violation]:
    data, length = run.data.seq_length, run.model.seq_length
    if run.is_bridge != is_bridge or not data or not length or data == length:
        return []
    where = COMMAND_LINE if COMMAND_LINE in map(run.where, ("data.seq_length", "model.seq_length")) else None
    return [Violation(where=where, length=length)]


def _without_sequence_parallelism(run: RuleContext) -> list[Violation]:
    needed = "set sequence_parallel=True"
    if run.parallel.tensor == 1:
        needed = "use tensor_model_parallel_size=2 or more with sequence_parallel=True"
    return [Violation(needed=needed)]


def cut_unevenly(
    model: Any, shape: ModelShape, ranks: Parallel, seq_length: int | None
) -> list[tuple[str, int | None, str]]:
    """Return the field of `model`, its size and the ranks, for each size that does not divide by its ranks."""
    tensor, experts = f"TP {ranks.tensor}", f"expert TP {ranks.expert_tensor}"
    chunks = 2 if ranks.context > 1 else 1  # a context-parallel rank has one of each half of a sequence
    context = f"CP {ranks.context}" if chunks == 1 else f"two chunks on each of CP {ranks.context}"
    context += f" x {tensor}" if ranks.sequence_parallel else ""
    groups = model.num_query_groups or 0
    shared = 0 if groups and not ranks.tensor % groups else groups
    widest = model.moe_ffn_hidden_size if shape.is_moe else None
    space = shape.state_space if shape.is_hybrid else None
    sequence = "model.seq_length" if model.seq_length else "data.seq_length"
    sizes = (
        ("model.num_attention_heads", model.num_attention_heads, tensor, ranks.tensor),
        ("model.num_query_groups", shared, tensor, ranks.tensor),
        ("model.ffn_hidden_size", model.ffn_hidden_size, tensor, ranks.tensor),
        ("model.moe_ffn_hidden_size", widest, experts, ranks.expert_tensor),
        ("model.num_moe_experts", model.num_moe_experts, f"EP {ranks.expert}", ranks.expert),
        ("model.mamba_num_heads", space and space.num_heads, tensor, ranks.tensor),
        ("model.mamba_num_groups", space and space.num_groups, tensor, ranks.tensor),
        (sequence, seq_length, context, chunks * ranks.of_tokens),
    )
    return [(path, size, by) for path, size, by, count in sizes if size and size > 0 and size % count]


def _indivisible(run: RuleContext) -> list[Violation]:
    cut = cut_unevenly(run.model, run.shape, run.parallel, run.model.seq_length or run.data.seq_length)
    return [Violation(path, value=size, by=by, rests_on=[path, *_sizes_named(by)]) for path, size, by in cut]


_SIZE_OF = {
    "TP": "model.tensor_model_parallel_size",
    "expert TP": "model.expert_tensor_parallel_size",
    "EP": "model.expert_model_parallel_size",
    "PP": "model.pipeline_model_parallel_size",
    "CP": "model.context_parallel_size",
    " x TP": "model.sequence_parallel",
}
"""Words for the ranks of a layout -> the setting that decides their number."""


def _sizes_named(text: str) -> list[str]:
    """Return the settings of the ranks that a text names."""
    return [setting for words, setting in _SIZE_OF.items() if words in text]


def _unsplittable(run: RuleContext) -> list[Violation]:
    try:
        run.parallel.places(run.shape.num_layers)
    except RunConfigError as error:
        return [Violation(error.path, value=error.value, rule=error.rule)]
    return []


RULES = (
    warning(
        id="PB401",
        title="blockwise scaling under sequence parallelism",
        setting="fp8_recipe",
        versions=(te(until="2.14"),),
        when=all_of("scheme is blockwise", "parallel.sequence_parallel", "not is_emulated", _odd_gather),
        message="gathering blockwise tensors whose sides are no multiples of 128 over TP {run.parallel.tensor} with "
        "sequence parallelism was reported to fail (all-gather requires a quantizable tensor)",
        remedies=(
            "make the tokens of a rank and hidden_size multiples of 128",
            "use Transformer Engine 2.14",
            "use fp8_recipe='tensorwise'",
        ),
        source="NVIDIA/TransformerEngine issue 2393, 2025-11-17; Transformer Engine 2.9, 2.13 and 2.14 "
        "pytorch/distributed.py _start_all_gather_fp8_blockwise: 2.14 dequantizes them first",
        evidence="reported",
    ),
    warning(
        id="PB402",
        title="tensor-parallel overlap that is turned off",
        setting="model.tp_comm_overlap",
        when=all_of("model.tp_comm_overlap", "not parallel.sequence_parallel", find=_without_sequence_parallelism),
        message="needs TP above 1 and sequence parallelism: Megatron-LM refuses it, Megatron Bridge sets it to False",
        remedies=("{needed}", "set tp_comm_overlap=False, as it will be"),
        source=f"{PARSER}; Megatron Bridge training/comm_overlap.py, 2026-08-22",
    ),
    warning(
        id="PB403",
        title="tensor-parallel overlap under MXFP8",
        setting="model.tp_comm_overlap",
        when=all_of(
            *("scheme is mxfp8", "model.tp_comm_overlap", "not is_emulated"),
            lambda run: any(size % 128 for size in (run.model.hidden_size, run.model.ffn_hidden_size) if size),
        ),
        message="MXFP8 user buffers were made for widths that are multiples of 128",
        remedies=("choose widths that are multiples of 128", "set tp_comm_overlap=False"),
        source="NVIDIA/TransformerEngine pull request 1711",
        evidence="reported",
    ),
    error(
        id="PB404",
        title="sharded weights and FP4 without FP4 weights",
        setting="fp4_param_gather",
        versions=(mcore(since="0.19"),),
        when=all_of(
            *("fp4", weight_shards, "not gathers_fp4"), find=lambda run: [Violation(unsharded=weight_shards(run))]
        ),
        message="weights sharded for tensor parallelism are gathered in FP4, so they have to be stored in it",
        remedies=("set fp4_param_gather=True", "set {unsharded}, which shards no weight further"),
        source=PARSER,
    ),
    error(
        id="PB405",
        title="sharded weights and MXFP8 without MXFP8 weights",
        setting="fp8_param_gather",
        versions=(mcore(since="0.19"),),
        when=all_of("scheme is mxfp8", weight_shards, "not has_megatron_fsdp", find=_unstored_shards),
        message="weights sharded for tensor parallelism keep no {run.mode} copy, and are stored in MXFP8 and gathered "
        "through the gradient buffer: Megatron refuses anything else",
        remedies=("set {needed}", "set {unsharded}, which shards no weight further"),
        source=PARSER,
    ),
    error(
        id="PB406",
        title="not a whole number of model replicas",
        setting="target.count",
        when=all_of("has_model", "target.count", find=_broken_replicas),
        message="the GPUs of the run must be a multiple of {what}",
        remedies=("ask for another number of GPUs", "change the parallel sizes"),
        source="megatron-core 0.16.1 parallel_state.initialize_model_parallel",
    ),
    error(
        id="PB407",
        title="two interleaved stages without overlapped messages",
        setting="model.overlap_p2p_comm",
        when=all_of(
            *("has_model", "not model.overlap_p2p_comm"),
            lambda run: run.parallel.virtual > 1 and run.parallel.pipeline == 2,
        ),
        message="two interleaved pipeline stages send activations and gradients between the same two ranks "
        "in one batch, where they are taken for each other: the run goes on, and does not learn",
        remedies=(
            "set overlap_p2p_comm=True and batch_p2p_comm=False",
            "use more than two stages",
            "do not interleave",
        ),
        source=f"{PARSER}; a BF16 run on megatron-core 0.16.1 and gloo, whose loss rose",
    ),
    error(
        id="PB408",
        title="size that does not divide by its ranks",
        setting="model.num_attention_heads",
        when=_indivisible,
        message="does not divide by {by}: each rank has to get the same part",
        remedies=("choose a multiple", "change the parallel sizes"),
        source=f"{MODEL_CHECK}, tensor_parallel/utils.py divide; transformer/moe/moe_layer.py; "
        "ssm/mamba_mixer.py; pipeline_parallel/schedules.py; utils.py get_batch_on_this_cp_rank",
    ),
    error(
        id="PB409",
        title="batch that does not divide over the replicas",
        setting="train.global_batch_size",
        when=_broken_batch,
        message="must be a multiple of {micro} samples of a micro-batch x {data} data-parallel ranks = {step}",
        remedies=("choose a multiple of {step}", "change the GPUs or the parallel sizes"),
        source="megatron-core 0.16.1 num_microbatches_calculator.py: ConstantNumMicroBatchesCalculator",
    ),
    warning(
        id="PB410",
        title="two sequence lengths",
        setting="data.seq_length",
        when=partial(_two_lengths, is_bridge=False),
        message="is not model.seq_length, which is {length} and counts here",
        remedies=("give both the same value",),
        source="Megatron-LM training/arguments.py, main of 2026-08-22: one length for model and data",
    ),
    error(
        id="PB411",
        title="two sequence lengths, which Megatron Bridge refuses",
        setting="data.seq_length",
        when=partial(_two_lengths, is_bridge=True),
        message="must be model.seq_length, which is {length}: Megatron Bridge asserts it when the run starts",
        remedies=("give both the same value",),
        source="Megatron Bridge training/config.py:1644 ConfigContainer.validate, 2026-08-22",
    ),
    error(
        id="PB412",
        title="two numbers of model chunks",
        setting="model.virtual_pipeline_model_parallel_size",
        when=all_of(
            *("has_model", "model.virtual_pipeline_model_parallel_size", "model.pipeline_model_parallel_layout"),
            "parallel.layout",
            lambda run: run.model.virtual_pipeline_model_parallel_size != run.parallel.virtual,
        ),
        message="must be the {run.parallel.virtual} chunks of a stage in model.pipeline_model_parallel_layout",
        remedies=("set it to None, and Megatron takes that of the layout", "correct the layout"),
        source=MODEL_CHECK,
    ),
    error(
        id="PB413",
        title="layers that do not divide over the pipeline stages",
        setting="model.num_layers",
        when=all_of("has_model", "model.num_layers", find=_unsplittable),
        message="{rule}, which Megatron Core asserts; plan and memory count a split as even as it can be",
        remedies=("change the number of layers or of stages", "say how many the first and the last stage have"),
        source="megatron-core 0.16.1 transformer_block.py get_num_layers_to_build",
    ),
    error(
        id="PB415",
        title="sharded MXFP8 weights under Megatron-FSDP",
        setting="ddp.use_megatron_fsdp",
        versions=(mcore(since="0.19"),),
        when=all_of(
            *("scheme is mxfp8", weight_shards, "has_megatron_fsdp"),
            find=lambda run: [Violation(unsharded=weight_shards(run))],
        ),
        message="Megatron-FSDP turns reuse_grad_buf_for_mxfp8_param_ag off, which weights sharded for tensor "
        "parallelism need under MXFP8: they keep no {run.mode} copy",
        remedies=(
            "set ddp.use_megatron_fsdp=False, for the distributed optimizer instead",
            "set {unsharded}, which shards no weight further",
        ),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2 and main of 2026-08-22; NVIDIA-NeMo/"
        "Megatron-Bridge pull request 6131, 2026-09-17",
    ),
)
