"""Rules about FSDP: settings that its variants turn off, ignore or refuse."""

from collections.abc import Iterator

from bridge.precision.precision_config import MEGATRON_FIELDS
from bridge.rules.context import RuleContext
from bridge.rules.facts.off_switches import SHARDING_OWNERS, find_off_switches
from bridge.rules.inert_fields import GRAD_BUFFER_REUSE
from bridge.rules.rule import PARSER_SOURCE, error, mcore, no_effect, sync_warning, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.fields import SHARED_SWITCHES
from bridge.target.versions import is_at_least

TRANSPOSE_CACHE = "keep_fp8_transpose_cache"
GRADIENT_SHARDING_STRATEGIES = ("optim_grads", "optim_grads_params")
"""Sharding strategies under which gradients are reduced in each micro-batch."""
IN_PLACE_REDUCTION_SINCE = "0.17"
"""First megatron-core whose Megatron-FSDP reduces a buffer of one rank in place."""
_FSDP_FIELDS = tuple(name for name in MEGATRON_FIELDS if name.startswith("megatron_fsdp_"))


def find_refused_by_fsdp_v2(context: RuleContext) -> Iterator[Violation]:
    """Yield the settings that version 2 of Megatron-FSDP refuses."""
    if not context.has_megatron_fsdp or context.ddp.megatron_fsdp_version != 2:
        return
    if not context.is_bf16:
        yield Violation("bf16", what="BF16 only")
    if context.optimizer.loss_scale:
        yield Violation("loss_scale", what="no loss scale")
    if context.has_precision_aware_optimizer:
        what = "no precision-aware optimizer"
        yield Violation("optimizer.use_precision_aware_optimizer", what=what)
    if context.is_fp8:
        yield Violation("fp8", what="no FP8 (MXFP8 is a prototype: pull requests 6485 and 7588)")
    if context.is_fp4:
        yield Violation("fp4", what="no FP4")


def find_one_sided_switches(context: RuleContext) -> Iterator[Violation]:
    """Yield the switches of sharding that the last sync before a run turns on, or would turn on."""
    planned = [row for row in context.rows if row.attribute in SHARED_SWITCHES and row.changes]
    if not planned and context.present.issuperset(SHARDING_OWNERS):
        for switch in find_off_switches(lambda owner, name: getattr(context.views[owner], name)):
            yield Violation(f"{switch.owner_name}.{switch.attribute}", value=False, why=switch.why)
        return
    where = None
    if not isinstance(context, RunContext):
        where = "turned on before the run"
    for row in planned:
        rests_on = [row.path]
        if row.by.setting is not None:
            rests_on.append(row.by.setting)
        yield Violation(row.path, value=False, where=where, why=row.why, rests_on=rests_on)


def find_buffer_under_megatron_fsdp(context: RuleContext) -> Violation | None:
    """Return a violation if the shared buffer is on under Megatron-FSDP.

    A recipe may state the buffer for runs without FSDP. The last sync before a run then turns it
    off, and the violation is an info.
    """
    if not context.has_megatron_fsdp:
        return None
    if not context.reuses_buffer and not (
        context.is_mxfp8 and context.stated.get(GRAD_BUFFER_REUSE)
    ):
        return None
    source = context.get_source(f"mixed_precision.{GRAD_BUFFER_REUSE}") or ""
    begins = context.is_last or isinstance(context, RunContext)
    if source.startswith("recipe ") and begins:
        return Violation(severity="info")
    return Violation()


def find_unread_reduction_dtype(context: RuleContext) -> Violation | None:
    """Return a violation if Megatron-FSDP does not read the stated reduction dtype.

    It is an info if Megatron-FSDP reduces in this dtype anyway.
    """
    if not context.has_megatron_fsdp or "grad_reduce_in_fp32" not in context.stated:
        return None
    main = context.ddp.megatron_fsdp_main_grads_dtype or context.mode
    sent = context.ddp.megatron_fsdp_grad_comm_dtype or main
    wanted = context.mode
    if context.get_setting_value("grad_reduce_in_fp32"):
        wanted = "fp32"
    caveat = f"; main gradients are {main} and sent in {sent}"
    steps = []
    if main != wanted:
        steps.append(f"ddp.megatron_fsdp_main_grads_dtype={wanted}")
    if sent != wanted:
        steps.append(f"ddp.megatron_fsdp_grad_comm_dtype={wanted}")
    if steps:
        return Violation(caveat=caveat, remedy=f"set {' and '.join(steps)} instead")
    return Violation(caveat=f"{caveat}, as it asks", remedy="leave it, or drop it", severity="info")


def find_half_precision_main_grads(context: RuleContext) -> Violation | None:
    """Return a violation if main gradients are in half precision, an info if that is stated."""
    if (
        not context.has_megatron_fsdp
        or not context.is_half_precision
        or context.ddp.megatron_fsdp_main_grads_dtype
    ):
        return None
    if "grad_reduce_in_fp32" in context.stated and not context.get_setting_value(
        "grad_reduce_in_fp32"
    ):
        return Violation(severity="info")
    return Violation()


def find_unread_fsdp_settings(context: RuleContext) -> Iterator[Violation]:
    """Yield the stated settings of Megatron-FSDP that the run does not read."""
    if not context.has_ddp:
        return
    stated = [
        name for name in (*_FSDP_FIELDS, TRANSPOSE_CACHE) if context.differs_from_default(name)
    ]
    if not context.has_megatron_fsdp:
        for name in stated:
            yield Violation(name, why="Megatron-FSDP does not shard this run")
        return
    is_cached = context.is_fp8 and context.ddp.fp8_param_gather and not context.is_mxfp8
    if TRANSPOSE_CACHE in stated and not is_cached:
        why = "it is about transposed FP8 weights, which this run does not store"
        yield Violation(TRANSPOSE_CACHE, why=why)


def find_unreplicated_experts(context: RunContext) -> Violation | None:
    """Return a violation if each expert has one data-parallel rank, with its effect on gradients."""
    if (
        not context.has_megatron_fsdp
        or context.ddp.megatron_fsdp_version == 2
        or not context.target.count
    ):
        return None
    if context.ddp.data_parallel_sharding_strategy not in GRADIENT_SHARDING_STRATEGIES:
        return None
    if not _has_several_micro_batches(context, context.target.count):
        return None
    parallel = context.parallel.fit_to_world_size(context.target.count)
    if not context.model.num_moe_experts or parallel.expert_data != 1 or parallel.expert == 1:
        return None
    main = context.ddp.megatron_fsdp_main_grads_dtype or context.mode
    sent = context.ddp.megatron_fsdp_grad_comm_dtype
    is_cast = sent is not None and sent != main
    is_averaged = context.model.calculate_per_token_loss or context.ddp.average_in_collective
    if is_at_least(context.target.mcore, IN_PLACE_REDUCTION_SINCE) is False or is_cast:
        effect = "adds it to itself"
    elif not is_averaged:
        ranks = parallel.data * parallel.context
        effect = f"scales what it holds by 1/{ranks} again"
    else:
        return None
    return Violation(effect=effect, value=parallel.expert, fewer=parallel.expert // 2)


def _has_several_micro_batches(context: RunContext, count: int) -> bool:
    """Return whether a step is known to have more than one micro-batch."""
    global_batch, micro_batch = context.train.global_batch_size, context.train.micro_batch_size
    if not global_batch or not micro_batch:
        return False
    return global_batch > micro_batch * context.parallel.fit_to_world_size(count).data


RULES = (
    warning(
        id="PB321",
        title="FSDP2 turns FP8 weights off",
        setting="fp8_param_gather",
        when=lambda context: context.gathers_fp8 and context.ddp.use_torch_fsdp2,
        message="Megatron-LM sets it to False under torch FSDP2 with "
        "Transformer Engine 2.0 and later",
        remedies=(
            "use the distributed optimizer instead",
            "set fp8_param_gather=False, as Megatron-LM does in any case",
        ),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2",
    ),
    error(
        id="PB323",
        title="FSDP2 in FP16",
        setting="fp16",
        when=lambda context: context.is_fp16 and context.ddp.use_torch_fsdp2,
        message="torch FSDP2 cannot train in FP16 under Megatron",
        remedies=("choose a bf16 recipe", "use the distributed optimizer"),
        source=PARSER_SOURCE,
    ),
    no_effect(
        id="PB324",
        title="Megatron-FSDP turns the shared buffer off",
        setting="reuse_grad_buf_for_mxfp8_param_ag",
        when=find_buffer_under_megatron_fsdp,
        message="has no effect: Megatron-FSDP does not implement it, and it "
        "is turned off before a run",
        remedies=(
            "set it to False, as runtime_config_update does",
            "use the distributed optimizer",
        ),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2; Megatron Bridge "
        "training/config.py, 2026-08-22",
    ),
    error(
        id="PB326",
        title="refused by Megatron-FSDP 2",
        setting="ddp.megatron_fsdp_version",
        when=find_refused_by_fsdp_v2,
        message="version 2 of Megatron-FSDP takes {what}",
        remedies=("use version 1", "use the distributed optimizer", "change the setting"),
        source="Megatron-LM main of 2026-08-22 optimizer/fully_sharded_optimizer.py, "
        "distributed/fsdp/mcore_fsdp_adapter.py; Megatron Bridge training/config.py, 2026-08-22",
    ),
    no_effect(
        id="PB327",
        title="Megatron-FSDP does not read the reduction dtype",
        setting="grad_reduce_in_fp32",
        versions=(mcore(since="0.19"),),
        when=find_unread_reduction_dtype,
        message="has no effect under Megatron-FSDP of megatron-core 0.19 and later{caveat}",
        remedies=("{remedy}",),
        source="megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py",
    ),
    warning(
        id="PB328",
        title="Megatron-FSDP accumulates gradients in the weights' dtype",
        setting="ddp.megatron_fsdp_main_grads_dtype",
        versions=(mcore(since="0.19"),),
        when=find_half_precision_main_grads,
        message="None means the weights' dtype, so main gradients are {run.mode}",
        remedies=("set it to fp32", "accept {run.mode} gradients"),
        source="megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py",
    ),
    error(
        id="PB329",
        title="emerging optimizer under FSDP",
        setting="optimizer.optimizer",
        when=lambda context: context.has_fsdp and context.has_emerging_optimizer,
        message="optimizers other than adam and sgd do not work under FSDP",
        remedies=("use adam", "use the distributed optimizer"),
        source=PARSER_SOURCE,
    ),
    sync_warning(
        id="PB330",
        title="sharding switch that is off in one place",
        setting="optimizer.use_distributed_optimizer",
        sync="reported",
        when=find_one_sided_switches,
        message="has to be on: {why}",
        remedies=("set {path}=True, as runtime_config_update does",),
        source="Megatron Bridge 0.6.2 training/config.py "
        "_validate_and_sync_distributed_optimizer_settings",
    ),
    no_effect(
        id="PB331",
        title="setting of Megatron-FSDP without effect",
        setting="megatron_fsdp_main_params_dtype",
        when=find_unread_fsdp_settings,
        message="has no effect: {why}",
        remedies=("drop it", "set ddp.use_megatron_fsdp=True"),
        source="megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py:134, "
        "fsdp/src/megatron_fsdp/megatron_fsdp.py:625",
    ),
    error(
        id="PB332",
        title="gradients that the optimizer does not read",
        setting="ddp.megatron_fsdp_use_decoupled_grad",
        versions=(mcore(since="0.18"),),
        when=lambda context: (
            context.has_megatron_fsdp
            and context.ddp.megatron_fsdp_use_decoupled_grad
            and context.has_optimizer
            and not context.has_precision_aware_optimizer
            and not context.optimizer.optimizer_cpu_offload
        ),
        message="hands gradients to the precision-aware optimizer, which is off",
        remedies=("set use_precision_aware_optimizer=True", "set it to False"),
        source="megatron-core 0.19.2 "
        "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:3369",
    ),
    warning(
        id="PB333",
        title="Megatron-FSDP without FP32 masters",
        setting="megatron_fsdp_main_params_dtype",
        versions=(mcore(since="0.17"),),
        when=lambda context: (
            context.has_megatron_fsdp
            and context.is_half_precision
            and context.has_optimizer
            and not context.has_precision_aware_optimizer
            and not context.gathers_fp8
            and context.ddp.megatron_fsdp_main_params_dtype in (context.mode, None)
        ),
        message="the optimizer steps on {run.mode} weights: an update that is small against a "
        "weight rounds away",
        remedies=("set megatron_fsdp_main_params_dtype=fp32", "accept {run.mode} weights"),
        source="megatron-core 0.17.1 to 0.19.2 "
        "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: the main weights have this "
        "dtype, and without one the weights themselves are the main weights",
        explanation="An update of the size lr x gradient is often smaller than half an ulp of a "
        "BF16 weight (one part in 256 or less). FP32 masters keep the sum. Transformer Engine's "
        "Adam keeps them where the optimizer is precision-aware.",
    ),
    error(
        id="PB334",
        title="gradients that the precision-aware optimizer does not read",
        setting="ddp.megatron_fsdp_use_decoupled_grad",
        versions=(mcore(since="0.18"),),
        when=lambda context: (
            context.has_megatron_fsdp
            and context.ddp.megatron_fsdp_version != 2
            and context.has_optimizer
            and context.has_precision_aware_optimizer
            and context.optimizer.optimizer == "adam"
            and not context.optimizer.optimizer_cpu_offload
            and not context.ddp.megatron_fsdp_use_decoupled_grad
        ),
        message="must be on under the precision-aware optimizer: FusedAdam reads "
        "param.decoupled_grad, the gradient is in param.grad, and the step "
        "changes nothing without a word",
        remedies=(
            "set ddp.megatron_fsdp_use_decoupled_grad=True",
            "set optimizer.use_precision_aware_optimizer=False",
        ),
        source="megatron-core 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22, "
        "optimizer/__init__.py, which sets use_decoupled_grad on the optimizer, "
        "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py update_main_grads; "
        "Transformer Engine 2.20 pytorch/optimizers/fused_adam.py:636. Megatron-LM's training.py "
        "and Megatron Bridge's config.py set it; pull requests 4426 and 4427",
    ),
    warning(
        id="PB336",
        title="experts on one rank each under Megatron-FSDP",
        setting="model.expert_model_parallel_size",
        when=find_unreplicated_experts,
        message="leaves one data-parallel rank to each expert, whose gradient buffer is not "
        "sharded then: Megatron-FSDP {effect} in each micro-batch of a step, and "
        "expert gradients are wrong",
        remedies=("set model.expert_model_parallel_size={fewer}", "use the distributed optimizer"),
        source="NVIDIA/Megatron-LM issue 6660, 2026-08-19; megatron-core 0.16.1, 0.17.1, 0.18.2, "
        "0.19.2 and main of 2026-08-22, "
        "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py "
        "_bucket_group_gradient_reduce, megatron_fsdp.py _grad_acc",
        explanation="A buffer of one rank accumulates gradients itself. The reduction of each "
        "micro-batch then works on the sum so far: 0.16.1 adds it to itself, later releases scale "
        "it again, or add it to itself where megatron_fsdp_grad_comm_dtype differs from the "
        "gradients' dtype.",
    ),
)
