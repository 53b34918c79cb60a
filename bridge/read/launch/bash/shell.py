"""`Shell`: the state of bash at one point of a script, and how assignments change it.

The state is the variables with their scopes, the functions, and the environment of the programs
that the script starts. After a change a variable never keeps its old value: the new value is
computed, or the variable becomes open, which means that only the run knows its value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.read.launch.bash.expansion import WordExpansion
from bridge.read.launch.bash.variables import VariableElements
from bridge.read.launch.shell_word import ShellWord
from bridge.read.launch.syntax_tree import WORD_NODES, get_node_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

NAME_PATTERN = re.compile(r"[A-Za-z_]\w*")
"""The name of a variable. Positional parameters (`1`, `@`) do not match."""
KEYED_ELEMENT_PATTERN = re.compile(r"\[[^\]]*\]\+?=")
"""The beginning of an element with its key: `A=([2]=x)`."""
DECLARE_COMMANDS = frozenset({"export", "declare", "local", "readonly", "typeset"})
LOCAL_COMMANDS = frozenset({"declare", "local", "typeset"})
"""Commands that declare variables of the function around them."""
TYPE_OPTIONS = frozenset("nAilu")
"""Options of `declare` for a type: `n` another name of a variable, `A` a mapping, `i` a number, `l`
and `u` a text in lower or upper case. Values of these types are not computed."""
MAX_POSITIONAL = 512
"""Positional parameters that are kept. If there are more, none is known."""
LIST_PATTERN = re.compile(r"\$\{?[@*]|\[[@*]\]")
"""A piece that may be any number of words: `$@`, `${A[@]}`."""
ARITHMETIC_CHANGE_PATTERN = re.compile(
    r"([A-Za-z_]\w*)\s*(\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""The changes of arithmetic: `A = 1`, `A += 1`, `A++`, `--A`."""


@dataclass
class ShellState:
    """A copy of the state, to which `Shell.restore` goes back after a subshell or a branch.

    The fields are those of `Shell` with the same name.
    """

    values: dict[str, VariableElements]
    exported: dict[str, None]
    functions: dict[str, Node]
    frames: list[dict[str, VariableElements | None]]
    is_all_exported: bool


class Shell(WordExpansion):
    """Variables, functions and the environment of programs at one point of a script."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        super().__init__(stated)
        self.exported: dict[str, None] = {}
        """Names of the exported variables, in the order of their export."""
        self.functions: dict[str, Node] = {}
        """Name of a function -> its definition."""
        self.frames: list[dict[str, VariableElements | None]] = []
        """For each function that is being followed, the outermost one first: name of a local
        variable -> the value that it hides, or None if it hides no variable."""
        self.is_all_exported = False
        """Whether `set -a` is on."""

    def copy_state(self) -> ShellState:
        """Return a copy of the state."""
        return ShellState(
            values=self.values.copy(),
            exported=self.exported.copy(),
            functions=self.functions.copy(),
            frames=[frame.copy() for frame in self.frames],
            is_all_exported=self.is_all_exported,
        )

    def restore(self, state: ShellState) -> None:
        """Go back to a state that `copy_state` returned. The state itself is not changed later."""
        self.values = state.values.copy()
        self.exported = state.exported.copy()
        self.functions = state.functions.copy()
        self.frames = [frame.copy() for frame in state.frames]
        self.is_all_exported = state.is_all_exported

    def get_environment(self) -> dict[str, ShellWord]:
        """Return the environment of the programs that the shell starts."""
        variables: dict[str, ShellWord] = {}
        for name in self.exported:
            elements = self.values.get(name, {})
            if 0 in elements:
                variables[name] = ShellWord.from_text(elements[0])
        return variables

    # -- assignments -------------------------------------------------------------------------------

    def assign(self, node: Node) -> dict[str, None]:
        """Set the variables that a command assigns, and return their names in order."""
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
        target = get_node_text(node.children[0])
        name, _, index = target.removesuffix("]").partition("[")
        is_appended = len(node.children) > 1 and node.children[1].type == "+="
        value = node.child_by_field_name("value")
        if value is not None and value.type == "array":
            self._assign_array(name, value, is_appended=is_appended)
            return name
        text = ""
        if value is not None:
            text = self.expand_node_text(value)
        if index and is_appended:
            self.forget(name)
        elif index:
            self.set_element(name, index, text)
        elif is_appended:
            self.append_text(name, text)
        else:
            self.set_text(name, text)
        return name

    def _assign_array(self, name: str, array: Node, *, is_appended: bool) -> None:
        """Follow `A=(x y)` or `A+=(x y)`. An array with keys, `A=([2]=x)`, becomes open."""
        nodes = [child for child in array.named_children if child.type in WORD_NODES]
        if any(KEYED_ELEMENT_PATTERN.match(get_node_text(node)) for node in nodes):
            self.forget(name)
            return
        words = self.expand_words(join_adjacent_nodes(nodes))
        if is_appended:
            self.append_array(name, words)
        else:
            self.set_array(name, words)

    def declare(
        self, words: list[str], assigned: Iterable[str], before: Mapping[str, VariableElements]
    ) -> None:
        """Follow `export`, `local`, `declare`, `readonly` or `typeset`.

        Args:
            words: The command without its assignments, which are already followed.
            assigned: The variables that these assignments have set.
            before: The variables before the assignments.
        """
        command = words[0]
        options = "".join(word for word in words[1:] if word[:1] in ("-", "+"))
        operands = [word for word in words[1:] if word[:1] not in ("-", "+")]
        if "f" in options:
            return
        is_local = command in LOCAL_COMMANDS and bool(self.frames) and "g" not in options
        names = dict.fromkeys(assigned)
        for operand in operands:
            name, sign, value = operand.partition("=")
            if NAME_PATTERN.fullmatch(name) is None:
                continue
            names[name] = None
            if is_local:
                self._declare_local(name, before)
            if sign:
                self.set_text(name, value)
        if is_local:
            for name in names:
                self.frames[-1].setdefault(name, before.get(name))
        if TYPE_OPTIONS.intersection(options) and command not in ("export", "readonly"):
            self._forget_typed(names, is_reference="n" in options)
        self._export_declared(command, options, names)

    def _declare_local(self, name: str, before: Mapping[str, VariableElements]) -> None:
        """Make a variable local to the innermost function, without a value, unless it is already."""
        if name not in self.frames[-1]:
            self.frames[-1][name] = before.get(name)
            self.values[name] = {}

    def _forget_typed(self, names: Iterable[str], *, is_reference: bool) -> None:
        """Make variables open that get a type.

        Args:
            names: The variables.
            is_reference: Whether they become other names of variables (`declare -n`). The script
                may then change a variable by its other name, so that variable becomes open too.
        """
        for name in names:
            if is_reference:
                for target in self.get_elements(name):
                    self.forget(target)
            self.forget(name)

    def _export_declared(self, command: str, options: str, names: Mapping[str, None]) -> None:
        """Export the variables of a declaration, or end their export (`export -n`)."""
        if command == "export" and "n" in options:
            self.exported = {name: None for name in self.exported if name not in names}
        elif command == "export" or "x" in options:
            self.exported = {**self.exported, **names}

    def leave_function(self) -> None:
        """Remove the local variables of the innermost function, and restore those that they hid."""
        for name, hidden in self.frames.pop().items():
            if hidden is None:
                self.values.pop(name, None)
            else:
                self.values[name] = hidden

    def forget_computed(self, expression: str) -> None:
        """Make the variables open that an arithmetic expression changes."""
        for match in ARITHMETIC_CHANGE_PATTERN.finditer(expression):
            self.forget(match[1] or match[3])

    # -- positional parameters ---------------------------------------------------------------------

    def set_positional(self, words: Sequence[str]) -> None:
        """Set the positional parameters: `$1`, `$2`, ..., `$@`, `$*` and `$#`.

        A word such as `$@` may be any number of words. Neither the parameters after it nor `$#` are
        known then.
        """
        for name in self.get_positional():
            if name.isdigit():
                self.values[name] = {}
        if len(words) > MAX_POSITIONAL:
            for name in self.get_positional():
                self.values.pop(name)
            return
        for name in ("@", "*"):
            self.values[name] = dict(enumerate(words))
        count = find_list_index(words)
        if count < len(words):
            for name in self.get_positional():
                if name not in ("@", "*"):
                    self.values.pop(name)
        else:
            self.values["#"] = {0: str(count)}
        for number, word in enumerate(words[: count + 1], 1):
            self.values[str(number)] = {0: word}

    def get_positional(self) -> dict[str, VariableElements]:
        """Return the positional parameters that are known, in a copy."""
        names = [name for name in self.values if not NAME_PATTERN.fullmatch(name)]
        return {name: self.values[name] for name in names}


def join_adjacent_nodes(nodes: Sequence[Node]) -> list[str]:
    """Return the words that nodes are written as.

    The grammar splits a word such as `[0]*$A+[1]*$B` into several nodes. Nodes without a blank
    between them are joined again.
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
    """Return the index of the first word that may be any number of words.

    It is the number of words if there is no such word.
    """
    for index, word in enumerate(words):
        if LIST_PATTERN.search(word):
            return index
    return len(words)
