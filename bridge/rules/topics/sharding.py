"""FSDP: what its variants turn off, ignore or refuse."""

from bridge.precision.config import MEGATRON_FIELDS
from bridge.rules.context import RuleContext, off_switches
from bridge.rules.inert import BUFFER
from bridge.rules.rule import PARSER, error, mcore, no_effect, warning
from bridge.rules.violation import Violation, all_of
from bridge.target.fields import SWITCHES
from bridge.target.versions import at_least

CACHE = "keep_fp8_transpose_cache"
GATHERED = ("optim_grads", "optim_grads_params")
"""Sharding strategies under which gradients are reduced in each micro-batch."""


def _refused_by_v2(run: RuleContext) -> list[Violation]:
    rows = (
        (not run.is_bf16, "bf16", "BF16 only"),
        (bool(run.optimizer.loss_scale), "loss_scale", "no loss scale"),
        (run.has_precision_aware, "optimizer.use_precision_aware_optimizer", "no precision-aware optimizer"),
        (bool(run.fp8), "fp8", "no FP8 (MXFP8 is a prototype: pull requests 6485 and 7588)"),
        (bool(run.fp4), "fp4", "no FP4"),
    )
    return [Violation(path, what=what) for applies, path, what in rows if applies]


def _switched(run: RuleContext) -> list[Violation]:
    where = None if run.is_whole else "turned on before the run"
    planned = [row for row in run.rows if row.attribute in SWITCHES and row.changes]
    if planned or not {"optimizer", "ddp"} <= run.given:
        found = []
        for row in planned:
            rests_on = [row.path, "ddp.use_megatron_fsdp"] if "FSDP" in row.why else [row.path]
            found.append(Violation(row.path, value=False, where=where, why=row.why, rests_on=rests_on))
        return found
    off = off_switches(lambda role, name: getattr(run.views[role], name))
    return [Violation(f"{role}.{name}", value=False, why=why) for role, name, why in off]


def _buffer_under_fsdp(run: RuleContext) -> list[Violation]:
    if not (run.reuses_buffer or (run.scheme == "mxfp8" and run.stated.get(BUFFER))):
        return []
    by_recipe = (run.where(f"mixed_precision.{BUFFER}") or "").startswith("recipe ")
    # A recipe states it for runs without FSDP, and the last sync before a run turns it off.
    return [Violation(severity="info" if by_recipe and (run.is_last or run.is_whole) else None)]


def _unread_reduction(run: RuleContext) -> list[Violation]:
    """Return the reduction dtype that Megatron-FSDP does not read: an info where its gradients are as it asks."""
    main = run.ddp.megatron_fsdp_main_grads_dtype or run.mode
    sent = run.ddp.megatron_fsdp_grad_comm_dtype or main
    wanted = "fp32" if run.held("grad_reduce_in_fp32") else run.mode
    is_as_asked = (main, sent) == (wanted, wanted)
    if is_as_asked:
        but = f"; main gradients are {main} and sent in {sent}, as it asks"
        return [Violation(but=but, remedy="leave it, or drop it", severity="info")]
    dtypes = {"ddp.megatron_fsdp_main_grads_dtype": main, "ddp.megatron_fsdp_grad_comm_dtype": sent}
    steps = [f"{name}={wanted}" for name, dtype in dtypes.items() if dtype != wanted]
    remedy = f"set {' and '.join(steps)} instead"
    return [Violation(but=f"; main gradients are {main} and sent in {sent}", remedy=remedy)]


def _narrow_main_gradients(run: RuleContext) -> list[Violation]:
    is_asked = "grad_reduce_in_fp32" in run.stated and not run.held("grad_reduce_in_fp32")
    return [Violation(severity="info" if is_asked else None)]


def _several_micro_batches(run: RuleContext) -> bool:
    """Return whether a step is known to have more than one micro-batch."""
    whole, each = run.train.global_batch_size, run.train.micro_batch_size
    return bool(whole and each and run.target.count and whole > each * run.parallel.on_enough(run.target.count).data)


def _lone_experts(run: RuleContext) -> list[Violation]:
    """Return the layout whose experts lie on one data-parallel rank each, where their gradients come out wrong."""
    parallel = run.parallel.on_enough(run.target.count)
    if not run.model.num_moe_experts or parallel.expert_data != 1 or parallel.expert == 1:
        return []
    ddp = run.ddp
    main = ddp.megatron_fsdp_main_grads_dtype or run.mode
    is_cast = ddp.megatron_fsdp_grad_comm_dtype not in (None, main)
    is_scaled = not (run.model.calculate_per_token_loss or ddp.average_in_collective)
    if at_least(run.mcore, REDUCES_IN_PLACE) is False or is_cast:
        effect = "adds it to itself"
    elif is_scaled:
        effect = f"scales what it holds by 1/{parallel.data * parallel.context} again"
    else:
        return []
    return [Violation(effect=effect, value=parallel.expert, fewer=parallel.expert // 2)]


REDUCES_IN_PLACE = "0.17"
"""First megatron-core whose Megatron-FSDP reduces a buffer of one rank in place."""
_OF_FSDP = tuple(name for name in MEGATRON_FIELDS if name.startswith("megatron_fsdp_"))


def _unread_by_ddp(run: RuleContext) -> list[Violation]:
    stated = [name for name in (*_OF_FSDP, CACHE) if run.stands_out(name)]
    if not run.has_megatron_fsdp:
        return [Violation(name, why="Megatron-FSDP does not shard this run") for name in stated]
    is_cached = bool(run.fp8) and run.ddp.fp8_param_gather and run.scheme != "mxfp8"
    why = "it is about transposed FP8 weights, which this run does not store"
    return [Violation(CACHE, why=why)] if CACHE in stated and not is_cached else []


RULES = (
    warning(
        id="PB321",
        title="FSDP2 turns FP8 weights off",
        setting="fp8_param_gather",
        when=all_of("gathers_fp8", "ddp.use_torch_fsdp2"),
        message="Megatron-LM sets it to False under torch FSDP2 with Transformer Engine 2.0 and later",
        remedies=("use the distributed optimizer instead", "set fp8_param_gather=False, as it will be"),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2",
    ),
    error(
        id="PB323",
        title="FSDP2 in FP16",
        setting="fp16",
        when=all_of("is_fp16", "ddp.use_torch_fsdp2"),
        message="torch FSDP2 cannot train in FP16 under Megatron",
        remedies=("choose a bf16 recipe", "use the distributed optimizer"),
        source=PARSER,
    ),
    no_effect(
        id="PB324",
        title="Megatron-FSDP turns the shared buffer off",
        setting="reuse_grad_buf_for_mxfp8_param_ag",
        when=all_of("has_megatron_fsdp", find=_buffer_under_fsdp),
        message="has no effect: Megatron-FSDP does not implement it, and it is turned off before a run",
        remedies=("set it to False, as runtime_config_update does", "use the distributed optimizer"),
        source="Megatron-LM training/arguments.py validate_args, 0.19.2; Megatron Bridge training/config.py, "
        "2026-08-22",
    ),
    error(
        id="PB326",
        title="refused by Megatron-FSDP 2",
        setting="ddp.megatron_fsdp_version",
        when=all_of("has_megatron_fsdp", lambda run: run.ddp.megatron_fsdp_version == 2, find=_refused_by_v2),
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
        when=all_of("has_megatron_fsdp", lambda run: "grad_reduce_in_fp32" in run.stated, find=_unread_reduction),
        message="has no effect under Megatron-FSDP of megatron-core 0.19 and later{but}",
        remedies=("{remedy}",),
        source="megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py",
    ),
    warning(
        id="PB328",
        title="Megatron-FSDP accumulates gradients in the weights' dtype",
        setting="ddp.megatron_fsdp_main_grads_dtype",
        versions=(mcore(since="0.19"),),
        when=all_of(
            *("has_megatron_fsdp", "is_half", "not ddp.megatron_fsdp_main_grads_dtype"), find=_narrow_main_gradients
        ),
        message="None means the weights' dtype, so main gradients are {run.mode}",
        remedies=("set it to fp32", "accept {run.mode} gradients"),
        source="megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py",
    ),
    error(
        id="PB329",
        title="emerging optimizer under FSDP",
        setting="optimizer.optimizer",
        when=all_of("has_fsdp", "has_emerging_optimizer"),
        message="optimizers other than adam and sgd do not work under FSDP",
        remedies=("use adam", "use the distributed optimizer"),
        source=PARSER,
    ),
    warning(
        id="PB330",
        title="sharding switch that is off in one place",
        setting="optimizer.use_distributed_optimizer",
        sync="reported",
        when=_switched,
        message="has to be on: {why}",
        remedies=("set {path}=True, as runtime_config_update does",),
        source="Megatron Bridge 0.6.2 training/config.py _validate_and_sync_distributed_optimizer_settings",
    ),
    no_effect(
        id="PB331",
        title="setting of Megatron-FSDP without effect",
        setting="megatron_fsdp_main_params_dtype",
        when=all_of("has_ddp", find=_unread_by_ddp),
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
        when=all_of(
            *("has_megatron_fsdp", "ddp.megatron_fsdp_use_decoupled_grad", "has_optimizer", "not has_precision_aware"),
            "not optimizer.optimizer_cpu_offload",
        ),
        message="hands gradients to the precision-aware optimizer, which is off",
        remedies=("set use_precision_aware_optimizer=True", "set it to False"),
        source="megatron-core 0.19.2 distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:3369",
    ),
    warning(
        id="PB333",
        title="Megatron-FSDP without FP32 masters",
        setting="megatron_fsdp_main_params_dtype",
        versions=(mcore(since="0.17"),),
        when=all_of(
            *("has_megatron_fsdp", "is_half", "has_optimizer", "not has_precision_aware", "not gathers_fp8"),
            lambda run: run.ddp.megatron_fsdp_main_params_dtype in (run.mode, None),
        ),
        message="the optimizer steps on {run.mode} weights: an update that is small against a weight rounds away",
        remedies=("set megatron_fsdp_main_params_dtype=fp32", "accept {run.mode} weights"),
        source="megatron-core 0.17.1 to 0.19.2 distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: the main "
        "weights have this dtype, and without one the weights themselves are the main weights",
        explanation="An update of the size lr x gradient is often smaller than half an ulp of a BF16 weight (one part "
        "in 256 or less). FP32 masters keep the sum. Transformer Engine's Adam keeps them where the optimizer is "
        "precision-aware.",
    ),
    error(
        id="PB334",
        title="gradients that the precision-aware optimizer does not read",
        setting="ddp.megatron_fsdp_use_decoupled_grad",
        versions=(mcore(since="0.18"),),
        when=all_of(
            *("has_megatron_fsdp", lambda run: run.ddp.megatron_fsdp_version != 2, "has_optimizer"),
            *("has_precision_aware", "optimizer.optimizer is adam", "not optimizer.optimizer_cpu_offload"),
            "not ddp.megatron_fsdp_use_decoupled_grad",
        ),
        message="must be on under the precision-aware optimizer: FusedAdam reads param.decoupled_grad, the gradient is "
        "in param.grad, and the step changes nothing without a word",
        remedies=(
            "set ddp.megatron_fsdp_use_decoupled_grad=True",
            "set optimizer.use_precision_aware_optimizer=False",
        ),
        source="megatron-core 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22, optimizer/__init__.py, which sets "
        "use_decoupled_grad on the optimizer, distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py "
        "update_main_grads; Transformer Engine 2.20 pytorch/optimizers/fused_adam.py:636. Megatron-LM's training.py "
        "and Megatron Bridge's config.py set it; pull requests 4426 and 4427",
    ),
    warning(
        id="PB336",
        title="experts on one rank each under Megatron-FSDP",
        setting="model.expert_model_parallel_size",
        when=all_of(
            *("is_whole", "has_megatron_fsdp", lambda run: run.ddp.megatron_fsdp_version != 2, "target.count"),
            lambda run: run.ddp.data_parallel_sharding_strategy in GATHERED,
            _several_micro_batches,
            find=_lone_experts,
        ),
        message="leaves one data-parallel rank to each expert, whose gradient buffer is not sharded then: "
        "Megatron-FSDP {effect} in each micro-batch of a step, and expert gradients are wrong",
        remedies=("set model.expert_model_parallel_size={fewer}", "use the distributed optimizer"),
        source="NVIDIA/Megatron-LM issue 6660, 2026-08-19; megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2 and main of "
        "2026-08-22, distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py _bucket_group_gradient_reduce, "
        "megatron_fsdp.py _grad_acc",
        explanation="A buffer of one rank accumulates gradients itself. The reduction of each micro-batch then works "
        "on the sum so far: 0.16.1 adds it to itself, later releases scale it again, or add it to itself where "
        "megatron_fsdp_grad_comm_dtype differs from the gradients' dtype.",
    ),
)
