"""`Shell`: the state of bash at one point of a script, and what its assignments change.

The state is the variables with their scopes, the functions, and the environment of the programs
that the script starts. No variable keeps the value that it had before a change: the new value is
computed, or the variable becomes one that only the run knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.read.launch.bash.variables import Variables
from bridge.read.launch.shell_word import ShellWord
from bridge.read.launch.syntax_tree import WORD_NODES, get_node_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

NAME_PATTERN = re.compile(r"[A-Za-z_]\w*")
KEYED_ELEMENT_PATTERN = re.compile(r"\[[^\]]*\]\+?=")
"""An element of `A=([2]=x)`."""
DECLARE_COMMANDS = frozenset({"export", "declare", "local", "readonly", "typeset"})
TYPE_OPTIONS = frozenset("nAilu")
"""Options of `declare`: a name for another variable, a mapping, a number, a text in one case."""
LOCAL_COMMANDS = frozenset({"declare", "local", "typeset"})
"""Declarers whose variables belong to the function around them."""
MAX_POSITIONAL = 512
"""Positional parameters; where there are more, none is known."""
LIST_PATTERN = re.compile(r"\$\{?[@*]|\[[@*]\]")
"""In a word that may be any number of words: `$@`, `${A[@]}`."""
ARITHMETIC_CHANGE_PATTERN = re.compile(
    r"([A-Za-z_]\w*)\s*(\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""The changes of arithmetic: `A = 1`, `A += 1`, `A++`, `--A`."""


@dataclass
class ShellState:
    """The state that a subshell has a copy of: no change of the copy is known outside."""

    values: dict[str, dict[int, str]]
    exported: dict[str, None]
    functions: dict[str, Node]
    frames: list[dict[str, dict[int, str] | None]]
    is_all_exported: bool


class Shell(Variables):
    """Variables, functions and the environment of programs at one point of a script."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        super().__init__(stated)
        self.exported: dict[str, None] = {}
        self.functions: dict[str, Node] = {}
        self.frames: list[dict[str, dict[int, str] | None]] = []
        """Local variables of each function that is being read -> the values that they hide."""
        self.shared_functions = set[str]()
        """Functions after `export -f`."""
        self.is_all_exported = False
        """Whether `set -a` is on."""

    def state(self) -> ShellState:
        """Return a copy of the state that a subshell can change."""
        return ShellState(
            values=self.values.copy(),
            exported=self.exported.copy(),
            functions=self.functions.copy(),
            frames=[frame.copy() for frame in self.frames],
            is_all_exported=self.is_all_exported,
        )

    def restore(self, state: ShellState) -> None:
        """Go back to a state."""
        self.values = state.values
        self.exported = state.exported
        self.functions = state.functions
        self.frames = state.frames
        self.is_all_exported = state.is_all_exported

    def environment(self) -> dict[str, ShellWord]:
        """Return the environment of the programs that the shell starts."""
        variables: dict[str, ShellWord] = {}
        for name in self.exported:
            elements = self.values.get(name, {})
            if 0 in elements:
                variables[name] = ShellWord.from_text(elements[0])
        return variables

    # -- assignments -------------------------------------------------------------------------------

    def assign(self, node: Node) -> dict[str, None]:
        """Set the variables of a command, and return their names."""
        names: dict[str, None] = {}
        children = node.children
        if node.type == "variable_assignment":
            children = [node]
        for child in children:
            if child.type == "variable_assignment":
                name = self._assign_variable(child)
                names[name] = None
        if self.is_all_exported:
            self.exported |= names
        return names

    def _assign_variable(self, node: Node) -> str:
        """Set a variable or an element of an array, and return the name of the variable."""
        name, _, index = get_node_text(node.children[0]).removesuffix("]").partition("[")
        append = len(node.children) > 1 and node.children[1].type == "+="
        value = node.child_by_field_name("value")
        if value is not None and value.type == "array":
            self._assign_array(name, value, append=append)
            return name
        text = ""
        if value is not None:
            text = self.text(value)
        if index:
            self.set_element(name, index, text, append=append)
        else:
            self.set(name, [text], append=append)
        return name

    def _assign_array(self, name: str, array: Node, *, append: bool) -> None:
        """Set an array; one with keys is unknown."""
        children = [child for child in array.named_children if child.type in WORD_NODES]
        if any(KEYED_ELEMENT_PATTERN.match(get_node_text(child)) for child in children):
            self.forget(name)
        else:
            self.set(
                name, self.expand_words(join_adjacent_nodes(children)), append=append, is_array=True
            )

    def declare(
        self, words: list[str], names: dict[str, None], before: Mapping[str, dict[int, str]]
    ) -> None:
        """Read `export`, `local`, `declare` and their like.

        Args:
            words: The command, without the assignments that stand in it.
            names: The variables that these have set.
            before: The variables before that.
        """
        options = "".join(word for word in words[1:] if word[:1] in ("-", "+"))
        plain = [word for word in words[1:] if word[:1] not in ("-", "+")]
        is_local = words[0] in LOCAL_COMMANDS and bool(self.frames) and "g" not in options
        if "f" in options:
            if words[0] == "export":
                self.shared_functions.update(plain)
            return
        for word in plain:
            name, sign, value = word.partition("=")
            if NAME_PATTERN.fullmatch(name) is None:
                continue
            names[name] = None
            self._declare_variable(name, value if sign else None, before, is_local=is_local)
        if is_local:
            for name in names:
                self.frames[-1].setdefault(name, before.get(name))
        if TYPE_OPTIONS.intersection(options) and words[0] not in ("export", "readonly"):
            self._retype(names, is_reference="n" in options)
        if words[0] == "export" and "n" in options:
            self.exported = {name: None for name in self.exported if name not in names}
        elif words[0] == "export" or "x" in options:
            self.exported |= names

    def _declare_variable(
        self,
        name: str,
        value: str | None,
        before: Mapping[str, dict[int, str]],
        *,
        is_local: bool,
    ) -> None:
        """Declare a variable that has a value, or none."""
        is_new = is_local and name not in self.frames[-1]
        if is_new:
            self.frames[-1][name] = before.get(name)
        if value is not None:
            self.set(name, [value])
        elif is_new:
            self.values[name] = {}

    def _retype(self, names: Iterable[str], *, is_reference: bool) -> None:
        """Make variables unknown that get another type, and those that they refer to."""
        for name in names:
            if is_reference:
                for target in self.get_elements(name):
                    self.forget(target)  # it is changed by another name
            self.forget(name)

    def leave_function(self) -> None:
        """Forget the local variables of a function, and take those that they have hidden."""
        for name, value in self.frames.pop().items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value

    def forget_computed(self, expression: str) -> None:
        """Make the variables unknown that arithmetic changes."""
        for match in ARITHMETIC_CHANGE_PATTERN.finditer(expression):
            self.forget(match[1] or match[3])

    # -- positional parameters ---------------------------------------------------------------------

    def set_positional(self, words: Sequence[str]) -> None:
        """Set `$1` and those behind it."""
        for name in self.positional():
            if name.isdigit():
                self.values[name] = {}
        if len(words) > MAX_POSITIONAL:
            for name in self.positional():
                self.values.pop(name)
            return
        words = list(words)
        for name in ("@", "*"):
            self.values[name] = dict(enumerate(words))
        count = find_list_index(words)
        if count < len(words):  # it may be any number of words
            for name in [*self.positional()]:
                if name not in ("@", "*"):
                    self.values.pop(name)
        else:
            self.values["#"] = {0: str(count)}
        for place, word in enumerate(words[: count + 1], 1):
            self.values[str(place)] = {0: word}

    def positional(self) -> dict[str, dict[int, str]]:
        """Return the elements of the positional parameters that are known."""
        variables = self.values.items()
        return {name: elements for name, elements in variables if not NAME_PATTERN.fullmatch(name)}


def join_adjacent_nodes(nodes: Sequence[Node]) -> list[str]:
    """Return nodes as they are written.

    Nodes without a blank between them are one word (`[0]*$A+[1]*$B`).
    """
    texts: list[str] = []
    end = -1
    for node in nodes:
        if node.start_byte == end:
            texts[-1] += get_node_text(node)
        else:
            texts.append(get_node_text(node))
        end = node.end_byte
    return texts


def find_list_index(words: Sequence[str]) -> int:
    """Return the place of the first word that may be any number of words.

    It is the number of words where there is no such word.
    """
    for index, word in enumerate(words):
        if LIST_PATTERN.search(word):
            return index
    return len(words)
