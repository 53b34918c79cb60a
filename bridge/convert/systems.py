"""The foreign systems that `convert` reads and writes, by name.

`detect_system` finds the system of a document. The module of a system is imported only when it is
needed.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from bridge.errors import PayloadError, close_matches, did_you_mean, listed
from bridge.read.foreign_system_signs import list_candidates

if TYPE_CHECKING:
    from bridge.read.foreign.system import System
    from bridge.read.text.document import Document

SYSTEM_MODULES = MappingProxyType(
    {
        "megatron-lm": "bridge.read.megatron_lm.importer",
        "megatron-bridge": "bridge.read.megatron_bridge.importer",
        "nemo1": "bridge.read.nemo.nemo1",
        "nemo2": "bridge.read.nemo.nemo2",
        "axolotl": "bridge.convert.axolotl",
        "huggingface": "bridge.convert.huggingface",
        "deepspeed": "bridge.read.deepspeed",
    }
)
"""Name of a system -> its module, which ends with its `SYSTEM`."""
TIE_MARGIN = 0.05
"""Two systems whose certainties differ by less are a tie."""


def get_system(name: str) -> System:
    """Return a system by its name, with hyphens or underscores.

    Raises:
        PayloadError: No system has the name. The message has the nearest names.
    """
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in SYSTEM_MODULES:
        hint = did_you_mean(close_matches(wanted, SYSTEM_MODULES))
        if not hint:
            hint = f"Systems: {', '.join(SYSTEM_MODULES)}."
        raise PayloadError(f"no system is called {name!r}. {hint}")
    system: System = import_module(SYSTEM_MODULES[wanted]).SYSTEM
    return system


def list_systems() -> list[System]:
    """Return every system, in the order of the table."""
    return [get_system(name) for name in SYSTEM_MODULES]


def detect_system(document: Document, system_name: str | None = None) -> tuple[System, str]:
    """Return the system that a document was written for, and the evidence as a clause after "it".

    Args:
        document: The file.
        system_name: The system that --from names, which overrules detection.

    Raises:
        PayloadError: No system is recognised, or two systems have the same certainty.
    """
    if system_name is not None:
        return get_system(system_name), "was named with --from"
    candidates = list_candidates(document)
    if not candidates:
        remedy = f"Name the system with --from: {', '.join(SYSTEM_MODULES)}."
        if document.kind == "python":
            remedy = "Give a configuration."
        rule = f"no system is recognised in this {document.kind} file"
        raise PayloadError(f"{document.path}: {rule}. {remedy}")
    first = candidates[0]
    tied = [other for other in candidates if first.certainty - other.certainty < TIE_MARGIN]
    if len(tied) > 1:
        names = listed([candidate.system for candidate in tied])
        reasons = "; ".join(f"{candidate.system}: it {candidate.evidence}" for candidate in tied)
        raise PayloadError(f"{document.path}: could be {names} ({reasons}). Say which with --from.")
    return get_system(first.system), first.evidence
