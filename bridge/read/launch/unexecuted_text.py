"""`find_unexecuted_text`: a text about a precision in a script that no followed command has.

    find_unexecuted_text([root], STATED_PRECISION_PATTERN, executed)
    # "the branch at line 9, which holds --fp8-format,"

Such a text is in a branch that is not taken, in a function that is not called, or in a construct
that is not followed. The run may reach it, so a message names it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from bridge.read.launch.syntax_tree import MODE_OPTIONS, get_command_name, get_node_text

if TYPE_CHECKING:
    import re
    from collections.abc import Collection, Iterable

    from tree_sitter import Node

BRANCH_NODES = frozenset({"if_statement", "case_item", "list"})
"""Kinds of nodes that are read under a condition."""


class _UnexecutedText(NamedTuple):
    """A text that no followed command has. They are sorted by these fields in their order."""

    is_no_mode: bool
    """Whether the text is another option than those of a mode."""
    script_number: int
    """0 for the script; then the strings and files that it runs."""
    line: int
    noun: str
    """The text as messages name it."""


def find_unexecuted_text(
    scripts: Iterable[Node], pattern: re.Pattern[str], executed: Collection[int]
) -> str:
    """Return a text in a script that matches a pattern and that no followed command has.

    Comments and printed messages do not count.

    Args:
        scripts: The trees of the script, and of the strings and files that it runs.
        executed: Ids of the nodes of the followed commands.

    Returns:
        The text as messages name it: "the branch at line 9, which holds --fp8-format,". If there
        are several, a mode comes first, then the script itself. Empty if there is none.
    """
    unexecuted: list[_UnexecutedText] = []
    for script_number, root in enumerate(scripts):
        for word, line, node in _list_matches(root, pattern):
            if _is_reached(node, executed):
                continue
            noun = f"line {line}, which holds {word},"
            if script_number:
                noun = f"line {line} of what it reads, which holds {word},"
            if _is_in_branch(node):
                noun = f"the branch at {noun}"
            is_no_mode = word not in MODE_OPTIONS
            unexecuted.append(_UnexecutedText(is_no_mode, script_number, line, noun))
    if not unexecuted:
        return ""
    return min(unexecuted).noun


class _Match(NamedTuple):
    """A text of a script that matches a pattern."""

    word: str
    """The text."""
    line: int
    node: Node | None
    """The innermost node at the text."""


@lru_cache(maxsize=64)
def _list_matches(root: Node, pattern: re.Pattern[str]) -> list[_Match]:
    """Return the texts of a script that match a pattern. A script is followed once per branch."""
    text = get_node_text(root)
    matches: list[_Match] = []
    for match in pattern.finditer(text):
        line = root.start_point.row + text.count("\n", 0, match.start()) + 1
        matches.append(_Match(match[0], line, _find_node_at(root, text, match.start())))
    return matches


def _find_node_at(root: Node, text: str, start: int) -> Node | None:
    """Return the innermost node at a character of a script.

    Args:
        root: The tree of the script.
        text: The text of the tree.
        start: The index of the character in the text.
    """
    start_byte = root.start_byte + len(text[:start].encode())
    return root.descendant_for_byte_range(start_byte, start_byte + 1)


def _is_reached(node: Node | None, executed: Collection[int]) -> bool:
    """Return whether a node is in a followed command, in a comment, or in a printed message."""
    while node is not None:
        if node.id in executed or _is_message(node):
            return True
        node = node.parent
    return False


def _is_in_branch(node: Node | None) -> bool:
    """Return whether a node is read under a condition."""
    while node is not None:
        if node.type in BRANCH_NODES:
            return True
        node = node.parent
    return False


def _is_message(node: Node) -> bool:
    """Return whether a node is a comment, or a command that prints a text."""
    if node.type == "comment":
        return True
    return node.type == "command" and get_command_name(node) in ("echo", "printf")
