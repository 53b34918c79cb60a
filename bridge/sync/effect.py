"""Findings of a sync: what was stated and will not act, what has no home, and what Megatron refuses later on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.errors import Finding
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bridge.precision.config import MixedPrecisionConfig
    from bridge.sync.owner import Owner
    from bridge.sync.report import SyncRow

__all__ = ["absent_findings", "effect_findings"]

SCALER_FIELDS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
SCHEME_FIELDS = (
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
)
DPA_SINCE = {"mxfp8": (0, 18), "nvfp4": (0, 17)}
"""Scheme -> first megatron-core that hands `fp8_dot_product_attention` to Transformer Engine for it."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a rule may look at."""

    config: MixedPrecisionConfig
    owners: Mapping[str, Owner]
    """By role, as they were before the sync."""
    version: tuple[int, ...] | None
    """Of megatron-core; None where it is unknown."""


def effect_findings(
    config: MixedPrecisionConfig, owners: Mapping[str, Owner], version: tuple[int, ...] | None
) -> list[Finding]:
    """Return what was stated and has no effect, and what is known to fail after the sync."""
    now = Situation(config=config, owners=owners, version=version)
    return [finding for rule in RULES for finding in rule(now)]


def absent_findings(
    config: MixedPrecisionConfig, rows: list[SyncRow], version: str, owners: Mapping[str, Owner]
) -> list[Finding]:
    """Return a finding for each stated field, away from its default, that an owner of this Megatron has no home for."""
    return [
        Finding(
            path=f"mixed_precision.{row.field}",
            rule=f"{row.owner}.{row.attribute} does not exist in megatron-core {version}, so it is not set there",
            value=getattr(config, row.field),
            where=row.by,
            remedy=f"Use a newer megatron-core ({row.why}), or drop it.",
            severity="warning",
        )
        for row in rows
        if row.verdict == "absent"
        and row.field is not None
        and owners[row.owner].is_megatron
        and _stands_out(config, row.field)
    ]


def _stands_out(config: MixedPrecisionConfig, field: str) -> bool:
    """Return whether `field` was stated with another value than its default."""
    return config.is_stated(field) and getattr(config, field) != getattr(type(config), field)


def _inert(config: MixedPrecisionConfig, field: str, why: str, remedy: str) -> Finding:
    return Finding(
        path=f"mixed_precision.{field}",
        rule=f"has no effect: {why}",
        value=config.to_dict(full=True)[field],
        where=config.source_of(field),
        remedy=remedy,
        severity="warning",
    )


def _scheme_fields(now: Situation) -> Iterator[Finding]:
    config = now.config
    scheme = config.scheme
    rows = FP8_SCHEMES if config.fp8 else FP4_SCHEMES
    for field in SCHEME_FIELDS:
        if not _stands_out(config, field):
            continue
        users = sorted({row.name for row in (*FP8_SCHEMES.values(), *FP4_SCHEMES.values()) if field in row.settings})
        if scheme is None:
            yield _inert(config, field, f"no FP8 or FP4 in this {config.mode.upper()} run", f"Drop {field}.")
        elif field not in rows[scheme].settings:
            why = f"{scheme} scaling does not read it (only {', '.join(users)})"
            yield _inert(config, field, why, f"Drop {field}, or choose a scheme that reads it.")
        elif (
            field == "fp8_dot_product_attention"
            and now.version is not None
            and now.version < DPA_SINCE.get(scheme, (0,))
        ):
            since = ".".join(map(str, DPA_SINCE[scheme]))
            why = f"megatron-core hands it to Transformer Engine under {scheme} from {since} on"
            yield _inert(config, field, why, f"Drop {field}, or use a newer megatron-core.")


def _wgrad(now: Situation) -> Iterator[Finding]:
    config = now.config
    if _stands_out(config, "fp8_wgrad"):
        why = "Transformer Engine 2.0 and later always runs the weight gradient in FP8 and ignores the keyword"
        yield _inert(config, "fp8_wgrad", why, "Drop fp8_wgrad, or use Transformer Engine 1.x.")


def _placement(now: Situation) -> Iterator[Finding]:
    config = now.config
    if config.scheme is None and _stands_out(config, "first_last_layers_bf16"):
        why = f"all layers of this {config.mode.upper()} run are in {config.mode.upper()}"
        yield _inert(config, "first_last_layers_bf16", why, "Drop it, or say fp8 or fp4.")
    model = now.owners.get("model")
    kept = config.first_last_layers_bf16 or (
        not config.is_stated("first_last_layers_bf16")
        and model is not None
        and model.own("first_last_layers_bf16") is True
    )
    counts = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if kept and config.scheme and all(config.is_stated(name) and getattr(config, name) == 0 for name in counts):
        remedy = "State at least one count above 0, or first_last_layers_bf16=False."
        yield _inert(config, counts[0], "with 0 at both ends no layer is kept in BF16", remedy)
    for field in counts:
        if not kept and _stands_out(config, field):
            yield _inert(
                config, field, "first_last_layers_bf16 is off", "State first_last_layers_bf16=True, or drop it."
            )


def _autocast(now: Situation) -> Iterator[Finding]:
    config = now.config
    model = now.owners.get("model")
    is_on = config.autocast_enabled or (
        not config.is_stated("autocast_enabled") and model is not None and model.own("enable_autocast") is True
    )
    tokens = config.to_dict(full=True)
    own = model is not None and model.is_own("autocast_dtype")
    if is_on and not own and (tokens["autocast_dtype"] or tokens["params_dtype"] or config.mode) == "fp32":
        yield _inert(config, "autocast_enabled", "autocast would cast to fp32", "State autocast_dtype, or turn it off.")
    if not is_on and _stands_out(config, "autocast_dtype"):
        yield _inert(config, "autocast_dtype", "autocast is off", "State autocast_enabled=True, or drop it.")


def _loss_scaler(now: Situation) -> Iterator[Finding]:
    config = now.config
    for field in SCALER_FIELDS:
        if _stands_out(config, field) and (not config.fp16 or config.loss_scale is not None):
            why = (
                "the loss scale is constant"
                if config.fp16
                else f"a {config.mode.upper()} run has no dynamic loss scale"
            )
            yield _inert(config, field, why, f"Drop {field}.")
    optimizer = now.owners.get("optimizer")
    if (
        config.mode == "fp32"
        and _stands_out(config, "loss_scale")
        and optimizer is not None
        and optimizer.value("use_distributed_optimizer") is False
    ):
        why = "Megatron's FP32 optimizer has no loss scale unless it is distributed"
        yield _inert(config, "loss_scale", why, "Drop it, or set optimizer.use_distributed_optimizer=True.")


def _fsdp_reduction(now: Situation) -> Iterator[Finding]:
    config = now.config
    ddp = now.owners.get("ddp")
    if (
        ddp is not None
        and config.is_stated("grad_reduce_in_fp32")
        and ddp.value("use_megatron_fsdp") is True
        and now.version is not None
        and now.version >= (0, 19)
    ):
        why = "Megatron-FSDP of megatron-core 0.19 and later does not read it"
        yield _inert(config, "grad_reduce_in_fp32", why, "Set ddp.megatron_fsdp_main_grads_dtype instead.")


def _stored_weights_need_sharding(now: Situation) -> Iterator[Finding]:
    config = now.config
    # Megatron-LM asserts this in its argument parser alone (training/arguments.py).
    optimizer, ddp = now.owners.get("optimizer"), now.owners.get("ddp")
    field = "fp8_param_gather" if config.fp8 else "fp4_param_gather"
    if config.scheme is None or not getattr(config, field) or (optimizer is None and ddp is None):
        return
    sharded = [
        owner for owner in (optimizer, ddp) if owner is not None and owner.value("use_distributed_optimizer") is True
    ]
    fsdp = [name for name in ("use_megatron_fsdp", "use_torch_fsdp2") if ddp is not None and ddp.value(name) is True]
    if not sharded and not fsdp and any(o is not None and o.has("use_distributed_optimizer") for o in (optimizer, ddp)):
        yield Finding(
            path=f"mixed_precision.{field}",
            rule="weights can be stored in low precision only under the distributed optimizer or FSDP",
            value=True,
            where=config.source_of(field),
            remedy=f"Set optimizer.use_distributed_optimizer and ddp.use_distributed_optimizer, or {field}=False.",
        )


def _mxfp8_weights_need_the_buffer(now: Situation) -> Iterator[Finding]:
    config = now.config
    # Transformer Engine raises NotImplementedError while DDP is built (param_and_grad_buffer.py).
    ddp = now.owners.get("ddp")
    if (
        ddp is not None
        and config.fp8
        and config.scheme == "mxfp8"
        and config.fp8_param_gather
        and not config.reuse_grad_buf_for_mxfp8_param_ag
        and ddp.own("reuse_grad_buf_for_mxfp8_param_ag") is not True
        and ddp.value("use_megatron_fsdp") is not True
    ):
        yield Finding(
            path="mixed_precision.fp8_param_gather",
            rule="MXFP8 weights need reuse_grad_buf_for_mxfp8_param_ag, except under Megatron-FSDP",
            value=True,
            where=config.source_of("fp8_param_gather"),
            remedy="State reuse_grad_buf_for_mxfp8_param_ag=True, or fp8_param_gather=False.",
        )


RULES: tuple[Callable[[Situation], Iterator[Finding]], ...] = (
    _scheme_fields,
    _wgrad,
    _placement,
    _autocast,
    _loss_scaler,
    _fsdp_reduction,
    _stored_weights_need_sharding,
    _mxfp8_weights_need_the_buffer,
)
