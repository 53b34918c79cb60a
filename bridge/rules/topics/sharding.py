"""FSDP: what its variants turn off, ignore or refuse."""

from typing import Any

from bridge.precision.config import MEGATRON_FIELDS
from bridge.rules.context import RuleContext
from bridge.rules.fields import SWITCHES, off_switches
from bridge.rules.inert import BUFFER
from bridge.rules.rule import PARSER, mcore, owners_rule, sync_rule, te

CACHE = "keep_fp8_transpose_cache"


def _refused_by_v2(s: RuleContext) -> list[dict[str, Any]]:
    rows = (
        (not s.is_bf16, "bf16", "BF16 only"),
        (bool(s.optimizer.loss_scale), "loss_scale", "no loss scale"),
        (s.has_precision_aware, "optimizer.use_precision_aware_optimizer", "no precision-aware optimizer"),
        (bool(s.fp8), "fp8", "no FP8 (MXFP8 is a prototype: pull requests 6485 and 7588)"),
        (bool(s.fp4), "fp4", "no FP4"),
    )
    return [{"path": path, "what": what} for applies, path, what in rows if applies]


def _switched(s: RuleContext) -> list[dict[str, Any]]:
    planned = [
        {"path": f"{row.owner}.{row.attribute}", "value": False, "why": row.why, "where": "turned on before the run"}
        for row in s.rows
        if row.attribute in SWITCHES and row.changes
    ]
    if planned or not {"optimizer", "ddp"} <= s.given:
        return planned
    return [
        {"path": f"{role}.{name}", "value": False, "why": why}
        for role, name, why in off_switches(lambda role, name: getattr(s.views[role], name))
    ]


def _buffer_under_fsdp(s: RuleContext) -> Any:
    if not s.has_megatron_fsdp or not (s.reuses_buffer or (s.is_mxfp8 and s.stated.get(BUFFER))):
        return None
    by_recipe = (s.where(f"mixed_precision.{BUFFER}") or "").startswith("recipe ")
    # A recipe states it for runs without FSDP, and the last sync before a run turns it off.
    return {"severity": "info" if by_recipe and (s.is_last or s.is_whole) else "warning"}


_OF_FSDP = tuple(name for name in MEGATRON_FIELDS if name.startswith("megatron_fsdp_"))


def _unread_by_ddp(s: RuleContext) -> list[dict[str, Any]]:
    stated = [name for name in (*_OF_FSDP, CACHE) if s.stands_out(name) and s.has_ddp]
    if not s.has_megatron_fsdp:
        return [{"path": name, "why": "Megatron-FSDP does not shard this run"} for name in stated]
    is_cached = bool(s.fp8) and s.ddp.fp8_param_gather and not s.is_mxfp8
    why = "it is about transposed FP8 weights, which this run does not store"
    return [{"path": CACHE, "why": why}] if CACHE in stated and not is_cached else []


RULES = (
    owners_rule(
        heading="PB321: FSDP2 turns FP8 weights off",
        predicate=lambda s: s.has_torch_fsdp2,
        warning="fp8_param_gather: Megatron-LM sets it to False under torch FSDP2 with Transformer Engine 2.0 and "
        "later",
        remedies=("use the distributed optimizer instead", "set fp8_param_gather=False, as it will be"),
        verified="Megatron-LM training/arguments.py validate_args, 0.19.2",
        gate="gathers_fp8",
        versions=(te(since="2.0"),),
    ),
    owners_rule(
        heading="PB322: FSDP2 turns FP4 weights off",
        predicate=lambda s: s.has_torch_fsdp2,
        warning="fp4_param_gather: Megatron-LM sets it to False under torch FSDP2 before Transformer Engine 2.7",
        remedies=("use Transformer Engine 2.7", "set fp4_param_gather=False, as it will be"),
        verified="Megatron-LM training/arguments.py validate_args, 0.19.2",
        gate="gathers_fp4",
        versions=(te(until="2.7"),),
    ),
    owners_rule(
        heading="PB323: FSDP2 in FP16",
        predicate=lambda s: s.has_torch_fsdp2,
        error="fp16: torch FSDP2 cannot train in FP16 under Megatron",
        remedies=("choose a bf16 recipe", "use the distributed optimizer"),
        verified=PARSER,
        gate="is_fp16",
    ),
    sync_rule(
        heading="PB324: Megatron-FSDP turns the shared buffer off",
        predicate=_buffer_under_fsdp,
        warning="reuse_grad_buf_for_mxfp8_param_ag: has no effect: Megatron-FSDP does not implement it, and it is "
        "turned off before a run",
        remedies=("set it to False, as runtime_config_update does", "use the distributed optimizer"),
        verified="Megatron-LM training/arguments.py validate_args, 0.19.2; Megatron Bridge training/config.py, "
        "2026-08-22",
    ),
    owners_rule(
        heading="PB325: FSDP with stored FP8 weights needs a newer Transformer Engine",
        predicate=lambda s: s.has_megatron_fsdp,
        error="fp8_param_gather: FSDP gathers FP8 weights from Transformer Engine 2.3 on",
        remedies=("use Transformer Engine 2.3", "set fp8_param_gather=False"),
        verified="megatron-core 0.19.2 fp8_utils.py: NotImplementedError",
        gate="gathers_fp8",
        versions=(te(until="2.3"),),
    ),
    owners_rule(
        heading="PB326: refused by Megatron-FSDP 2",
        predicate=_refused_by_v2,
        error="ddp.megatron_fsdp_version: version 2 of Megatron-FSDP takes {what}",
        remedies=("use version 1", "use the distributed optimizer", "change the setting"),
        verified="Megatron-LM main of 2026-08-22 optimizer/fully_sharded_optimizer.py, "
        "distributed/fsdp/mcore_fsdp_adapter.py; "
        "Megatron Bridge training/config.py, 2026-08-22",
        gate="has_fsdp_v2",
    ),
    sync_rule(
        heading="PB327: Megatron-FSDP does not read the reduction dtype",
        predicate=lambda s: "grad_reduce_in_fp32" in s.stated,
        warning="grad_reduce_in_fp32: has no effect under Megatron-FSDP of megatron-core 0.19 and later",
        remedies=("set ddp.megatron_fsdp_main_grads_dtype and megatron_fsdp_grad_comm_dtype instead",),
        verified="megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py",
        gate="has_megatron_fsdp",
        versions=(mcore(since="0.19"),),
    ),
    owners_rule(
        heading="PB328: Megatron-FSDP accumulates gradients in the weights' dtype",
        predicate=lambda s: s.is_half and s.ddp.megatron_fsdp_main_grads_dtype is None,
        warning="ddp.megatron_fsdp_main_grads_dtype: None means the weights' dtype, so main gradients are {s.mode}",
        remedies=("set it to fp32", "accept {s.mode} gradients"),
        verified="megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py",
        gate="has_megatron_fsdp",
        versions=(mcore(since="0.19"),),
    ),
    owners_rule(
        heading="PB329: emerging optimizer under FSDP",
        predicate=lambda s: (s.has_megatron_fsdp or s.has_torch_fsdp2) and s.optimizer.optimizer not in ("adam", "sgd"),
        error="optimizer.optimizer: optimizers other than adam and sgd do not work under FSDP",
        remedies=("use adam", "use the distributed optimizer"),
        verified=PARSER,
        gate="has_optimizer",
    ),
    sync_rule(
        heading="PB330: sharding switch that is off in one place",
        predicate=_switched,
        warning="optimizer.use_distributed_optimizer: has to be on: {why}",
        remedies=("set {path}=True, as runtime_config_update does",),
        verified="Megatron Bridge 0.6.2 training/config.py _validate_and_sync_distributed_optimizer_settings",
    ),
    sync_rule(
        heading="PB331: setting of Megatron-FSDP without effect",
        predicate=_unread_by_ddp,
        warning="megatron_fsdp_main_params_dtype: has no effect: {why}",
        remedies=("drop it", "set ddp.use_megatron_fsdp=True"),
        verified="megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py:134, "
        "fsdp/src/megatron_fsdp/megatron_fsdp.py:625",
    ),
    owners_rule(
        heading="PB332: gradients that the optimizer does not read",
        predicate=lambda s: s.ddp.megatron_fsdp_use_decoupled_grad and s.has_optimizer and not s.has_precision_aware,
        error="ddp.megatron_fsdp_use_decoupled_grad: hands gradients to the precision-aware optimizer, which is off",
        remedies=("set use_precision_aware_optimizer=True", "set it to False"),
        verified="megatron-core 0.19.2 distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:3369",
        gate="has_megatron_fsdp",
        versions=(mcore(since="0.18"),),
    ),
)
