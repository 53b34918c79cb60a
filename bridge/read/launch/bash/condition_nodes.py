"""`evaluate_condition`: the answer of a condition of a script, from its node in the tree.

[[ $MODE == fp8 ]]
test "$A" -gt 1
(( A > 1 ))
[ -n "$A" ] && ! true
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.read.launch.bash.arithmetic import evaluate_arithmetic
from bridge.read.launch.bash.conditions import ConditionResult, evaluate_test_words
from bridge.read.launch.syntax_tree import WORD_NODES, get_command_name, get_node_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tree_sitter import Node

    from bridge.read.launch.bash.variables import Variables

CONSTANT_COMMANDS = {"true": True, ":": True, "false": False}
"""Command with the same answer in each run -> the answer."""


def evaluate_condition(node: Node, variables: Variables) -> ConditionResult | None:
    """Return the answer of a condition; None for a command that is no condition."""
    kind = node.type
    first = ""
    if node.children:
        first = node.children[0].type
    if kind == "negated_command":
        inner = evaluate_condition(node.named_children[-1], variables)
        return None if inner is None else inner.negated
    if kind == "list":
        return _evaluate_pair(node, variables)
    if kind == "command":
        return _evaluate_command(node, variables)
    if kind == "test_command" and first in ("[", "[["):
        return evaluate_test_words(_expand_test_words(node, variables))
    if first == "((":
        value = evaluate_arithmetic(f"${get_node_text(node)}", variables.values)
        if value is None:
            return ConditionResult(holds=False)
        return ConditionResult(holds=value != "0", is_undecided=False)
    if kind == "test_command":
        return ConditionResult(holds=False)
    return None


def _evaluate_command(node: Node, variables: Variables) -> ConditionResult | None:
    """Return the answer of `test ...`, `true` and `false`; None for another command."""
    name = get_command_name(node)
    if name == "test":
        words = [child for child in node.children[1:] if child.type in WORD_NODES]
        return evaluate_test_words([variables.text(word) for word in words])
    if name in CONSTANT_COMMANDS:
        return ConditionResult(holds=CONSTANT_COMMANDS[name], is_undecided=False)
    return None


def _evaluate_pair(node: Node, variables: Variables) -> ConditionResult | None:
    """Return the answer of two conditions; only the run has it unless the file decides both."""
    left = evaluate_condition(node.children[0], variables)
    right = evaluate_condition(node.children[-1], variables)
    if left is None or right is None:
        return None
    if left.is_undecided or right.is_undecided:
        return ConditionResult(holds=False)
    if node.children[1].type == "&&":
        holds = left.holds and right.holds
    else:
        holds = left.holds or right.holds
    return ConditionResult(holds, is_undecided=False)


def _expand_test_words(node: Node, variables: Variables) -> list[str]:
    """Return the words inside `[ ... ]` or `[[ ... ]]`, expanded."""
    texts: list[str] = []
    for child in _list_test_nodes(node):
        if child.type in WORD_NODES:
            texts.append(variables.text(child))
        else:
            texts.append(get_node_text(child))
    return texts


def _list_test_nodes(node: Node) -> Iterable[Node]:
    """Yield the words and operators of `[ ... ]` or `[[ ... ]]` without the brackets."""
    for child in node.children:
        if child.type in ("[", "]", "[[", "]]"):
            continue
        if child.type in WORD_NODES or not child.child_count:
            yield child
        else:
            yield from _list_test_nodes(child)
