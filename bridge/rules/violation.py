"""`Violation`: one place where a run breaks a rule, with the values for the rule's message."""

from collections.abc import Iterable
from typing import Final

VALUE_OF_PATH: Final = object()
"""The value of `Violation.value` that means the value of the setting at the violation's path."""


class Violation:
    """One place where a run breaks a rule.

    Args:
        path: The setting at fault: a field of the precision, or section.field. None: the setting of
            the rule.
        value: The value at fault. `VALUE_OF_PATH`: the value of the setting at `path`.
        where: The source of the value. None: the source that set the setting at `path`.
        severity: The severity of this violation. None: the severity of the rule.
        rests_on: The settings that decide whether this place breaks the rule. None: every setting
            that the rule reads.
        **words: Name in the templates of the rule -> value. The names ``run``, ``path`` and
            ``value`` are always defined.
    """

    __slots__ = ("path", "rests_on", "severity", "value", "where", "words")

    def __init__(
        self,
        path: str | None = None,
        *,
        value: object = VALUE_OF_PATH,
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
