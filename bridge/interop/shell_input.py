"""What a command reads and who reads what a script writes: heredocs that are scripts, files or texts, and `xargs`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.interop.launch import PYTHON, QUIET, found_launch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Xargs", "echoed", "heredoc_kind"]

CONFIGURATIONS = frozenset({".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".conf"})
NO_SCRIPTS = CONFIGURATIONS | {".py", ".md", ".txt", ".csv", ".jsonl", ".html", ".c", ".cc", ".cpp", ".cu", ".patch"}
SHOWN = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty"})
WITH_A_VALUE = "nPLdsEIa"
"""Letters of xargs that are followed by a value."""


def heredoc_kind(chain: Sequence[Sequence[str]], outputs: Iterable[str]) -> tuple[str, str]:
    """Return what becomes of a heredoc, and the file it is written to.

    Args:
        chain: The words of the command that reads it and of those it is piped into.
        outputs: Files that their standard output goes to.

    Returns:
        "script": a program runs it; "written": it goes to a file; "configuration": to one that is no script;
        "printed": somebody reads it; "data": a program reads it that is no shell.
    """
    files = [file for file in outputs if file not in SHOWN]
    for words in chain:
        name = PurePosixPath(words[0]).name if words else ""
        runs_python = name == "xargs" or any(PYTHON.search(word) for word in words)
        if runs_python or found_launch(list(words)) is not None:
            return "data", ""
        if name and (name not in QUIET or name == "source"):
            return "script", ""
        if name == "tee":
            files += [word for word in words[1:] if not word.startswith("-") and word not in SHOWN]
    if not files:
        return "printed", ""
    suffix = PurePosixPath(files[-1]).suffix
    if suffix in NO_SCRIPTS:
        return ("configuration" if suffix in CONFIGURATIONS else "data"), files[-1]
    return "written", files[-1]


def echoed(words: Sequence[str]) -> list[list[str]] | None:
    """Return the words of each line that `echo` or `printf` prints, None for other commands and other formats."""
    command, rest = (words[0], list(words[1:])) if words else ("", [])
    if command == "echo":
        while rest and re.fullmatch(r"-[neE]+", rest[0]):
            rest.pop(0)
    elif command == "printf" and rest:
        if rest[:1] == ["--"]:
            rest.pop(0)
        form = rest.pop(0)
        if "%" not in form:
            rest = [form]
        elif re.fullmatch(r"%s(\\n)+", form):
            return [_pieces(word) for word in rest]
        elif not re.fullmatch(r"(%s|\\n|\s)+", form):
            return None
    else:
        return None
    return [[piece for word in rest for piece in _pieces(word)]]


def _pieces(word: str) -> list[str]:
    return re.sub(r"\\[nt]", " ", word).split()


@dataclass(slots=True)
class Xargs:
    """A call of xargs."""

    command: list[str]
    placeholder: str = ""
    """What `-I` has it replace."""
    file: str = ""
    """What it reads instead of standard input."""
    count: int = 0
    """Words for each call; 0: all."""

    @classmethod
    def of(cls, words: Sequence[str]) -> Xargs:
        """Return the call that the words, `xargs` first, are."""
        found, at = cls([]), 1
        while at < len(words) and words[at].startswith("-"):
            option, value = words[at], words[at][2:]
            at += 1
            if option.startswith("--"):
                name, _, value = option.partition("=")
            else:
                name = option[:2]
                if name[1:] and name[1:] in WITH_A_VALUE and not value:
                    value = words[at] if at < len(words) else ""
                    at += 1
            if name in ("-I", "-i", "--replace"):
                found.placeholder = value or "{}"
            elif name in ("-a", "--arg-file"):
                found.file = value
            elif name in ("-n", "--max-args") and value.isdigit():
                found.count = int(value)
        found.command = list(words[at:])
        return found

    def calls(self, lines: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return the commands that it runs for what it reads, line by line."""
        if self.placeholder:
            return [[word.replace(self.placeholder, " ".join(line)) for word in self.command] for line in lines]
        given = [word for line in lines for word in line]
        size = self.count or max(len(given), 1)
        return [[*self.command, *given[at : at + size]] for at in range(0, len(given), size)] or [list(self.command)]
