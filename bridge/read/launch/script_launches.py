"""`read_launches`: the launches of a script, on the branch that bash takes and on the other branches.

launches('if [ "$FP8" ]; then F=--fp8-format=hybrid; fi; torchrun pretrain_gpt.py --bf16 $F')
# two launches: without $F, and with it where "line 1, if [ "$FP8" ]"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.read.launch.bash.variables import split_words
from bridge.read.launch.launch import Launch
from bridge.read.launch.notes import Note, NoteKind
from bridge.read.launch.interpreter import ScriptInterpreter
from bridge.read.launch.syntax_tree import find_error_line, parse_script, find_unexecuted_text
from bridge.read.launch.command_line_rows import STATED_PRECISION_PATTERN
from bridge.read.launch.commands import MAX_COMMANDS
from bridge.read.launch.shell_word import ShellWord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

    from bridge.read.launch.trace import UndecidedCondition

MAX_BRANCHES = 48


def read_launches(
    text: str, path: str = "<script>", variables: Mapping[str, str] | None = None
) -> tuple[Launch, ...]:
    """Return the launches of a script, first those of the branch that bash takes with nothing set.

    A launch of another branch is listed where its precision differs, and names the branch. A script
    without a launch has one that is made of the arguments in its variables.

    Args:
        text: The script.
        path: Its path; files that it sources are read from its folder.
        variables: Variables that its environment sets.
    """
    root = parse_script(text, path)
    stated = variables or {}
    error = find_error_line(root)
    try:
        first = _run_interpreter(root, path, stated, {})
        if not first.reading.launches and error:
            rule = "must be bash that can be read here, and is not"
            raise PayloadError(f"{path}, line {error}: {rule}. Correct the script there.")
        others = _run_other_branches(first, root, path, stated)
    except RecursionError:
        raise PayloadError(
            f"{path}: commands are nested too deeply to be followed. Simplify the script."
        ) from None
    notes: list[Note] = []
    if error:
        noun = f"line {error}, which cannot be read here"
        notes.append(Note(noun, NoteKind.BROKEN_LINE))
    if len(others) < len(first.reading.undecided_conditions):
        notes.append(Note(f"the branches behind the first {len(others)}"))
    _add_unread_parts(first, notes)
    for branch in others:
        _add_unread_parts(branch.reader, notes)
    return tuple(_merge_launches(first, others))


@dataclass(frozen=True, kw_only=True)
class _Branch:
    """A reading of the script in which one condition is answered otherwise."""

    question: UndecidedCondition
    """The condition."""
    reader: ScriptInterpreter

    @property
    def label(self) -> str:
        """The name of the branch."""
        arm = self.question.arm
        return arm.label(holds=not arm.answer.holds)


def _run_other_branches(
    first: ScriptInterpreter, root: Node, path: str, stated: Mapping[str, str]
) -> list[_Branch]:
    """Return a reading for each question of the first one, as far as the limits allow."""
    branches: list[_Branch] = []
    steps = first.steps
    for question in [*first.reading.undecided_conditions.values()][:MAX_BRANCHES]:
        if steps >= MAX_COMMANDS:
            break
        arm = question.arm
        if arm.answer.equal:
            name, value = arm.answer.equal
            reader = _run_interpreter(root, path, {**stated, name: value}, {})
        else:
            reader = _run_interpreter(root, path, stated, {arm.text: not arm.answer.holds})
        branches.append(_Branch(question=question, reader=reader))
        steps += reader.steps
    return branches


def _add_unread_parts(reader: ScriptInterpreter, notes: Sequence[Note]) -> None:
    """Write the parts of the script that were not read into the launches of a reading."""
    unread = find_unexecuted_text(reader.scripts, STATED_PRECISION_PATTERN, reader.executed)
    reading = reader.reading
    every_note = (*reading.notes, *notes)
    started = reading.launches or [_make_launch_from_variables(reader)]
    reading.launches = [replace(launch, notes=every_note, unread=unread) for launch in started]


def _run_interpreter(
    root: Node, path: str, stated: Mapping[str, str], answers: Mapping[str, bool]
) -> ScriptInterpreter:
    """Return a reading of a script; checks that would end it before any launch are passed."""
    reader = ScriptInterpreter(root, path, stated, answers)
    if reader.end == "exit" and not reader.reading.launches:
        return ScriptInterpreter(root, path, stated, answers, is_lenient=True)
    return reader


def _make_launch_from_variables(reader: ScriptInterpreter) -> Launch:
    """Return the arguments that variables hold, for a file that others source."""
    holders: list[str] = []
    arguments: list[ShellWord] = []
    for name in reader.values:
        if name in reader.stated:
            continue
        words = [
            ShellWord.from_text(word) for word in split_words(" ".join(reader.get_elements(name)))
        ]
        if any(word.startswith("--") for word in words):
            holders.append(name)
            arguments += words
    return Launch(
        line=0,
        program=", ".join(holders),
        arguments=(*arguments, *reader.reading.stray_options),
        environment=reader.environment(),
    )


def _merge_launches(first: ScriptInterpreter, others: Sequence[_Branch]) -> list[Launch]:
    """Return the launches of the first reading, and those of others with a new precision."""
    launches = first.reading.launches
    added = _collect_new_launches(launches, others)
    decisions = _collect_decisions(launches, others)
    listed: list[Launch] = []
    for launch in launches:
        listed.append(replace(launch, decisions=decisions[launch.line]))
    listed += sorted(added, key=lambda launch: launch.line)
    return [launch for launch in listed if launch.line or not _is_started(launch, added)]


def _is_started(collected: Launch, added: Sequence[Launch]) -> bool:
    """Return whether a program is started on another branch, with arguments that variables hold."""
    started = [launch for launch in added if launch.line]
    if not collected.arguments:
        return bool(started)
    return any(launch.flags & collected.flags for launch in started)


def _collect_new_launches(launches: Sequence[Launch], others: Sequence[_Branch]) -> list[Launch]:
    """Return the launches of other branches whose precision is new, each with its branch."""
    known = _collect_precisions(launches)
    added: list[Launch] = []
    for branch in others:
        started = branch.reader.reading.launches
        if launches[0].line:
            started = [launch for launch in started if launch.line]
        for launch in started:
            if known.isdisjoint(_collect_precisions([launch])):
                added.append(replace(launch, decisions=(branch.label,)))
        known |= _collect_precisions(started)
    return added


def _collect_decisions(
    launches: Sequence[Launch], others: Sequence[_Branch]
) -> dict[int, tuple[str, ...]]:
    """Return line of a launch -> the branches that the precision of the launches there rests on."""
    decisions: dict[int, dict[str, None]] = {launch.line: {} for launch in launches}
    for branch in others:
        there = _collect_precisions(branch.reader.reading.launches)
        for launch in launches:
            if there.isdisjoint(_collect_precisions([launch])):
                decisions[launch.line][branch.question.taken] = None
    return {line: tuple(branches) for line, branches in decisions.items()}


def _collect_precisions(launches: Iterable[Launch]) -> set[object]:
    """Return the precision of each launch twice: with its line, and with its program."""
    precisions: set[object] = set()
    for launch in launches:
        precisions.add((launch.line, launch.precision_words))
        precisions.add((launch.name, launch.precision_words))
    return precisions
