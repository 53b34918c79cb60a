"""`read_framework`: a YAML file of a framework on top of Megatron Core, read by the framework's own module.

A module in `EXPERIMENT_READERS` has `is_of`, whether a file of these contents trains on Megatron
Core, and `read`, which returns the reading of the file. The files of a framework in `TREE_READERS`
are recognised by the column `tree` of its row in `framework_signs.yaml`, and its module has
`read_config` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bridge.errors import PayloadError, UnreadFileError
from bridge.preflight.file_reading import FileReading
from bridge.preflight.run_choice import RunChoice
from bridge.read import framework_signs
from bridge.read.framework import (
    flagscale,
    ms_swift,
    nemo_rl,
    primus,
    primus_bridge,
    roll,
    verl,
)
from bridge.read.text.document import Document
from bridge.read.text.inherited_config import DEFAULTS_KEY, read_inherited_config


class FrameworkReader(Protocol):
    """The module of a framework."""

    def is_of(self, config: Mapping[str, Any]) -> bool:
        """Return whether a file of these contents is an experiment of the framework on Megatron Core."""

    def read(self, config: Mapping[str, Any], path: Path, choice: RunChoice) -> FileReading:
        """Return what the file says of a run; RunConfigError for one that cannot be read."""


EXPERIMENT_READERS: Sequence[FrameworkReader] = (primus, primus_bridge, flagscale)
TREE_READERS: Mapping[str, Callable[[Mapping[str, Any], Path, RunChoice], FileReading]] = {
    "ms_swift": ms_swift.read_config,
    "nemo_rl": nemo_rl.read_config,
    "roll": roll.read_config,
    "verl": verl.read_config,
}
"""Table of a framework -> the function that reads a YAML file of it."""


def read_framework(config: Mapping[str, Any], path: Path, choice: RunChoice) -> FileReading | None:
    """Return what a framework's file says of a run; None for a file of no framework that is read here."""
    for reader in EXPERIMENT_READERS:
        if reader.is_of(config):
            return reader.read(config, path, choice)
    framework = _recognise(config, path)
    if framework is None and DEFAULTS_KEY in config:
        framework = _recognise_by_defaults(config, path)
        if framework is not None and not framework.tree:
            raise UnreadFileError(framework.refusal(str(path)), kind=f"looks like {framework.name}")
    if framework is None or framework.tree not in TREE_READERS:
        return None
    choice.refuse_for(path)
    return TREE_READERS[framework.tree](config, path, choice)


def _recognise(config: Mapping[str, Any], path: Path) -> framework_signs.Framework | None:
    return framework_signs.recognise_file(Document(path=str(path), text="", kind="yaml", of=config))


def _recognise_by_defaults(
    whole: Mapping[str, Any], path: Path
) -> framework_signs.Framework | None:
    """Return the framework of a file by the files that its `defaults` names; None where none of them is there."""
    try:
        config = read_inherited_config(path, whole)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    return _recognise(config.values, path) if config.read else None
