"""`answer_of`: the answer of a condition of a script, from its node in the tree.

[[ $MODE == fp8 ]]
test "$A" -gt 1
(( A > 1 ))
[ -n "$A" ] && ! true
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.read.launch.arithmetic import computed
from bridge.read.launch.conditions import Answer, answer_of_words
from bridge.read.launch.script import WORDS, name_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tree_sitter import Node

    from bridge.read.launch.variables import Variables

CONSTANTS = {"true": True, ":": True, "false": False}
"""Command with the same answer in each run -> the answer."""


def answer_of(node: Node, variables: Variables) -> Answer | None:
    """Return the answer of a condition; None for a command that is no condition."""
    kind = node.type
    first = ""
    if node.children:
        first = node.children[0].type
    if kind == "negated_command":
        inner = answer_of(node.named_children[-1], variables)
        return None if inner is None else inner.negated
    if kind == "list":
        return _answer_of_pair(node, variables)
    if kind == "command":
        return _answer_of_command(node, variables)
    if kind == "test_command" and first in ("[", "[["):
        return answer_of_words(_tested_texts(node, variables))
    if first == "((":
        value = computed(f"${text_of(node)}", variables.values)
        if value is None:
            return Answer(holds=False)
        return Answer(holds=value != "0", is_free=False)
    if kind == "test_command":
        return Answer(holds=False)
    return None


def _answer_of_command(node: Node, variables: Variables) -> Answer | None:
    """Return the answer of `test ...`, `true` and `false`; None for another command."""
    name = name_of(node)
    if name == "test":
        words = [child for child in node.children[1:] if child.type in WORDS]
        return answer_of_words([variables.text(word) for word in words])
    if name in CONSTANTS:
        return Answer(holds=CONSTANTS[name], is_free=False)
    return None


def _answer_of_pair(node: Node, variables: Variables) -> Answer | None:
    """Return the answer of two conditions; only the run has it unless the file decides both."""
    left = answer_of(node.children[0], variables)
    right = answer_of(node.children[-1], variables)
    if left is None or right is None:
        return None
    if left.is_free or right.is_free:
        return Answer(holds=False)
    if node.children[1].type == "&&":
        holds = left.holds and right.holds
    else:
        holds = left.holds or right.holds
    return Answer(holds, is_free=False)


def _tested_texts(node: Node, variables: Variables) -> list[str]:
    """Return the words inside `[ ... ]` or `[[ ... ]]`, expanded."""
    texts: list[str] = []
    for child in _tested_nodes(node):
        if child.type in WORDS:
            texts.append(variables.text(child))
        else:
            texts.append(text_of(child))
    return texts


def _tested_nodes(node: Node) -> Iterable[Node]:
    """Yield the words and operators of `[ ... ]` or `[[ ... ]]` without the brackets."""
    for child in node.children:
        if child.type in ("[", "]", "[[", "]]"):
            continue
        if child.type in WORDS or not child.child_count:
            yield child
        else:
            yield from _tested_nodes(child)
