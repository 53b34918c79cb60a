"""`Violation`: a place where a run breaks a rule; the predicates that return them, made of conditions."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from bridge.rules.context import RuleContext

HELD: Any = object()
"""Stands for the value that a path holds."""
CONSTANTS = {"None": None, "False": False, "True": True}
"""Word of a condition -> its value; any other word stands for itself."""


class Violation:
    """One place where a run breaks a rule.

    Args:
        path: The setting at fault: a field of the precision, or section.field; None: the one of the row.
        value: Its value; `HELD`: the one that the path holds.
        where: The source of the value; None: the one that set the path.
        severity: None: the one of the row.
        rests_on: Paths of the settings that decide whether this place breaks the rule, where the rule reads more than
            them; None: all that it reads.
        **words: Names in the row's message and remedies -> values; they have ``run``, ``path`` and ``value`` anyway.
    """

    __slots__ = ("path", "rests_on", "severity", "value", "where", "words")

    def __init__(
        self,
        path: str | None = None,
        *,
        value: Any = HELD,
        where: str | None = None,
        severity: str | None = None,
        rests_on: Iterable[str] | None = None,
        **words: Any,
    ) -> None:
        self.path, self.value, self.where, self.severity, self.words = path, value, where, severity, words
        self.rests_on = rests_on


Condition = Callable[[RuleContext], object]
Predicate = Callable[[RuleContext], list[Violation]]


def all_of(*conditions: str | Condition, find: Predicate = lambda _: [Violation()]) -> Predicate:
    """Return the predicate of a rule that is broken where all conditions hold, asked in this order, as `find` says.

    A condition is the path of a value of the run that is true ("is_low", "model.tp_comm_overlap"), or with "not "
    before it of one that is false; a value that it has, or has not ("fp8 is e4m3", "target.gpu is not None"); or a
    function of the run. Without `find` the row's own setting is at fault.
    """
    held = [_condition(one) if isinstance(one, str) else one for one in conditions]
    return lambda run: find(run) if all(holds(run) for holds in held) else []


def _condition(words: str) -> Condition:
    path, is_compared, wanted = words.removeprefix("not ").partition(" is ")
    value = attrgetter(path)
    if is_compared:
        text = wanted.removeprefix("not ")
        one = CONSTANTS.get(text, text)
        return lambda run: (value(run) == one) is (text == wanted)
    return (lambda run: not value(run)) if words.startswith("not ") else value


def stands_out(name: str) -> Condition:
    """Return whether a field is stated away from its default."""
    return lambda run: run.stands_out(name)


def violations(broken: Mapping[str, object]) -> list[Violation]:
    """Return a violation of each path whose condition holds."""
    return [Violation(path) for path, holds in broken.items() if holds]


def without_effect(run: RuleContext, fields: Iterable[str]) -> list[Violation]:
    """Return a violation for each of `fields` that was stated, away from its default, and has no effect."""
    stated = [name for name in fields if run.stands_out(name)]
    return [Violation(name, why=run.inert[name]) for name in stated if name in run.inert]
