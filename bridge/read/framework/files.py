"""`read_framework`: a YAML file of a framework on top of Megatron Core, read by the framework's own module.

A framework's module has `is_of`, whether the contents of a file are an experiment of it that trains on Megatron Core,
and `read`, what such a file says of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bridge.preflight.file_reading import FileReading, RunChoice
from bridge.read.framework import primus


class FrameworkReader(Protocol):
    """The module of a framework."""

    def is_of(self, whole: Mapping[str, Any]) -> bool:
        """Return whether a file of these contents is an experiment of the framework on Megatron Core."""

    def read(self, whole: Mapping[str, Any], path: Path, choice: RunChoice) -> FileReading:
        """Return what the file says of a run; RunConfigError for one that cannot be read."""


READERS: Sequence[FrameworkReader] = (primus,)


def read_framework(whole: Mapping[str, Any], path: Path, choice: RunChoice) -> FileReading | None:
    """Return what a framework's file says of a run; None for a file of no framework that is read here."""
    for reader in READERS:
        if reader.is_of(whole):
            return reader.read(whole, path, choice)
    return None
