"""`maybe_read`: a launch script of a framework on Megatron Core that has settings of its own on its command line.

Scripts of a framework that takes Megatron-LM's arguments are read with those of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.errors import PayloadError, RunConfigError, UnreadFileError
from bridge.preflight.file_reading import FileReading, RunChoice
from bridge.read import framework_signs
from bridge.read.framework import ms_swift, nemo_rl, roll, verl
from bridge.read.launch.alternatives import launches
from bridge.read.launch.launches import Launch
from bridge.read.megatron_bridge import launch as megatron_bridge
from bridge.read.text.document import Document

SIGNS = re.compile(r"policy\.|--config|run_\w+\.py|actor_rollout_ref|verl|megatron\s|swift")
"""Words without which a script is none of these frameworks'."""
BRIDGE = "megatron_bridge"
Reader = Callable[[Launch, Path, RunChoice], FileReading]

READERS: Mapping[str, Reader] = {
    BRIDGE: megatron_bridge.read_launch,
    "ms_swift": ms_swift.read_launch,
    "nemo_rl": nemo_rl.read_launch,
    "roll": roll.read_launch,
    "verl": verl.read_launch,
}
"""Table of a framework -> the function that reads a launch of it."""


def maybe_read(document: Document, choice: RunChoice) -> FileReading | None:
    """Return what one launch of a script says; None where no launch is one of such a framework.

    Raises:
        RunConfigError: It trains on something else than Megatron Core, or cannot be read.
    """
    if document.kind != "shell" or not SIGNS.search(document.text):
        return None
    try:
        found = _launches_of(launches(document.text, document.path, choice.variables))
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    if not found:
        return None
    number = choice.number or 1
    if not 1 <= number <= len(found):
        rule = f"must be from 1 to {len(found)}, the runs of {document.path}"
        raise RunConfigError.of("--launch", rule, number, "Give the number of one of them.")
    launch, table = found[number - 1]
    if choice.asks_megatron_bridge and table != BRIDGE:
        rule = f"calls a recipe of Megatron Bridge, and {launch.name} starts none"
        raise RunConfigError.of("--ask-megatron-bridge", rule, True, "Drop it.")
    reading = READERS[table](launch, Path(document.path), choice)
    labels = tuple(one.label for one, _ in found) if len(found) > 1 else ()
    return replace(reading, runs=labels, number=number)


def _launches_of(started: Sequence[Launch]) -> list[tuple[Launch, str]]:
    """Return the launches of such frameworks, each with the table of its framework."""
    found = []
    for launch in started:
        framework = framework_signs.recognise_launch(launch)
        if framework is not None and framework.tree in READERS:
            found.append((launch, framework.tree))
    return found
