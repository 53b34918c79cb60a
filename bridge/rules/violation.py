"""`Violation`: one place where a run breaks a rule, with the words of the rule's message."""

from collections.abc import Iterable
from typing import Final

HELD: Final = object()
"""Stands for the value that a path holds."""


class Violation:
    """One place where a run breaks a rule.

    Args:
        path: The setting at fault: a field of the precision, or section.field; None: the setting
            of the row.
        value: Its value; `HELD`: the one that the path holds.
        where: The source of the value; None: the one that set the path.
        severity: None: the one of the row.
        rests_on: Paths of the settings that decide whether this place breaks the rule, where the
            rule reads more than them; None: all that it reads.
        **words: Names in the row's message and remedies -> values; they have ``run``, ``path`` and
            ``value`` anyway.
    """

    __slots__ = ("path", "rests_on", "severity", "value", "where", "words")

    def __init__(
        self,
        path: str | None = None,
        *,
        value: object = HELD,
        where: str | None = None,
        severity: str | None = None,
        rests_on: Iterable[str] | None = None,
        **words: object,
    ) -> None:
        self.path = path
        self.value = value
        self.where = where
        self.severity = severity
        self.rests_on = rests_on
        self.words = words
