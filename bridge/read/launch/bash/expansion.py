"""`WordExpansion`: the words that bash expands the words of a script to.

    expansion.set_text("FLAGS", "--bf16 --fp8-format $FORMAT")
    expansion.expand_words(["$FLAGS"])      # ["--bf16", "--fp8-format", "$FORMAT"]

A piece that only the run decides stays in the word as it is written.

A word is cut into pieces by `PIECE_PATTERN`: quoted strings, parameters (`$name`, `${name...}`),
deferred pieces (`$(...)`, backquotes), escaped characters, and plain text. Each piece is expanded
by itself. A value outside of quotes is split at its blanks into several words, as bash does.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from bridge.read.launch.bash.arithmetic import evaluate_arithmetic
from bridge.read.launch.bash.variables import (
    LIST_SIGNS,
    MAX_VARIABLE_WORDS,
    Variables,
    VariableState,
)
from bridge.read.launch.shell_word import (
    BRACES_REGEX,
    DEFERRED_REGEX,
    ShellWord,
    format_default,
    get_variable_name,
    join_texts,
    split_words,
)
from bridge.read.launch.syntax_tree import get_node_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tree_sitter import Node

QUOTED_PIECE_REGEX = rf"""
    (?P<parameter> \$ (?: \w+ | [@*#] | {BRACES_REGEX} ) )   # $name, $@, ${{name:-default}}
  | (?P<deferred> {DEFERRED_REGEX} )                         # $(...), <(...), backquotes
  | (?P<plain> [^'"\\$`<>]+ | . )                            # a text, or a single sign
"""
"""A piece that has the same meaning inside of `"..."` and outside, except for escaped characters."""
QUOTED_PIECE_PATTERN = re.compile(
    rf"""
    \\ (?P<escaped> ["\\$`\n] )
  | {QUOTED_PIECE_REGEX}
    """,
    re.DOTALL | re.VERBOSE,
)
"""A piece of the inside of `"..."`."""
PIECE_PATTERN = re.compile(
    rf"""
    \\ (?P<escaped> . )
  | ' (?P<raw> [^']* ) '
  | " (?P<string> (?: \\. | {DEFERRED_REGEX} | [^"\\] )*+ ) "
  | {QUOTED_PIECE_REGEX}
    """,
    re.DOTALL | re.VERBOSE,
)
"""A piece of a word outside of quotes."""
PARAMETER_PATTERN = re.compile(
    r"""
    \$\{
    ( [!#]? )
    ( \w+ | [@*#?$!-] )?
    (?: \[ ( [^\]\n]* ) \] )?
    ( :?[-=+?] | [^\w}] )?
    """,
    re.VERBOSE,
)
"""`${!name[index]operator...`: the sign, the name, the index and the operator. Each may be absent."""
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


class WordBreak(Enum):
    """A sign among the pieces of a word, instead of a text."""

    WORD_BREAK = "the end of one word and the beginning of the next"


WORD_BREAK = WordBreak.WORD_BREAK
ExpandedPiece = str | WordBreak
"""An expanded piece of a word. A value that bash splits has word breaks between its texts."""


@lru_cache(maxsize=1024)
def _cut_word(word: str, *, is_quoted: bool) -> tuple[tuple[str, str], ...]:
    """Return kind and text of each piece of a word as it is written.

    A script with open conditions is followed many times, each time with the same words.
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


class WordExpansion(Variables):
    """Variables, and the words of a script expanded with them."""

    def expand_node_text(self, node: Node) -> str:
        """Return a word node as one text: as in an assignment, without splitting."""
        return self.expand_text(get_node_text(node).lstrip())

    def expand_text(self, word: str, *, is_quoted: bool = False) -> str:
        """Return a word, as it is written, as one expanded text.

        Args:
            is_quoted: Whether it is the inside of `"..."`.
        """
        texts: list[str] = []
        pieces = self._expand_pieces(word, is_split=False, is_quoted=is_quoted)
        for piece in islice(pieces, MAX_VARIABLE_WORDS):
            if piece is WORD_BREAK:
                texts.append(" ")
            else:
                texts.append(piece)
        return join_texts(texts)

    def expand_node_words(self, nodes: Iterable[Node]) -> list[str]:
        """Return the words that the word nodes of a command expand to."""
        return self.expand_words(get_node_text(node).lstrip() for node in nodes)

    def expand_words(self, texts: Iterable[str]) -> list[str]:
        """Return the words that words, as they are written, expand to."""
        words: list[str] = []
        for text in texts:
            pieces = self._expand_pieces(text, is_split=True)
            words += _join_pieces(islice(pieces, MAX_VARIABLE_WORDS))
            if len(words) > MAX_VARIABLE_WORDS:
                break
        return words[:MAX_VARIABLE_WORDS]

    def _expand_pieces(
        self, word: str, *, is_split: bool, is_quoted: bool = False
    ) -> Iterator[ExpandedPiece]:
        """Yield the expanded pieces of a word.

        Args:
            word: The word as it is written.
            is_split: Whether values are split at their blanks.
            is_quoted: Whether the word is the inside of `"..."`.
        """
        for kind, piece in _cut_word(word, is_quoted=is_quoted):
            if kind == "parameter":
                yield from self._expand_parameter(piece, is_split=is_split, is_quoted=is_quoted)
            elif kind == "string" and piece:
                yield from self._expand_pieces(piece, is_split=False, is_quoted=True)
            elif kind == "deferred":
                yield from self._expand_deferred(piece, is_split=is_split)
            elif kind == "escaped":
                yield piece.removeprefix("\n")  # a backslash at the end of a line joins two lines
            else:
                yield piece

    # -- commands and arithmetic -------------------------------------------------------------------

    def _expand_deferred(self, piece: str, *, is_split: bool) -> Iterator[ExpandedPiece]:
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
                    yield from self._expand_pieces(text, is_split=False, is_quoted=True)
                return
        value = evaluate_arithmetic(piece, self.values)
        if value is None:
            value = piece
        yield value

    # -- parameters --------------------------------------------------------------------------------

    def _expand_parameter(
        self, expansion: str, *, is_split: bool, is_quoted: bool
    ) -> Iterator[ExpandedPiece]:
        """Yield the pieces that `$name` or `${name...}` expands to.

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
                yield WORD_BREAK
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
        sign, name, subscript, operator = match.groups("")
        argument = self.expand_text(expansion[match.end() : -1], is_quoted=is_quoted)
        return _Parameter(expansion, name, subscript, sign or operator, argument)

    def _split_value(self, value: str, name: str) -> Iterator[ExpandedPiece]:
        """Yield the words of a value that is not in quotes, with word breaks for its blanks."""
        if self._has_custom_separator(value):
            yield f"${name}"  # where IFS splits it is left to the run
            return
        if value[:1].isspace():
            yield WORD_BREAK
        for index, field in enumerate(split_words(value)):
            if index:
                yield WORD_BREAK
            yield field
        if value[-1:].isspace():
            yield WORD_BREAK

    def _has_custom_separator(self, value: str) -> bool:
        """Return whether the script has set IFS so that a value is not split at its blanks."""
        separators = "".join(self.get_elements("IFS"))
        is_restored = bool(get_variable_name(separators))  # `IFS=$OLD_IFS`
        if not separators or is_restored or separators in (" \t\n", "$' \\t\\n'"):
            return False
        return any(char.isspace() or char in separators for char in value)

    def _evaluate_parameter(self, parameter: _Parameter) -> list[str]:
        """Return the values that a parameter expands to: a single one unless it is a list.

        An operator of another kind, such as `${name%suffix}`, leaves the parameter as it is
        written.
        """
        name = parameter.name
        subscript = parameter.subscript.strip("\"'")
        if subscript not in ("", *LIST_SIGNS):
            return [parameter.text]
        values = self.get_named_elements(name, subscript)
        state = self.get_state(name, subscript)
        if parameter.operator in DEFAULT_OPERATORS:
            return self._apply_default(parameter, values, state)
        if parameter.operator not in ASK_OPERATORS or state is VariableState.NOT_ASSIGNED:
            return [parameter.text]
        return values

    def _apply_default(
        self, parameter: _Parameter, values: list[str], state: VariableState
    ) -> list[str]:
        """Return the values of `${name:-default}`, and set the variable if the operator has a `=`.

        Args:
            values: Its values without the default.
            state: Whether it is set without the default.
        """
        text = " ".join(values)
        if state is VariableState.UNSET:
            default = parameter.argument
        elif state is VariableState.NOT_ASSIGNED or _may_be_empty(text, parameter.operator):
            # `A=$B`, then `${A:-x}`: the variable that decides is B.
            deciding_variable = get_variable_name(text) or parameter.name
            default = format_default(deciding_variable, parameter.argument)
        else:
            return values
        if parameter.operator.endswith("="):
            self.set_text(parameter.name, default)
        return [default]


def _may_be_empty(text: str, operator: str) -> bool:
    """Return whether a default may take the place of a value that the script has set.

    A value such as `$A` is empty in bash if nothing sets A. A value that is empty for certain has
    its default only with a colon: `${A:-default}`.
    """
    if not text:
        return operator.startswith(":")
    return not ShellWord.from_text(text).text_when_unset


def _join_pieces(pieces: Iterable[ExpandedPiece]) -> list[str]:
    """Return the words that pieces make up. A word has at least one piece, which may be empty."""
    words: list[str] = []
    texts: list[str] = []
    for piece in pieces:
        if piece is not WORD_BREAK:
            texts.append(piece)
        elif texts:
            words.append(join_texts(texts))
            texts = []
    if texts:
        words.append(join_texts(texts))
    return words
