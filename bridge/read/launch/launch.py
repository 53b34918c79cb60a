"""`Launch`: one start of a training program, and the words of it that affect precision.

    torchrun --nproc_per_node 8 pretrain_gpt.py --bf16
    runner                      program         arguments

A launch has the environment of its program too, and the parts of the script that were not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.read.launch.command_line_rows import OTHER_PRECISION_OPTIONS, PRECISION_PATTERN
from bridge.read.launch.notes import NoteKind
from bridge.read.launch.shell_word import ShellWord
from bridge.read.launch.syntax_tree import MODE_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bridge.read.launch.notes import Note

CONFIGURATION_FILE_PATTERN = re.compile(r"^@|\.(?:ya?ml|json|toml)$")
"""A word that names a file of options (`@file`), or a configuration."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a training program."""

    line: int
    """Its line in the script; 0 if the script only sets variables with arguments."""
    program: str
    arguments: tuple[ShellWord, ...]
    """The words after the program."""
    runner: tuple[ShellWord, ...] = ()
    """The words before the program: `accelerate launch --mixed_precision fp8`, `torchrun
    --nproc_per_node 8`."""
    environment: Mapping[str, ShellWord] = field(default_factory=dict)
    """Name of a variable that the script gives to the program -> its value."""
    unread_environment: str = ""
    """The option of `env`, or of a Ray job, whose variables could not be read; empty if all were."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a file that the script has written before, by `cat` and a here-document -> its
    text."""
    decisions: tuple[str, ...] = ()
    """The branches on which the precision of this launch depends, and which a run decides."""
    notes: tuple[Note, ...] = ()
    """Parts of the script that were not read: a sourced file, a here-document about precision."""
    started_scripts: tuple[str, ...] = ()
    """Other scripts that the script runs in shells of their own, which are not followed."""
    unread: str = ""
    """The first text about a precision that no command reached, such as "the branch at line 9,
    which holds --fp8-format,"; empty if there is none."""

    @property
    def label(self) -> str:
        """The name of the run in messages: "line 41, pretrain_gpt.py"."""
        location = ""
        if self.line:
            location = f"line {self.line}, {self.name}"
        elif self.program:
            location = f"arguments in {self.program}"
        return "; ".join(filter(None, (location, *self.decisions)))

    @property
    def variable_defaults(self) -> dict[str, ShellWord]:
        """Variable that the environment may set -> its default, if a word about precision has it."""
        defaults: dict[str, ShellWord] = {}
        for words in self.precision_words:
            for word in words:
                for name, text in word.defaults.items():
                    defaults[name] = ShellWord.from_text(text)
        return defaults

    @cached_property
    def flags(self) -> frozenset[str]:
        """The arguments, each without the value after `=`."""
        return frozenset(
            word.partition("=")[0] for word in get_arguments_before_dashes(self.arguments)
        )

    @property
    def unread_sources(self) -> tuple[Note, ...]:
        """The files that the script sources and that were not read."""
        return tuple(note for note in self.notes if note.kind is NoteKind.SOURCED_FILE)

    @cached_property
    def precision_words(self) -> tuple[tuple[ShellWord, ...], ...]:
        """The words that affect precision, by which launches are compared.

        They are those of the runner, those of the arguments, and a pair for each variable.
        """
        variables: list[tuple[ShellWord, ShellWord]] = []
        for name in sorted(self.environment):
            if is_precision_text(name) or name.startswith("ACCELERATE_"):
                variables.append((ShellWord(name), self.environment[name]))
        runner = _select_precision_words(self.runner)
        arguments = _select_precision_words(get_arguments_before_dashes(self.arguments))
        return runner, arguments, *variables

    @cached_property
    def name(self) -> str:
        """The program; of a Python file the name without its folder."""
        if self.program.endswith(".py"):
            return PurePosixPath(self.program).name
        return self.program


def get_arguments_before_dashes(words: Sequence[ShellWord]) -> Sequence[ShellWord]:
    """Return the words of a command before `--`. argparse reads no word after it as an option."""
    if "--" in words:
        return words[: words.index("--")]
    return words


@lru_cache(maxsize=4096)
def is_precision_text(text: str) -> bool:
    """Return whether a piece of a script affects precision."""
    return (
        PRECISION_PATTERN.search(text) is not None
        or OTHER_PRECISION_OPTIONS.fullmatch(text) is not None
    )


def _select_precision_words(words: Sequence[ShellWord]) -> tuple[ShellWord, ...]:
    """Return the words that affect precision: options, their values, and files of options."""
    chosen: list[ShellWord] = []
    for option, word in pairwise((ShellWord(), *words)):
        is_value = option.startswith("--") and "=" not in option and not word.startswith("-")
        if option in MODE_OPTIONS and word.is_open:
            is_value = False  # `--bf16 $ARGS`: a switch of Megatron-LM, and further arguments
        is_path = "/" in word and not word.startswith("-")
        if is_value:
            is_chosen = is_precision_text(option)
        else:
            is_chosen = is_precision_text(word) and not is_path
        if is_chosen or CONFIGURATION_FILE_PATTERN.search(word):
            chosen.append(word)
    return tuple(chosen)
