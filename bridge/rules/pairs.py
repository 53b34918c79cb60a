"""Settings that two configs hold: pairs that must agree, and switches of sharding that are meant for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PAIRS", "SWITCHES", "Pair", "off_switches"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One setting in two places, each a role and an attribute."""

    one: tuple[str, str]
    two: tuple[str, str]
    is_checked: bool = True
    """The check reports a difference as an error; otherwise only a sync has to write both equal."""


PAIRS = (
    Pair(one=("model", "fp16"), two=("optimizer", "fp16")),
    Pair(one=("model", "bf16"), two=("optimizer", "bf16")),
    Pair(one=("model", "fp8_recipe"), two=("optimizer", "fp8_recipe")),
    Pair(one=("optimizer", "reuse_grad_buf_for_mxfp8_param_ag"), two=("ddp", "reuse_grad_buf_for_mxfp8_param_ag")),
    Pair(one=("model", "params_dtype"), two=("optimizer", "params_dtype"), is_checked=False),  # no reader in the latter
    Pair(one=("model", "fp8_param"), two=("ddp", "fp8_param_gather"), is_checked=False),  # PB303
    Pair(one=("model", "fp4_param"), two=("ddp", "fp4_param_gather"), is_checked=False),  # PB303
    Pair(one=("model", "enable_autocast"), two=("model", "autocast_enabled"), is_checked=False),
)

SWITCHES = ("use_distributed_optimizer", "overlap_param_gather")
"""Switches that the optimizer and DDP both have to know; on in one config is meant for both."""


def off_switches(value: Callable[[str, str], Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (role, attribute, why it has to be on) of each switch that is off in the optimizer or in DDP.

    Args:
        value: Returns what a role's attribute holds.
    """
    is_fsdp = value("ddp", "use_megatron_fsdp") is True
    for name in SWITCHES:
        on = [role for role in ("optimizer", "ddp") if value(role, name) is True]
        needed = name == "use_distributed_optimizer" and is_fsdp
        for role in ("optimizer", "ddp"):
            if value(role, name) is False and (on or needed):
                yield role, name, f"{on[0]}.{name} is" if on else "Megatron-FSDP always shards the optimizer"
