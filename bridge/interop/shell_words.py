"""A shell script as words: quotes, expansions, arrays, heredocs and comments, as bash tells them apart.

Nothing is expanded here and nothing is ever run. `$(...)` and backticks stay opaque text.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from bridge.errors import PayloadError
from bridge.interop.shell_brackets import closing
from bridge.interop.shell_tokens import Part, Token, Word

__all__ = ["Lexer"]

NAME = re.compile(r"[A-Za-z_]\w*")
ARRAY_HEAD = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?\+?=")
PARAMETER = re.compile(r"([!#]?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[^\]]*\])?")
OPERATOR = re.compile(r"(:?[-=+?]|##?|%%?|//?|:|\^\^?|,,?|@)")
OPERATORS = ("&&", "||", ";;&", ";;", ";&", ";", "|&", "|", "(", ")")
REDIRECT = re.compile(r"(\d*|\{\w+\})(<<<|<<-|<<|<>|<&|<|&>>|&>|>>|>&|>\||>)")
RUN = re.compile(r"[\w./:=,+-]+")
QUOTED_RUN = re.compile(r"[^\"\\`$]+")
MAX_DEPTH = 40
MAX_WORDS = 30_000


class Lexer:
    """Turns a script into tokens.

    Args:
        text: The script.
        path: What it is called in messages.
    """

    def __init__(self, text: str, path: str = "<script>") -> None:
        self.text, self.path, self.at, self.depth, self.words = text, path, 0, 0, 0
        self.line_starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self.heredocs: list[tuple[Token, str, bool, bool]] = []
        self.plain_brackets = False

    def line(self, at: int) -> int:
        """Return the line number of an offset."""
        return bisect_right(self.line_starts, at)

    def tokens(self) -> list[Token]:
        """Return every token.

        Raises:
            PayloadError: A quote, a bracket or a substitution that is never closed.
        """
        found: list[Token] = []
        while (token := self.token()) is not None:
            found.append(token)
            self.words += 1 + len(token.words)
            if self.words > MAX_WORDS:
                rule = f"a launch script must not have more than {MAX_WORDS} words"
                raise PayloadError(f"{self.path}: {rule}. Give the part of it that starts the run.")
        return found

    def token(self) -> Token | None:
        """Return the next token, or None at the end."""
        self.blanks()
        text, at = self.text, self.at
        if at >= len(text):
            return None
        if text[at] == "\n":
            self.at += 1
            self.read_heredocs()
            return Token("newline", "\n", at, at + 1)
        redirect = REDIRECT.match(text, at)
        if redirect is not None and not (
            text[redirect.end() - 1] in "<>" and text[redirect.end() : redirect.end() + 1] == "("
        ):
            return self.redirection(redirect)
        if text.startswith("((", at) and (arithmetic := self.arithmetic()) is not None:
            return arithmetic
        for operator in OPERATORS:
            if text.startswith(operator, at):
                self.at += len(operator)
                return Token("operator", operator, at, self.at)
        if text[at] == "&":
            self.at += 1
            return Token("operator", ";", at, self.at)
        if text.startswith("[[", at) and text[at + 2 : at + 3].isspace():
            return self.test()
        word = self.word()
        head = word.literal
        if head and text[self.at : self.at + 1] == "(" and ARRAY_HEAD.fullmatch(head):
            return self.array(word, head)
        return Token("word", text[at : self.at], at, self.at, word=word)

    def blanks(self) -> None:
        """Pass blanks, continued lines and comments."""
        text, size = self.text, len(self.text)
        while self.at < size:
            if text[self.at] in " \t":
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif text[self.at] == "#":
                end = text.find("\n", self.at)
                self.at = size if end < 0 else end
            else:
                return

    # -- words -------------------------------------------------------------------------------------------------------

    def word(self, stop: str = "", *, plain: bool = False) -> Word:
        """Read one word; it ends at a blank or an operator, or inside `${...}` at `stop`."""
        self.deeper()
        word, text, size = Word(start=self.at), self.text, len(self.text)
        ends = stop or (" \t\n" if plain else " \t\n;|&<>()")
        while self.at < size:
            char = text[self.at]
            if char in ends:
                if char in "<>" and text[self.at + 1 : self.at + 2] == "(":
                    self.command(word, 2, quoted=False)
                    continue
                if char == "(" and self.at > word.start and text[self.at - 1] in "@+?*" and not stop:
                    self.extended_glob(word)
                    continue
                break
            if char == "\\":
                if text[self.at + 1 : self.at + 2] != "\n":
                    self.add(word, text[self.at + 1 : self.at + 2], quoted=True)
                self.at += 2
            elif char == "'":
                end = self.find("'", self.at + 1, "quote '")
                self.add(word, text[self.at + 1 : end], quoted=True)
                self.at = end + 1
            elif char == '"':
                self.at += 1
                self.double_quoted(word)
            elif char == "`":
                self.backticks(word, quoted=False)
            elif char == "$":
                self.dollar(word, quoted=False)
            else:
                run = RUN.match(text, self.at)
                self.add(word, run[0] if run else char, quoted=False)
                self.at += len(run[0]) if run else 1
        self.at = min(self.at, size)
        word.end = self.at
        self.depth -= 1
        return word

    def add(self, word: Word, text: str, *, quoted: bool) -> None:
        """Add text to a word."""
        last = word.parts[-1] if word.parts else None
        if last is not None and last.kind == "text" and last.quoted == quoted:
            last.text += text
        else:
            word.parts.append(Part("text", text, quoted))

    def double_quoted(self, word: Word, end: str = '"') -> None:
        """Read up to the closing quote; with an empty `end`, to the end of the text (a heredoc)."""
        begun, text, size = self.at, self.text, len(self.text)
        self.add(word, "", quoted=True)
        while self.at < size:
            char = text[self.at]
            if char == end:
                self.at += 1
                return
            if char == "\\" and text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                if text[self.at + 1] != "\n":
                    self.add(word, text[self.at + 1], quoted=True)
                self.at += 2
            elif char == "`":
                self.backticks(word, quoted=True)
            elif char == "$":
                self.dollar(word, quoted=True)
            else:
                run = QUOTED_RUN.match(text, self.at)
                self.add(word, run[0] if run else char, quoted=True)
                self.at += len(run[0]) if run else 1
        if end:
            raise self.unclosed('quote "', begun - 1)

    def dollar(self, word: Word, *, quoted: bool) -> None:
        """Read what a dollar begins."""
        text, at = self.text, self.at
        following = text[at + 1 : at + 2]
        if text.startswith("$((", at):
            end = self.closing(at + 1)
            word.parts.append(Part("command", text[at : end + 1], quoted, source=text[at : end + 1]))
            self.at = end + 1
        elif following == "(":
            self.command(word, 2, quoted=quoted)
        elif following == "{":
            self.braces(word, quoted=quoted)
        elif following == "'" and not quoted:
            end = at + 2
            while text[end : end + 1] not in ("'", ""):
                end += 2 if text[end] == "\\" else 1
            self.add(word, text[at + 2 : end], quoted=True)
            self.at = end + 1
        elif following == '"' and not quoted:
            self.at += 2
            self.double_quoted(word)
        else:
            named = NAME.match(text, at + 1)
            name = named[0] if named else following if following and following in "0123456789@*#?$!-" else ""
            if not name:
                self.add(word, "$", quoted=quoted)
            else:
                word.parts.append(Part("parameter", name, quoted, source=f"${name}"))
            self.at += 1 + len(name)

    def braces(self, word: Word, *, quoted: bool) -> None:
        """Read `${name}`, `${name[@]}`, `${name:-word}` and their kin."""
        begun = self.at
        self.at += 2
        named = PARAMETER.match(self.text, self.at)
        part = Part("parameter", "", quoted)
        if named is not None:
            part.text, part.index = named[2], named[3] or ""
            part.operator = named[1]  # ! or #: indirection or length
            self.at = named.end()
            operator = OPERATOR.match(self.text, self.at)
            if operator is not None:
                part.operator += operator[0]
                self.at = operator.end()
        part.argument = self.word("}")
        if self.text[self.at : self.at + 1] != "}":
            raise self.unclosed("${", begun)
        self.at += 1
        part.source = self.text[begun : self.at]
        word.parts.append(part)

    def command(self, word: Word, opening: int, *, quoted: bool) -> None:
        """Read a substitution that stays opaque: `$(...)`, `<(...)`."""
        end = self.closing(self.at + opening - 1)
        source = self.text[self.at : end + 1]
        word.parts.append(Part("command", source, quoted, source=source))
        self.at = end + 1

    def backticks(self, word: Word, *, quoted: bool) -> None:
        """Read what stands in backticks."""
        end = self.at + 1
        while self.text[end : end + 1] not in ("`", ""):
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise self.unclosed("`", self.at)
        word.parts.append(Part("command", self.text[self.at : end + 1], quoted, source=self.text[self.at : end + 1]))
        self.at = end + 1

    def extended_glob(self, word: Word) -> None:
        """Read the bracket of a pattern such as `@(a|b)`."""
        end = self.closing(self.at)
        self.add(word, self.text[self.at : end + 1], quoted=False)
        self.at = end + 1

    # -- structures --------------------------------------------------------------------------------------------------

    def array(self, word: Word, head: str) -> Token:
        """Read `NAME=( ... )` with its line ends and comments."""
        begun = self.at
        elements: list[Word] = []
        self.at += 1
        while True:
            self.blanks()
            char = self.text[self.at : self.at + 1]
            if not char:
                raise self.unclosed("array (", begun)
            if char == ")":
                self.at += 1
                return Token("array", head, word.start, self.at, words=elements)
            if char in "\n;|&<>(":
                self.at += 1
                continue
            elements.append(self.word())

    def test(self) -> Token:
        """Read `[[ ... ]]`."""
        begun = self.at
        words: list[Word] = []
        self.at += 2
        while True:
            while self.text[self.at : self.at + 1] in (" ", "\t", "\n") or self.text.startswith("\\\n", self.at):
                self.at += 2 if self.text[self.at] == "\\" else 1
            if self.at >= len(self.text):
                raise self.unclosed("[[", begun)
            if self.text.startswith("]]", self.at):
                self.at += 2
                return Token("test", self.text[begun : self.at], begun, self.at, words=words)
            words.append(self.word(plain=True))

    def arithmetic(self) -> Token | None:
        """Read `(( ... ))`, or return None where it is two subshells that begin together."""
        begun = self.at
        end = closing(self.text, begun) if not self.plain_brackets else None
        if end is None:
            self.plain_brackets = True  # one search to the end of the text is enough
            return None
        if self.text[end - 1] != ")":
            return None
        self.at = end + 1
        return Token("arithmetic", self.text[begun + 2 : end - 1], begun, self.at)

    def redirection(self, found: re.Match[str]) -> Token:
        """Read `> file`, `<<EOF` and their kin."""
        begun = self.at
        self.at = found.end()
        self.blanks()
        if self.text[self.at : self.at + 1] in ("", "\n"):
            return Token("redirect", found[2], begun, self.at)
        word = self.word()
        token = Token("redirect", found[2], begun, self.at, word=word)
        if found[2] in ("<<", "<<-"):
            delimiter = "".join(part.text for part in word.parts)
            quoted = any(part.quoted for part in word.parts)
            self.heredocs.append((token, delimiter, found[2] == "<<-", quoted))
        return token

    def read_heredocs(self) -> None:
        """Read the bodies that the line just ended asked for."""
        waiting, self.heredocs = self.heredocs, []
        for token, delimiter, tabs, quoted in waiting:
            lines = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                line = line.lstrip("\t") if tabs else line
                if line == delimiter:
                    break
                lines.append(line)
            body = "\n".join(lines)
            token.body = Word([Part("text", body, quoted=True)]) if quoted else _expandable(body, self.path)

    def find(self, what: str, start: int, called: str) -> int:
        """Return where `what` stands; an error that `called` is never closed."""
        end = self.text.find(what, start)
        if end < 0:
            raise self.unclosed(called, start - 1)
        return end

    def closing(self, opened: int) -> int:
        """Return the offset of the bracket that closes the one at `opened`."""
        end = closing(self.text, opened)
        if end is None:
            raise self.unclosed("(", opened)
        return end

    def deeper(self) -> None:
        """Count a level of words within words."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.unclosed(f"nesting deeper than {MAX_DEPTH}:", self.at)

    def unclosed(self, what: str, at: int) -> PayloadError:
        """Return the error to raise about something that has no end."""
        line = self.line(max(at, 0))
        return PayloadError(f"{self.path}, line {line}: {what} is never closed. Complete the script.")


def _expandable(body: str, path: str) -> Word:
    """Return a heredoc's text as a word whose variables are expanded."""
    inner = Lexer(body, path)
    word = Word()
    try:
        inner.double_quoted(word, end="")
    except PayloadError:
        return Word([Part("text", body, quoted=True)])
    return word
