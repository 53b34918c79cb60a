"""`parse`: a shell script's tokens as a tree of commands."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.shell_tokens import Token
from bridge.interop.shell_tree import (
    AndOr,
    Arithmetic,
    Branch,
    Case,
    Define,
    Group,
    If,
    Loop,
    Node,
    Pipe,
    Simple,
    Test,
)
from bridge.interop.shell_words import Lexer

if TYPE_CHECKING:
    from bridge.interop.shell_tokens import Word

__all__ = ["parse"]

MAX_DEPTH = 60
MAX_CHAIN = 80
CLOSERS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}", "in"})


def parse(text: str, path: str = "<script>") -> tuple[list[Node], Lexer]:
    """Return the script's commands and the lexer that knows its lines.

    Raises:
        PayloadError: A quote, bracket or block that is never closed, or one that was never opened.
    """
    lexer = Lexer(text, path)
    parser = _Parser(lexer)
    return parser.commands(()), lexer


class _Parser:
    def __init__(self, lexer: Lexer) -> None:
        self.lexer, self.tokens, self.at, self.depth = lexer, lexer.tokens(), 0, 0

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def is_operator(self, *texts: str) -> bool:
        return self.now is not None and self.now.kind == "operator" and self.now.text in texts

    def reserved(self) -> str | None:
        """Return the word here where it could be a reserved one."""
        token = self.now
        return token.word.literal if token is not None and token.kind == "word" and token.word is not None else None

    def place(self) -> int:
        return self.now.start if self.now is not None else len(self.lexer.text)

    def before(self) -> int:
        return self.tokens[self.at - 1].end if self.at else 0

    def skip_newlines(self) -> None:
        while self.now is not None and (self.now.kind == "newline" or self.is_operator(";")):
            self.at += 1

    def expect(self, word: str, opened: int, what: str) -> None:
        self.skip_newlines()
        if self.reserved() != word:
            line = self.lexer.line(opened)
            raise PayloadError(f"{self.lexer.path}, line {line}: `{what}` needs a `{word}`. Complete the script.")
        self.at += 1

    # -- lists -------------------------------------------------------------------------------------------------------

    def commands(self, closers: tuple[str, ...]) -> list[Node]:
        """Read commands up to one of the closing words, or to the end where there are none."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            line = self.lexer.line(self.place())
            raise PayloadError(
                f"{self.lexer.path}, line {line}: nesting is deeper than {MAX_DEPTH}. Simplify the script."
            )
        found: list[Node] = []
        while True:
            self.skip_newlines()
            if self.now is None or self.reserved() in closers or self.is_operator(*closers):
                break
            if self.is_operator(")", ";;", ";&", ";;&") or self.reserved() in CLOSERS:
                line = self.lexer.line(self.place())
                text = (self.now.text or "").strip()
                raise PayloadError(f"{self.lexer.path}, line {line}: `{text}` closes nothing. Correct the script.")
            found.append(self.and_or())
        self.depth -= 1
        return found

    def and_or(self) -> Node:
        left = self.pipe()
        count = 0
        while self.is_operator("&&", "||"):
            count += 1
            if count > MAX_CHAIN:
                line = self.lexer.line(left.start)
                rule = f"must not have more than {MAX_CHAIN} `&&` and `||` in a row"
                raise PayloadError(f"{self.lexer.path}, line {line}: {rule}. Simplify the script.")
            operator = self.tokens[self.at].text
            self.at += 1
            self.skip_newlines()
            right = self.pipe()
            left = AndOr(left=left, operator=operator, right=right, start=left.start, end=self.before())
        return left

    def pipe(self) -> Node:
        start, negated = self.place(), False
        while self.reserved() in ("!", "time", "coproc"):
            negated ^= self.reserved() == "!"
            self.at += 1
        commands = [self.command()]
        while self.is_operator("|", "|&"):
            self.at += 1
            self.skip_newlines()
            commands.append(self.command())
        if len(commands) == 1 and not negated:
            return commands[0]
        for place, inner in enumerate(commands):
            _feed(inner, commands[place + 1 :])
            if isinstance(inner, Simple) and place:
                inner.source = commands[place - 1]
                inner.fed = self.lexer.text[start : commands[place - 1].end]
        text = self.lexer.text[start : self.before()] if negated else ""
        return Pipe(commands=commands, negated=negated, start=start, end=self.before(), text=text)

    # -- commands ----------------------------------------------------------------------------------------------------

    def command(self) -> Node:
        token, word, start = self.now, self.reserved(), self.place()
        if token is None:
            return Simple(items=[], start=start, end=start)
        node: Node
        if token.kind == "test":
            self.at += 1
            node = Test(words=token.words, start=start, text=token.text)
        elif token.kind == "arithmetic":
            self.at += 1
            node = Arithmetic(expression=token.text, start=start, text=f"(({token.text}))")
        elif word == "if":
            node = self.conditional(start)
        elif word in ("for", "select"):
            node = self.for_loop(start)
        elif word in ("while", "until"):
            self.at += 1
            condition = self.commands(("do",))
            node = Loop(body=[*condition, *self.loop_body(start, word)], start=start)
        elif word == "case":
            node = self.case(start)
        elif word == "{" or self.is_operator("("):
            closer = "}" if word == "{" else ")"
            self.at += 1
            body = self.commands((closer,))
            self.close(closer, start)
            node = Group(body=body, start=start)
        elif word == "function" or self.defines():
            node = self.function(start)
        else:
            return self.simple(start)
        heredocs = self.redirections()
        node.end = self.before()
        if heredocs:
            return Group(body=[node, Simple(items=[], heredocs=heredocs, start=start)], start=start, end=node.end)
        return node

    def close(self, closer: str, opened: int) -> None:
        if not (self.is_operator(closer) or self.reserved() == closer):
            line = self.lexer.line(opened)
            raise PayloadError(f"{self.lexer.path}, line {line}: `{closer}` is missing. Complete the script.")
        self.at += 1

    def redirections(self) -> list[Word]:
        bodies = []
        while self.now is not None and self.now.kind == "redirect":
            if self.now.body is not None:
                bodies.append(self.now.body)
            self.at += 1
        return bodies

    def simple(self, start: int) -> Simple:
        node = Simple(items=[], start=start)
        while (token := self.now) is not None:
            if token.kind == "redirect":
                self.redirect(token, node)
            elif token.kind in ("word", "array"):
                node.items.append(token)
            elif token.kind == "test":  # `[[` as an argument is text
                node.items.append(
                    Token("word", token.text, token.start, token.end, word=token.words[0] if token.words else None)
                )
            else:
                break
            self.at += 1
        if self.now is not None and node.start == self.place():
            self.at += 1  # nothing could be read here: never stand still
        node.end = self.before()
        node.text = self.lexer.text[start : node.end] if self.lexer.text[start : start + 1] in "[t:f" else ""
        node.last_line, node.cut = self.line_end(node)
        return node

    def redirect(self, token: Token, node: Simple) -> None:
        """Note what a command reads or writes."""
        if token.body is not None:
            node.heredocs.append(token.body)
        elif token.word is not None and token.text in ("<<<", "<"):
            (node.strings if token.text == "<<<" else node.files).append(token.word)
        elif token.word is not None and ">" in token.text and self.lexer.text[token.start] not in "023456789":
            node.outputs.append(token.word)
            node.appends = token.text in (">>", "&>>")

    def line_end(self, node: Simple) -> tuple[int, str]:
        """Return the line on which a command ends, and why it does not go on where it looks as if it did."""
        text, end = self.lexer.text, node.end
        gap = text[end : self.place()] if self.now is None or self.now.kind == "newline" else ""
        comment = re.search(r"\\\n[ \t]*#", gap)
        if comment is not None:
            return self.lexer.line(end + comment.end() - 1), "a comment stands there"
        last = node.items[-1].word if node.items else None
        if last is not None and all(part.kind == "text" for part in last.parts):
            said = "".join(part.text for part in last.parts)
            if said and not said.strip(" \t") and text[last.start] == "\\":
                return self.lexer.line(last.start), "a blank follows the backslash"
        if "\\\n" in gap:
            return self.lexer.line(end), "the line behind the backslash is empty"
        if "#" in gap and gap.rstrip().endswith("\\"):
            return self.lexer.line(end), "a comment hides the backslash"
        return self.lexer.line(end), ""

    def conditional(self, start: int) -> If:
        branches: list[Branch] = []
        otherwise = None
        what = "if"
        while True:
            self.at += 1
            begun = self.place()
            condition = self.commands(("then",))
            text = " ".join(self.lexer.text[begun : self.before()].strip(" \n;").split())
            self.expect("then", start, what)
            body = self.commands(("elif", "else", "fi"))
            branches.append(Branch(condition=condition, body=body, text=text, start=begun))
            what = self.reserved() or ""
            if what == "elif":
                continue
            if what == "else":
                self.at += 1
                otherwise = self.commands(("fi",))
            self.expect("fi", start, "if")
            return If(branches=branches, otherwise=otherwise, start=start)

    def for_loop(self, start: int) -> Loop:
        self.at += 1
        variable, items = None, None
        if self.now is not None and self.now.kind == "arithmetic":
            self.at += 1
        else:
            variable = self.reserved()
            self.at += 1
            self.skip_newlines()
            if self.reserved() == "in":
                self.at += 1
                items = []
                while self.now is not None and self.now.kind == "word" and self.now.word is not None:
                    items.append(self.now.word)
                    self.at += 1
        self.skip_newlines()
        body = self.loop_body(start, "for")
        return Loop(variable=variable, items=items, body=body, start=start)

    def loop_body(self, start: int, what: str) -> list[Node]:
        self.skip_newlines()
        if self.reserved() == "{":
            self.at += 1
            body = self.commands(("}",))
            self.close("}", start)
            return body
        self.expect("do", start, what)
        body = self.commands(("done",))
        self.expect("done", start, what)
        return body

    def case(self, start: int) -> Case:
        self.at += 1
        subject = self.now.word if self.now is not None else None
        self.at += 1
        self.expect("in", start, "case")
        arms: list[tuple[list[Word], list[Node], str, int]] = []
        while True:
            self.skip_newlines()
            if self.now is None or subject is None:
                self.expect("esac", start, "case")
            if self.reserved() == "esac":
                self.at += 1
                return Case(subject=subject, arms=arms, start=start)  # type: ignore[arg-type]
            if self.is_operator("("):
                self.at += 1
            begun = self.place()
            patterns: list[Word] = []
            while self.now is not None and not self.is_operator(")"):
                if self.now.kind == "newline":
                    self.expect("esac", start, "case")
                if self.now.word is not None:
                    patterns.append(self.now.word)
                self.at += 1
            text = self.lexer.text[begun : self.before()].strip()
            self.close(")", start)
            body = self.commands((";;", ";&", ";;&", "esac"))
            if self.is_operator(";;", ";&", ";;&"):
                self.at += 1
            arms.append((patterns, body, text, begun))

    def defines(self) -> bool:
        following = self.tokens[self.at + 1 : self.at + 3]
        return (
            self.now is not None
            and self.now.kind == "word"
            and [(token.kind, token.text) for token in following] == [("operator", "("), ("operator", ")")]
        )

    def function(self, start: int) -> Define:
        if self.reserved() == "function":
            self.at += 1
        name = self.reserved() or ""
        self.at += 1
        if self.is_operator("("):
            self.at += 1
            self.close(")", start)
        self.skip_newlines()
        body = self.command()
        return Define(name=name, body=[body], start=start)


def _feed(node: Node, sinks: list[Node]) -> None:
    """Note on each command of a node what the output goes to."""
    if isinstance(node, Simple):
        node.sinks = [*node.sinks, *sinks]
    elif isinstance(node, Group):
        for inner in node.body:
            _feed(inner, sinks)
