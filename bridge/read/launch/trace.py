"""`ScriptTrace`: the launches and the open conditions that were found while a script was followed."""

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
    """A condition with its result, and the commands that it decides about."""

    result: ConditionResult
    text: str
    """The condition as it is written."""
    line: int
    body: Sequence[Node]
    """The commands that are followed if the condition holds."""
    word: str = "if"
    """The keyword in labels: `if`, `elif`, or `in` for a loop."""

    def format_label(self, *, holds: bool) -> str:
        """Return the name of a branch: "line 3, if [ $FP8 ]", or "line 3, not [ $FP8 ]".

        Args:
            holds: Whether it is the branch that is taken if the condition holds.
        """
        word = self.word if holds else "not"
        return f"line {self.line}, {word} {self.text}"


@dataclass(frozen=True, kw_only=True)
class OpenCondition:
    """A condition that the script does not decide."""

    arm: Arm
    taken: str
    """The name of the branch that was followed."""


@dataclass(kw_only=True)
class ScriptTrace:
    """The findings in a script up to the command that is being followed."""

    launches: list[Launch] = field(default_factory=list)
    """The training programs that were started."""
    notes: dict[Note, None] = field(default_factory=dict)
    """Parts that were not read, in the order of the script."""
    open_conditions: dict[str | tuple[str, str], OpenCondition] = field(default_factory=dict)
    """Key of a condition -> the condition. The key is the variable and the value that it is
    compared with, or the text of another condition, so that each question is asked once."""
    files: dict[str, str] = field(default_factory=dict)
    """Name of a file that `cat` has written from a here-document -> its text."""
    started_scripts: dict[str, None] = field(default_factory=dict)
    """Files of scripts that run in shells of their own, which are not followed."""
    stray_options: list[ShellWord] = field(default_factory=list)
    """Options at the beginning of a line, where a command should be: the line before has lost its
    backslash."""

    def note(self, note: Note) -> None:
        """Add a part that was not read."""
        self.notes[note] = None

    def add_open_condition(self, arm: Arm, *, taken: str) -> None:
        """Add a condition that the script does not decide, unless the same is there already.

        Args:
            arm: The condition.
            taken: The name of the branch that was followed.
        """
        key = arm.result.equal or arm.text
        self.open_conditions.setdefault(key, OpenCondition(arm=arm, taken=taken))

    def copy(self) -> ScriptTrace:
        """Return a copy that can be added to."""
        return ScriptTrace(
            launches=self.launches.copy(),
            notes=self.notes.copy(),
            open_conditions=self.open_conditions.copy(),
            files=self.files.copy(),
            started_scripts=self.started_scripts.copy(),
            stray_options=self.stray_options.copy(),
        )
