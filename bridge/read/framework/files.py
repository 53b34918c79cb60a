"""`read_framework`: a YAML file of a framework on top of Megatron Core, read by the framework's own module.

A framework's module has `is_of`, whether the contents of a file are an experiment of it that trains on Megatron Core,
and `read`, what such a file says of a run. A framework whose settings are a tree of its own is recognised by the column
`tree` of its row, and its module has `read` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bridge.errors import PayloadError, UnreadFileError
from bridge.preflight.file_reading import FileReading, RunChoice
from bridge.read import framework_signs
from bridge.read.framework import flagscale, ms_swift, nemo_rl, primus, roll, verl
from bridge.read.text.composed import DEFAULTS, composed
from bridge.read.text.document import Document


class FrameworkReader(Protocol):
    """The module of a framework."""

    def is_of(self, whole: Mapping[str, Any]) -> bool:
        """Return whether a file of these contents is an experiment of the framework on Megatron Core."""

    def read(self, whole: Mapping[str, Any], path: Path, choice: RunChoice) -> FileReading:
        """Return what the file says of a run; RunConfigError for one that cannot be read."""


READERS: Sequence[FrameworkReader] = (primus, flagscale)
TREES: Mapping[str, Callable[[Mapping[str, Any], Path, RunChoice], FileReading]] = {
    "ms_swift": ms_swift.read,
    "nemo_rl": nemo_rl.read,
    "roll": roll.read,
    "verl": verl.read,
}
"""Table of a framework -> the function that reads a YAML file of it."""


def read_framework(whole: Mapping[str, Any], path: Path, choice: RunChoice) -> FileReading | None:
    """Return what a framework's file says of a run; None for a file of no framework that is read here."""
    for reader in READERS:
        if reader.is_of(whole):
            choice.refuse_checkpoint(path)
            return reader.read(whole, path, choice)
    found = _recognised(whole, path)
    if found is None and DEFAULTS in whole:
        found = _by_its_bases(whole, path)
        if found is not None and not found.tree:
            raise UnreadFileError(found.refusal(str(path)), kind=f"looks like {found.name}")
    if found is None or found.tree not in TREES:
        return None
    choice.refuse_for(path)
    return TREES[found.tree](whole, path, choice)


def _recognised(whole: Mapping[str, Any], path: Path) -> framework_signs.Framework | None:
    return framework_signs.recognise_file(Document(path=str(path), text="", kind="yaml", of=whole))


def _by_its_bases(whole: Mapping[str, Any], path: Path) -> framework_signs.Framework | None:
    """Return the framework of a file by the files that its `defaults` names; None where none of them is there."""
    try:
        config = composed(path, whole)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    return _recognised(config.values, path) if config.read else None
