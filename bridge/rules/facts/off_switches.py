"""`find_off_switches`: switches that are off in the optimizer or in DDP and have to be on in both."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bridge.target.fields import SHARED_SWITCHES

SHARDING_OWNERS = ("optimizer", "ddp")
"""The two configs that hold each switch of `SWITCHES`."""


class OffSwitch(NamedTuple):
    """A switch of `SWITCHES` that is off in one config and has to be on."""

    role: str
    attribute: str
    why: str
    """Why it has to be on."""


def find_off_switches(value: Callable[[str, str], Any]) -> Iterator[OffSwitch]:
    """Yield each switch that is off in the optimizer or in DDP and has to be on."""
    is_fsdp = value("ddp", "use_megatron_fsdp") is True
    for name in SHARED_SWITCHES:
        on = [role for role in SHARDING_OWNERS if value(role, name) is True]
        if on:
            why = f"{on[0]}.{name} is"
        elif name == "use_distributed_optimizer" and is_fsdp:
            why = "Megatron-FSDP always shards the optimizer"
        else:
            continue
        for role in SHARDING_OWNERS:
            if value(role, name) is False:
                yield OffSwitch(role, name, why)
