"""In which dtype gradients are accumulated, reduced and applied."""

from bridge.rules.context import RuleContext
from bridge.rules.rule import PARSER, error, info, mcore, no_effect, warning
from bridge.rules.topics.parallel import weight_shards
from bridge.rules.violation import Violation, all_of

_ACCUMULATES_LOW = (
    *("is_bf16", "has_ddp", "not precision", "not ddp.grad_reduce_in_fp32", "not has_megatron_fsdp"),
    "optimizer.main_grads_dtype is fp32",
)


def _low_gradients(run: RuleContext) -> list[Violation]:
    ddp = run.sections["ddp"]
    held = "is Megatron's class default, while Megatron-LM's argument parser turns it on for BF16"
    if ddp.is_mapping and "grad_reduce_in_fp32" in ddp.stated:
        held = "is stated as False"
    return [Violation(held=held)]


def _unread_accumulation(run: RuleContext) -> list[Violation]:
    sends, keeps = "reduce_scatter_with_fp32_accumulation", "param_name_patterns_for_fp32_local_accumulation"
    stated = [name for name in (sends, keeps) if run.stands_out(name)]
    found = []
    for name in stated:
        if run.has_megatron_fsdp:
            found.append(Violation(name, why="Megatron-FSDP has buffers of its own"))
        elif run.is_fp32:
            found.append(Violation(name, why="gradients are FP32 in an FP32 run"))
        elif name == sends and not run.is_sharded:
            found.append(Violation(name, why="without the distributed optimizer gradients are all-reduced"))
    return found


def _shards_the_output_head(run: RuleContext) -> bool:
    """Return whether weights of dense layers, and with them the output head, are sharded beyond tensor parallelism."""
    model = run.model
    shards = model.tensor_parallel_num_weight_shards or run.parallel.tensor
    return shards > run.parallel.tensor or (model.gtp_weight_remat_size or 1) > 1


RULES = (
    warning(
        id="PB361",
        title="gradients summed in BF16",
        setting="ddp.grad_reduce_in_fp32",
        when=all_of(*_ACCUMULATES_LOW, find=_low_gradients),
        message="{held}: gradients are accumulated over micro-batches and ranks in BF16",
        remedies=("set it to True", "choose a recipe: the bf16 ones state True", "silence this if BF16 is meant"),
        source=f"{PARSER}; NVIDIA/Megatron-LM issue 1335, 2024-12-24",
    ),
    info(
        id="PB362",
        title="half-precision reduction",
        setting="grad_reduce_in_fp32",
        when=all_of(
            "is_bf16", lambda run: run.stated.get("grad_reduce_in_fp32") is False, "has_ddp", "not has_megatron_fsdp"
        ),
        message="gradients go {run.flow}",
        remedies=("state grad_reduce_in_fp32=True for FP32 sums",),
        source="megatron-core 0.16.1 distributed/distributed_data_parallel.py",
    ),
    warning(
        id="PB363",
        title="main gradient dtype without a reader",
        setting="optimizer.main_grads_dtype",
        when=all_of(
            *("has_precision_aware", "ddp.grad_reduce_in_fp32"),
            *("optimizer.main_grads_dtype is not fp32", "optimizer.main_grads_dtype is not None"),
        ),
        message="contradicts ddp.grad_reduce_in_fp32, which alone decides: main gradients are FP32",
        remedies=("leave it at fp32", "set grad_reduce_in_fp32=False"),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2: asserted there, ignored by configs built in "
        "Python",
    ),
    warning(
        id="PB364",
        title="FP32 accumulation in the reduce-scatter turned off",
        setting="ddp.reduce_scatter_with_fp32_accumulation",
        when=all_of("has_ddp", "ddp.reduce_scatter_with_fp32_accumulation", "ddp.grad_reduce_in_fp32"),
        message="Megatron-LM sets it to False together with grad_reduce_in_fp32",
        remedies=("drop it: the reduction is in FP32 already", "set grad_reduce_in_fp32=False"),
        source="Megatron-LM main of 2026-08-22 training/arguments.py validate_args",
    ),
    error(
        id="PB365",
        title="local FP32 accumulation together with FP32 reduction",
        setting="ddp.param_name_patterns_for_fp32_local_accumulation",
        versions=(mcore(since="0.17"),),
        when=all_of("has_ddp", "ddp.param_name_patterns_for_fp32_local_accumulation", "ddp.grad_reduce_in_fp32"),
        message="chooses parameters to accumulate in FP32 where grad_reduce_in_fp32 does it for all of them",
        remedies=("drop the patterns", "state grad_reduce_in_fp32=False"),
        source="megatron-core 0.17.1 distributed_data_parallel_config.py __post_init__: an assertion",
    ),
    no_effect(
        id="PB366",
        title="FP32 accumulation without effect",
        setting="reduce_scatter_with_fp32_accumulation",
        when=all_of("has_ddp", find=_unread_accumulation),
        message="has no effect: {why}",
        remedies=("drop it",),
        source="megatron-core 0.16.1 distributed/param_and_grad_buffer.py:163, :488; 0.19.2 :1365",
    ),
    warning(
        id="PB367",
        title="gradients of sharded weights reduced in half precision",
        setting="grad_reduce_in_fp32",
        versions=(mcore(since="0.19", until="0.20"),),
        when=all_of(
            *("is_half", "ddp.grad_reduce_in_fp32", "not has_megatron_fsdp", _shards_the_output_head),
            find=lambda run: [Violation(unsharded=weight_shards(run))],
        ),
        message="the gradient of the output head is reduced over the shards of its weight in {run.mode} before it is "
        "added up in FP32",
        remedies=("use megatron-core 0.20", "set {unsharded}, which shards no weight further"),
        source="megatron-core 0.19.2 tensor_parallel/layers.py LinearWithGradAccumulationAndAsyncCommunication; fixed "
        "in Megatron-LM main of 2026-08-22 (pull request 6624)",
    ),
)
