"""`parse_script`: the syntax tree of a launch script, made by tree-sitter-bash.

Placeholders such as `DATA=<Specify path>` are no bash, and become words before the script is
parsed. Of 1,197 launch scripts in public repositories 22 have one, and 8 of these could not be read
otherwise. A part that the grammar does not understand is skipped; `find_error_line` returns its
line.

The parser is slow for some inputs, so that a script is refused if it has too many open brackets, or
takes more than `MAX_PARSE_SECONDS`.
"""

from __future__ import annotations

import re
import time
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.extras import require_extra

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

MAX_PARSE_SECONDS = 0.6
CHUNK_BYTES = 4_096
"""Bytes that the parser gets at once. Between two chunks it can be stopped."""
MAX_OPEN_SIGNS = {"(": 300, "${": 300, "|": 2_000, "<<": 500, "&&": 300, "||": 300}
"""Sign -> how many of it a script may have more than of its closing sign.

The parser's time is quadratic in this number."""
CLOSING_SIGNS = {"(": ")", "${": "}"}
"""Opening sign -> its closing sign. The other signs are only counted."""
PLACEHOLDER_PATTERN = re.compile(
    r"(?<==)<[A-Za-z\[][^<>\n$&|;\"']*>(?:[ \t]*\(e\.g\.[^()\n]*\))?"
    r"|(?<=[ \t])<[A-Z][^<>\n()$&|;\"']*[^<>\s()$&|;\"']>(?=[\s/_\\])"
)
"""A placeholder: `=<path/to/data>` as a value, or `<DATA_PATH>` as a word. A redirection has no
closing sign on its line, or a lower-case file."""
BRACKET_EXPANSION_PATTERN = re.compile(
    r"(?<=\$\{)(\w+(?:\[[^\]{}\n]*\])?(?:%%?|##?|//?))([^{}\]'\n]{0,200}+[\]{'][^}\n]{0,200}+)(?=\})"
)
"""`${name%%]*`: a pattern with a bracket or a quote. The grammar takes this sign for bash's own."""
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
MODE_OPTIONS = frozenset({"--bf16", "--fp16"})
"""Options that are switches in Megatron-LM, and take a value elsewhere."""


@lru_cache(maxsize=64)
def parse_script(text: str, path: str) -> Node:
    """Return the tree of a script.

    Raises:
        PayloadError: It is nested too deeply, or has too many open brackets.
    """
    text = PLACEHOLDER_PATTERN.sub(lambda placeholder: re.sub(r"\W", "_", placeholder[0]), text)
    for sign, limit in MAX_OPEN_SIGNS.items():
        closing_sign = CLOSING_SIGNS.get(sign, "\0")  # a script has no zero byte
        if text.count(sign) - text.count(closing_sign) > limit:
            rule = f"a launch script must not have more than {limit} open {sign!r}"
            raise PayloadError(f"{path}: {rule}. Simplify the script.")
    root = _parse_tree(text, path)
    if root.has_error and BRACKET_EXPANSION_PATTERN.search(text):
        # Such an expansion stays open in any case, so its pattern may be changed.
        return _parse_tree(BRACKET_EXPANSION_PATTERN.sub(_replace_brackets, text), path)
    return root


def _replace_brackets(expansion: re.Match[str]) -> str:
    """Return an expansion with `_` for each bracket and quote in its pattern."""
    return expansion[1] + re.sub(r"[\[\]{']", "_", expansion[2])


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
    # The time is now known to be short. The source is parsed again as a whole: then the text of a node
    # is a slice of it, while a tree of chunks calls the function above for each node.
    return parser.parse(source).root_node


@cache
def _make_parser() -> Parser:
    """Return the parser of bash."""
    import tree_sitter_bash  # a compiled grammar, which nothing but a launch script needs
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def list_statements(node: Node) -> list[Node]:
    """Return the commands inside a block, a clause, or a part that the grammar does not understand."""
    return [child for child in node.named_children if child.type != "comment"]


def get_node_text(node: Node | None) -> str:
    """Return a node as it is written."""
    if node is None:
        return ""
    text = node.text  # a new copy at each access, so it is read once
    if text is None:
        return ""
    return text.decode()


def get_command_name(command: Node) -> str:
    """Return the first word of a command as it is written."""
    return get_node_text(command.child_by_field_name("name") or command.children[0])


def find_error_line(root: Node) -> int:
    """Return the first line that the grammar does not understand; 0 if it understands all."""
    if not root.has_error:
        return 0
    node = root
    while node.type != "ERROR":
        broken = [child for child in node.children if child.has_error and not child.is_missing]
        if not broken:
            break
        node = broken[0]
    return min(node.start_point.row + 1, root.end_point.row - 1)
