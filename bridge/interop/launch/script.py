"""The syntax tree of a launch script, made by tree-sitter-bash.

Placeholders (`DATA=<Specify path>`), which are no bash, become words before the script is parsed. A part that the
grammar does not understand is skipped, and `broken_line` has its line.
"""

from __future__ import annotations

import re
import time
from functools import cache
from typing import TYPE_CHECKING

from bridge.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

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
LATE = frozenset(
    {"command_substitution", "process_substitution", "arithmetic_expansion", "ansi_c_string", "translated_string"}
)
"""Words that are not followed."""
WORDS = LATE.union(
    ("word", "number", "string", "raw_string", "simple_expansion", "expansion", "concatenation", "brace_expression"),
    ("variable_name", "special_variable_name", "subscript", "regex", "extglob_pattern", "test_operator"),
)
BRANCHES = frozenset({"if_statement", "case_item", "list"})
MODES = frozenset({"--bf16", "--fp16"})
"""Switches in Megatron-LM, and followed by a value elsewhere."""
NESTING = frozenset({"redirected_statement", "list", "pipeline", "negated_command"})


def parse(text: str, path: str) -> Node:
    """Return the tree of a script; PayloadError for one that is nested too deeply, or has too many open brackets."""
    text = PLACEHOLDER.sub(lambda found: re.sub(r"\W", "_", found[0]), text)
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


def unexecuted(scripts: Iterable[Node], pattern: re.Pattern[str], executed: Collection[int]) -> str:
    """Return where the text of scripts that no command executes matches a pattern, as a noun; empty: nowhere.

    Text of comments and messages does not count, the alternative of `${X:+...}` does. A mode comes before other flags,
    the script itself before what it reads.
    """
    found = []
    for place, root in enumerate(scripts):
        for match in re.finditer(pattern.pattern.encode(), root.text or b""):
            parents = list(
                _parents(root.descendant_for_byte_range(root.start_byte + match.start(), root.start_byte + match.end()))
            )
            if _is_executed(parents, executed):
                continue
            flag, is_branch = match[0].decode(), any(node.type in BRANCHES for node in parents)
            line = (root.text or b"").count(b"\n", 0, match.start()) + root.start_point.row + 1
            where = f"{'the branch at ' if is_branch else ''}line {line}{' of what it reads' if place else ''}"
            found.append((flag not in MODES, place > 0, line, f"{where}, which holds {flag},"))
    return min(found)[-1] if found else ""


def _parents(node: Node | None) -> Iterator[Node]:
    """Yield a node and all that it is in."""
    while node is not None:
        yield node
        node = node.parent


def _is_executed(parents: Sequence[Node], executed: Collection[int]) -> bool:
    """Return whether a command executes a place of a script, or only shows it; `parents` are what it is in."""
    for at, node in enumerate(parents):
        is_message = node.type == "command" and name_of(node) in ("echo", "printf")
        if node.type == "comment" or is_message:
            return True
        if node.id in executed:
            inner = (one for one in parents[:at] if one.type == "expansion")
            return not any(child.type in (":+", "+") for one in inner for child in one.children)
    return False
