"""`maybe_read`: a file of a framework on Megatron Core that has settings of its own, read by the framework's module.

That is a YAML file, or a launch script whose command line has its settings. Files of a framework that takes
Megatron-LM's arguments are read with those of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.errors import PayloadError, RunConfigError
from bridge.front.files import ms_swift, nemo_rl, verl
from bridge.front.files.reading import FileReading, RunChoice
from bridge.interop import frameworks
from bridge.interop.launch.alternatives import launches
from bridge.interop.launch.launches import Launch
from bridge.interop.reading.composed import DEFAULTS, composed
from bridge.interop.reading.document import Document

SIGNS = re.compile(r"policy\.|--config|actor_rollout_ref|verl|megatron\s|swift")
"""Words without which a script is none of these frameworks'."""
READERS = {"ms_swift": ms_swift.read_launch, "nemo_rl": nemo_rl.read_launch, "verl": verl.read_launch}
"""Table of a framework -> the function that reads a launch of it."""
FILES = {"ms_swift": ms_swift.read, "nemo_rl": nemo_rl.read, "verl": verl.read}
"""The same -> the function that reads a YAML file of it."""


def maybe_read(document: Document, path: Path, choice: RunChoice | None) -> FileReading | None:
    """Return what a file of such a framework says of a run; None for another file.

    Raises:
        RunConfigError: It trains on something else than Megatron Core, or cannot be read.
    """
    if document.kind == "shell":
        return _of_script(document, choice or RunChoice()) if SIGNS.search(document.text) else None
    if document.kind != "yaml":
        return None
    return maybe_read_mapping(document.mapping, path)


def maybe_read_mapping(whole: Mapping[str, object], path: Path) -> FileReading | None:
    """Return what the mapping of a YAML file says of a run; None for a file of no such framework."""
    found = _recognised(whole, path)
    if found is None and DEFAULTS in whole:
        found = _by_its_bases(whole, path)
        if found is not None and not found.tree:
            raise RunConfigError(found.refusal(str(path)))
    if found is None or found.tree not in FILES:
        return None
    return FILES[found.tree](whole, path)


def _recognised(whole: Mapping[str, object], path: Path) -> frameworks.Framework | None:
    return frameworks.recognise(Document(path=str(path), text="", kind="yaml", of=whole))


def _by_its_bases(whole: Mapping[str, object], path: Path) -> frameworks.Framework | None:
    """Return the framework of a file by the files that its `defaults` names; None where none of them is there."""
    try:
        config = composed(path, whole)
    except PayloadError as error:
        raise RunConfigError(str(error)) from None
    return _recognised(config.values, path) if config.read else None


def _of_script(document: Document, choice: RunChoice) -> FileReading | None:
    """Return what one launch of a script says; None where no launch is one of such a framework."""
    try:
        found = _launches_of(launches(document.text, document.path, choice.variables))
    except PayloadError as error:
        raise RunConfigError(str(error)) from None
    if not found:
        return None
    number = choice.number or 1
    if not 1 <= number <= len(found):
        rule = f"must be from 1 to {len(found)}, the runs of {document.path}"
        raise RunConfigError.of("--launch", rule, number, "Give the number of one of them.")
    launch, table = found[number - 1]
    reading = READERS[table](launch, Path(document.path))
    labels = tuple(one.label for one, _ in found) if len(found) > 1 else ()
    return replace(reading, runs=labels, number=number)


def _launches_of(started: Sequence[Launch]) -> list[tuple[Launch, str]]:
    """Return the launches of such frameworks, each with the table of its framework."""
    found = []
    for launch in started:
        framework = frameworks.of_launch(launch)
        if framework is not None and framework.tree in READERS:
            found.append((launch, framework.tree))
    return found
