"""The foreign systems by name. Importing this imports none of them."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from bridge.errors import PayloadError, close_matches, did_you_mean

if TYPE_CHECKING:
    from bridge.interop.contract import System


ROWS = {
    "megatron-lm": ("megatron_lm.importer", "shell yaml json text env"),
    "megatron-bridge": ("megatron_bridge", "yaml json"),
    "nemo1": ("nemo1.importer", "yaml"),
    "nemo2": ("nemo2", "python yaml json"),
    "te-recipe": ("te_recipe", "json yaml"),
    "axolotl": ("axolotl", "yaml"),
    "huggingface": ("huggingface", "json yaml"),
    "accelerate": ("accelerate", "yaml json env"),
    "deepspeed": ("deepspeed", "json"),
    "lightning": ("lightning", "yaml json"),
    "torchao": ("torchao", "json yaml"),
    "torchtitan": ("torchtitan", "json yaml text"),
    "pytorch": ("pytorch", "json"),
    "fsdp": ("fsdp", "json yaml"),
}
"""Name of a system -> its module in this room, which ends with its `SYSTEM`, and the kinds of document it is in."""

MODULES = MappingProxyType({name: f"bridge.interop.{module}" for name, (module, _) in ROWS.items()})
KINDS = MappingProxyType({name: tuple(kinds.split()) for name, (_, kinds) in ROWS.items()})
"""Only documents of these kinds are shown to a system's `recognise`."""


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
