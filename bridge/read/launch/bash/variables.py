"""`Variables`: the variables of a script at one point.

    variables.set_text("FLAGS", "--bf16 --fp8-format $FORMAT")
    variables.append_array("ARGS", ["--fp16"])
    variables.get_elements("FLAGS")         # ["--bf16 --fp8-format $FORMAT"]

A variable holds texts of the script. A piece of a text that only the run decides stays in it as it
is written.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from bridge.read.launch.shell_word import OPEN_PIECE_PATTERN, join_texts, split_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VariableElements = dict[int, str]
"""The elements of a variable by their index. A variable that is no array has the element 0."""
MAX_VARIABLE_WORDS = 20_000
"""Words of one variable or one command that are kept."""
LIST_SIGNS = ("@", "*")
"""Subscripts that name all elements of an array: `${A[@]}`. `$@` and `$*` are all parameters."""


class VariableState(Enum):
    """Whether a variable has a value, as far as the script shows it."""

    NOT_ASSIGNED = "the script does not assign it, so only its environment can"
    UNSET = "the script has unset it, or has not set the element"
    SET = "the script has set it"


class Variables:
    """Variables at one point of a script."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        self.stated = stated
        """Variables that the environment of the run sets. They replace a value that only the run
        decides."""
        self.values: dict[str, VariableElements] = {}
        """Name -> its elements. A variable without elements is known to be unset; the script has
        not set a variable that is absent. The elements are never changed, only replaced,
        so that a copy of the mapping is a copy of all variables."""
        for name, value in stated.items():
            self.values[name] = {0: value}

    def get_elements(self, name: str) -> list[str]:
        """Return the elements of a variable in their order; none for a variable that nothing sets."""
        return [*self.values.get(name, {}).values()]

    def get_named_elements(self, name: str, subscript: str) -> list[str]:
        """Return the elements that `${name[subscript]}` names; none if nothing sets them.

        Args:
            name: The variable.
            subscript: `@` or `*` for all elements; empty for the element 0.
        """
        elements = self.values.get(name, {})
        if subscript in LIST_SIGNS or name in LIST_SIGNS:
            return [*elements.values()]
        if 0 in elements:
            return [elements[0]]
        return []

    def get_state(self, name: str, subscript: str) -> VariableState:
        """Return whether the elements that `${name[subscript]}` names are set.

        `$@` and `$*` are never unset: without parameters they are empty lists.
        """
        if name not in self.values:
            return VariableState.NOT_ASSIGNED
        if name in LIST_SIGNS or self.get_named_elements(name, subscript):
            return VariableState.SET
        return VariableState.UNSET

    def set_text(self, name: str, text: str) -> None:
        """Follow `A=text`. As in bash, of an array it replaces only the element 0."""
        if self._is_decided_by_environment(name, [text]):
            text = self.stated[name]
        self.values[name] = {**self.values.get(name, {}), 0: text}

    def append_text(self, name: str, text: str) -> None:
        """Follow `A+=text`, which adds to the element 0."""
        elements = self.values.get(name, {})
        self.values[name] = {**elements, 0: join_texts([elements.get(0), text])}

    def set_array(self, name: str, words: Sequence[str]) -> None:
        """Follow `A=(x y)`."""
        if self._is_decided_by_environment(name, words):
            words = split_words(self.stated[name])
        self.values[name] = dict(enumerate(words[:MAX_VARIABLE_WORDS]))

    def append_array(self, name: str, words: Sequence[str]) -> None:
        """Follow `A+=(x y)`."""
        elements = self.values.get(name, {})
        first_index = max(elements, default=-1) + 1
        added = words[: MAX_VARIABLE_WORDS - len(elements)]
        self.values[name] = {**elements, **dict(enumerate(added, first_index))}

    def _is_decided_by_environment(self, name: str, words: Sequence[str]) -> bool:
        """Return whether the run decides a value, and the environment states the variable."""
        return name in self.stated and any(map(OPEN_PIECE_PATTERN.search, words))

    def set_element(self, name: str, index: str, text: str) -> None:
        """Follow `A[index]=text`.

        An index that is no plain number, such as `$i`, makes the array open.
        """
        if not index.isdecimal():
            self.forget(name)
            return
        elements = {**self.values.get(name, {}), int(index): text}
        self.values[name] = dict(sorted(elements.items()))

    def forget(self, name: str) -> None:
        """Make a variable open: its value becomes `$NAME`, which only the run decides."""
        if name in self.values:
            self.set_array(name, [f"${name}"])
