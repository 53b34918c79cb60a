"""`Variables`: the variables of a script at one point, and the words that bash makes of them.

    variables.set("FLAGS", ["--bf16 --fp8-format $FORMAT"])
    variables.words_of(["$FLAGS"])      # ["--bf16", "--fp8-format", "$FORMAT"]

A piece that only the run decides stays in the word as it is written.
"""

from __future__ import annotations

import re
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

from bridge.read.launch.bash.arithmetic import evaluate_arithmetic
from bridge.read.launch.shell_word import (
    BRACES_REGEX,
    DEFAULT_PATTERN,
    DEFERRED_REGEX,
    FIELD_PATTERN,
    UNKNOWN_PATTERN,
    ShellWord,
    get_variable_name,
    join_texts,
)
from bridge.read.launch.syntax_tree import get_node_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tree_sitter import Node

MAX_VARIABLE_WORDS = 20_000
_REST_REGEX = rf"(?P<parameter>\$(?:\w+|[@*#]|{BRACES_REGEX}))|(?P<late>{DEFERRED_REGEX})|(?P<plain>[^'\"\\$`<>]+|.)"
_QUOTES_REGEX = rf"'(?P<raw>[^']*)'|\"(?P<string>(?:\\.|{DEFERRED_REGEX}|[^\"\\])*+)\""
QUOTED_PIECE_PATTERN = re.compile(rf"\\(?P<escaped>[\"\\$`\n])|{_REST_REGEX}", re.DOTALL)
PIECE_PATTERN = re.compile(rf"\\(?P<escaped>.)|{_QUOTES_REGEX}|{_REST_REGEX}", re.DOTALL)
"""The pieces of a word, in quotes and outside."""
PARAMETER_PATTERN = re.compile(r"\$\{([!#]?)(\w+|[@*#?$!-])?(?:\[([^\]\n]*)\])?(:?[-=+?]|[^\w}])?")
"""`${name[index]operator...`, with the sign before the name."""
HEREDOC_PATTERN = re.compile(
    r"\$\(\s*cat\s*<<\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)\n(?P<text>(?:.*\n)*?)(?P=end)\s*\)"
)
"""`$(cat <<EOF ...)`, whose output is its own text."""
JOINED_ARRAY_PATTERN = re.compile(
    r"""\$\(\s*IFS=(['"])(?P<sign>[^'"$`\\\n])[^'"$`\\\n]*\1\s*;\s*echo\s+"\$\{(?P<name>\w+)\[\*\]\}"\s*\)"""
)
"""`$(IFS=', '; echo "${array[*]}")`, whose output is the elements with the first sign between
them."""
DEFAULT_OPERATORS = (":-", "-", ":=", "=")
"""Operators of `${name:-default}`."""


class _Parameter(NamedTuple):
    """The parts of `$name` or `${name[index]operator argument}`."""

    text: str
    """As it is written."""
    name: str
    subscript: str = ""
    operator: str = ""
    """`#` and `!` too, which stand before the name."""
    argument: str = ""


class Variables:
    """Variables at one point of a script."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        self.stated = stated
        """Variables that are set from outside; they replace a value that only the run decides."""
        self.values = {name: {0: value} for name, value in stated.items()}
        """The elements of each variable by their index; one that is no array has the element 0.
        They are never changed, only replaced, so that a copy of the mapping is a copy of all
        variables. No element: known to be unset."""

    def get_elements(self, name: str) -> list[str]:
        """Return the elements of a variable in their order; none for one that nothing sets."""
        return [*self.values.get(name, {}).values()]

    def set(
        self, name: str, words: Sequence[str], *, append: bool = False, is_array: bool = False
    ) -> None:
        """Set a variable, or add to it.

        A text that is no array becomes the element 0, as in bash.
        """
        old = self.values.get(name, {})
        first = 0
        if append and is_array:
            first = max(old, default=-1) + 1
            words = words[: MAX_VARIABLE_WORDS - len(old)]
        elif append:
            words = [join_texts([old.get(0), *words])]
        elif name in self.stated and any(map(UNKNOWN_PATTERN.search, words)):
            words = [self.stated[name]]
            if is_array:
                words = split_words(self.stated[name])
        new = dict(enumerate(words[:MAX_VARIABLE_WORDS], first))
        if append or not is_array:
            new = {**old, **new}
        self.values[name] = new

    def set_element(self, name: str, index: str, text: str, *, append: bool = False) -> None:
        """Set an element of an array, or add to it; without a plain number the array is unknown."""
        elements = dict(self.values.get(name, {}))
        if not index.isdecimal():
            self.forget(name)
            return
        place = int(index)
        if append:
            text = join_texts([elements.get(place), text])
        elements[place] = text
        self.values[name] = dict(sorted(elements.items()))

    def forget(self, name: str) -> None:
        """Make a variable one that only the run knows."""
        if name in self.values:
            self.set(name, [f"${name}"], is_array=True)

    def text(self, node: Node) -> str:
        """Return a word as one text: as in an assignment, without splitting."""
        return self.expand_text(get_node_text(node).lstrip())

    def expand_text(self, word: str, *, is_quoted: bool = False) -> str:
        """Return a word, as it is written, as one text; `is_quoted` for the inside of `"..."`."""
        texts: list[str] = []
        pieces = self._pieces(word, is_split=False, is_quoted=is_quoted)
        for piece in islice(pieces, MAX_VARIABLE_WORDS):
            texts.append(" " if piece is None else piece)
        return join_texts(texts)

    def words(self, nodes: Iterable[Node]) -> list[str]:
        """Return the words that several words of a command expand to."""
        return self.expand_words(get_node_text(node).lstrip() for node in nodes)

    def expand_words(self, texts: Iterable[str]) -> list[str]:
        """Return the words that several words, as they are written, expand to."""
        words: list[str] = []
        for text in texts:
            pieces = islice(self._pieces(text, is_split=True), MAX_VARIABLE_WORDS)
            for is_end, word in groupby(pieces, lambda piece: piece is None):
                if not is_end:
                    words.append(join_texts(word))
            if len(words) > MAX_VARIABLE_WORDS:
                break
        return words[:MAX_VARIABLE_WORDS]

    def _pieces(
        self, word: str, *, is_split: bool, is_quoted: bool = False
    ) -> Iterator[str | None]:
        """Yield the pieces of a word, with None between two words of a value that is split."""
        pattern = QUOTED_PIECE_PATTERN if is_quoted else PIECE_PATTERN
        for match in pattern.finditer(word):
            kind = str(match.lastgroup)
            piece = match[kind]
            if kind == "parameter":
                yield from self._expand_parameter(piece, is_split=is_split, is_quoted=is_quoted)
            elif kind == "string" and piece:
                yield from self._pieces(piece, is_split=False, is_quoted=True)
            elif kind == "late":
                yield from self._expand_deferred(piece, is_split=is_split)
            elif kind == "escaped":
                yield piece.removeprefix("\n")
            else:
                yield piece

    def _expand_deferred(self, piece: str, *, is_split: bool) -> Iterator[str | None]:
        """Yield the pieces of `$((A + B))` of constants and of `$(cat <<EOF ...)`.

        Any other piece is yielded as it is written.
        """
        if not is_split:
            array = JOINED_ARRAY_PATTERN.fullmatch(piece)
            if array is not None and array["name"] in self.values:
                yield array["sign"].join(self.get_elements(array["name"]))
                return
            shown = HEREDOC_PATTERN.fullmatch(piece)
            if shown is not None:
                text = shown["text"].rstrip("\n")
                if shown["quote"]:
                    yield text
                else:
                    yield from self._pieces(text, is_split=False, is_quoted=True)
                return
        value = evaluate_arithmetic(piece, self.values)
        yield piece if value is None else value

    def _expand_parameter(
        self, expansion: str, *, is_split: bool, is_quoted: bool
    ) -> Iterator[str | None]:
        """Yield the pieces of `$name` and `${name...}`.

        In quotes `${A[@]}` and `$@` stay several words.
        """
        parameter = self._parse_parameter(expansion, is_quoted=is_quoted)
        values = [expansion]
        if parameter.name:
            values = self._evaluate_parameter(parameter)
        if not is_split and "@" not in (parameter.subscript, parameter.name):
            values = [" ".join(values)]
        for place, value in enumerate(values):
            if place:
                yield None
            if is_split:
                yield from self._fields(value, parameter.name)
            else:
                yield value

    def _parse_parameter(self, expansion: str, *, is_quoted: bool) -> _Parameter:
        """Return the parts of `$name` or `${name...}`; no name where they are not understood."""
        if not expansion.startswith("${"):
            return _Parameter(expansion, name=expansion[1:])
        match = PARAMETER_PATTERN.match(expansion)
        if match is None:
            return _Parameter(expansion, name="")
        sign, name, index, operator = match.groups("")
        argument = self.expand_text(expansion[match.end() : -1], is_quoted=is_quoted)
        return _Parameter(expansion, name, index, sign or operator, argument)

    def _fields(self, value: str, name: str) -> Iterator[str | None]:
        """Yield the words of a value that is not in quotes, with None at its blanks."""
        if self._has_custom_separator(value):
            yield f"${name}"  # IFS splits it at other signs than blanks
            return
        if value[:1].isspace():
            yield None
        for place, field in enumerate(split_words(value)):
            if place:
                yield None
            yield field
        if value[-1:].isspace():
            yield None

    def _has_custom_separator(self, value: str) -> bool:
        """Return whether the script splits a value in another way than at blanks."""
        separators = "".join(self.get_elements("IFS"))
        if not separators or get_variable_name(separators) or separators in (" \t\n", "$' \\t\\n'"):
            return False  # with `IFS=$OLD_IFS` a script restores it
        return any(char.isspace() or char in separators for char in value)

    def _evaluate_parameter(self, parameter: _Parameter) -> list[str]:
        """Return the words of a parameter, and set its variable where the operator is `:=` or `=`.

        It is a single word unless the parameter is a list.
        """
        name = parameter.name
        index = parameter.subscript.strip("\"'")
        operator = parameter.operator
        if index not in ("", "@", "*") or operator not in ("", ":?", "?", *DEFAULT_OPERATORS):
            return [parameter.text]
        words = self._find_elements(name, index)
        if operator not in DEFAULT_OPERATORS:
            return [parameter.text] if words is None else words
        if words == [] and name not in ("@", "*"):  # the script has unset it
            if operator[-1] == "=":
                self.set(name, [parameter.argument])
            return [parameter.argument]
        text = " ".join(words or ())
        # A value such as `$A`, where nothing sets A, is empty in bash: the default may take its place.
        is_unset = words is None or bool(text and not ShellWord.from_text(text).text_when_unset)
        if not (is_unset or (operator[0] == ":" and not text)):
            return words or []
        default = f"${{{get_variable_name(text) or name}:-{parameter.argument}}}"
        if operator[-1] == "=":
            self.set(name, [default])
        return [default]

    def _find_elements(self, name: str, index: str) -> list[str] | None:
        """Return the elements that `${name[index]}` stands for.

        None where nothing is known of it.
        """
        elements = self.values.get(name)
        if elements is None:
            return None
        if {index, name} & {"@", "*"}:
            return [*elements.values()]
        if 0 in elements:
            return [elements[0]]
        return []


def split_words(text: str) -> list[str]:
    """Return the words of a text that bash splits at blanks; a word of a default has its variable."""
    if not any(mark in text for mark in "$`<>"):
        return text.split()

    def spread(default: re.Match[str]) -> str:
        if " " not in default[2]:
            return default[0]
        return " ".join(f"${{{default[1]}:-{field}}}" for field in split_words(default[2]))

    fields = [match[0] for match in FIELD_PATTERN.finditer(DEFAULT_PATTERN.sub(spread, text))]
    return [field for field in fields if ShellWord.from_text(field)]
