"""`Variables`: the variables of a script at one point, and the words that bash expands them to.

    variables.set("FLAGS", ["--bf16 --fp8-format $FORMAT"])
    variables.expand_words(["$FLAGS"])      # ["--bf16", "--fp8-format", "$FORMAT"]

A piece that only the run decides stays in the word as it is written.

A word is cut into pieces by `PIECE_PATTERN`: quoted strings, parameters (`$name`, `${name...}`),
deferred pieces (`$(...)`, backquotes), escaped characters, and plain text. Each piece is expanded
by itself. A value outside of quotes is split at its blanks into several words, as bash does.
"""

from __future__ import annotations

import re
from functools import lru_cache
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

VariableElements = dict[int, str]
"""The elements of a variable by their index. A variable that is no array has the element 0."""
MAX_VARIABLE_WORDS = 20_000
"""Words of one variable or one command that are kept."""
_REST_REGEX = rf"(?P<parameter>\$(?:\w+|[@*#]|{BRACES_REGEX}))|(?P<late>{DEFERRED_REGEX})|(?P<plain>[^'\"\\$`<>]+|.)"
_QUOTES_REGEX = rf"'(?P<raw>[^']*)'|\"(?P<string>(?:\\.|{DEFERRED_REGEX}|[^\"\\])*+)\""
QUOTED_PIECE_PATTERN = re.compile(rf"\\(?P<escaped>[\"\\$`\n])|{_REST_REGEX}", re.DOTALL)
PIECE_PATTERN = re.compile(rf"\\(?P<escaped>.)|{_QUOTES_REGEX}|{_REST_REGEX}", re.DOTALL)
"""The pieces of a word, in quotes and outside."""
PARAMETER_PATTERN = re.compile(r"\$\{([!#]?)(\w+|[@*#?$!-])?(?:\[([^\]\n]*)\])?(:?[-=+?]|[^\w}])?")
"""`${name[index]operator...`, with `#` or `!` before the name."""
HEREDOC_PATTERN = re.compile(
    r"\$\(\s*cat\s*<<\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)\n(?P<text>(?:.*\n)*?)(?P=end)\s*\)"
)
"""`$(cat <<EOF ...)`, whose output is the text of the here-document."""
JOINED_ARRAY_PATTERN = re.compile(
    r"""\$\(\s*IFS=(['"])(?P<sign>[^'"$`\\\n])[^'"$`\\\n]*\1\s*;\s*echo\s+"\$\{(?P<name>\w+)\[\*\]\}"\s*\)"""
)
"""`$(IFS=', '; echo "${array[*]}")`, whose output is the elements with the first character of IFS
between them."""
DEFAULT_OPERATORS = (":-", "-", ":=", "=")
"""Operators with a default: `${name:-default}`. Those with `=` set the variable too."""
ASK_OPERATORS = ("", ":?", "?")
"""Operators that leave the value as it is."""


@lru_cache(maxsize=1024)
def _cut_word(word: str, *, is_quoted: bool) -> tuple[tuple[str, str], ...]:
    """Return kind and text of each piece of a word as it is written.

    A script with undecided conditions is followed many times, each time with the same words.
    """
    pattern = QUOTED_PIECE_PATTERN if is_quoted else PIECE_PATTERN
    pieces: list[tuple[str, str]] = []
    for match in pattern.finditer(word):
        kind = str(match.lastgroup)
        pieces.append((kind, match[kind]))
    return tuple(pieces)


class _Parameter(NamedTuple):
    """The parts of `$name` or `${name[index]operator argument}`."""

    text: str
    """The parameter as it is written."""
    name: str
    """The variable; empty if the form is not understood."""
    subscript: str = ""
    """The text between the brackets: an index, `@` or `*`."""
    operator: str = ""
    """The operator after the name, or `#` or `!` before it."""
    argument: str = ""
    """The text after the operator, expanded."""


class Variables:
    """Variables at one point of a script."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        self.stated = stated
        """Variables that the environment of the run sets. They replace a value that only the run
        decides."""
        self.values: dict[str, VariableElements] = {}
        """Name -> its elements. A variable without elements is known to be unset; a variable that
        is absent is one that the script has not set. The elements are never changed, only replaced,
        so that a copy of the mapping is a copy of all variables."""
        for name, value in stated.items():
            self.values[name] = {0: value}

    def get_elements(self, name: str) -> list[str]:
        """Return the elements of a variable in their order; none for one that nothing sets."""
        return [*self.values.get(name, {}).values()]

    def set(
        self, name: str, words: Sequence[str], *, append: bool = False, is_array: bool = False
    ) -> None:
        """Set a variable, or add to it.

        Args:
            name: The variable.
            words: The elements of an array, or one text, which becomes the element 0.
            append: Whether the words are added (`A+=x`, `A+=(x y)`).
            is_array: Whether the words are the elements of an array.
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
        elements = dict(enumerate(words[:MAX_VARIABLE_WORDS], first))
        if append or not is_array:
            # As in bash, `A=x` replaces only the element 0 of an array.
            elements = {**old, **elements}
        self.values[name] = elements

    def set_element(self, name: str, index: str, text: str, *, append: bool = False) -> None:
        """Set an element of an array, or add to it.

        An index that is no plain number, such as `$i`, makes the array unknown.
        """
        if not index.isdecimal():
            self.forget(name)
            return
        elements = dict(self.values.get(name, {}))
        number = int(index)
        if append:
            text = join_texts([elements.get(number), text])
        elements[number] = text
        self.values[name] = dict(sorted(elements.items()))

    def forget(self, name: str) -> None:
        """Make a variable unknown: its value becomes `$NAME`, which only the run decides."""
        if name in self.values:
            self.set(name, [f"${name}"], is_array=True)

    def text(self, node: Node) -> str:
        """Return a word as one text: as in an assignment, without splitting."""
        return self.expand_text(get_node_text(node).lstrip())

    def expand_text(self, word: str, *, is_quoted: bool = False) -> str:
        """Return a word, which is given as it is written, as one expanded text.

        Args:
            word: The word.
            is_quoted: Whether it is the inside of `"..."`.
        """
        texts: list[str] = []
        pieces = self._pieces(word, is_split=False, is_quoted=is_quoted)
        for piece in islice(pieces, MAX_VARIABLE_WORDS):
            texts.append(" " if piece is None else piece)
        return join_texts(texts)

    def words(self, nodes: Iterable[Node]) -> list[str]:
        """Return the words that the word nodes of a command expand to."""
        return self.expand_words(get_node_text(node).lstrip() for node in nodes)

    def expand_words(self, texts: Iterable[str]) -> list[str]:
        """Return the words that words as they are written expand to."""
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
        """Yield the expanded pieces of a word, and None between two words of a split value.

        Args:
            word: The word as it is written.
            is_split: Whether values are split at their blanks.
            is_quoted: Whether the word is the inside of `"..."`.
        """
        for kind, piece in _cut_word(word, is_quoted=is_quoted):
            if kind == "parameter":
                yield from self._expand_parameter(piece, is_split=is_split, is_quoted=is_quoted)
            elif kind == "string" and piece:
                yield from self._pieces(piece, is_split=False, is_quoted=True)
            elif kind == "late":
                yield from self._expand_deferred(piece, is_split=is_split)
            elif kind == "escaped":
                yield piece.removeprefix("\n")  # a backslash at the end of a line joins two lines
            else:
                yield piece

    def _expand_deferred(self, piece: str, *, is_split: bool) -> Iterator[str | None]:
        """Yield the pieces that a command or an arithmetic expression expands to.

        Three forms are known: `$((A + B))`, `$(cat <<EOF ...)` and `$(IFS=,; echo "${A[*]}")`. The
        last two are known only if their output is not split. Any other piece is yielded as it is
        written.
        """
        if not is_split:
            array = JOINED_ARRAY_PATTERN.fullmatch(piece)
            if array is not None and array["name"] in self.values:
                yield array["sign"].join(self.get_elements(array["name"]))
                return
            heredoc = HEREDOC_PATTERN.fullmatch(piece)
            if heredoc is not None:
                text = heredoc["text"].rstrip("\n")  # as `$(...)` does
                if heredoc["quote"]:
                    yield text
                else:
                    yield from self._pieces(text, is_split=False, is_quoted=True)
                return
        value = evaluate_arithmetic(piece, self.values)
        if value is None:
            value = piece
        yield value

    def _expand_parameter(
        self, expansion: str, *, is_split: bool, is_quoted: bool
    ) -> Iterator[str | None]:
        """Yield the pieces that `$name` or `${name...}` expands to, with None between two words.

        Also in quotes `${A[@]}` and `$@` are several words.
        """
        parameter = self._parse_parameter(expansion, is_quoted=is_quoted)
        values = [expansion]
        if parameter.name:
            values = self._evaluate_parameter(parameter)
        if not is_split and "@" not in (parameter.subscript, parameter.name):
            values = [" ".join(values)]
        for index, value in enumerate(values):
            if index:
                yield None
            if is_split:
                yield from self._split_value(value, parameter.name)
            else:
                yield value

    def _parse_parameter(self, expansion: str, *, is_quoted: bool) -> _Parameter:
        """Return the parts of `$name` or `${name...}`, without a name for a form that is not read."""
        if not expansion.startswith("${"):
            return _Parameter(expansion, name=expansion[1:])
        match = PARAMETER_PATTERN.match(expansion)
        if match is None:
            return _Parameter(expansion, name="")
        sign, name, index, operator = match.groups("")
        argument = self.expand_text(expansion[match.end() : -1], is_quoted=is_quoted)
        return _Parameter(expansion, name, index, sign or operator, argument)

    def _split_value(self, value: str, name: str) -> Iterator[str | None]:
        """Yield the words of a value that is not in quotes, with None for its blanks."""
        if self._has_custom_separator(value):
            yield f"${name}"  # where IFS splits it is left to the run
            return
        if value[:1].isspace():
            yield None
        for index, field in enumerate(split_words(value)):
            if index:
                yield None
            yield field
        if value[-1:].isspace():
            yield None

    def _has_custom_separator(self, value: str) -> bool:
        """Return whether the script has set IFS so that a value is not split at its blanks."""
        separators = "".join(self.get_elements("IFS"))
        is_restored = bool(get_variable_name(separators))  # `IFS=$OLD_IFS`
        if not separators or is_restored or separators in (" \t\n", "$' \\t\\n'"):
            return False
        return any(char.isspace() or char in separators for char in value)

    def _evaluate_parameter(self, parameter: _Parameter) -> list[str]:
        """Return the words that a parameter expands to: one word unless the parameter is a list.

        An operator of another kind, such as `${name%suffix}`, leaves the parameter as it is
        written.
        """
        name = parameter.name
        index = parameter.subscript.strip("\"'")
        operator = parameter.operator
        if index not in ("", "@", "*") or operator not in (*ASK_OPERATORS, *DEFAULT_OPERATORS):
            return [parameter.text]
        words = self._find_elements(name, index)
        if operator in DEFAULT_OPERATORS:
            return self._apply_default(parameter, words)
        if words is None:
            return [parameter.text]
        return words

    def _apply_default(self, parameter: _Parameter, words: list[str] | None) -> list[str]:
        """Return the words of `${name:-default}`, and set the variable if the operator has a `=`.

        Args:
            parameter: The parameter.
            words: Its words without the default; None if the script has not set it.
        """
        name = parameter.name
        text = " ".join(words or ())
        # A value such as `$A` is empty in bash if nothing sets A. The default may then take its place.
        may_be_empty = bool(text) and not ShellWord.from_text(text).text_when_unset
        is_empty = parameter.operator.startswith(":") and not text
        if words == [] and name not in ("@", "*"):  # the script has unset it
            default = parameter.argument
        elif words is None or may_be_empty or is_empty:
            default = f"${{{get_variable_name(text) or name}:-{parameter.argument}}}"
        else:
            return words
        if parameter.operator.endswith("="):
            self.set(name, [default])
        return [default]

    def _find_elements(self, name: str, index: str) -> list[str] | None:
        """Return the elements that `${name[index]}` names; None if the script has not set it.

        Args:
            name: The variable.
            index: `@` or `*` for all elements; empty for the element 0.
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
    """Return the words of a text that bash splits at blanks.

    A default with blanks, `${A:-x y}`, becomes a word for each of its words: `${A:-x} ${A:-y}`. So
    each word still names the variable that may replace it.
    """
    if not any(mark in text for mark in "$`<>"):
        return text.split()
    with_split_defaults = DEFAULT_PATTERN.sub(_split_default, text)
    fields = [match[0] for match in FIELD_PATTERN.finditer(with_split_defaults)]
    return [field for field in fields if ShellWord.from_text(field)]


def _split_default(default: re.Match[str]) -> str:
    """Return `${A:-x y}` as `${A:-x} ${A:-y}`."""
    if " " not in default[2]:
        return default[0]
    return " ".join(f"${{{default[1]}:-{field}}}" for field in split_words(default[2]))
