"""`Script`: the syntax tree of a launch script, made by tree-sitter-bash.

Before the script is parsed, placeholders (`DATA=<Specify path>`), which are no bash, become words, and the bodies of
here-documents are taken out. A part that the grammar does not understand is skipped, and `Script.error` has its line.
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
MAX_PIPES = 2_000
MAX_HEREDOCS = 500
"""The end of each is looked for in all lines behind it."""
MAX_OPEN = 300
"""Brackets that are opened and not closed: the parser's recovery takes time with the square of their number."""
PLACEHOLDER = re.compile(
    r"(?<==)<[A-Za-z\[][^<>\n$&|;\"']*>(?:[ \t]*\(e\.g\.[^()\n]*\))?"
    r"|(?<=[ \t])<[A-Z][^<>\n()$&|;\"']*[^<>\s()$&|;\"']>(?=[\s/_\\])"
)
LISTED = re.compile(r"(?<=\w)(=)\$([A-Za-z_]\w*)(?=,\w)")
"""`n=$X,m=$Y` between two strings, which the grammar takes for two words."""
SUBSTRING = re.compile(r"\$\{(\w+):[ \t]*\$[^{}\n]*\}")
"""`${X:$N+1}`, which the grammar does not know and only a run decides."""
HEREDOC = re.compile(r"(?<!<)<<(-?)[ \t]*(\\?)(['\"]?)([A-Za-z_]\w*)\3")
STAND_IN = re.compile(r"__heredoc_(\d{1,6})__")
LATE = frozenset({"command_substitution", "process_substitution", "arithmetic_expansion"})
WORDS = LATE.union(
    ("word", "number", "string", "raw_string", "ansi_c_string", "translated_string", "simple_expansion", "expansion"),
    ("concatenation", "brace_expression", "variable_name", "special_variable_name", "subscript"),
    ("regex", "extglob_pattern", "test_operator"),
)
COMMANDS = frozenset({"command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"})
BRANCHES = frozenset({"if_statement", "case_item", "list"})
REDIRECTS = frozenset({"file_redirect", "herestring_redirect"})
NESTING = frozenset({"redirected_statement", "list", "pipeline", "negated_command"})


class Mention(NamedTuple):
    """Text of a script that no command executes."""

    line: int
    text: str
    is_branch: bool
    """A branch holds it."""


def statements(node: Node) -> list[Node]:
    """Return the commands inside a node: those of a body, a clause or a part that the grammar does not understand."""
    return [child for child in node.named_children if child.type != "comment"]


def parse(text: str, path: str = "<script>") -> Script:
    """Return the tree of a script; PayloadError for one that is nested too deeply, or has too many open brackets."""
    lines = text.split("\n")
    if text.count("<<") > MAX_HEREDOCS:
        raise PayloadError(f"{path}: a launch script must not have more than {MAX_HEREDOCS} '<<'. Simplify the script.")
    text = LISTED.sub(r"\1${\2}", SUBSTRING.sub(r"${\1:0}", text))
    clean, bodies = _without_heredocs(PLACEHOLDER.sub(lambda found: re.sub(r"\W", "_", found[0]), text))
    for sign, closing, most in (("(", ")", MAX_OPEN), ("${", "}", MAX_OPEN), ("|", "\0", MAX_PIPES)):
        if clean.count(sign) - clean.count(closing) > most:
            rule = f"a launch script must not have more than {most} open {sign!r}"
            raise PayloadError(f"{path}: {rule}. Simplify the script.")
    source = f"{clean}\n\n".encode()
    started = time.process_time()
    parser = _parser()
    try:
        tree = parser.parse(
            lambda offset, _point: source[offset : offset + 65_536],
            progress_callback=lambda _offset, _error: time.process_time() - started > MAX_SECONDS,
        )
    except ValueError:
        parser.reset()
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None
    root = tree.root_node
    broken = next(_errors(root), None)
    if broken is not None and broken.is_missing and broken.parent is not None:
        broken = broken.parent
    error = min(broken.start_point.row + 1, clean.count("\n") + 1) if broken is not None else 0
    return Script(source, bodies, root, lines, error)


@cache
def _parser() -> Parser:
    import tree_sitter_bash  # a compiled grammar, which nothing but a launch script needs
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _errors(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.type == "ERROR" or one.is_missing:
            yield one
        elif one.has_error:
            waiting += reversed(one.children)


def _without_heredocs(text: str) -> tuple[str, list[tuple[str, bool]]]:
    """Return the script with a here-string in the place of each here-document, and each body: is it literal?"""
    bodies: list[tuple[str, bool]] = []
    lines = text.split("\n") if "<<" in text else []
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        opened = [] if line.lstrip().startswith("#") else list(HEREDOC.finditer(line))
        for found in opened:
            tabs = "\t" if found[1] else ""
            end = next(
                (at + 1 + n for n, one in enumerate(lines[at + 1 :]) if one.lstrip(tabs).rstrip() == found[4]), 0
            )
            if not end:
                continue
            lines[start] = lines[start].replace(found[0], f"<__heredoc_{len(bodies)}__", 1)
            body = "\n".join(one.lstrip(tabs) for one in lines[at + 1 : end])
            bodies.append((body, bool(found[2] or found[3])))
            lines[at + 1 : end + 1] = [""] * (end - at)
            at = end
        at += 1
    return "\n".join(lines) or text, bodies


class Script:
    """A parsed script.

    `bodies` are its here-documents, and whether each is literal; `lines` stand as they are written; `error` is the
    first line that the grammar does not understand, 0 for none.
    """

    def __init__(self, source: bytes, bodies: list[tuple[str, bool]], root: Node, lines: list[str], error: int) -> None:
        self.source, self.bodies, self.root, self.lines, self.error = source, bodies, root, lines, error

    def text(self, node: Node, last: Node | None = None) -> str:
        """Return a node as written, or what stands from it to `last`."""
        return self.source[node.start_byte : (last or node).end_byte].decode()

    def name(self, node: Node) -> str:
        """Return the first word of a command as written."""
        first = node.child_by_field_name("name") or node.children[0]
        return self.text(first)

    def body(self, node: Node) -> tuple[str, bool] | None:
        """Return the here-document of this script that a word stands for, and whether it is literal."""
        found = STAND_IN.fullmatch(self.text(node))
        return self.bodies[int(found[1])] if found and int(found[1]) < len(self.bodies) else None

    def redirects(self, node: Node) -> list[Node]:
        """Return the redirections behind a command or behind the list that it ends."""
        found = [child for child in node.named_children if child.type in REDIRECTS]
        parent = node.parent
        while parent is not None and parent.type in NESTING:
            if parent.type == "redirected_statement":
                found += parent.children_by_field_name("redirect")
            elif parent.named_children[-1] != node:
                break
            node, parent = parent, parent.parent
        return found

    def test(self, node: Node) -> Iterator[Node]:
        """Return the words and operators of `[ ... ]` or `[[ ... ]]` without the brackets."""
        for child in node.children:
            if child.type not in ("[", "]", "[[", "]]"):
                yield from [child] if child.type in WORDS or not child.child_count else self.test(child)

    def unexecuted(self, pattern: re.Pattern[str], executed: Collection[int]) -> Iterator[Mention]:
        """Yield the matches of a pattern that are in no executed command, comment or message.

        The alternative of `${X:+...}` is not executed either.
        """
        for found in re.finditer(pattern.pattern.encode(), self.source):
            node = self.root.descendant_for_byte_range(found.start(), found.end())
            is_branch = is_alternative = False
            while node is not None:
                is_alternative |= node.type == "expansion" and any(one.type in (":+", "+") for one in node.children)
                is_message = node.type == "command" and self.name(node) in ("echo", "printf")
                if (node.id in executed and not is_alternative) or node.type == "comment" or is_message:
                    break
                is_branch |= node.type in BRANCHES
                node = node.parent
            else:
                yield Mention(self.source.count(b"\n", 0, found.start()) + 1, found[0].decode(), is_branch)
