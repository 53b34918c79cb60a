"""FSDP: what its variants turn off, ignore or refuse."""

from bridge.precision.config import MEGATRON_FIELDS
from bridge.rules.context import RuleContext, off_switches
from bridge.rules.fields import SWITCHES
from bridge.rules.inert import BUFFER
from bridge.rules.rule import PARSER, error, mcore, no_effect, warning
from bridge.rules.violation import Violation, all_of

CACHE = "keep_fp8_transpose_cache"


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
        return [Violation(row.path, value=False, where=where, why=row.why) for row in planned]
    off = off_switches(lambda role, name: getattr(run.views[role], name))
    return [Violation(f"{role}.{name}", value=False, why=why) for role, name, why in off]


def _buffer_under_fsdp(run: RuleContext) -> list[Violation]:
    if not (run.reuses_buffer or (run.scheme == "mxfp8" and run.stated.get(BUFFER))):
        return []
    by_recipe = (run.where(f"mixed_precision.{BUFFER}") or "").startswith("recipe ")
    # A recipe states it for runs without FSDP, and the last sync before a run turns it off.
    return [Violation(severity="info" if by_recipe and (run.is_last or run.is_whole) else None)]


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
        when=all_of("has_megatron_fsdp", lambda run: "grad_reduce_in_fp32" in run.stated),
        message="has no effect under Megatron-FSDP of megatron-core 0.19 and later",
        remedies=("set ddp.megatron_fsdp_main_grads_dtype and megatron_fsdp_grad_comm_dtype instead",),
        source="megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py",
    ),
    warning(
        id="PB328",
        title="Megatron-FSDP accumulates gradients in the weights' dtype",
        setting="ddp.megatron_fsdp_main_grads_dtype",
        versions=(mcore(since="0.19"),),
        when=all_of("has_megatron_fsdp", "is_half", "not ddp.megatron_fsdp_main_grads_dtype"),
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
            "has_megatron_fsdp", "ddp.megatron_fsdp_use_decoupled_grad", "has_optimizer", "not has_precision_aware"
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
)
