"""`parse_script`: the syntax tree of a launch script, made by tree-sitter-bash.

Placeholders (`DATA=<Specify path>`), which are no bash, become words before the script is parsed. A
part that the grammar does not understand is skipped; `find_error_line` returns its line.
"""

from __future__ import annotations

import re
import time
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import PayloadError
from bridge.extras import require_extra

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tree_sitter import Node, Parser

MAX_PARSE_SECONDS = 0.6
CHUNK_BYTES = 4_096
"""Bytes that are handed to the parser at once."""
MAX_OPEN_SIGNS = {"(": 300, "${": 300, "|": 2_000, "<<": 500, "&&": 300, "||": 300}
"""Opening sign -> how many more of it than of its closing sign a script may have.

The parser's time is quadratic in the number of open signs."""
CLOSING_SIGNS = {"(": ")", "${": "}"}
PLACEHOLDER_PATTERN = re.compile(
    r"(?<==)<[A-Za-z\[][^<>\n$&|;\"']*>(?:[ \t]*\(e\.g\.[^()\n]*\))?"
    r"|(?<=[ \t])<[A-Z][^<>\n()$&|;\"']*[^<>\s()$&|;\"']>(?=[\s/_\\])"
)
BRACKET_EXPANSION_PATTERN = re.compile(
    r"(?<=\$\{)(\w+(?:\[[^\]{}\n]*\])?(?:%%?|##?|//?))([^{}\]'\n]{0,200}+[\]{'][^}\n]{0,200}+)(?=\})"
)
"""`${name%%]*`: a pattern with a bracket or a quote, which the grammar takes for one of its own."""
WORD_NODES = frozenset(
    {
        "ansi_c_string",
        "arithmetic_expansion",
        "brace_expression",
        "command_substitution",
        "concatenation",
        "expansion",
        "extglob_pattern",
        "number",
        "process_substitution",
        "raw_string",
        "regex",
        "simple_expansion",
        "special_variable_name",
        "string",
        "subscript",
        "test_operator",
        "translated_string",
        "variable_name",
        "word",
    }
)
"""Kinds of nodes that are words of a command."""
BRANCH_NODES = frozenset({"if_statement", "case_item", "list"})
"""Kinds of nodes that are read under a condition."""
MODE_OPTIONS = frozenset({"--bf16", "--fp16"})
"""Options that are switches in Megatron-LM, and take a value elsewhere."""


@lru_cache(maxsize=64)
def parse_script(text: str, path: str) -> Node:
    """Return the tree of a script.

    Raises:
        PayloadError: It is nested too deeply, or has too many open brackets.
    """
    text = PLACEHOLDER_PATTERN.sub(lambda placeholder: re.sub(r"\W", "_", placeholder[0]), text)
    for sign, most in MAX_OPEN_SIGNS.items():
        if text.count(sign) - text.count(CLOSING_SIGNS.get(sign, "\0")) > most:
            rule = f"a launch script must not have more than {most} open {sign!r}"
            raise PayloadError(f"{path}: {rule}. Simplify the script.")
    root = _parse_tree(text, path)
    if root.has_error and BRACKET_EXPANSION_PATTERN.search(
        text
    ):  # only the run decides what is left of the value
        return _parse_tree(BRACKET_EXPANSION_PATTERN.sub(_replace_brackets, text), path)
    return root


def _replace_brackets(pattern: re.Match[str]) -> str:
    return pattern[1] + re.sub(r"[\[\]{']", "_", pattern[2])


def _parse_tree(text: str, path: str) -> Node:
    """Return the tree of a text.

    Raises:
        PayloadError: It is nested too deeply.
    """
    require_extra("scripts", f"{path}: reading a launch script")
    source = f"{text}\n\n".encode()
    started = time.process_time()
    parser = _make_parser()
    try:
        parser.parse(
            lambda offset, _point: source[offset : offset + CHUNK_BYTES],
            progress_callback=lambda _offset, _error: (
                time.process_time() - started > MAX_PARSE_SECONDS
            ),
        )
    except ValueError:
        parser.reset()
        raise PayloadError(
            f"{path}: commands are nested too deeply to be followed. Simplify the script."
        ) from None
    # The text of a node of a whole source is a slice of it; that of chunks is put together by calls.
    return parser.parse(source).root_node


@cache
def _make_parser() -> Parser:
    import tree_sitter_bash  # a compiled grammar, which nothing but a launch script needs
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def list_statements(node: Node) -> list[Node]:
    """Return the commands inside a body, a clause or a part that is not understood."""
    return [child for child in node.named_children if child.type != "comment"]


def get_node_text(node: Node | None) -> str:
    """Return a node as it is written."""
    if node is None:
        return ""
    text = node.text  # made anew each time that it is asked for
    if text is None:
        return ""
    return text.decode()


def get_command_name(command: Node) -> str:
    """Return the first word of a command as it is written."""
    return get_node_text(command.child_by_field_name("name") or command.children[0])


def find_error_line(root: Node) -> int:
    """Return the first line that the grammar does not understand; 0: it understands all."""
    if not root.has_error:
        return 0
    node = root
    while node.type != "ERROR":
        broken = [child for child in node.children if child.has_error and not child.is_missing]
        if not broken:
            break
        node = broken[0]
    return min(node.start_point.row + 1, root.end_point.row - 1)


def find_unexecuted_text(
    scripts: Iterable[Node], pattern: re.Pattern[str], executed: Collection[int]
) -> str:
    """Return where text that no command executes matches a pattern, as a noun; empty: nowhere.

    Comments and messages do not count. A mode comes before other flags, the script itself before
    what it reads.
    """
    places: list[_Unexecuted] = []
    for script, root in enumerate(scripts):
        text = get_node_text(root)
        for match in pattern.finditer(text):
            start = root.start_byte + len(text[: match.start()].encode())
            branch = ""
            node = root.descendant_for_byte_range(start, start + 1)
            while node is not None and not (node.id in executed or _is_message(node)):
                if node.type in BRANCH_NODES:
                    branch = "the branch at "
                node = node.parent
            if node is None:
                line = root.start_point.row + text.count("\n", 0, match.start()) + 1
                source = " of what it reads" if script else ""
                where = f"{branch}line {line}{source}, which holds {match[0]},"
                places.append(_Unexecuted(match[0] not in MODE_OPTIONS, script, line, where))
    if not places:
        return ""
    return min(places).where


class _Unexecuted(NamedTuple):
    """A place of a text that no command executes; the order is that of the fields."""

    is_no_mode: bool
    script: int
    line: int
    where: str


def _is_message(node: Node) -> bool:
    """Return whether a node is a comment or prints a text."""
    if node.type == "comment":
        return True
    return node.type == "command" and get_command_name(node) in ("echo", "printf")
