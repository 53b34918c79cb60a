"""`Value`: a value of a Python launcher that is followed by its syntax, and the text that it becomes.

    Value(8, {"SLURM_JOB_NUM_NODES"}).text      # "${SLURM_JOB_NUM_NODES:-8}"
    make_open_value("args.run_id").text         # "${args_run_id}"

A text of a launcher is written as bash has it: a piece that rests on the default of a variable is
`${NAME:-default}`, and a piece that only the run knows is `${NAME}`. So the reader of launch scripts
treats a launcher's command as that of a script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from bridge.read.framework.launcher.syntax import format_expression
from bridge.read.launch.shell_word import ShellWord

MAX_NAMES = 2
"""Variables that a default names. `ShellWord` reads four levels."""
MAX_TEXT_LENGTH = 1_000_000
"""Characters of a text that is followed."""
MAX_NAME_LENGTH = 80
"""Characters of the name of a value that only the run knows."""
QUOTING_PATTERN = re.compile(r"[\"'`\\]")
"""Characters that end a text in bash, so that it cannot be a default there."""


class UnknownValueError(Exception):
    """A value is needed that only the run knows."""


class PathEndError(Exception):
    """The end of a path: an error of the launcher, or too many statements.

    Args:
        text: The fault, as a clause.
        names: Variables on whose defaults the condition of the error rests.
    """

    def __init__(self, text: str, names: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.names = frozenset(names)


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the program."""

    content: object = None
    """A number, a text, None, a list, tuple or mapping of `Value`, or a class of this module."""
    names: frozenset[str] = frozenset()
    """Variables on whose defaults the value rests."""
    late_name: str = ""
    """The name of a value that only the run knows; empty for any other value."""

    @property
    def text(self) -> str:
        """The text that the value becomes in a command of bash."""
        if self.late_name:
            return f"${{{self.late_name}}}"
        text = self.content
        if not isinstance(text, str):
            try:
                text = str(get_plain(self.content, set()))
            except UnknownValueError:
                return f"${{{min(self.names, default='value')}}}"
        if not self.names:
            return text
        is_no_default = self.content is None or text.count("{") != text.count("}")
        if is_no_default or QUOTING_PATTERN.search(text):
            return f"${{{min(self.names)}}}"
        for name in sorted(self.names)[:MAX_NAMES]:
            text = f"${{{name}:-{text}}}"
        return text


def make_open_value(source: ast.AST | str) -> Value:
    """Return a value that only the run knows.

    Args:
        source: The expression whose value it is, or its name.
    """
    if isinstance(source, ast.AST):
        source = format_expression(source)
    return Value(late_name=format_name(source))


@lru_cache(maxsize=65_536)
def format_name(source: str) -> str:
    """Return the name of an expression as that of a variable: "args_run_id" for "args.run_id"."""
    return re.sub(r"\W+", "_", source).strip("_")[:MAX_NAME_LENGTH] or "value"


def get_plain(content: object, names: set[str]) -> object:
    """Return a value as Python has it, without the variables that it rests on.

    Args:
        content: A `Value`, or the content of one.
        names: The variables that the value rests on are added to it.

    Raises:
        UnknownValueError: Only the run knows the value, or a part of it.
    """
    if isinstance(content, Value):
        if content.late_name:
            raise UnknownValueError(content.late_name)
        names.update(content.names)
        content = content.content
    if isinstance(content, str) and "$" in content:
        word = ShellWord.from_text(content)
        if word.is_open:
            raise UnknownValueError(content)
        names.update(word.defaults)
        return str(word)
    if isinstance(content, list | tuple | set):
        return type(content)(get_plain(item, names) for item in content)
    if isinstance(content, dict):
        return {key: get_plain(item, names) for key, item in content.items()}
    if content is not None and not isinstance(content, str | int | float):
        raise UnknownValueError(type(content).__name__)
    return content


def join_texts(values: Iterable[Value]) -> Value:
    """Return the texts of values as one text.

    Raises:
        UnknownValueError: It is too long.
    """
    text = "".join(value.text for value in values)
    if len(text) > MAX_TEXT_LENGTH:
        raise UnknownValueError("a long text")
    return Value(text)


def wrap(content: object, names: Iterable[str] = ()) -> Value:
    """Return a plain value as a `Value`, with a `Value` for each element of it."""
    names = frozenset(names)
    if isinstance(content, list | tuple):
        return Value(type(content)(wrap(item, names) for item in content))
    if isinstance(content, dict):
        return Value({key: wrap(item, names) for key, item in content.items()})
    return Value(content, names)


@dataclass(eq=False, slots=True)
class Frame:
    """The names that a function or a module sees."""

    module: Module
    names: dict[str, Value] = field(default_factory=dict)
    outer: Frame | None = None
    """The names around a function."""

    def find(self, name: str) -> Value | None:
        """Return the value of a name; None for an unknown name."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.names:
                return frame.names[name]
            frame = frame.outer
        return None


@dataclass(eq=False, slots=True)
class Module:
    """A module whose source is read."""

    name: str
    """Its import path; empty for the launcher."""
    path: str


@dataclass(frozen=True, slots=True)
class Imported:
    """A module, function or class without source, by its import path."""

    path: str


@dataclass(eq=False, slots=True)
class Function:
    """A function or a lambda of the program, with the names around it."""

    node: ast.FunctionDef | ast.Lambda
    frame: Frame
    holder: Value | None = None
    """The instance of a method; None for a function."""


@dataclass(eq=False, slots=True)
class Class:
    """A class of the program."""

    node: ast.ClassDef
    frame: Frame


@dataclass(eq=False, slots=True)
class Instance:
    """An instance of a class of the program."""

    kind: Class
    fields: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call."""

    arguments: Sequence[Value]
    options: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Start:
    """A call of `execute_train`."""

    line: int
    """The line of the launcher."""
    package: str
    """The framework whose function it is."""
    arguments: Mapping[str, Value]
