"""Rules about tensor, pipeline, context and sequence parallelism together with a precision."""

from collections.abc import Iterator

from bridge.errors import RunConfigError
from bridge.precision.stated_field import COMMAND_LINE
from bridge.rules.facts.divisions import (
    CONTEXT_SIZE,
    EXPERT_SIZE,
    EXPERT_TENSOR_SIZES,
    PIPELINE_SIZE,
    TENSOR_SIZE,
    find_uneven_sizes,
)
from bridge.rules.facts.gemm_sizes import compute_tokens_per_rank
from bridge.rules.facts.weight_shards import format_unsharding_settings
from bridge.rules.rule import MODEL_CHECK_SOURCE, PARSER_SOURCE, error, mcore, te, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation


def gathers_ragged_blocks(context: RunContext) -> bool:
    """Return whether sequence parallelism gathers blockwise tensors of ragged blocks."""
    if not context.is_blockwise or not context.parallel.sequence_parallel or context.is_emulated:
        return False
    return _has_unaligned_size(context.model.hidden_size, compute_tokens_per_rank(context))


def has_unaligned_user_buffers(context: RunContext) -> bool:
    """Return whether user buffers under MXFP8 have widths that are not multiples of 128."""
    if not context.is_mxfp8 or not context.model.tp_comm_overlap or context.is_emulated:
        return False
    return _has_unaligned_size(context.model.hidden_size, context.model.ffn_hidden_size)


def _has_unaligned_size(*sizes: int | None) -> bool:
    """Return whether a known size is not a multiple of 128."""
    return any(size % 128 for size in sizes if size)


def find_overlap_without_sequence(context: RunContext) -> Violation | None:
    """Return a violation if tensor-parallel overlap lacks sequence parallelism."""
    if not context.model.tp_comm_overlap or context.parallel.sequence_parallel:
        return None
    needed = "set sequence_parallel=True"
    if context.parallel.tensor == 1:
        needed = "use tensor_model_parallel_size=2 or more with sequence_parallel=True"
    return Violation(needed=needed)


def find_sharded_without_fp4_weights(context: RunContext) -> Violation | None:
    """Return a violation if the weights of a sharded FP4 model are not stored in FP4."""
    if not context.is_fp4:
        return None
    settings = format_unsharding_settings(context)
    if settings and not context.gathers_fp4:
        return Violation(unsharded=settings)
    return None


def find_sharded_without_mxfp8_weights(context: RunContext) -> Violation | None:
    """Return a violation if a setting that sharded MXFP8 weights need is missing."""
    if not context.is_mxfp8:
        return None
    settings = format_unsharding_settings(context)
    if not settings or context.has_megatron_fsdp:
        return None
    missing = []
    if not context.gathers_fp8:
        missing.append("fp8_param_gather")
    if not context.reuses_buffer:
        missing.append("reuse_grad_buf_for_mxfp8_param_ag")
    if missing:
        needed = " and ".join(f"{name}=True" for name in missing)
        return Violation(missing[0], needed=needed, unsharded=settings)
    return None


def find_sharded_under_megatron_fsdp(context: RunContext) -> Violation | None:
    """Return a violation if MXFP8 weights are sharded under Megatron-FSDP."""
    if not context.is_mxfp8:
        return None
    settings = format_unsharding_settings(context)
    if settings and context.has_megatron_fsdp:
        return Violation(unsharded=settings)
    return None


def find_incomplete_replicas(context: RunContext) -> Violation | None:
    """Return a violation if replicas of the model, or of the experts, do not fill the GPUs."""
    if not context.has_model or not context.target.count:
        return None
    count, layout = context.target.count, context.parallel
    if count % layout.replica_size:
        product = (
            f"TP {layout.tensor} x PP {layout.pipeline} x CP {layout.context} = "
            f"{layout.replica_size}"
        )
        return Violation(product=product, rests_on=(TENSOR_SIZE, PIPELINE_SIZE, CONTEXT_SIZE))
    if context.has_experts and count % layout.expert_replica_size:
        product = (
            f"expert TP {layout.expert_tensor} x EP {layout.expert} x PP {layout.pipeline} = "
            f"{layout.expert_replica_size}"
        )
        settings = ("model.num_moe_experts", *EXPERT_TENSOR_SIZES, EXPERT_SIZE, PIPELINE_SIZE)
        return Violation(product=product, rests_on=settings)
    return None


def find_indivisible_batch(context: RunContext) -> Violation | None:
    """Return a violation if micro-batches on all replicas do not fill the global batch.

    The launch of scripts/train.py knows the ranks and checks the batch itself. Configs without a
    sequence length of the model do not describe a run yet: their batch is a class default.
    """
    global_batch, micro = context.train.global_batch_size, context.train.micro_batch_size
    count, replica = context.target.count, context.parallel.replica_size
    if not context.has_model or not context.model.seq_length or context.program.is_train_script:
        return None
    if not global_batch or not micro or not count or count % replica:
        return None
    data = count // replica
    step = micro * data
    if micro > 0 and global_batch % step:
        return Violation(micro=micro, data=data, step=step)
    return None


def find_length_mismatch(context: RunContext) -> Violation | None:
    """Return a violation if the sequence lengths of data and model differ, in other frameworks."""
    if not context.program.is_megatron_bridge:
        return _find_length_mismatch(context)
    return None


def find_length_mismatch_in_bridge(context: RunContext) -> Violation | None:
    """Return a violation if the sequence lengths of data and model differ, in Megatron Bridge."""
    if context.program.is_megatron_bridge:
        return _find_length_mismatch(context)
    return None


def _find_length_mismatch(context: RunContext) -> Violation | None:
    data_length, length = context.data.seq_length, context.model.seq_length
    if not data_length or not length or data_length == length:
        return None
    where = None
    if COMMAND_LINE in (
        context.get_source("data.seq_length"),
        context.get_source("model.seq_length"),
    ):
        where = COMMAND_LINE
    return Violation(where=where, length=length)


def find_indivisible_sizes(context: RunContext) -> Iterator[Violation]:
    """Yield the sizes that are not divisible by their ranks."""
    length = context.model.seq_length or context.data.seq_length
    for uneven in find_uneven_sizes(context.model, context.shape, context.parallel, length):
        group = uneven.group
        rests_on = [uneven.path, *group.settings]
        yield Violation(uneven.path, value=uneven.size, by=group.label, rests_on=rests_on)


def find_unsplittable_layers(context: RunContext) -> Violation | None:
    """Return a violation if the pipeline stages cannot share the layers."""
    if not context.has_model or not context.model.num_layers:
        return None
    try:
        context.parallel.split_layers(context.shape.num_layers)
    except RunConfigError as error:
        return Violation(error.path, value=error.value, rule=error.rule)
    return None


RULES = (
    warning(
        id="PB401",
        title="blockwise scaling under sequence parallelism",
        setting="fp8_recipe",
        versions=(te(until="2.14"),),
        when=gathers_ragged_blocks,
        message="gathering blockwise tensors whose sides are not multiples of 128 over TP "
        "{run.parallel.tensor} with sequence parallelism was reported to fail (all-gather "
        "requires a quantizable tensor)",
        remedies=(
            "make the tokens of a rank and hidden_size multiples of 128",
            "use Transformer Engine 2.14",
            "use fp8_recipe='tensorwise'",
        ),
        source="NVIDIA/TransformerEngine issue 2393, 2025-11-17; Transformer Engine 2.9, 2.13 and "
        "2.14 pytorch/distributed.py _start_all_gather_fp8_blockwise: 2.14 dequantizes them first",
        evidence="reported",
    ),
    warning(
        id="PB402",
        title="tensor-parallel overlap that is turned off",
        setting="model.tp_comm_overlap",
        when=find_overlap_without_sequence,
        message="needs TP above 1 and sequence parallelism: Megatron-LM refuses it, Megatron "
        "Bridge sets it to False",
        remedies=("{needed}", "set tp_comm_overlap=False, as Megatron Bridge does in any case"),
        source=f"{PARSER_SOURCE}; Megatron Bridge training/comm_overlap.py, 2026-08-22",
    ),
    warning(
        id="PB403",
        title="tensor-parallel overlap under MXFP8",
        setting="model.tp_comm_overlap",
        when=has_unaligned_user_buffers,
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
        when=find_sharded_without_fp4_weights,
        message="weights sharded for tensor parallelism are gathered in FP4, so "
        "they have to be stored in it",
        remedies=("set fp4_param_gather=True", "set {unsharded}, which shards no weight further"),
        source=PARSER_SOURCE,
    ),
    error(
        id="PB405",
        title="sharded weights and MXFP8 without MXFP8 weights",
        setting="fp8_param_gather",
        versions=(mcore(since="0.19"),),
        when=find_sharded_without_mxfp8_weights,
        message="weights sharded for tensor parallelism keep no {run.mode} copy, and are stored "
        "in MXFP8 and gathered through the gradient buffer: Megatron refuses anything else",
        remedies=("set {needed}", "set {unsharded}, which shards no weight further"),
        source=PARSER_SOURCE,
    ),
    error(
        id="PB406",
        title="not a whole number of model replicas",
        setting="target.count",
        when=find_incomplete_replicas,
        message="the GPUs of the run must be a multiple of {product}",
        remedies=("ask for another number of GPUs", "change the parallel sizes"),
        source="megatron-core 0.16.1 parallel_state.initialize_model_parallel",
    ),
    error(
        id="PB407",
        title="two interleaved stages without overlapped messages",
        setting="model.overlap_p2p_comm",
        when=lambda context: (
            context.has_model
            and not context.model.overlap_p2p_comm
            and context.parallel.virtual > 1
            and context.parallel.pipeline == 2
        ),
        message="two interleaved pipeline stages send activations and gradients between the same "
        "two ranks in one batch, where they are taken for each other: the run "
        "goes on, and does not learn",
        remedies=(
            "set overlap_p2p_comm=True and batch_p2p_comm=False",
            "use more than two stages",
            "do not interleave",
        ),
        source=f"{PARSER_SOURCE}; a BF16 run on megatron-core 0.16.1 and gloo, whose loss rose",
    ),
    error(
        id="PB408",
        title="size that does not divide by its ranks",
        setting="model.num_attention_heads",
        when=find_indivisible_sizes,
        message="does not divide by {by}: each rank has to get the same part",
        remedies=("choose a multiple", "change the parallel sizes"),
        source=f"{MODEL_CHECK_SOURCE}, tensor_parallel/utils.py divide; transformer/moe/moe_layer.py; "
        "ssm/mamba_mixer.py; pipeline_parallel/schedules.py; utils.py get_batch_on_this_cp_rank",
    ),
    error(
        id="PB409",
        title="batch that does not divide over the replicas",
        setting="train.global_batch_size",
        when=find_indivisible_batch,
        message="must be a multiple of {micro} samples of a micro-batch x {data} data-parallel "
        "ranks = {step}",
        remedies=("choose a multiple of {step}", "change the GPUs or the parallel sizes"),
        source="megatron-core 0.16.1 num_microbatches_calculator.py: "
        "ConstantNumMicroBatchesCalculator",
    ),
    warning(
        id="PB410",
        title="two sequence lengths",
        setting="data.seq_length",
        when=find_length_mismatch,
        message="is not model.seq_length, which is {length} and counts here",
        remedies=("give both the same value",),
        source="Megatron-LM training/arguments.py, main of 2026-08-22: one "
        "length for model and data",
    ),
    error(
        id="PB411",
        title="two sequence lengths, which Megatron Bridge refuses",
        setting="data.seq_length",
        when=find_length_mismatch_in_bridge,
        message="must be model.seq_length, which is {length}: Megatron Bridge "
        "asserts it when the run starts",
        remedies=("give both the same value",),
        source="Megatron Bridge training/config.py:1644 ConfigContainer.validate, 2026-08-22",
    ),
    error(
        id="PB412",
        title="two numbers of model chunks",
        setting="model.virtual_pipeline_model_parallel_size",
        when=lambda context: (
            context.has_model
            and bool(context.model.virtual_pipeline_model_parallel_size)
            and bool(context.model.pipeline_model_parallel_layout)
            and bool(context.parallel.layout)
            and context.model.virtual_pipeline_model_parallel_size != context.parallel.virtual
        ),
        message="must be the {run.parallel.virtual} chunks of a stage in "
        "model.pipeline_model_parallel_layout",
        remedies=(
            "set it to None: Megatron then takes the number of the layout",
            "correct the layout",
        ),
        source=MODEL_CHECK_SOURCE,
    ),
    error(
        id="PB413",
        title="layers that do not divide over the pipeline stages",
        setting="model.num_layers",
        when=find_unsplittable_layers,
        message="{rule}, which Megatron Core asserts; plan and memory count a "
        "split as even as it can be",
        remedies=(
            "change the number of layers or of stages",
            "state how many layers the first and the last stage have",
        ),
        source="megatron-core 0.16.1 transformer_block.py get_num_layers_to_build",
    ),
    error(
        id="PB415",
        title="sharded MXFP8 weights under Megatron-FSDP",
        setting="ddp.use_megatron_fsdp",
        versions=(mcore(since="0.19"),),
        when=find_sharded_under_megatron_fsdp,
        message="Megatron-FSDP turns reuse_grad_buf_for_mxfp8_param_ag off, which weights sharded "
        "for tensor parallelism need under MXFP8: they keep no {run.mode} copy",
        remedies=(
            "set ddp.use_megatron_fsdp=False, for the distributed optimizer instead",
            "set {unsharded}, which shards no weight further",
        ),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2 and main of 2026-08-22; "
        "NVIDIA-NeMo/Megatron-Bridge pull request 6131, 2026-09-17",
    ),
)
