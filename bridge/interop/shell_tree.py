"""A shell script as a tree: commands, branches, loops, functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.interop.shell_tokens import Token, Word

__all__ = ["AndOr", "Arithmetic", "Branch", "Case", "Define", "Group", "If", "Loop", "Node", "Pipe", "Simple", "Test"]


@dataclass(slots=True, kw_only=True)
class Node:
    """A piece of a script with its place."""

    start: int
    end: int = 0
    text: str = ""
    """As written, where it can be a condition."""


@dataclass(slots=True, kw_only=True)
class Simple(Node):
    """A command of words, assignments and arrays, with what it reads and writes."""

    items: list[Token]
    heredocs: list[Word] = field(default_factory=list)
    strings: list[Word] = field(default_factory=list)
    """After `<<<`."""
    files: list[Word] = field(default_factory=list)
    """After `<`."""
    outputs: list[Word] = field(default_factory=list)
    """After `>` and its kin, for standard output."""
    appends: bool = False
    """They come after `>>`."""
    source: Node | None = None
    """What is piped into it."""
    fed: str = ""
    """What is piped into it, as written."""
    sinks: list[Node] = field(default_factory=list)
    """What it is piped into, next first."""
    last_line: int = 0
    """Where it ends, or is cut off."""
    cut: str = ""
    """Why a line that seems to continue it does not, as a clause; empty where none seems to."""


@dataclass(slots=True, kw_only=True)
class Test(Node):
    """`[[ ... ]]`."""

    words: list[Word]


@dataclass(slots=True, kw_only=True)
class Arithmetic(Node):
    """`(( ... ))`."""

    expression: str


@dataclass(slots=True, kw_only=True)
class AndOr(Node):
    """`left && right` or `left || right`."""

    left: Node
    operator: str
    right: Node


@dataclass(slots=True, kw_only=True)
class Pipe(Node):
    """`a | b | c`, perhaps after `!`."""

    commands: list[Node]
    negated: bool = False


@dataclass(slots=True, kw_only=True)
class Branch:
    """A condition and what runs where it holds."""

    condition: list[Node]
    body: list[Node]
    text: str
    """The condition as written."""
    start: int


@dataclass(slots=True, kw_only=True)
class If(Node):
    """`if ... elif ... else ... fi`."""

    branches: list[Branch]
    otherwise: list[Node] | None


@dataclass(slots=True, kw_only=True)
class Loop(Node):
    """`for`, `select`, `while` and `until`."""

    variable: str | None = None
    items: list[Word] | None = None
    body: list[Node]


@dataclass(slots=True, kw_only=True)
class Case(Node):
    """`case subject in pattern) ... esac`."""

    subject: Word
    arms: list[tuple[list[Word], list[Node], str, int]]


@dataclass(slots=True, kw_only=True)
class Define(Node):
    """A function."""

    name: str
    body: list[Node]


@dataclass(slots=True, kw_only=True)
class Group(Node):
    """`{ ...; }` or `( ... )`."""

    body: list[Node]
