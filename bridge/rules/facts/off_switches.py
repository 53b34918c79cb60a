"""`find_off_switches`: switches that are off in the optimizer or in DDP and have to be on in both."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bridge.target.fields import SHARED_SWITCHES

SHARDING_OWNERS = ("optimizer", "ddp")
"""The two owners that have each switch of `SHARED_SWITCHES`."""


class OffSwitch(NamedTuple):
    """A switch of `SHARED_SWITCHES` that is off in one owner and has to be on."""

    owner_name: str
    attribute: str
    is_for_fsdp: bool
    """Whether Megatron-FSDP needs the switch. False: the other owner has the switch on."""
    why: str
    """Why the switch has to be on."""


def find_off_switches(get_value: Callable[[str, str], Any]) -> Iterator[OffSwitch]:
    """Yield each switch that is off in the optimizer or in DDP and has to be on.

    Args:
        get_value: A function of an owner name and an attribute. It returns the value of the
            attribute.
    """
    is_fsdp = get_value("ddp", "use_megatron_fsdp") is True
    for name in SHARED_SWITCHES:
        owners_on = [owner for owner in SHARDING_OWNERS if get_value(owner, name) is True]
        is_for_fsdp = not owners_on and name == "use_distributed_optimizer" and is_fsdp
        if owners_on:
            why = f"{owners_on[0]}.{name} is"
        elif is_for_fsdp:
            why = "Megatron-FSDP always shards the optimizer"
        else:
            continue
        for owner_name in SHARDING_OWNERS:
            if get_value(owner_name, name) is False:
                yield OffSwitch(owner_name, name, is_for_fsdp, why)
