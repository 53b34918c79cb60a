"""`launches` returns what a script starts on the branch of bash, and on the other branches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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

    A launch of another branch is listed where its precision differs, and names the branch. Without
    any launch, one is made of the arguments that the script's variables hold.

    Files that the script sources are read from the folder of `path`; `variables` is what the user
    states of the environment.
    """
    root = parse(text, path)
    stated = variables or {}
    error = broken_line(root)
    try:
        first = _read(root, path, stated, {})
        others = _other_branches(first, root, path, stated)
    except RecursionError:
        raise PayloadError(
            f"{path}: commands are nested too deeply to be followed. Simplify the script."
        ) from None
    if not first.launches and error:
        rule = "must be bash that can be read here, and is not"
        raise PayloadError(f"{path}, line {error}: {rule}. Correct the script there.")
    notes: list[str] = []
    if error:
        notes.append(f"line {error}, which {UNREADABLE}")
    if len(others) < len(first.questions):
        notes.append(f"the branches behind the first {len(others)}")
    _complete(first, notes)
    for branch in others:
        _complete(branch.reader, notes)
    return tuple(_listed(first, others))


class _Branch(NamedTuple):
    """A reading of the script in which one condition is answered otherwise."""

    arm: Arm
    """The condition."""
    reader: Reader


def _other_branches(
    first: Reader, root: Node, path: str, stated: Mapping[str, str]
) -> list[_Branch]:
    """Return a reading for each question of the first one, as far as the limits allow."""
    branches: list[_Branch] = []
    steps = first.steps
    for arm, _ in [*first.questions.values()][:MAX_BRANCHES]:
        if steps >= MAX_STEPS:
            break
        if arm.test.equal:
            name, value = arm.test.equal
            reader = _read(root, path, {**stated, name: value}, {})
        else:
            reader = _read(root, path, stated, {arm.text: not arm.test.holds})
        branches.append(_Branch(arm, reader))
        steps += reader.steps
    return branches


def _complete(reader: Reader, notes: Sequence[str]) -> None:
    """Write into the launches of a reading what was not read."""
    unread = unexecuted(reader.scripts, STATING, reader.executed)
    every_note = (*reader.notes, *notes)
    started = reader.launches or [_of_variables(reader)]
    reader.launches = [replace(launch, notes=every_note, unread=unread) for launch in started]


def _read(root: Node, path: str, stated: Mapping[str, str], answers: Mapping[str, bool]) -> Reader:
    """Return a reading of a script; checks that would end it before any launch are passed."""
    reader = Reader(root, path, stated, answers)
    if reader.end == "exit" and not reader.launches:
        return Reader(root, path, stated, answers, is_lenient=True)
    return reader


def _of_variables(reader: Reader) -> Launch:
    """Return the arguments that variables hold, for a file that others source."""
    holders: list[str] = []
    arguments: list[Word] = []
    for name in reader.values:
        if name in reader.stated:
            continue
        words = [Word.of(word) for word in split(" ".join(reader.held(name)))]
        if any(word.startswith("--") for word in words):
            holders.append(name)
            arguments += words
    return Launch(
        line=0,
        program=", ".join(holders),
        arguments=(*arguments, *reader.stray),
        environment=reader.environment(),
    )


def _listed(first: Reader, others: Sequence[_Branch]) -> list[Launch]:
    """Return the launches of the first reading, and those of others with a new precision."""
    known = _known(first.launches)
    added: list[Launch] = []
    decisions: dict[int, dict[str, None]] = {launch.line: {} for launch in first.launches}
    for branch, (_, taken) in zip(others, first.questions.values(), strict=False):
        there = _known(branch.reader.launches)
        for launch in first.launches:
            if there.isdisjoint(_known([launch])):
                decisions[launch.line][taken] = None
        started = branch.reader.launches
        if first.launches[0].line:
            started = [launch for launch in started if launch.line]
        label = branch.arm.label(holds=not branch.arm.test.holds)
        for launch in started:
            if known.isdisjoint(_known([launch])):
                added.append(replace(launch, decisions=(label,)))
        known |= _known(started)
    is_started = any(launch.line for launch in added)
    listed: list[Launch] = []
    for launch in first.launches:
        if launch.line or launch.arguments or not is_started:
            listed.append(replace(launch, decisions=tuple(decisions[launch.line])))
    return listed + sorted(added, key=lambda launch: launch.line)


def _known(launches: Iterable[Launch]) -> set[object]:
    """Return what bears on precision in launches, each with its line and with its program."""
    known: set[object] = set()
    for launch in launches:
        known.add((launch.line, launch.known))
        known.add((launch.name, launch.known))
    return known
