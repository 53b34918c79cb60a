"""`Journal`: the names and fields that a program changes, so that a branch can be followed and taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from bridge.read.megatron_bridge.values import FieldValue, Object, Value, is_same

Result = TypeVar("Result")


class Absent:
    """The value of a name or a field that is not there."""


ABSENT = Absent()
Namespace = dict[str, Value]
"""The names of a function, or the fields of an object."""


@dataclass(kw_only=True, slots=True)
class Change:
    """One name or field that a branch changed."""

    holder: Namespace
    name: str
    before: Value
    after: Value


Changes = Mapping[tuple[int, str], Change]
"""What a branch changed, by holder and name."""


class Journal:
    """The changes of the branches that are being followed, the innermost branch last."""

    def __init__(self) -> None:
        self._branches: list[dict[tuple[int, str], Change]] = []

    def put(self, holder: Namespace, name: str, value: Value) -> None:
        """Write a name or a field."""
        if self._branches:
            branch = self._branches[-1]
            key = (id(holder), name)
            if key not in branch:
                before = holder.get(name, ABSENT)
                branch[key] = Change(holder=holder, name=name, before=before, after=value)
            branch[key].after = value
        _write(holder, name, value)

    def follow_branch(self, follow: Callable[[], Result]) -> tuple[Result, Changes]:
        """Follow a branch and take back what it changed; return what `follow` returns, and the changes."""
        self._branches.append({})
        result = follow()
        changes = self._branches.pop()
        for change in changes.values():
            _write(change.holder, change.name, change.before)
        return result, changes

    def repeat(self, changes: Changes) -> None:
        """Change again what a branch changed: it is the only one that a run can take."""
        for change in changes.values():
            self.put(change.holder, change.name, change.after)

    def join(self, first: Changes, second: Changes, decider: str) -> None:
        """Change what two branches agree on; what differs is open."""
        for key in dict.fromkeys((*first, *second)):
            change = first.get(key) or second[key]
            values: list[Value] = []
            for branch in (first, second):
                values.append(branch[key].after if key in branch else change.before)
            if _is_same_value(*values):
                self.put(change.holder, change.name, values[0])
            else:
                self.put(change.holder, change.name, _make_open_value(values, decider))


def _write(holder: Namespace, name: str, value: Value) -> None:
    if value is ABSENT:
        holder.pop(name, None)
    else:
        holder[name] = value


def _is_same_value(first: Value, second: Value) -> bool:
    if isinstance(first, FieldValue) and isinstance(second, FieldValue):
        return is_same(first.value, second.value)
    return is_same(first, second)


def _make_open_value(values: list[Value], decider: str) -> Value:
    """Return an open value in the place of two that differ: a field where they are fields."""
    for value in values:
        if isinstance(value, FieldValue):
            return FieldValue(value=Object(decider=decider), origin=value.origin)
    return Object(decider=decider)
