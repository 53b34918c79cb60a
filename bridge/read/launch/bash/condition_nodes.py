"""`evaluate_condition`: the result of a condition, from its node in the syntax tree.

These forms are read:

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

    from bridge.read.launch.bash.expansion import WordExpansion

CONSTANT_COMMANDS = {"true": True, ":": True, "false": False}
"""Command that always succeeds or always fails -> whether it succeeds."""


def evaluate_condition(node: Node, expansion: WordExpansion) -> ConditionResult | None:
    """Return the result of a condition.

    Returns:
        The result, open if the script does not decide it. None for a command that is no
        condition, such as `mkdir logs`.
    """
    kind = node.type
    first = ""
    if node.children:
        first = node.children[0].type
    if kind == "negated_command":
        inner = evaluate_condition(node.named_children[-1], expansion)
        if inner is None:
            return None
        return inner.negated
    if kind == "list":
        return _evaluate_pair(node, expansion)
    if kind == "command":
        return _evaluate_command(node, expansion)
    if kind == "test_command" and first in ("[", "[["):
        return evaluate_test_words(_expand_test_words(node, expansion))
    if first == "((":
        # `((A > 1))` succeeds if the value of `$((A > 1))` is not 0.
        value = evaluate_arithmetic(f"${get_node_text(node)}", expansion.values)
        if value is None:
            return ConditionResult(holds=False)
        return ConditionResult(holds=value != "0", is_open=False)
    if kind == "test_command":
        return ConditionResult(holds=False)
    return None


def _evaluate_command(node: Node, expansion: WordExpansion) -> ConditionResult | None:
    """Return the result of `test ...`, `true` and `false`; None for another command."""
    name = get_command_name(node)
    if name == "test":
        words = [child for child in node.children[1:] if child.type in WORD_NODES]
        return evaluate_test_words([expansion.expand_node_text(word) for word in words])
    if name in CONSTANT_COMMANDS:
        return ConditionResult(holds=CONSTANT_COMMANDS[name], is_open=False)
    return None


def _evaluate_pair(node: Node, expansion: WordExpansion) -> ConditionResult | None:
    """Return the result of `left && right` or `left || right`, open unless both are decided."""
    left = evaluate_condition(node.children[0], expansion)
    right = evaluate_condition(node.children[-1], expansion)
    if left is None or right is None:
        return None
    if left.is_open or right.is_open:
        return ConditionResult(holds=False)
    if node.children[1].type == "&&":
        holds = left.holds and right.holds
    else:
        holds = left.holds or right.holds
    return ConditionResult(holds, is_open=False)


def _expand_test_words(node: Node, expansion: WordExpansion) -> list[str]:
    """Return the words inside `[ ... ]` or `[[ ... ]]`, expanded."""
    texts: list[str] = []
    for child in _list_test_nodes(node):
        if child.type in WORD_NODES:
            texts.append(expansion.expand_node_text(child))
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
