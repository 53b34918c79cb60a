"""Findings about weights stored in FP8 or FP4: what they need of DDP and optimizer, and the buffer they go through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import Finding
from bridge.sync.sharding import BUFFER, out_of_step, under_fsdp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.sync.situation import Situation

__all__ = ["STORAGE_RULES"]


def _low_precision_weights(now: Situation) -> tuple[str, str] | None:
    """Return what stores the weights in low precision, by its path, and who said so; None where nothing does."""
    config = now.config
    if config.scheme is None:
        return None
    family = "fp8" if config.fp8 else "fp4"
    field = f"{family}_param_gather"
    if getattr(config, field):
        return f"mixed_precision.{field}", config.source_of(field)
    homes = (("ddp", field), ("model", f"{family}_param"))
    return next(((f"{role}.{name}", role) for role, name in homes if now.after(role, name) is True), None)


def _stored_weights_need_sharding(now: Situation) -> Iterator[Finding]:
    # Megatron-LM asserts this in its argument parser alone (training/arguments.py).
    optimizer, ddp = now.owners.get("optimizer"), now.owners.get("ddp")
    stored = _low_precision_weights(now)
    owners = [owner for owner in (optimizer, ddp) if owner is not None and owner.has("use_distributed_optimizer")]
    if stored is None or not owners:
        return
    sharded = any(owner.value("use_distributed_optimizer") is True for owner in owners)
    fsdp = ddp is not None and any(ddp.value(name) is True for name in ("use_megatron_fsdp", "use_torch_fsdp2"))
    if not sharded and not fsdp:
        path, by = stored
        remedy = f"Set optimizer.use_distributed_optimizer and ddp.use_distributed_optimizer, or {_name(path)}=False."
        rule = "weights can be stored in low precision only under the distributed optimizer or FSDP"
        yield Finding(path=path, rule=rule, value=True, where=by, remedy=remedy)


def _mxfp8_weights_need_the_buffer(now: Situation) -> Iterator[Finding]:
    # Transformer Engine raises NotImplementedError while DDP is built (param_and_grad_buffer.py).
    stored = _low_precision_weights(now)
    if (
        stored is not None
        and "ddp" in now.owners
        and now.config.fp8
        and now.scheme == "mxfp8"
        and now.after("ddp", BUFFER) is not True
        and not under_fsdp(now.owners)
    ):
        path, by = stored
        rule = f"MXFP8 weights need {BUFFER}, except under Megatron-FSDP"
        yield Finding(
            path=path, rule=rule, value=True, where=by, remedy=f"State {BUFFER}=True, or {_name(path)}=False."
        )


def _buffer_under_fsdp(now: Situation) -> Iterator[Finding]:
    if under_fsdp(now.owners) and now.scheme == "mxfp8" and now.stands_out(BUFFER):
        # A recipe says it for runs without FSDP; who says it himself expects something of it.
        is_settled = now.is_last and now.config.source_of(BUFFER).startswith("recipe ")
        why = "Megatron-FSDP does not implement it" + (", and it is turned off" if now.is_last else "")
        remedy = f"Set {BUFFER}=False{'' if now.is_last else ', as runtime_config_update does'}."
        yield now.inert(BUFFER, why, remedy, severity="info" if is_settled else "warning")


def _put_aside(now: Situation) -> Iterator[Finding]:
    for field, by in now.config.put_aside.items():
        yield Finding(
            path=f"mixed_precision.{field}",
            rule=f"is off, because what it needs was turned off after {by} had turned it on",
            value=False,
            where=now.config.source_of(field),
            remedy=f"Nothing is to be done; {field}=False says the same.",
            severity="info",
        )


def _out_of_step(now: Situation) -> Iterator[Finding]:
    yield from out_of_step(now.owners, settled=now.is_last)


def _name(path: str) -> str:
    return path.removeprefix("mixed_precision.")


STORAGE_RULES: tuple[Callable[[Situation], Iterator[Finding]], ...] = (
    _stored_weights_need_sharding,
    _mxfp8_weights_need_the_buffer,
    _buffer_under_fsdp,
    _put_aside,
    _out_of_step,
)
