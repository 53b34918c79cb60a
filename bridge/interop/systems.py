"""The foreign systems by name. Importing this imports none of them."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from bridge.errors import PayloadError, close_matches, did_you_mean

if TYPE_CHECKING:
    from bridge.interop.contract import System

__all__ = ["KINDS", "MODULES", "all_systems", "system"]

MODULES = MappingProxyType(
    {
        "megatron-lm": "bridge.interop.megatron_lm.importer",
        "megatron-bridge": "bridge.interop.megatron_bridge",
        "nemo1": "bridge.interop.nemo1.importer",
        "nemo2": "bridge.interop.nemo2",
        "te-recipe": "bridge.interop.te_recipe",
        "axolotl": "bridge.interop.axolotl",
        "huggingface": "bridge.interop.huggingface",
        "accelerate": "bridge.interop.accelerate",
        "deepspeed": "bridge.interop.deepspeed",
        "lightning": "bridge.interop.lightning",
        "torchao": "bridge.interop.torchao",
        "torchtitan": "bridge.interop.torchtitan",
        "pytorch": "bridge.interop.pytorch",
        "fsdp": "bridge.interop.fsdp",
    }
)
"""Name of a system -> the module that ends with its `SYSTEM`."""

KINDS = MappingProxyType(
    {
        "megatron-lm": ("shell", "yaml", "json", "text", "env"),
        "megatron-bridge": ("yaml", "json"),
        "nemo1": ("yaml",),
        "nemo2": ("python", "yaml", "json"),
        "te-recipe": ("json", "yaml"),
        "axolotl": ("yaml",),
        "huggingface": ("json", "yaml"),
        "accelerate": ("yaml", "json", "env"),
        "deepspeed": ("json",),
        "lightning": ("yaml", "json"),
        "torchao": ("json", "yaml"),
        "torchtitan": ("json", "yaml", "text"),
        "pytorch": ("json",),
        "fsdp": ("json", "yaml"),
    }
)
"""Name of a system -> kinds of document it is written in; only these are shown to its `recognise`."""


def system(name: str) -> System:
    """Return a system by its name, in either spelling.

    Raises:
        PayloadError: There is none of that name; the nearest are named.
    """
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in MODULES:
        hint = did_you_mean(close_matches(wanted, MODULES)) or f"Systems: {', '.join(MODULES)}."
        raise PayloadError(f"no system is called {name!r}. {hint}")
    found: System = import_module(MODULES[wanted]).SYSTEM
    return found


def all_systems(kind: str | None = None) -> list[System]:
    """Return every system, or those that documents of one kind can be written for, in the order of the table."""
    return [system(name) for name in MODULES if kind is None or kind in KINDS[name]]
