"""The commands of a launch script as plain nodes, made from the syntax tree of tree-sitter-bash.

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
    from collections.abc import Iterator

    from tree_sitter import Node as TreeNode
    from tree_sitter import Parser

__all__ = [
    "AndOr",
    "Arithmetic",
    "Array",
    "Assignment",
    "Case",
    "Command",
    "Define",
    "Group",
    "If",
    "Loop",
    "Node",
    "Not",
    "Part",
    "Script",
    "Test",
    "Word",
    "parse",
]

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
CONTAINERS = frozenset({"program", "ERROR", "do_group", "compound_statement", "subshell", "else_clause"})
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


@dataclass(frozen=True, slots=True)
class Array:
    """`(a b c)` behind an assignment."""

    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """`NAME=value`, `NAME+=value` or `NAME[0]=value`."""

    name: str
    value: Word | Array
    append: bool = False
    index: str = ""


@dataclass(slots=True, kw_only=True)
class Command:
    """A simple command, a declaration, or assignments alone."""

    line: int
    end: int
    """Its last line."""
    words: tuple[Word, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    """Of a declaration: behind its word; else: before the command."""
    outputs: list[tuple[str, Word]] = field(default_factory=list)
    """`>` or `>>` and the file."""
    body: Word | None = None
    """The here-document or here-string that it reads."""


@dataclass(slots=True)
class Test:
    """`[ ... ]`, `[[ ... ]]`."""

    words: tuple[Word, ...]
    is_double: bool


@dataclass(slots=True)
class Arithmetic:
    """`(( ... ))`."""

    text: str


@dataclass(slots=True)
class Not:
    """`! command`."""

    node: Node


@dataclass(slots=True)
class AndOr:
    """`left && right` or `left || right`."""

    left: Node
    operator: str
    right: Node
    line: int
    text: str
    """The left side as written."""


@dataclass(slots=True)
class If:
    """An `if` with its branches: condition, its text and line, body."""

    line: int
    branches: list[tuple[list[Node], str, int, list[Node]]]
    otherwise: list[Node]


@dataclass(slots=True)
class Case:
    """A `case` with its arms: patterns, their text and line, body."""

    line: int
    subject: Word
    arms: list[tuple[tuple[Word, ...], str, int, list[Node]]]


@dataclass(slots=True)
class Loop:
    """A loop; `items` are those of a `for`."""

    variable: str
    items: tuple[Word, ...]
    body: list[Node]
    line: int


@dataclass(slots=True)
class Group:
    """`{ ... }`, `( ... )` or a pipeline."""

    body: list[Node]
    is_pipe: bool = False


@dataclass(slots=True)
class Define:
    """A function."""

    name: str
    body: list[Node]


Node = Command | Test | Arithmetic | Not | AndOr | If | Case | Loop | Group | Define


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A parsed script."""

    nodes: list[Node]
    lines: list[str]
    """Its lines, as they are written."""
    error: int = 0
    """The first line that the grammar does not understand; 0: none."""


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
        root = tree.root_node
        nodes = _Compiler(source, bodies).statements(root)
    except (ValueError, RecursionError):
        parser.reset()
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None
    broken = next(_errors(root), None) if root.has_error else None
    if broken is not None and broken.is_missing and broken.parent is not None:
        broken = broken.parent
    error = min(broken.start_point.row + 1, clean.count("\n") + 1) if broken is not None else 0
    return Script(nodes=nodes, lines=text.split("\n"), error=error)


@cache
def _parser() -> Parser:
    import tree_sitter_bash  # a compiled grammar, which nothing but a launch script needs
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _errors(node: TreeNode) -> Iterator[TreeNode]:
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
            end = next(
                (
                    place
                    for place in range(at + 1, len(lines))
                    if (lines[place].lstrip("\t") if strip else lines[place]).rstrip() == found[4]
                ),
                0,
            )
            if not end:
                continue
            body = "\n".join(one.lstrip("\t") if strip else one for one in lines[at + 1 : end])
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


class _Compiler:
    """Makes nodes of the tree of tree-sitter.

    Args:
        source: The script.
        bodies: Its here-documents.
    """

    def __init__(self, source: bytes, bodies: list[Word]) -> None:
        self.source, self.bodies = source, bodies

    def start(self, node: TreeNode) -> int:
        """Return where a node begins; the grammar counts blanks before an expansion inside a string to it."""
        found = BLANKS.match(self.source, node.start_byte, node.end_byte)
        return found.end() if found is not None else node.start_byte

    def own(self, node: TreeNode) -> str:
        """Return the text of a node without those blanks."""
        return self.source[self.start(node) : node.end_byte].decode()

    def text(self, node: TreeNode) -> str:
        return self.source[node.start_byte : node.end_byte].decode()

    def shown(self, nodes: list[TreeNode]) -> str:
        """Return a condition on one line, as a report shows it."""
        text = self.source[nodes[0].start_byte : nodes[-1].end_byte].decode() if nodes else ""
        return " ".join(text.split())

    # -- commands ----------------------------------------------------------------------------------------------------

    def statements(self, node: TreeNode) -> list[Node]:
        found: list[Node] = []
        for child in node.named_children:
            found += self.statement(child)
        return found

    def statement(self, node: TreeNode) -> list[Node]:
        kind = node.type
        if kind in ("command", "variable_assignment", "variable_assignments", "declaration_command", "unset_command"):
            return [self.command(node)]
        if kind == "redirected_statement":
            return self.redirected(node)
        if kind in ("compound_statement", "subshell"):
            if node.children and node.children[0].type == "((":
                return [Arithmetic(self.text(node)[2:-2])]
            return [Group(self.statements(node))]
        if kind == "test_command":
            words = tuple(self.leaves(node))
            return [Test(words, self.text(node).startswith("[["))]
        if kind == "negated_command":
            inner = self.statements(node)
            return [Not(inner[0])] if inner else []
        if kind == "list":
            return self.joined(node)
        if kind == "pipeline":
            return [Group(self.statements(node), is_pipe=True)]
        if kind == "if_statement":
            return [self.conditional(node)]
        if kind == "case_statement":
            return [self.case(node)]
        if kind in ("for_statement", "while_statement", "c_style_for_statement"):
            return [self.loop(node)]
        if kind == "function_definition":
            name = node.child_by_field_name("name")
            body = node.child_by_field_name("body")
            return [Define(self.text(name), self.statement(body))] if name is not None and body is not None else []
        return self.statements(node) if kind in CONTAINERS else []

    def command(self, node: TreeNode) -> Command:
        found = Command(line=node.start_point.row + 1, end=node.end_point.row + 1)
        words: list[Word] = []
        assignments: list[Assignment] = []
        if node.type == "variable_assignment":
            assignments.append(self.assignment(node))
        for child in node.children if node.type != "variable_assignment" else ():
            if child.type == "variable_assignment":
                assignments.append(self.assignment(child))
            elif child.type == "command_name":
                words.append(self.word(child.children[0]) if child.children else ())
            elif child.type in WORDS:
                words.append(self.word(child))
            elif child.type in ("file_redirect", "herestring_redirect"):
                self.redirect(child, found)
            elif not child.is_named and child.type not in ("$", "=", "=="):
                words.append((Part(text=self.text(child)),))
            elif child.type in ("=", "=="):
                words.append((Part(text=child.type),))
        found.words, found.assignments = tuple(words), tuple(assignments)
        return found

    def assignment(self, node: TreeNode) -> Assignment:
        target, sign = node.children[0], node.children[1] if len(node.children) > 1 else None
        name, _, index = self.text(target).partition("[")
        append = sign is not None and sign.type == "+="
        value = node.children[2] if len(node.children) > 2 else None
        if value is None:
            return Assignment(name, (), append, index.rstrip("]"))
        if value.type == "array":
            return Assignment(
                name, Array(tuple(self.word(item) for item in value.named_children if item.type in WORDS)), append
            )
        return Assignment(name, self.pieces(node, value.start_byte, node.end_byte), append, index.rstrip("]"))

    def redirected(self, node: TreeNode) -> list[Node]:
        found: list[Node] = []
        for child in node.named_children:
            if child.type not in ("file_redirect", "herestring_redirect", "heredoc_redirect"):
                found += self.statement(child)
        last = _last(found)
        if last is None:  # `> file` alone, or `{ ... } > file`
            return found
        for child in node.named_children:
            if child.type in ("file_redirect", "herestring_redirect"):
                self.redirect(child, last)
        return found

    def redirect(self, node: TreeNode, command: Command) -> None:
        command.end = max(command.end, node.end_point.row + 1)
        given = [child for child in node.named_children if child.type in WORDS]
        if not given:
            return
        word = self.word(given[0])
        found = re.fullmatch(r"__heredoc_(\d+)__", self.text(given[0]))
        if node.type == "herestring_redirect" or found:
            command.body = self.bodies[int(found[1])] if found else word
        else:
            sign = next((child.type for child in node.children if not child.is_named), "")
            descriptor = node.children[0].type == "file_descriptor" and self.text(node.children[0]) != "1"
            if sign in (">", ">>", ">|", "&>") and not descriptor:
                command.outputs.append((sign, word))
        command.words += tuple(map(self.word, given[1:]))

    def joined(self, node: TreeNode) -> list[Node]:
        """Return `a && b || c`; the tree nests as deep as the list is long."""
        chain: list[TreeNode] = []
        while node.type == "list" and len(node.children) == 3:
            chain.append(node)
            node = node.children[0]
        left: list[Node] = self.statement(node)
        for one in reversed(chain):
            right = self.statement(one.children[2])
            if not left or not right:
                left = left or right
                continue
            text = self.shown([one.children[0]])
            left = [AndOr(_one(left), one.children[1].type, _one(right), one.start_point.row + 1, text)]
        return left

    def conditional(self, node: TreeNode) -> If:
        found = If(node.start_point.row + 1, [], [])
        self._branch(node, found)
        for child in node.named_children:
            if child.type == "elif_clause":
                self._branch(child, found)
            elif child.type == "else_clause":
                found.otherwise = self.statements(child)
        return found

    def _branch(self, node: TreeNode, found: If) -> None:
        """Add the condition and body of an `if` or `elif`."""
        condition: list[TreeNode] = []
        body: list[TreeNode] = []
        into = condition
        for child in node.children:
            if child.type == "then":
                into = body
            elif child.is_named and child.type not in ("elif_clause", "else_clause", "comment"):
                into.append(child)
        tests = [one for child in condition for one in self.statement(child)]
        inside = [one for child in body for one in self.statement(child)]
        found.branches.append((tests, self.shown(condition), node.start_point.row + 1, inside))

    def case(self, node: TreeNode) -> Case:
        subject = node.child_by_field_name("value")
        arms = []
        for item in node.named_children:
            if item.type != "case_item":
                continue
            closing = next((at for at, child in enumerate(item.children) if child.type == ")"), len(item.children))
            heads = [child for child in item.children[:closing] if child.is_named]
            body = [one for child in item.children[closing + 1 :] if child.is_named for one in self.statement(child)]
            arms.append((tuple(map(self.word, heads)), self.shown(heads), item.start_point.row + 1, body))
        return Case(node.start_point.row + 1, self.word(subject) if subject is not None else (), arms)

    def loop(self, node: TreeNode) -> Loop:
        body = next((child for child in node.named_children if child.type in ("do_group", "compound_statement")), None)
        name = ""
        items: tuple[Word, ...] = ()
        if node.type == "for_statement":
            variable = node.child_by_field_name("variable")
            name = self.text(variable) if variable is not None else ""
            given = node.children_by_field_name("value")
            items = tuple(self.word(child) for child in given if child.type in WORDS)
        return Loop(name, items, self.statements(body) if body is not None else [], node.start_point.row + 1)

    # -- words -------------------------------------------------------------------------------------------------------

    def leaves(self, node: TreeNode) -> Iterator[Word]:
        """Return the words of a test, with its operators and brackets as words."""
        for child in node.children:
            if child.type in ("[", "]", "[[", "]]"):
                continue
            if child.type in WORDS:
                yield self.word(child)
            elif child.child_count:
                yield from self.leaves(child)
            else:
                yield (Part(text=self.text(child)),)

    def word(self, node: TreeNode, *, quoted: bool = False) -> Word:
        kind = node.type
        if kind in LATE:
            return (Part(text=self.own(node), quoted=quoted, is_late=True),)
        if kind == "simple_expansion":
            text = self.own(node)
            return (Part(text=text, quoted=quoted, name=text[1:]),)
        if kind == "expansion":
            return (self.expansion(node, quoted=quoted),)
        if kind == "raw_string":
            return (Part(text=self.own(node)[1:-1], quoted=True),)
        if kind == "ansi_c_string":
            inner = self.own(node)[2:-1]
            return (Part(text=re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), inner), quoted=True),)
        if kind in ("string", "translated_string"):
            start = self.start(node) + (2 if kind == "translated_string" else 1)
            return self.pieces(node, start, node.end_byte - 1, quoted=True) or (Part(text="", quoted=True),)
        return self.pieces(node, node.start_byte, node.end_byte, quoted=quoted)

    def pieces(self, node: TreeNode, start: int, end: int, *, quoted: bool = False) -> Word:
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
            found += self.literal(at, self.start(child), quoted=quoted)
            found += self.word(child, quoted=quoted)
            at = child.end_byte
        return (*found, *self.literal(at, end, quoted=quoted))

    def literal(self, start: int, end: int, *, quoted: bool) -> list[Part]:
        """Return text with its backslashes resolved; an escaped blank separates no words."""
        if start >= end:
            return []
        text = self.source[start:end].decode().replace("\\\n", "")
        if "\\" not in text:
            return [Part(text=text, quoted=quoted)] if text else []
        if quoted:
            return [Part(text=re.sub(r"\\([\"\\$`])", r"\1", text), quoted=True)]
        return [Part(text=re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL), quoted=True)]

    def expansion(self, node: TreeNode, *, quoted: bool) -> Part:
        """Return `${...}`."""
        text = self.own(node)
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
                argument = self.pieces(node, child.end_byte, node.end_byte - 1, quoted=quoted)
        return Part(text=text, quoted=quoted, name=name, index=index, operator=operator, argument=argument)


def _last(nodes: list[Node]) -> Command | None:
    """Return the command that a redirection behind these nodes belongs to."""
    last = nodes[-1] if nodes else None
    while not isinstance(last, Command | None):
        if isinstance(last, AndOr):
            last = last.right
        elif isinstance(last, Not):
            last = last.node
        else:
            last = last.body[-1] if isinstance(last, Group) and last.is_pipe and last.body else None
    return last


def _one(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else Group(nodes)
