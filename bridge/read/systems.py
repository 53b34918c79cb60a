"""The foreign systems by name, and which of them a document was written for.

Importing this imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from bridge.errors import PayloadError, close_matches, did_you_mean, listed

if TYPE_CHECKING:
    from bridge.read.contract import Recognised, System
    from bridge.read.text.document import Document

ROWS = {
    "megatron-lm": ("read.megatron_lm.importer", "shell yaml json text env"),
    "megatron-bridge": ("read.megatron_bridge.importer", "yaml json python"),
    "nemo1": ("read.nemo.nemo1", "yaml"),
    "nemo2": ("read.nemo.nemo2", "python yaml json"),
    "axolotl": ("convert.axolotl", "yaml"),
    "huggingface": ("convert.huggingface", "json yaml"),
    "deepspeed": ("read.deepspeed", "json"),
}
"""Name of a system -> its module in `bridge`, which ends with its `SYSTEM`, and the kinds of
document it is in."""

MODULES = MappingProxyType({name: f"bridge.{module}" for name, (module, _) in ROWS.items()})
KINDS = MappingProxyType({name: tuple(kinds.split()) for name, (_, kinds) in ROWS.items()})
"""Only documents of these kinds are shown to a system's `recognise`."""
CLOSE = 0.05
"""Certainties this close are a tie."""


def system(name: str) -> System:
    """Return a system by its name, in either spelling.

    PayloadError with the nearest names where there is none.
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


def candidates(document: Document) -> list[tuple[System, Recognised]]:
    """Return every system that takes a document for its own, the most certain first."""
    read = [(one, one.recognise(document)) for one in all_systems(document.kind)]
    found = [(one, why) for one, why in read if why is not None]
    return sorted(found, key=lambda pair: -pair[1].certainty)


def detect(document: Document, chosen: str | None = None) -> tuple[System, str]:
    """Return the system of a document and the evidence, as a clause.

    `chosen` with --from overrules detection.
    """
    if chosen is not None:
        return system(chosen), "was named with --from"
    found = candidates(document)
    if not found:
        remedy = f"Name the system with --from: {', '.join(MODULES)}."
        if document.kind == "python":
            remedy = "Give a configuration."
        raise PayloadError(
            f"{document.path}: no system is recognised in this {document.kind} file. {remedy}"
        )
    (first, why), *others = found
    tied = [one for one, other in others if why.certainty - other.certainty < CLOSE]
    if tied:
        reasons = "; ".join(
            f"{one.name}: it {reason.evidence}" for one, reason in found[: len(tied) + 1]
        )
        names = listed([first.name, *(one.name for one in tied)])
        raise PayloadError(f"{document.path}: could be {names} ({reasons}). Say which with --from.")
    return first, why.evidence
