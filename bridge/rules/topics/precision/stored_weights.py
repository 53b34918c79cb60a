"""Rules about weights stored in FP8 or FP4: the configs that have to agree, and the cost."""

from collections.abc import Iterator

from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.rule import (
    MODEL_CHECK_SOURCE,
    PARSER_SOURCE,
    contradiction,
    error,
    info,
    mcore,
    sync_error,
    te,
    warning,
)
from bridge.rules.run_context import RunContext
from bridge.rules.storage_violation import make_storage_violation
from bridge.rules.violation import Violation
from bridge.target.versions import is_at_least

LAYER_WISE_FP8 = "0.19"
"""First megatron-core whose layer-wise optimizer gathers FP8 weights through the FP32 masters.

Source: distributed/param_and_grad_buffer.py start_param_sync; Megatron-LM's parser asserts the
distributed optimizer before it turns it into the layer-wise one.
"""
UNSLICED_NVFP4 = "2.15"
"""First Transformer Engine whose NVFP4 tensors refuse to be sliced.

Earlier releases dequantise such tensors first.

Source: its commit 549f5ba4, pytorch/tensor/nvfp4_tensor.py.
"""
REMEDY_FORMATS = {"fp8": "e4m3", "fp4": "e2m1"}
"""Family -> the format that a remedy states."""


def find_unsharded_fp8_weights(context: RuleContext) -> Violation | None:
    """Return a violation if weights are stored in FP8 under an optimizer that is not sharded.

    Megatron Bridge trains published recipes with an optimizer that shards whole layers, although
    Megatron-LM's parser refuses that.
    """
    if not _lacks_sharding(context, "fp8"):
        return None
    if not _shards_by_layer(context):
        return make_storage_violation(context, "fp8")
    if not is_at_least(context.target.mcore, LAYER_WISE_FP8):
        return make_storage_violation(context, "fp8", severity="warning")
    return None


def find_unsharded_fp4_weights(context: RuleContext) -> Violation | None:
    """Return a violation if weights are stored in FP4 under an optimizer that is not sharded."""
    if not _lacks_sharding(context, "fp4"):
        return None
    if _shards_by_layer(context):
        return make_storage_violation(context, "fp4", severity="warning")
    return make_storage_violation(context, "fp4")


def _lacks_sharding(context: RuleContext, family: str) -> bool:
    """Return whether weights are stored in a family, and no optimizer is known to be sharded."""
    is_known = False
    for owner_name in ("optimizer", "ddp"):
        if owner_name not in context.present:
            continue
        if context.views[owner_name].use_distributed_optimizer is not None:
            is_known = True
            break
    is_sharded = context.is_sharded or context.has_fsdp
    return context.gathers_family(family) and is_known and not is_sharded


def _shards_by_layer(context: RuleContext) -> bool:
    """Return whether the optimizer shards whole layers."""
    optimizer = context.optimizer
    if optimizer.use_layer_wise_distributed_optimizer:
        return True
    return str(optimizer.optimizer).startswith("dist_")


def find_one_sided_storage(context: RuleContext) -> Iterator[Violation]:
    """Yield the families in which only the model or only DDP stores weights."""
    if not context.has_model or not context.has_ddp:
        return
    gathers = {"fp8": context.ddp.fp8_param_gather, "fp4": context.ddp.fp4_param_gather}
    stores = {"fp8": context.model.fp8_param, "fp4": context.model.fp4_param}
    for family in FAMILIES:
        theirs = gathers[family]
        if stores[family] != theirs:
            ddp_field = f"ddp.{family}_param_gather"
            yield Violation(f"model.{family}_param", other=ddp_field, theirs=theirs)


def find_conflicting_storage_names(context: RuleContext) -> Iterator[Violation]:
    """Yield the families for which the two names of the field are stated with different values."""
    for family in FAMILIES:
        mine, theirs = f"{family}_param", f"{family}_param_gather"
        if mine in context.stated and theirs in context.stated:
            value, other = context.stated[mine], context.stated[theirs]
            if value != other:
                yield Violation(mine, value=value, other=theirs, theirs=other)


def find_storage_without_format(context: RuleContext) -> Iterator[Violation]:
    """Yield the families in which weights are stored but which the run does not use.

    There is no violation if the family is stated to be off.
    """
    for family, chosen in REMEDY_FORMATS.items():
        if context.get_format(family) or family in context.stated:
            continue
        is_owners = context.precision is None and context.gathers_family(family)
        for name in (f"{family}_param_gather", f"{family}_param"):
            if context.stated.get(name) or is_owners:
                words = {"family": family, "name": family.upper(), "chosen": chosen}
                yield Violation(name, value=True, **words)
                break


def find_unsavable_projections(context: RunContext) -> Violation | None:
    """Return a violation if input projections are stored in NVFP4: checkpoints cannot split them.

    Only Megatron-FSDP writes checkpoints that do not split them.
    """
    if not context.gathers_fp4 or not context.calls_te or context.has_fsdp or not context.has_model:
        return None
    if context.shape.state_space is not None:
        mixers = "Mamba layers"
    elif context.shape.delta_net is not None:
        mixers = "gated delta nets"
    else:
        return None
    if REMEDY_FORMATS["fp4"] in context.stored_formats("in_proj"):
        violation = make_storage_violation(context, "fp4")
        violation.words["mixers"] = mixers
        return violation
    return None


RULES = (
    sync_error(
        id="PB301",
        title="FP8 weights without sharded optimizer",
        setting="fp8_param_gather",
        sync="last",
        when=find_unsharded_fp8_weights,
        message="weights can be stored in FP8 only under the distributed optimizer or FSDP",
        remedies=(
            "set use_distributed_optimizer=True in optimizer and ddp",
            "set fp8_param_gather=False",
        ),
        source=PARSER_SOURCE,
    ),
    sync_error(
        id="PB302",
        title="FP4 weights without sharded optimizer",
        setting="fp4_param_gather",
        sync="last",
        when=find_unsharded_fp4_weights,
        message="weights can be stored in FP4 only under the distributed optimizer or FSDP",
        remedies=(
            "set use_distributed_optimizer=True in optimizer and ddp",
            "set fp4_param_gather=False",
        ),
        source="megatron-core 0.19.2 optimizer/distrib_optimizer.py: the only optimizer that "
        "updates FP4 weights",
    ),
    error(
        id="PB303",
        title="stored weights that are never updated",
        setting="model.fp8_param",
        versions=(mcore(since="0.17.1"),),
        when=find_one_sided_storage,
        message="must equal {other}, which is {theirs!r}: the optimizer skips low-precision "
        "weights that DDP does not know of",
        remedies=("give both the same value", "choose a recipe, which writes both"),
        source="megatron-core 0.19.2 optimizer/distrib_optimizer.py (since 0.17.1; up to 0.17.0 "
        "the copy was unconditional)",
        explanation="The weights keep the values they were made with, and the loss falls only as "
        "far as the other parameters take it.",
    ),
    contradiction(
        id="PB304",
        title="two answers to one question",
        setting="fp8_param",
        when=find_conflicting_storage_names,
        message="is another name of {other}, which says {theirs!r} and is the one that is read",
        remedies=("give one of the two names", "give both the same value"),
        source="NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py, 2026-08-22: the last one "
        "set wins silently",
    ),
    contradiction(
        id="PB305",
        title="stored weights without their format",
        setting="fp8_param_gather",
        when=find_storage_without_format,
        message="weights can be stored in {name} only in an {family} run",
        remedies=("set it to False", "state {family}={chosen!r}"),
        source=f"{MODEL_CHECK_SOURCE}; Megatron-LM training/arguments.py, 0.19.2",
    ),
    info(
        id="PB306",
        title="FP8 that takes more memory",
        setting="fp8_param_gather",
        when=lambda context: (
            context.is_fp8
            and context.has_owners
            and not context.gathers_fp8
            and not context.is_emulated
        ),
        message="weights stay in {run.mode} and are cast again in every step: expect more memory "
        "than {run.mode} alone, not less",
        remedies=(
            "store them in FP8 (fp8_param_gather=True)",
            "count it with `precision-bridge memory`",
        ),
        source="NVIDIA/TransformerEngine issues 257 (2023-06-01 to "
        "2026-01-15) and 1261 (2024-10-16)",
        evidence="reported",
    ),
    warning(
        id="PB307",
        title="FP16 weights that pass through BF16",
        setting="reuse_grad_buf_for_mxfp8_param_ag",
        when=lambda context: (
            context.is_mxfp8
            and context.is_fp16
            and context.gathers_fp8
            and context.reuses_buffer
            and context.ddp.grad_reduce_in_fp32
        ),
        message="Megatron gathers weights through the FP32 gradient buffer as BF16, whatever the "
        "mode, so FP16 weights lose three bits",
        remedies=(
            "use BF16",
            "set reuse_grad_buf_for_mxfp8_param_ag=False and fp8_param_gather=False",
        ),
        source="megatron-core 0.16.1 distributed/param_and_grad_buffer.py:786-790; measured "
        "on a run",
    ),
    error(
        id="PB308",
        title="stored weights with masters of nothing",
        setting="model.use_cpu_initialization",
        when=lambda context: (
            context.gathers_fp8 and context.model.use_cpu_initialization and context.calls_te
        ),
        message="must be off where weights are stored in FP8, whose masters would be memory that "
        "nothing has written",
        remedies=("set model.use_cpu_initialization=False", "set fp8_param_gather=False"),
        source="megatron-core 0.16.1 extensions/transformer_engine.py:836-853, "
        "optimizer/distrib_optimizer.py:385; measured on a run with "
        "Transformer Engine 2.20.2 on a CPU",
        explanation="Transformer Engine keeps a stored weight's first value for the master when "
        "it makes the weight. Megatron initialises the weight on the CPU after that.",
    ),
    error(
        id="PB309",
        title="stored weights without masters",
        setting="fp8_param_gather",
        when=lambda context: (
            context.gathers_fp8
            and context.is_fp32
            and not context.is_delayed
            and not context.has_fsdp
            and context.calls_te
            and context.optimizer.optimizer == "adam"
        ),
        message="an FP32 run has no master weights, and Transformer Engine's Adam refuses to "
        "update {run.scheme} weights without them in the first step",
        remedies=("state bf16=True", "set fp8_param_gather=False"),
        source="Transformer Engine 2.20.2 pytorch/optimizers/fused_adam.py:700; met in a "
        "rehearsal of Megatron-LM "
        "tests/functional_tests/test_cases/moe/deepseek_proxy_fsdp_ep2_fsdp2 (main of 2026-08-22) "
        "without its FSDP",
    ),
    info(
        id="PB310",
        title="a shared buffer that the training loop has to fill",
        setting="reuse_grad_buf_for_mxfp8_param_ag",
        when=lambda context: (
            context.is_mxfp8
            and context.gathers_fp8
            and context.reuses_buffer
            and context.ddp.overlap_param_gather
            and not context.has_megatron_fsdp
        ),
        message="under overlap_param_gather the training loop has to copy the master weights into "
        "the shared buffer before each step, or the loss stays where it was, without an error",
        remedies=(
            "call _copy_main_params_to_param_buffer() behind zero_grad_buffer() "
            "in a loop of your own",
        ),
        source="megatron-core 0.16.1 optimizer/optimizer.py:579-583, which leaves it to the loop; "
        "Megatron-LM main of 2026-08-22 training/training.py train_step; measured on a run",
        explanation="Weights and gradients share the buffer, and zeroing the gradients zeroes the "
        "weights. A gather that is forced before a validation or a checkpoint marks the weights "
        "as gathered (0.16.1: distributed_data_parallel.py:491, param_and_grad_buffer.py:300), so "
        "that the loop has to finish it too.",
    ),
    warning(
        id="PB311",
        title="NVFP4 weights that cannot be saved",
        setting="fp4_param_gather",
        versions=(te(since=UNSLICED_NVFP4),),
        when=find_unsavable_projections,
        message="a checkpoint of {mixers} splits the weight of their input projection, and "
        "Transformer Engine cannot slice an NVFP4 weight: saving ends in a NotImplementedError",
        remedies=("set fp4_param_gather=False", "save no checkpoint"),
        source="megatron-core 0.16.1 ssm/mamba_mixer.py:1149 and ssm/gated_delta_net.py:474, "
        "0.19.2 ssm/mamba_mixer.py:1418 and ssm/gated_delta_net/common.py:525; Transformer Engine "
        "2.15 to 2.20.2 and main of 2026-08-22 pytorch/tensor/nvfp4_tensor.py __torch_dispatch__; "
        "measured on a rehearsal of Nemotron 3 with megatron-core 0.19.2",
        explanation="The rows of the projection are saved as z, x, B, C and dt, or as query, key, "
        "value and gates, so that a model of another tensor-parallel size can read them. "
        "Transformer Engine before 2.15 writes the parts in the mode of the run.",
    ),
)
