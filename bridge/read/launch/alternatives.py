"""`launches`: what a script starts on the branches that bash takes with nothing set, and on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.read.launch.launches import STATING, UNREADABLE, Launch
from bridge.read.launch.reader import MAX_STEPS, Arm, Reader
from bridge.read.launch.script import broken_line, parse, unexecuted
from bridge.read.launch.variables import split
from bridge.read.launch.word import Word

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

MAX_BRANCHES = 48


def launches(
    text: str, path: str = "<script>", variables: Mapping[str, str] | None = None
) -> tuple[Launch, ...]:
    """Return the launches of a script, first those of the branch that bash takes with nothing set.

    A launch of another branch is listed where its precision differs, and names the branch. Without any launch, one is
    made of the arguments that the script's variables hold.

    Files that the script sources are read from the folder of `path`; `variables` is what the user states of the
    environment.
    """
    root, stated = parse(text, path), variables or {}
    error, others = broken_line(root), list[tuple[Arm, Reader]]()
    try:
        first = _read(root, path, stated, {})
        steps = first.steps
        for arm, _ in [*first.questions.values()][:MAX_BRANCHES]:
            if steps < MAX_STEPS:
                assumed = [arm.test.equal] if arm.test.equal else []
                answers = {} if assumed else {arm.text: not arm.test.holds}
                others.append((arm, _read(root, path, {**stated, **dict(assumed)}, answers)))
                steps += others[-1][1].steps
    except RecursionError:
        raise PayloadError(
            f"{path}: commands are nested too deeply to be followed. Simplify the script."
        ) from None
    if not first.launches and error:
        rule = "must be bash that can be read here, and is not"
        raise PayloadError(f"{path}, line {error}: {rule}. Correct the script there.")
    notes = [f"line {error}, which {UNREADABLE}"] if error else []
    if len(others) < len(first.questions):
        notes.append(f"the branches behind the first {len(others)}")
    for reader in (first, *(reader for _, reader in others)):
        unread = unexecuted(reader.scripts, STATING, reader.executed)
        made = reader.launches or [_held(reader)]
        reader.launches = [
            replace(launch, notes=(*reader.notes, *notes), unread=unread) for launch in made
        ]
    return tuple(_listed(first, others))


def _read(root: Node, path: str, stated: Mapping[str, str], answers: Mapping[str, bool]) -> Reader:
    """Return a reading of a script; one that its own checks would end before any launch passes them."""
    reader = Reader(root, path, stated, answers)
    if reader.end == "exit" and not reader.launches:
        return Reader(root, path, stated, answers, is_lenient=True)
    return reader


def _held(reader: Reader) -> Launch:
    """Return the arguments that variables hold, for a file that others source."""
    values = {
        name: " ".join(reader.held(name)) for name in reader.values if name not in reader.stated
    }
    words = {name: [Word.of(word) for word in split(text)] for name, text in values.items()}
    held = {
        name: found for name, found in words.items() if any(word.startswith("--") for word in found)
    }
    arguments = (*(word for found in held.values() for word in found), *reader.stray)
    return Launch(
        line=0, program=", ".join(held), arguments=arguments, environment=reader.environment()
    )


def _listed(first: Reader, others: Sequence[tuple[Arm, Reader]]) -> list[Launch]:
    """Return the launches of the first reading, and those of others whose precision is new there."""
    known, added = _known(first.launches), list[Launch]()
    decisions: dict[int, dict[str, None]] = {launch.line: {} for launch in first.launches}
    for (arm, reader), (_, taken) in zip(others, first.questions.values(), strict=False):
        there = _known(reader.launches)
        for launch in first.launches:
            if there.isdisjoint(_known([launch])):
                decisions[launch.line][taken] = None
        started = [
            launch for launch in reader.launches if launch.line or not first.launches[0].line
        ]
        label = arm.label(holds=not arm.test.holds)
        added += [
            replace(one, decisions=(label,)) for one in started if known.isdisjoint(_known([one]))
        ]
        known |= _known(started)
    is_started = any(launch.line for launch in added)
    own = [launch for launch in first.launches if launch.line or launch.arguments or not is_started]
    found = [replace(launch, decisions=tuple(decisions[launch.line])) for launch in own]
    return found + sorted(added, key=lambda launch: launch.line)


def _known(found: Iterable[Launch]) -> set[object]:
    """Return what bears on precision in launches, each with its line and with its program."""
    return {(key, launch.known) for launch in found for key in (launch.line, launch.name)}
