"""Rules about the dtypes in which gradients are accumulated, reduced and applied."""

from collections.abc import Iterator

from bridge.rules.context import RuleContext
from bridge.rules.facts.weight_shards import format_unsharding_settings
from bridge.rules.rule import PARSER_SOURCE, error, info, mcore, no_effect, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation

FP32_COLLECTIVE_FIELD = "reduce_scatter_with_fp32_accumulation"
FP32_ACCUMULATION_FIELD = "param_name_patterns_for_fp32_local_accumulation"


def find_gradients_summed_in_bf16(context: RunContext) -> Violation | None:
    """Return a violation if a BF16 run without a recipe sums its gradients in BF16."""
    if not context.is_bf16 or not context.has_ddp or context.precision is not None:
        return None
    if context.ddp.grad_reduce_in_fp32 or context.has_megatron_fsdp or context.ddp.use_torch_fsdp2:
        return None
    if context.optimizer.main_grads_dtype != "fp32":
        return None
    ddp = context.sections["ddp"]
    origin = "is Megatron's class default, while Megatron-LM's argument parser turns it on for BF16"
    if ddp.is_mapping and "grad_reduce_in_fp32" in ddp.stated:
        origin = "is stated as False"
    return Violation(origin=origin)


def find_unread_accumulation(context: RuleContext) -> Iterator[Violation]:
    """Yield each stated setting of FP32 accumulation that no reduction of the run reads."""
    if not context.has_ddp:
        return
    stated = [
        name
        for name in (FP32_COLLECTIVE_FIELD, FP32_ACCUMULATION_FIELD)
        if context.differs_from_default(name)
    ]
    for name in stated:
        if context.has_megatron_fsdp:
            yield Violation(name, why="Megatron-FSDP has buffers of its own")
        elif context.is_fp32:
            yield Violation(name, why="gradients are FP32 in an FP32 run")
        elif name == FP32_COLLECTIVE_FIELD and not context.is_sharded:
            why = "without the distributed optimizer gradients are all-reduced"
            yield Violation(name, why=why)


def has_moments_refused_by_fp8_kernel(context: RuleContext) -> bool:
    """Return whether the fused Adam updates weights stored in FP8 with moments in BF16."""
    optimizer = context.optimizer
    if (
        not context.is_delayed
        or not context.gathers_fp8
        or not context.has_precision_aware_optimizer
    ):
        return False
    if (
        context.has_megatron_fsdp
        or optimizer.optimizer_cpu_offload
        or optimizer.optimizer != "adam"
    ):
        return False
    # Under another recipe, Megatron keeps FP32 masters itself, and the fused Adam updates these.
    if optimizer.fp8_recipe not in (None, "delayed"):
        return False
    return optimizer.exp_avg_dtype == optimizer.exp_avg_sq_dtype == "bf16"


def find_half_precision_head_sums(context: RunContext) -> Violation | None:
    """Return a violation if the output head is sharded beyond tensor parallelism."""
    if (
        not context.is_half_precision
        or not context.ddp.grad_reduce_in_fp32
        or context.has_megatron_fsdp
    ):
        return None
    shards = context.model.tensor_parallel_num_weight_shards or context.parallel.tensor
    if shards > context.parallel.tensor or (context.model.gtp_weight_remat_size or 1) > 1:
        return Violation(unsharded=format_unsharding_settings(context))
    return None


RULES = (
    warning(
        id="PB361",
        title="gradients summed in BF16",
        setting="ddp.grad_reduce_in_fp32",
        when=find_gradients_summed_in_bf16,
        message="{origin}: gradients are accumulated over micro-batches and ranks in BF16",
        remedies=(
            "set it to True",
            "choose a recipe: the bf16 ones state True",
            "silence this if BF16 is meant",
        ),
        source=f"{PARSER_SOURCE}; NVIDIA/Megatron-LM issue 1335, 2024-12-24",
    ),
    info(
        id="PB362",
        title="half-precision reduction",
        setting="grad_reduce_in_fp32",
        when=lambda context: (
            context.is_bf16
            and context.stated.get("grad_reduce_in_fp32") is False
            and context.has_ddp
            and not context.has_megatron_fsdp
        ),
        message="gradients go {run.gradient_flow}",
        remedies=("state grad_reduce_in_fp32=True for FP32 sums",),
        source="megatron-core 0.16.1 distributed/distributed_data_parallel.py",
    ),
    warning(
        id="PB363",
        title="main gradient dtype without a reader",
        setting="optimizer.main_grads_dtype",
        when=lambda context: (
            context.has_precision_aware_optimizer
            and context.ddp.grad_reduce_in_fp32
            and context.optimizer.main_grads_dtype not in ("fp32", None)
        ),
        message="contradicts ddp.grad_reduce_in_fp32, which alone decides: main gradients are FP32",
        remedies=("leave it at fp32", "set grad_reduce_in_fp32=False"),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2: asserted there, ignored "
        "by configs built in Python",
    ),
    warning(
        id="PB364",
        title="FP32 accumulation in the reduce-scatter turned off",
        setting="ddp.reduce_scatter_with_fp32_accumulation",
        when=lambda context: (
            context.has_ddp
            and context.ddp.reduce_scatter_with_fp32_accumulation
            and context.ddp.grad_reduce_in_fp32
        ),
        message="Megatron-LM sets it to False together with grad_reduce_in_fp32",
        remedies=("drop it: the reduction is in FP32 already", "set grad_reduce_in_fp32=False"),
        source="Megatron-LM main of 2026-08-22 training/arguments.py validate_args",
    ),
    error(
        id="PB365",
        title="local FP32 accumulation together with FP32 reduction",
        setting="ddp.param_name_patterns_for_fp32_local_accumulation",
        versions=(mcore(since="0.17"),),
        when=lambda context: (
            context.has_ddp
            and bool(context.ddp.param_name_patterns_for_fp32_local_accumulation)
            and context.ddp.grad_reduce_in_fp32
        ),
        message="chooses parameters to accumulate in FP32 where "
        "grad_reduce_in_fp32 does it for all of them",
        remedies=("drop the patterns", "state grad_reduce_in_fp32=False"),
        source="megatron-core 0.17.1 distributed_data_parallel_config.py __post_init__: "
        "an assertion",
    ),
    no_effect(
        id="PB366",
        title="FP32 accumulation without effect",
        setting="reduce_scatter_with_fp32_accumulation",
        when=find_unread_accumulation,
        message="has no effect: {why}",
        remedies=("drop it",),
        source="megatron-core 0.16.1 distributed/param_and_grad_buffer.py:163, :488; 0.19.2 :1365",
    ),
    warning(
        id="PB367",
        title="gradients of sharded weights reduced in half precision",
        setting="grad_reduce_in_fp32",
        versions=(mcore(since="0.19", until="0.20"),),
        when=find_half_precision_head_sums,
        message="the gradient of the output head is reduced over the shards of its weight in "
        "{run.mode} before it is added up in FP32",
        remedies=("use megatron-core 0.20", "set {unsharded}, which shards no weight further"),
        source="megatron-core 0.19.2 tensor_parallel/layers.py "
        "LinearWithGradAccumulationAndAsyncCommunication; fixed in Megatron-LM main of 2026-08-22 "
        "(pull request 6624)",
    ),
    warning(
        id="PB368",
        title="gradients that FSDP2 reduces in BF16",
        setting="ddp.use_torch_fsdp2",
        when=lambda context: (
            context.is_bf16 and context.has_ddp and bool(context.ddp.use_torch_fsdp2)
        ),
        message="PyTorch's FSDP2 accumulates and reduces gradients in the dtype of the weights, "
        "bf16, and does not read ddp.grad_reduce_in_fp32",
        remedies=(
            "use the distributed optimizer or Megatron-FSDP",
            "silence this if BF16 is meant",
        ),
        source="megatron-core 0.16.1 and 0.19.2 distributed/torch_fully_sharded_data_parallel.py, "
        "which hands fully_shard no policy of precision",
    ),
    error(
        id="PB369",
        title="moments in BF16 of weights stored in FP8",
        setting="optimizer.exp_avg_dtype",
        when=has_moments_refused_by_fp8_kernel,
        message="Transformer Engine's fused Adam takes FP32 moments alone for weights that delayed "
        "scaling stores in FP8: the first step ends with an error",
        remedies=(
            "set exp_avg_dtype=fp32 and exp_avg_sq_dtype=fp32",
            "set fp8_param_gather=False",
        ),
        source="NVIDIA/TransformerEngine 0608bdee common/multi_tensor/adam.cu "
        "multi_tensor_adam_fp8_cuda, pytorch/optimizers/fused_adam.py (fuse_unscale); "
        "modelscope/ms-swift issue 8001, 2026-02-06",
    ),
)
