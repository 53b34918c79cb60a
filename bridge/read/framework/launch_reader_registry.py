"""`maybe_read_script`: a launch script of a framework that has settings of its own.

Scripts of a framework that takes Megatron-LM's arguments are read with those of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.errors import PayloadError, RunConfigError, UnreadFileError
from bridge.preflight.file_reading import FileReading
from bridge.preflight.launches import Launches
from bridge.preflight.run_choice import RunChoice
from bridge.read import framework_signs
from bridge.read.framework import ms_swift, nemo_rl, primus_launch, roll, verl
from bridge.read.launch.launch import Launch
from bridge.read.launch.script_launches import read_document_launches
from bridge.read.megatron_bridge import launch as megatron_bridge
from bridge.read.text.document import Document

SCRIPT_SIGNS = re.compile(
    r"policy\.|--config|run_\w+\.py|actor_rollout_ref|verl|megatron\s|swift|primus-cli"
)
"""Words without which a script is none of these frameworks'."""
MEGATRON_BRIDGE_TABLE = "megatron_bridge"
LaunchReader = Callable[[Launch, Path, RunChoice], FileReading]

LAUNCH_READERS: Mapping[str, LaunchReader] = {
    MEGATRON_BRIDGE_TABLE: megatron_bridge.read_launch,
    "ms_swift": ms_swift.read_launch,
    "nemo_rl": nemo_rl.read_launch,
    "primus": primus_launch.read_launch,
    "roll": roll.read_launch,
    "verl": verl.read_launch,
}
"""Table of a framework -> the function that reads a launch of it."""


def maybe_read_script(document: Document, choice: RunChoice) -> FileReading | None:
    """Return what one launch of a script says; None where no launch is one of such a framework.

    Raises:
        RunConfigError: It trains on something else than Megatron Core, or cannot be read.
    """
    if document.kind != "shell" or not SCRIPT_SIGNS.search(document.text):
        return None
    try:
        framework_launches = _collect_framework_launches(
            read_document_launches(document, choice.variables)
        )
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    if not framework_launches:
        return None
    number = choice.number or 1
    if not 1 <= number <= len(framework_launches):
        rule = f"must be from 1 to {len(framework_launches)}, the runs of {document.path}"
        raise RunConfigError.of("--launch", rule, number, "Give the number of one of them.")
    launch, table = framework_launches[number - 1]
    if choice.asks_megatron_bridge and table != MEGATRON_BRIDGE_TABLE:
        rule = f"calls a recipe of Megatron Bridge, and {launch.name} starts none"
        raise RunConfigError.of("--ask-megatron-bridge", rule, True, "Drop it.")
    labels: tuple[str, ...] = ()
    if len(framework_launches) > 1:
        labels = tuple(one.label for one, _ in framework_launches)
    try:
        reading = LAUNCH_READERS[table](launch, Path(document.path), choice)
    except UnreadFileError as error:
        refused_numbers = _list_refused(framework_launches, document, choice)
        if len(refused_numbers) < len(labels):
            others = Launches(labels=labels, number=number, refused_numbers=refused_numbers)
            for sentence in others.sentences:
                error.add_note(sentence)
        raise
    # A reader of a launch gives the variables; the labels are of the whole script.
    launches = replace(reading.launches, labels=labels, number=number)
    return replace(reading, launches=launches)


def _list_refused(
    framework_launches: Sequence[tuple[Launch, str]], document: Document, choice: RunChoice
) -> tuple[int, ...]:
    """Return the numbers of the launches that train nothing on Megatron Core, from 1."""
    refused_numbers = []
    for number, (launch, table) in enumerate(framework_launches, start=1):
        try:
            LAUNCH_READERS[table](launch, Path(document.path), choice)
        except UnreadFileError:
            refused_numbers.append(number)
        except RunConfigError:
            continue  # a run on Megatron Core with a fault, which --launch NUMBER shows
    return tuple(refused_numbers)


def _collect_framework_launches(launches_of_script: Sequence[Launch]) -> list[tuple[Launch, str]]:
    """Return the launches of such frameworks, each with the table of its framework."""
    framework_launches = []
    for launch in launches_of_script:
        framework = framework_signs.recognise_launch(launch)
        if framework is not None and framework.tree in LAUNCH_READERS:
            framework_launches.append((launch, framework.tree))
    return framework_launches
