"""`Environment`: the state of bash at one point of a script, and the words of a command in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.interop.launch.script import WORDS
from bridge.interop.launch.variables import Variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tree_sitter import Node

    from bridge.interop.launch.files import Sources
    from bridge.interop.launch.script import Script
    from bridge.interop.launch.variables import Value

NAME = re.compile(r"[A-Za-z_]\w*")


class Environment:
    """Variables, functions and the script that is read; the arguments are those of `Variables`."""

    def __init__(self, sources: Sources, stated: Mapping[str, str], assumed: Mapping[str, str], open_: str) -> None:
        self.sources, self.script, self.unknowns = sources, sources.script, sources.unknowns
        self.values = Variables(sources.unknowns, stated, assumed, open_)
        self.exported: dict[str, str] = {}
        self.functions: dict[str, tuple[Script, Node]] = {}
        self.line = 0
        """The line of the script that a string or a sourced file stands on; 0: outside of one."""

    def text(self, node: Node) -> str:
        """Return a word as one text."""
        return self.values.text(self.script, node)

    def test_words(self, node: Node) -> list[str] | None:
        """Return the words of a test without its brackets."""
        if node.type == "test_command" and node.children[0].type in ("[", "[["):
            script = self.script
            return [self.text(one) if one.type in WORDS else script.text(one) for one in script.test(node)]
        if node.type == "command" and self.script.name(node) == "test":
            return [self.text(one) for one in node.children[1:] if one.type in WORDS]
        return None

    def expanded(self, node: Node, redirects: list[Node]) -> list[str]:
        """Return the words of a command, those behind a redirection too."""
        words: list[str] = []
        children = [] if node.type == "variable_assignment" else node.children
        for child in children:
            if child.type == "command_name":
                words += self.values.words(self.script, child.children[:1])
            elif child.type in WORDS:
                words += self.values.words(self.script, [child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(self.script.text(child))
        for redirect in redirects:
            words += self.values.words(self.script, targets(redirect)[1:])
        return words

    def declare(self, words: list[str], declared: dict[str, str]) -> None:
        """Read `export NAME=value` and its kin."""
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if NAME.fullmatch(name) and equals:
                self.values.set(name, value)
                declared[name] = value
            elif words[0] == "export" and name in self.values.values:
                held = self.values.values[name]
                declared[name] = held if isinstance(held, str) else " ".join(held)
        if words[0] == "export" or any(word.startswith("-") and "x" in word for word in words[1:]):
            self.exported |= declared

    def assigned(self, node: Node) -> dict[str, str]:
        """Set the variables of a command; return those that hold a text."""
        values, found = self.values, {}
        nodes = [node] if node.type == "variable_assignment" else node.children
        for one in nodes:
            if one.type != "variable_assignment":
                continue
            name, _, index = self.script.text(one.children[0]).partition("[")
            given = one.child_by_field_name("value")
            append, taken = len(one.children) > 1 and one.children[1].type == "+=", values.taken
            value: Value = "" if given is None else self.text(given)
            if given is not None and given.type == "array":
                value = values.words(self.script, [child for child in given.named_children if child.type in WORDS])
            elif index:
                value, append = [str(value)], True
            values.set(name, value, append=append, soft=values.taken > taken)
            held = values.values[name]
            if isinstance(held, str):
                found[name] = held
        return found

    def redirected(self, redirects: list[Node]) -> tuple[str | None, list[tuple[bool, str]]]:
        """Return the text that a command reads, and the files that it writes with whether it appends."""
        text = None
        outputs: list[tuple[bool, str]] = []
        for redirect in redirects:
            for target in targets(redirect)[:1]:
                body = self.script.body(target)
                sign = next((child.type for child in redirect.children if not child.is_named), "")
                is_error = (
                    redirect.children[0].type == "file_descriptor" and self.script.text(redirect.children[0]) != "1"
                )
                if body is not None:
                    text = body[0] if body[1] else self.values.heredoc(body[0])
                elif redirect.type == "herestring_redirect":
                    text = self.text(target)
                elif sign in (">", ">>", ">|", "&>") and not is_error:
                    outputs.append((sign == ">>", self.unknowns.shown(self.text(target))))
        return text, outputs


def targets(redirect: Node) -> list[Node]:
    """Return the words of a redirection: its file first."""
    return [child for child in redirect.named_children if child.type in WORDS]
