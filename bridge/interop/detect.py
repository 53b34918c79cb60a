"""Which system a document was written for, and how that shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import PayloadError, listed
from bridge.interop.systems import MODULES, all_systems, system

if TYPE_CHECKING:
    from bridge.interop.contract import Recognised, System
    from bridge.interop.document import Document


CLOSE = 0.05
"""Certainties this close are a tie."""


def candidates(document: Document) -> list[tuple[System, Recognised]]:
    """Return every system that takes a document for its own, the most certain first."""
    found = [(one, why) for one in all_systems(document.kind) if (why := one.recognise(document)) is not None]
    return sorted(found, key=lambda pair: -pair[1].certainty)


def detect(document: Document, chosen: str | None = None) -> tuple[System, str]:
    """Return the system of a document and the evidence, as a clause.

    Args:
        document: The document.
        chosen: The name of the system given with --from; overrules detection.

    Raises:
        PayloadError: No system recognises it, two do with the same certainty, or `chosen` is the name of none.
    """
    if chosen is not None:
        return system(chosen), "was named with --from"
    found = candidates(document)
    if not found:
        remedy = f"Name the system with --from: {', '.join(MODULES)}."
        if document.kind == "python":
            remedy = "Give a configuration; `precision-bridge sources FOLDER` lists what programs call."
        raise PayloadError(f"{document.path}: no system is recognised in this {document.kind} file. {remedy}")
    (first, why), *others = found
    tied = [one for one, other in others if why.certainty - other.certainty < CLOSE]
    if tied:
        reasons = "; ".join(f"{one.name}: it {reason.evidence}" for one, reason in found[: len(tied) + 1])
        names = listed([first.name, *(one.name for one in tied)])
        raise PayloadError(f"{document.path}: could be {names} ({reasons}). Say which with --from.")
    return first, why.evidence
