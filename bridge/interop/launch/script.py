"""The syntax tree of a launch script, made by tree-sitter-bash.

Placeholders (`DATA=<Specify path>`), which are no bash, become words before the script is parsed. A part that the
grammar does not understand is skipped, and `broken_line` has its line.
"""

from __future__ import annotations

import re
import time
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tree_sitter import Node, Parser

MAX_SECONDS = 0.6
CHUNK = 4_096
"""Bytes that are handed to the parser at once."""
LIMITS = (("(", ")", 300), ("${", "}", 300), ("|", "\0", 2_000), ("<<", "\0", 500))
"""Opening sign, closing sign, and how many more of the first: the parser's time is quadratic in their number."""
PLACEHOLDER = re.compile(
    r"(?<==)<[A-Za-z\[][^<>\n$&|;\"']*>(?:[ \t]*\(e\.g\.[^()\n]*\))?"
    r"|(?<=[ \t])<[A-Z][^<>\n()$&|;\"']*[^<>\s()$&|;\"']>(?=[\s/_\\])"
)
LISTED = re.compile(r"(?<=\w)(=)\$([A-Za-z_]\w*)(?=,\w)")
"""`n=$X,m=$Y` between two strings, which the grammar takes for two words."""
LATE = frozenset(
    {"command_substitution", "process_substitution", "arithmetic_expansion", "ansi_c_string", "translated_string"}
)
"""Words that are not followed."""
WORDS = LATE.union(
    ("word", "number", "string", "raw_string", "simple_expansion", "expansion", "concatenation", "brace_expression"),
    ("variable_name", "special_variable_name", "subscript", "regex", "extglob_pattern", "test_operator"),
)
BRANCHES = frozenset({"if_statement", "case_item", "list"})
NESTING = frozenset({"redirected_statement", "list", "pipeline", "negated_command"})


class Mention(NamedTuple):
    """Text of a script that no command executes."""

    line: int
    text: str
    is_branch: bool
    """A branch holds it."""


def parse(text: str, path: str) -> Node:
    """Return the tree of a script; PayloadError for one that is nested too deeply, or has too many open brackets."""
    text = PLACEHOLDER.sub(lambda found: re.sub(r"\W", "_", found[0]), LISTED.sub(r"\1${\2}", text))
    for sign, closing, most in LIMITS:
        if text.count(sign) - text.count(closing) > most:
            rule = f"a launch script must not have more than {most} open {sign!r}"
            raise PayloadError(f"{path}: {rule}. Simplify the script.")
    source = f"{text}\n\n".encode()
    started = time.process_time()
    parser = _parser()
    try:
        tree = parser.parse(
            lambda offset, _point: source[offset : offset + CHUNK],
            progress_callback=lambda _offset, _error: time.process_time() - started > MAX_SECONDS,
        )
    except ValueError:
        parser.reset()
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None
    return tree.root_node


@cache
def _parser() -> Parser:
    import tree_sitter_bash  # a compiled grammar, which nothing but a launch script needs
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def statements(node: Node) -> list[Node]:
    """Return the commands inside a node: those of a body, a clause or a part that the grammar does not understand."""
    return [child for child in node.named_children if child.type != "comment"]


def text_of(node: Node | None) -> str:
    """Return a node as it is written."""
    return (node.text or b"").decode() if node is not None else ""


def shown(nodes: list[Node]) -> str:
    """Return neighbours as they are written, in one line."""
    parent = nodes[0].parent if nodes else None
    if parent is None:
        return ""
    source, base = parent.text or b"", parent.start_byte
    return " ".join(source[nodes[0].start_byte - base : nodes[-1].end_byte - base].decode().split())


def name_of(command: Node) -> str:
    """Return the first word of a command as it is written."""
    return text_of(command.child_by_field_name("name") or command.children[0])


def targets(redirect: Node) -> list[Node]:
    """Return the words of a redirection: its file first."""
    return [child for child in redirect.named_children if child.type in WORDS]


def redirects(node: Node) -> list[Node]:
    """Return the redirections behind a command or behind the list that it ends."""
    found = [child for child in node.named_children if child.type == "herestring_redirect"]
    parent = node.parent
    while parent is not None and parent.type in NESTING:
        if parent.type == "redirected_statement":
            found += parent.children_by_field_name("redirect")
        elif parent.named_children[-1] != node:
            break
        node, parent = parent, parent.parent
    return [inner for one in found for inner in (one, *one.children_by_field_name("redirect"))]


def broken_line(root: Node) -> int:
    """Return the first line that the grammar does not understand; 0: it understands all."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.type == "ERROR" or node.is_missing:
            broken = node.parent if node.is_missing and node.parent is not None else node
            return min(broken.start_point.row + 1, root.end_point.row - 1)
        if node.has_error:
            waiting += reversed(node.children)
    return 0


def unexecuted(root: Node, pattern: re.Pattern[str], executed: Collection[int]) -> Iterator[Mention]:
    """Yield the matches of a pattern that are in no executed command, comment or message.

    The alternative of `${X:+...}` is not executed either.
    """
    source, base = root.text or b"", root.start_byte
    for found in re.finditer(pattern.pattern.encode(), source):
        node = root.descendant_for_byte_range(base + found.start(), base + found.end())
        is_branch = is_alternative = False
        while node is not None:
            is_alternative |= node.type == "expansion" and any(one.type in (":+", "+") for one in node.children)
            is_message = node.type == "command" and name_of(node) in ("echo", "printf")
            if (node.id in executed and not is_alternative) or node.type == "comment" or is_message:
                break
            is_branch |= node.type in BRANCHES
            node = node.parent
        else:
            line = source.count(b"\n", 0, found.start()) + root.start_point.row + 1
            yield Mention(line, found[0].decode(), is_branch)
