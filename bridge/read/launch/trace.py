"""`ScriptTrace`: what a script was found to do: its launches, and the conditions that it does not decide."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tree_sitter import Node

    from bridge.read.launch.bash.conditions import ConditionResult
    from bridge.read.launch.launch import Launch
    from bridge.read.launch.notes import Note
    from bridge.read.launch.shell_word import ShellWord


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A condition with its answer, and the commands that it decides about."""

    answer: ConditionResult
    text: str
    """The condition as it is written."""
    line: int
    body: Sequence[Node]
    word: str = "if"

    def label(self, *, holds: bool) -> str:
        """Return the name of the branch that is taken where the condition holds, or does not."""
        word = self.word if holds else "not"
        return f"line {self.line}, {word} {self.text}"


@dataclass(frozen=True, kw_only=True)
class UndecidedCondition:
    """A condition that the file does not decide."""

    arm: Arm
    taken: str
    """The name of the branch that the reading takes."""


@dataclass(kw_only=True)
class ScriptTrace:
    """What a script was found to do up to the command that is read."""

    launches: list[Launch] = field(default_factory=list)
    notes: dict[Note, None] = field(default_factory=dict)
    """Parts that were not read, in the order of the script."""
    undecided_conditions: dict[object, UndecidedCondition] = field(default_factory=dict)
    """Conditions that the file does not decide, each by its text or by the variable that it asks
    for."""
    files: dict[str, str] = field(default_factory=dict)
    """Name of a file that `cat` has written from a here-document -> its text."""
    stray_options: list[ShellWord] = field(default_factory=list)
    """Options that stand where a command should."""

    def note(self, note: Note) -> None:
        """Add a part that was not read."""
        self.notes[note] = None

    def ask(self, arm: Arm, *, taken: str) -> None:
        """Add a condition that the file does not decide, unless the same was asked before."""
        self.undecided_conditions.setdefault(
            arm.answer.equal or arm.text, UndecidedCondition(arm=arm, taken=taken)
        )

    def copy(self) -> ScriptTrace:
        """Return a copy that can be added to."""
        return ScriptTrace(
            launches=self.launches.copy(),
            notes=self.notes.copy(),
            undecided_conditions=self.undecided_conditions.copy(),
            files=self.files.copy(),
            stray_options=self.stray_options.copy(),
        )
