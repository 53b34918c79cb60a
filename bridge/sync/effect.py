"""Findings of a sync: what was stated and will not act, what has no home, and what Megatron refuses later on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import Finding, listed
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES
from bridge.sync.effect_storage import STORAGE_RULES
from bridge.sync.sharding import BUFFER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bridge.precision.config import PrecisionConfig
    from bridge.sync.owner import Owner
    from bridge.sync.report import SyncRow
    from bridge.sync.situation import Situation

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


def effect_findings(now: Situation) -> list[Finding]:
    """Return what was stated and has no effect, and what is known to fail after the sync."""
    return [finding for rule in RULES for finding in rule(now)]


def absent_findings(
    config: PrecisionConfig, rows: list[SyncRow], version: str, owners: Mapping[str, Owner]
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
        and config.is_stated(row.field)
        and getattr(config, row.field) != getattr(type(config), row.field)
    ]


def _scheme_fields(now: Situation) -> Iterator[Finding]:
    config, scheme = now.config, now.scheme
    rows = FP8_SCHEMES if config.fp8 else FP4_SCHEMES
    for field in SCHEME_FIELDS:
        if not now.stands_out(field):
            continue
        users = sorted({row.name for row in (*FP8_SCHEMES.values(), *FP4_SCHEMES.values()) if field in row.settings})
        if scheme is None:
            yield now.inert(field, f"no FP8 or FP4 in this {config.mode.upper()} run", f"Drop {field}.")
        elif scheme in rows and field not in rows[scheme].settings:
            why = f"{scheme} scaling does not read it (only {', '.join(users)})"
            yield now.inert(field, why, f"Drop {field}, or choose a scheme that reads it.")
        elif (
            field == "fp8_dot_product_attention"
            and now.version is not None
            and now.version < DPA_SINCE.get(scheme, (0,))
        ):
            since = ".".join(map(str, DPA_SINCE[scheme]))
            why = f"megatron-core hands it to Transformer Engine under {scheme} from {since} on"
            yield now.inert(field, why, f"Drop {field}, or use a newer megatron-core.")


def _wgrad(now: Situation) -> Iterator[Finding]:
    if now.stands_out("fp8_wgrad"):
        why = "Transformer Engine 2.0 and later always runs the weight gradient in FP8 and ignores the keyword"
        yield now.inert("fp8_wgrad", why, "Drop fp8_wgrad, or use Transformer Engine 1.x.")


def _placement(now: Situation) -> Iterator[Finding]:
    config = now.config
    if config.scheme is None and now.stands_out("first_last_layers_bf16"):
        why = f"all layers of this {config.mode.upper()} run are in {config.mode.upper()}"
        yield now.inert("first_last_layers_bf16", why, "Drop it, or say fp8 or fp4.")
    model = now.owners.get("model")
    kept = config.first_last_layers_bf16 or (
        not config.is_stated("first_last_layers_bf16")
        and model is not None
        and model.own("first_last_layers_bf16") is True
    )
    counts = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if kept and config.scheme and all(config.is_stated(name) and getattr(config, name) == 0 for name in counts):
        remedy = "State at least one count above 0, or first_last_layers_bf16=False."
        yield now.inert(counts[0], "with 0 at both ends no layer is kept in BF16", remedy)
    for field in counts:
        if not kept and now.stands_out(field):
            yield now.inert(field, "first_last_layers_bf16 is off", "State first_last_layers_bf16=True, or drop it.")


def _autocast(now: Situation) -> Iterator[Finding]:
    config = now.config
    model = now.owners.get("model")
    is_on = config.autocast_enabled or (
        not config.is_stated("autocast_enabled") and model is not None and model.own("enable_autocast") is True
    )
    tokens = config.to_dict(full=True)
    own = model is not None and model.is_own("autocast_dtype")
    if is_on and not own and (tokens["autocast_dtype"] or tokens["params_dtype"] or config.mode) == "fp32":
        yield now.inert("autocast_enabled", "autocast would cast to fp32", "State autocast_dtype, or turn it off.")
    if not is_on and now.stands_out("autocast_dtype"):
        yield now.inert("autocast_dtype", "autocast is off", "State autocast_enabled=True, or drop it.")


def _loss_scaler(now: Situation) -> Iterator[Finding]:
    config = now.config
    for field in SCALER_FIELDS:
        if now.stands_out(field) and (not config.fp16 or config.loss_scale is not None):
            why = (
                "the loss scale is constant"
                if config.fp16
                else f"a {config.mode.upper()} run has no dynamic loss scale"
            )
            yield now.inert(field, why, f"Drop {field}.")
    optimizer = now.owners.get("optimizer")
    if (
        config.mode == "fp32"
        and now.stands_out("loss_scale")
        and optimizer is not None
        and optimizer.value("use_distributed_optimizer") is False
    ):
        why = "Megatron's FP32 optimizer has no loss scale unless it is distributed"
        yield now.inert("loss_scale", why, "Drop it, or set optimizer.use_distributed_optimizer=True.")


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
        yield now.inert("grad_reduce_in_fp32", why, "Set ddp.megatron_fsdp_main_grads_dtype instead.")


def _left_over(now: Situation) -> Iterator[Finding]:
    """What belongs to a format that is off: the run is what it says, and this does not act."""
    config = now.config
    for family in ("fp8", "fp4"):
        if getattr(config, family) is not None:
            continue
        gather = next((name for name in (f"{family}_param_gather", f"{family}_param") if name in config.stated), None)
        fields = (f"{family}_recipe", gather, BUFFER if family == "fp8" else None)
        for field in fields:
            if field is not None and now.stands_out(field) and getattr(config, field):
                why = f"no {family.upper()} in this {(config.scheme or config.mode).upper()} run"
                yield now.inert(field, why, f"Drop {field}, or say {family}.")


def _kept_scheme(now: Situation) -> Iterator[Finding]:
    """A scheme of an owner's own, kept where the recipe states none, has to train with the recipe's format."""
    config = now.config
    row = FP8_SCHEMES.get(now.scheme or "") if config.fp8 else None
    if row is not None and now.scheme != config.fp8_recipe and config.fp8 not in row.formats:
        holder = next((role for role, owner in now.owners.items() if owner.own("fp8_recipe") == now.scheme), "model")
        yield Finding(
            path=f"{holder}.fp8_recipe",
            rule=f"is kept, as the recipe states none, and trains with {listed(row.formats)}, not with {config.fp8!r}",
            value=now.scheme,
            remedy=f"State fp8={row.formats[0]!r}, or the fp8_recipe that is meant.",
        )


RULES: tuple[Callable[[Situation], Iterator[Finding]], ...] = (
    _scheme_fields,
    _wgrad,
    _placement,
    _autocast,
    _loss_scaler,
    _fsdp_reduction,
    _left_over,
    _kept_scheme,
    *STORAGE_RULES,
)
