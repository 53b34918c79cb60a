"""`read_launches`: the launches of a script, on the branch that bash takes and on the other branches.

    read_launches('if [ "$FP8" ]; then F=--fp8-format=hybrid; fi; torchrun pretrain_gpt.py --bf16
    $F') # two launches: the first without $F; the second with it, on the branch 'line 1, if [ "$FP8" ]'

The script is followed once with nothing set, and then once more for each condition that it does not
decide, with the other result of this condition. Conditions are not combined: their number would
grow with the power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.read.launch.command_line_rows import STATED_PRECISION_PATTERN
from bridge.read.launch.commands import MAX_COMMANDS, End
from bridge.read.launch.interpreter import ScriptInterpreter
from bridge.read.launch.launch import Launch
from bridge.read.launch.notes import Note, NoteKind
from bridge.read.launch.shell_word import ShellWord, split_words
from bridge.read.launch.slurm_header import find_slurm_variables
from bridge.read.launch.syntax_tree import find_error_line, parse_script
from bridge.read.launch.unexecuted_text import find_unexecuted_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

    from bridge.read.launch.trace import OpenCondition
    from bridge.read.text.document import Document

MAX_BRANCHES = 48
"""Open conditions of a script for which it is followed again."""


def read_launches(
    text: str, path: str = "<script>", variables: Mapping[str, str] | None = None
) -> tuple[Launch, ...]:
    """Return the launches of a script, first those of the branch that bash takes with nothing set.

    A launch of another branch is listed if its precision differs, and names the branch. A script
    that starts no program has one launch, made of the arguments in its variables: other scripts
    source it.

    Args:
        text: The script.
        path: Its path; files that it sources are looked for from its folder.
        variables: Variables that its environment sets. Those of Slurm are read from its header too.

    Raises:
        PayloadError: The script is no bash that can be read, or is nested too deeply.
    """
    root = parse_script(text, path)
    stated = {**find_slurm_variables(text), **(variables or {})}
    error_line = find_error_line(root)
    try:
        first = _run_interpreter(root, path, stated, {})
        if not first.trace.launches and error_line:
            rule = "must be bash that can be read here, and is not"
            raise PayloadError(f"{path}, line {error_line}: {rule}. Correct the script there.")
        others = _run_other_branches(first, root, path, stated)
    except RecursionError:
        raise PayloadError(
            f"{path}: commands are nested too deeply to be followed. Simplify the script."
        ) from None
    notes: list[Note] = []
    if error_line:
        noun = f"line {error_line}, which cannot be read here"
        notes.append(Note(noun, NoteKind.BROKEN_LINE))
    if len(others) < len(first.trace.open_conditions):
        notes.append(Note(f"the branches behind the first {len(others)}"))
    branches: list[_Branch] = []
    for condition, interpreter in others:
        launches = _complete_launches(interpreter, notes)
        branches.append(_Branch(condition=condition, launches=launches))
    return tuple(_merge_launches(_complete_launches(first, notes), branches))


def read_document_launches(document: Document, variables: Mapping[str, str]) -> tuple[Launch, ...]:
    """Return the launches of a document that is a script. It is followed once for all readers.

    Args:
        document: The script.
        variables: Variables that its environment sets.

    Raises:
        PayloadError: The script is no bash that can be read, or is nested too deeply.
    """
    key = tuple(sorted(variables.items()))
    if key not in document.launches:
        document.launches[key] = read_launches(document.text, document.path, variables)
    return document.launches[key]


@dataclass(frozen=True, kw_only=True)
class _Branch:
    """The launches of a script with the other result of one condition."""

    condition: OpenCondition
    launches: list[Launch]

    @property
    def label(self) -> str:
        """The name of the branch."""
        arm = self.condition.arm
        return arm.format_label(holds=not arm.result.holds)


def _run_other_branches(
    first: ScriptInterpreter, root: Node, path: str, stated: Mapping[str, str]
) -> list[tuple[OpenCondition, ScriptInterpreter]]:
    """Follow the script again for each open condition, as far as the limits allow.

    Args:
        first: The script as bash runs it with nothing set.
        root: Its syntax tree.
        stated: Variables that its environment sets.
    """
    followed: list[tuple[OpenCondition, ScriptInterpreter]] = []
    step_count = first.step_count
    conditions = list(first.trace.open_conditions.values())
    for condition in conditions[:MAX_BRANCHES]:
        if step_count >= MAX_COMMANDS:
            break
        arm = condition.arm
        if arm.result.equal:
            name, value = arm.result.equal
            interpreter = _run_interpreter(root, path, {**stated, name: value}, {})
        else:
            forced_results = {arm.text: not arm.result.holds}
            interpreter = _run_interpreter(root, path, stated, forced_results)
        followed.append((condition, interpreter))
        step_count += interpreter.step_count
    return followed


def _run_interpreter(
    root: Node, path: str, stated: Mapping[str, str], forced_results: Mapping[str, bool]
) -> ScriptInterpreter:
    """Follow a script; if a check ends it before any launch, follow it again as if it passed."""
    interpreter = ScriptInterpreter(root, path, stated, forced_results)
    interpreter.follow()
    if interpreter.end is End.EXIT and not interpreter.trace.launches:
        interpreter = ScriptInterpreter(root, path, stated, forced_results, is_lenient=True)
        interpreter.follow()
    return interpreter


def _complete_launches(interpreter: ScriptInterpreter, notes: Sequence[Note]) -> list[Launch]:
    """Return the launches of a followed script, with the parts of the script that were not read.

    Args:
        interpreter: The followed script.
        notes: Parts that are not read on any branch.
    """
    unread = find_unexecuted_text(
        interpreter.scripts, STATED_PRECISION_PATTERN, interpreter.executed
    )
    all_notes = (*interpreter.trace.notes, *notes)
    launches = interpreter.trace.launches or [_make_launch_from_variables(interpreter)]
    started = tuple(interpreter.trace.started_scripts)
    completed: list[Launch] = []
    for launch in launches:
        completed.append(replace(launch, notes=all_notes, unread=unread, started_scripts=started))
    return completed


def _make_launch_from_variables(interpreter: ScriptInterpreter) -> Launch:
    """Return a launch without a program, of the arguments that the variables of a script hold."""
    holders: list[str] = []
    arguments: list[ShellWord] = []
    for name in interpreter.values:
        if name in interpreter.stated:
            continue
        value = " ".join(interpreter.get_elements(name))
        words = [ShellWord.from_text(word) for word in split_words(value)]
        if any(word.startswith("--") for word in words):
            holders.append(name)
            arguments += words
    return Launch(
        line=0,
        program=", ".join(holders),
        arguments=(*arguments, *interpreter.trace.stray_options),
        environment=interpreter.get_environment(),
    )


def _merge_launches(launches: Sequence[Launch], branches: Sequence[_Branch]) -> list[Launch]:
    """Return the launches with nothing set, and those of other branches with a new precision."""
    added = _collect_new_launches(launches, branches)
    decisions = _collect_decisions(launches, branches)
    merged: list[Launch] = []
    for launch in launches:
        merged.append(replace(launch, decisions=decisions[launch.line]))
    merged += sorted(added, key=lambda launch: launch.line)
    return [launch for launch in merged if launch.line or not _is_started(launch, added)]


def _is_started(collected: Launch, added: Sequence[Launch]) -> bool:
    """Return whether another branch starts a program with the arguments that variables hold.

    Args:
        collected: The arguments in variables of a script that starts no program with them.
        added: The launches of other branches.
    """
    started = [launch for launch in added if launch.line]
    if not collected.arguments:
        return bool(started)
    return any(launch.flags & collected.flags for launch in started)


def _collect_new_launches(launches: Sequence[Launch], branches: Sequence[_Branch]) -> list[Launch]:
    """Return the launches of other branches whose precision is new, each with its branch."""
    known = _collect_precisions(launches)
    added: list[Launch] = []
    for branch in branches:
        branch_launches = branch.launches
        if launches[0].line:
            branch_launches = [launch for launch in branch_launches if launch.line]
        for launch in branch_launches:
            if known.isdisjoint(_collect_precisions([launch])):
                added.append(replace(launch, decisions=(branch.label,)))
        known |= _collect_precisions(branch_launches)
    return added


def _collect_decisions(
    launches: Sequence[Launch], branches: Sequence[_Branch]
) -> dict[int, tuple[str, ...]]:
    """Return line of a launch -> the branches on which the precision of its launches depends.

    A launch depends on a condition if the other branch has no launch of its precision.
    """
    decisions: dict[int, dict[str, None]] = {launch.line: {} for launch in launches}
    for branch in branches:
        branch_precisions = _collect_precisions(branch.launches)
        for launch in launches:
            if branch_precisions.isdisjoint(_collect_precisions([launch])):
                decisions[launch.line][branch.condition.taken] = None
    return {line: tuple(labels) for line, labels in decisions.items()}


def _collect_precisions(launches: Iterable[Launch]) -> set[object]:
    """Return the keys by which the precision of launches is compared.

    Each launch has two: its precision at its line, and its precision in its program. The same
    program with the same precision on another line is nothing new.
    """
    precisions: set[object] = set()
    for launch in launches:
        precisions.add((launch.line, launch.precision_words))
        precisions.add((launch.name, launch.precision_words))
    return precisions
