"""`Script`: the syntax tree of a launch script, made by tree-sitter-bash, and the words of its commands.

Before the script is parsed, placeholders (`DATA=<Specify path>`), which are no bash, become words, and the bodies of
here-documents are taken out. A part that the grammar does not understand is skipped, and `Script.error` has its line.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from bridge.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tree_sitter import Node, Parser

__all__ = ["Command", "Part", "Script", "Word", "parse", "statements"]

MAX_SECONDS = 0.6
MAX_PIPES = 2_000
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
EXPANDED = re.compile(r"\$(\w+)|\$\{(\w+)(?:(:?[-=])([^{}]*))?\}|\$\([^()]*\)|`[^`]*`|\\([$`\\])")
WORDS = frozenset(
    {
        "word",
        "number",
        "string",
        "raw_string",
        "ansi_c_string",
        "translated_string",
        "simple_expansion",
        "expansion",
        "command_substitution",
        "process_substitution",
        "arithmetic_expansion",
        "concatenation",
        "brace_expression",
        "variable_name",
        "regex",
        "extglob_pattern",
        "test_operator",
        "special_variable_name",
        "subscript",
    }
)
BLANKS = re.compile(rb"(?:\s|\\\n)*")
LATE = frozenset({"command_substitution", "process_substitution", "arithmetic_expansion"})
BRANCHES = frozenset({"if_statement", "case_item", "list"})
COMMANDS = frozenset({"command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"})
REDIRECTS = frozenset({"file_redirect", "herestring_redirect"})
NESTING = frozenset({"redirected_statement", "list", "pipeline", "negated_command"})
STAND_IN = re.compile(r"__heredoc_(\d+)__")
ESCAPES = {"n": "\n", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a word: text, a parameter, or text that only a run decides."""

    text: str
    """The text; of anything else, how it is written."""
    quoted: bool = False
    name: str = ""
    """Of a parameter: `X`, `1`, `@`."""
    index: str = ""
    """Of an array's element: `@`, `*`, `0`."""
    operator: str = ""
    """`:-`, `%`, ... and `!` or `#` before the name."""
    argument: tuple[Part, ...] = ()
    is_late: bool = False
    """A command substitution or arithmetic."""


Word = tuple[Part, ...]


@dataclass(slots=True, kw_only=True)
class Command:
    """A simple command, a declaration, or assignments alone."""

    line: int
    end: int
    """Its last line."""
    words: tuple[Word, ...] = ()
    assignments: tuple[tuple[str, str, bool, Word | list[Word]], ...] = ()
    """Name, index, whether `+=` appends, and the value: a list is that of an array."""
    outputs: list[tuple[bool, Word]] = field(default_factory=list)
    """Whether `>>` appends, and the file."""
    body: Word | None = None
    """The here-document or here-string that it reads."""

    @property
    def name(self) -> str:
        """The first word as far as it is written out."""
        return self.words[0][0].text if self.words and self.words[0] else ""


def statements(node: Node) -> list[Node]:
    """Return the commands inside a node: those of a body, a clause or a part that the grammar does not understand."""
    return [child for child in node.named_children if child.type != "comment"]


def parse(text: str, path: str = "<script>") -> Script:
    """Return the commands of a script.

    Raises:
        PayloadError: The script has more open brackets or pipes than any launch script, or is nested too deeply.
    """
    bodies: list[Word] = []
    text = LISTED.sub(r"\1${\2}", SUBSTRING.sub(r"${\1:0}", text))
    clean = _without_heredocs(PLACEHOLDER.sub(lambda found: re.sub(r"\W", "_", found[0]), text), bodies)
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
    broken = next(_errors(root), None) if root.has_error else None
    if broken is not None and broken.is_missing and broken.parent is not None:
        broken = broken.parent
    error = min(broken.start_point.row + 1, clean.count("\n") + 1) if broken is not None else 0
    return Script(source, bodies, root, text.split("\n"), error)


@cache
def _parser() -> Parser:
    import tree_sitter_bash  # a compiled grammar, which nothing but a launch script needs
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _errors(node: Node) -> Iterator[Node]:
    """Return the nodes that the grammar does not understand, in order."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.type == "ERROR" or one.is_missing:
            yield one
        elif one.has_error:
            waiting += reversed(one.children)


def _without_heredocs(text: str, bodies: list[Word]) -> str:
    """Return the script with each here-document as a here-string that stands for it; its lines become empty."""
    if "<<" not in text:
        return text
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        for found in HEREDOC.finditer(line) if "<<" in line and not line.lstrip().startswith("#") else ():
            strip = found[1] == "-"
            bare = [one.lstrip("\t") if strip else one for one in lines[at + 1 :]]
            end = next((place for place, one in enumerate(bare, at + 1) if one.rstrip() == found[4]), 0)
            if not end:
                continue
            body = "\n".join(bare[: end - at - 1])
            bodies.append((Part(text=body, quoted=True),) if found[2] or found[3] else tuple(_expanded(body)))
            lines[start] = lines[start].replace(found[0], f"<__heredoc_{len(bodies) - 1}__", 1)
            lines[at + 1 : end + 1] = [""] * (end - at)
            at = end
        at += 1
    return "\n".join(lines)


def _expanded(body: str) -> Iterator[Part]:
    """Return the pieces of a here-document whose variables are expanded."""
    at = 0
    for found in EXPANDED.finditer(body):
        if found.start() > at:
            yield Part(text=body[at : found.start()], quoted=True)
        at = found.end()
        if found[5]:
            yield Part(text=found[5], quoted=True)
        elif found[1] or found[2]:
            argument = (Part(text=found[4], quoted=True),) if found[4] else ()
            name, operator = found[1] or found[2], found[3] or ""
            yield Part(text=found[0], quoted=True, name=name, operator=operator, argument=argument)
        else:
            yield Part(text=found[0], quoted=True, is_late=True)
    if at < len(body):
        yield Part(text=body[at:], quoted=True)


class Script:
    """A parsed script.

    Args:
        source: The text that was parsed.
        bodies: Its here-documents.
        root: The tree.
        lines: The lines as they are written.
        error: The first line that the grammar does not understand; 0: none.
    """

    def __init__(self, source: bytes, bodies: list[Word], root: Node, lines: list[str], error: int) -> None:
        self.source, self.bodies, self.root, self.lines, self.error = source, bodies, root, lines, error
        self._commands: dict[int, Command] = {}
        self._words: dict[int, tuple[Word, ...]] = {}

    def text(self, node: Node) -> str:
        """Return a node as written."""
        return self.source[node.start_byte : node.end_byte].decode()

    def unexecuted(self, pattern: re.Pattern[str], executed: Collection[int]) -> Iterator[tuple[int, str, bool]]:
        """Return line, text and whether a branch holds it of what matches in no executed command, comment or message.

        The alternative of `${X:+...}` is not executed either.
        """
        for found in re.finditer(pattern.pattern.encode(), self.source):
            node = self.root.descendant_for_byte_range(found.start(), found.end())
            line, is_branch, is_alternative = 0, False, False
            while node is not None:
                line = line or self.source.count(b"\n", 0, found.start()) + 1
                is_alternative |= node.type == "expansion" and any(one.type in (":+", "+") for one in node.children)
                is_executed = node.id in executed and not is_alternative
                if is_executed or node.type == "comment" or self._is_message(node):
                    break
                is_branch |= node.type in BRANCHES
                node = node.parent
            else:
                yield line, found[0].decode(), is_branch

    def _is_message(self, node: Node) -> bool:
        return node.type == "command" and self.command(node).name in ("echo", "printf")

    def shown(self, nodes: list[Node]) -> str:
        """Return a condition on one line, as a report shows it."""
        text = self.source[nodes[0].start_byte : nodes[-1].end_byte].decode() if nodes else ""
        return " ".join(text.split())

    def words(self, nodes: list[Node]) -> tuple[Word, ...]:
        """Return the words that nodes are."""
        return tuple(self._word(node) for node in nodes if node.type in WORDS)

    def test(self, node: Node) -> tuple[Word, ...]:
        """Return the words of `[ ... ]` or `[[ ... ]]` without the brackets."""
        if node.id not in self._words:
            self._words[node.id] = tuple(self._leaves(node))
        return self._words[node.id]

    def command(self, node: Node) -> Command:
        """Return a command with the redirections behind it or behind the list that it ends."""
        if node.id not in self._commands:
            self._commands[node.id] = self._command(node)
        return self._commands[node.id]

    def _command(self, node: Node) -> Command:
        found = Command(line=node.start_point.row + 1, end=node.end_point.row + 1)
        words: list[Word] = []
        children = [node] if node.type == "variable_assignment" else node.children
        for child in children:
            if child.type == "command_name":
                words += [self._word(child.children[0]) if child.children else ()]
            elif child.type in WORDS:
                words.append(self._word(child))
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append((Part(text=self.text(child)),))
        found.words = tuple(words)
        found.assignments = tuple(self._assignment(child) for child in children if child.type == "variable_assignment")
        for redirect in self._redirects(node):
            self._redirect(redirect, found)
        return found

    @staticmethod
    def _redirects(node: Node) -> list[Node]:
        found = [child for child in node.named_children if child.type in REDIRECTS]
        parent = node.parent
        while parent is not None and parent.type in NESTING:
            if parent.type == "redirected_statement":
                found += parent.children_by_field_name("redirect")
            elif parent.named_children[-1] != node:
                break
            node, parent = parent, parent.parent
        return found

    def _redirect(self, node: Node, command: Command) -> None:
        command.end = max(command.end, node.end_point.row + 1)
        given = [child for child in node.named_children if child.type in WORDS]
        if not given:
            return
        found = STAND_IN.fullmatch(self.text(given[0]))
        if node.type == "herestring_redirect" or found:
            command.body = self.bodies[int(found[1])] if found else self._word(given[0])
        else:
            sign = next((child.type for child in node.children if not child.is_named), "")
            descriptor = node.children[0].type == "file_descriptor" and self.text(node.children[0]) != "1"
            if sign in (">", ">>", ">|", "&>") and not descriptor:
                command.outputs.append((sign == ">>", self._word(given[0])))
        command.words += self.words(given[1:])

    def _assignment(self, node: Node) -> tuple[str, str, bool, Word | list[Word]]:
        name, _, index = self.text(node.children[0]).partition("[")
        value = node.child_by_field_name("value")
        append = len(node.children) > 1 and node.children[1].type == "+="
        if value is not None and value.type == "array":
            return name, "", append, list(self.words(value.named_children))
        given: Word = () if value is None else self._pieces(node, value.start_byte, node.end_byte)
        return name, index.rstrip("]"), append, given

    def _leaves(self, node: Node) -> Iterator[Word]:
        """Return the words of a test, with its operators as words."""
        for child in node.children:
            if child.type in ("[", "]", "[[", "]]"):
                continue
            if child.type in WORDS:
                yield self._word(child)
            elif child.child_count:
                yield from self._leaves(child)
            else:
                yield (Part(text=self.text(child)),)

    def _start(self, node: Node) -> int:
        """Return where a node begins; the grammar counts blanks before an expansion inside a string to it."""
        found = BLANKS.match(self.source, node.start_byte, node.end_byte)
        return found.end() if found is not None else node.start_byte

    def _own(self, node: Node) -> str:
        """Return the text of a node without those blanks."""
        return self.source[self._start(node) : node.end_byte].decode()

    def _word(self, node: Node, *, quoted: bool = False) -> Word:
        kind = node.type
        if kind in LATE:
            return (Part(text=self._own(node), quoted=quoted, is_late=True),)
        if kind == "simple_expansion":
            text = self._own(node)
            return (Part(text=text, quoted=quoted, name=text[1:]),)
        if kind == "expansion":
            return (self._expansion(node, quoted=quoted),)
        if kind == "raw_string":
            return (Part(text=self._own(node)[1:-1], quoted=True),)
        if kind == "ansi_c_string":
            inner = self._own(node)[2:-1]
            return (Part(text=re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), inner), quoted=True),)
        if kind in ("string", "translated_string"):
            start = self._start(node) + (2 if kind == "translated_string" else 1)
            return self._pieces(node, start, node.end_byte - 1, quoted=True) or (Part(text="", quoted=True),)
        return self._pieces(node, node.start_byte, node.end_byte, quoted=quoted)

    def _pieces(self, node: Node, start: int, end: int, *, quoted: bool = False) -> Word:
        """Return a stretch of a node: its expansions and strings, and what stands between them as text."""
        found: list[Part] = []
        at = start
        if node.type == "translated_string" and node.children:
            node = node.children[-1]
        for child in node.children:
            if child.start_byte < start or child.end_byte > end or child.start_byte < at:
                continue
            if not (child.type in WORDS or child.type in LATE) or child.type in ("word", "number", "variable_name"):
                continue
            found += self._literal(at, self._start(child), quoted=quoted)
            found += self._word(child, quoted=quoted)
            at = child.end_byte
        return (*found, *self._literal(at, end, quoted=quoted))

    def _literal(self, start: int, end: int, *, quoted: bool) -> list[Part]:
        """Return text with its backslashes resolved; an escaped blank separates no words."""
        if start >= end:
            return []
        text = self.source[start:end].decode().replace("\\\n", "")
        if "\\" not in text:
            return [Part(text=text, quoted=quoted)] if text else []
        if quoted:
            return [Part(text=re.sub(r"\\([\"\\$`])", r"\1", text), quoted=True)]
        return [Part(text=re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL), quoted=True)]

    def _expansion(self, node: Node, *, quoted: bool) -> Part:
        """Return `${...}`."""
        text = self._own(node)
        name, index, operator = "", "", ""
        argument: Word = ()
        for child in node.children[1:-1]:
            if not name and child.type in ("!", "#") and not child.is_named:
                operator = child.type + "name"
            elif not name and child.type in ("variable_name", "special_variable_name", "number", "word"):
                name = self.text(child)
            elif not name and child.type == "subscript":
                name, _, index = self.text(child).partition("[")
                index = index.rstrip("]").strip("\"'")
            elif name and not operator:
                operator = self.text(child)
                argument = self._pieces(node, child.end_byte, node.end_byte - 1, quoted=quoted)
        return Part(text=text, quoted=quoted, name=name, index=index, operator=operator, argument=argument)
