"""`Journal`: the names and fields that a program changes, so that a branch can be followed and undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from bridge.read.megatron_bridge.values import FieldValue, Object, Value, is_same

Result = TypeVar("Result")


class Absent:
    """The value of a name or a field that is not set."""


ABSENT = Absent()
Namespace = dict[str, Any]
"""The names of a function with their values, or the fields of an object with their `FieldValue`."""


@dataclass(kw_only=True, slots=True)
class Change:
    """One name or field that a branch changed."""

    holder: Namespace
    name: str
    before: Value
    """The value before the branch; `ABSENT` if it was not set."""
    after: Value
    """The value at the end of the branch."""


Changes = Mapping[tuple[int, str], Change]
"""Identity of a namespace, and a name in it -> the change of a branch."""


class Journal:
    """The changes of the branches that are being followed, the innermost branch last."""

    def __init__(self) -> None:
        self._branches: list[dict[tuple[int, str], Change]] = []

    def put(self, holder: Namespace, name: str, value: Value) -> None:
        """Write a name or a field, and record the change for the innermost branch."""
        if self._branches:
            branch = self._branches[-1]
            key = (id(holder), name)
            if key not in branch:
                before = holder.get(name, ABSENT)
                branch[key] = Change(holder=holder, name=name, before=before, after=value)
            branch[key].after = value
        _write(holder, name, value)

    def follow_branch(self, follow: Callable[[], Result]) -> tuple[Result, Changes]:
        """Follow a branch, and undo its changes.

        Args:
            follow: Follows the branch.

        Returns:
            The result of `follow`, and the changes of the branch.
        """
        self._branches.append({})
        result = follow()
        changes = self._branches.pop()
        for change in changes.values():
            _write(change.holder, change.name, change.before)
        return result, changes

    def repeat(self, changes: Changes) -> None:
        """Apply the changes of a branch again, which is the only one that the program can take."""
        for change in changes.values():
            self.put(change.holder, change.name, change.after)

    def join(self, first: Changes, second: Changes, decider: str) -> None:
        """Apply the changes of two branches, of which the program takes one.

        A name or field that has the same value after both branches gets this value. Any other one
        gets an open value.

        Args:
            first: The changes of one branch.
            second: The changes of the other branch.
            decider: The condition that decides which branch is taken.
        """
        for key in dict.fromkeys((*first, *second)):
            change = first.get(key) or second[key]
            first_value = _get_value_after(first, key, change)
            second_value = _get_value_after(second, key, change)
            if _is_same_value(first_value, second_value):
                self.put(change.holder, change.name, first_value)
            else:
                open_value = _make_open_value(first_value, second_value, decider)
                self.put(change.holder, change.name, open_value)


def _get_value_after(changes: Changes, key: tuple[int, str], change: Change) -> Value:
    """Return the value of a name or field after a branch, which is that before it without a change."""
    if key in changes:
        return changes[key].after
    return change.before


def _write(holder: Namespace, name: str, value: Value) -> None:
    """Write a name or a field; `ABSENT` removes it."""
    if value is ABSENT:
        holder.pop(name, None)
    else:
        holder[name] = value


def _is_same_value(first: Value, second: Value) -> bool:
    """Return whether two values are the same. Two fields with the same value may be set by two statements."""
    if isinstance(first, FieldValue) and isinstance(second, FieldValue):
        return is_same(first.value, second.value)
    return is_same(first, second)


def _make_open_value(first: Value, second: Value, decider: str) -> Value:
    """Return an open value in the place of two that differ. It is a field if one of the two is a field."""
    for value in (first, second):
        if isinstance(value, FieldValue):
            return FieldValue(value=Object(decider=decider), origin=value.origin)
    return Object(decider=decider)
