"""Every exception that a user of Precision Bridge can meet.

`BridgeError` is the root: what was asked for cannot be done as asked, and a command ends with exit
code 2. A `TrainingError` ends it with 1: the run itself failed.

`WrongValueError` (ValueError) is internal: a value that a reader of plain data cannot use. Its
caller knows the path and raises one of the errors above. Errors carry their parts as attributes, so
that no code reads another error's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

MAX_LINE_LENGTH = 600
"""Characters of a message's line."""
MAX_LINES = 50
LONG_WORD = re.compile(r"\S{300,}")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters with which a name from a file could steer a terminal."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about a configuration: what is wrong or without effect, and what to do about it."""

    path: str
    """Field or owner.field the finding is about."""
    rule: str
    """The rule as a clause without a full stop."""
    remedy: str
    """The remedy as one sentence."""
    value: object = None
    """The value that was found."""
    where: str | None = None
    """The source that set the value."""
    severity: str = "error"
    """error, warning or info."""
    id: str = ""
    """The id of the rule that was broken.

    It is empty where the finding is about one run only, as Megatron's own refusals are.
    """

    def __str__(self) -> str:
        where = ""
        if self.where and self.where != "stated":
            where = f" ({self.where})"
        return bounded(f"{self.path}: {self.rule}, got {self.value!r}{where}. {self.remedy}")


class BridgeWarning(UserWarning):
    """Something works, but not as its name or its caller suggests."""


class BridgeError(Exception):
    """Root of all errors of this package; `get_exit_code` is what a command ends with."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes the error in another process: its text and its parts.

        The arguments of its constructor do not matter.
        """
        return type(self).__new__, (type(self), *self.args), self.__dict__


class _FindingsError(BridgeError):
    """An error made of findings, one per line."""

    def __init__(self, headline: str, findings: Iterable[Finding]) -> None:
        self.headline = headline
        self.findings = tuple(findings)
        lines = [f"  {finding}" for finding in self.findings]
        super().__init__("\n".join([headline, *lines]))


class PrecisionConfigError(_FindingsError, ValueError):
    """A precision config that can never be right. `findings` holds every fault."""


class CheckError(_FindingsError):
    """A run that is known to go wrong. `findings` holds what the check calls errors."""


class _SettingError(BridgeError):
    """An error about one setting.

    Its parts are attributes, empty where the message is about no single setting. They are those of
    a `Finding`, and `matches`, the nearest known names.
    """

    def __init__(
        self,
        message: str,
        matches: Sequence[str] = (),
        *,
        path: str = "",
        rule: str = "",
        value: object = None,
        remedy: str = "",
    ) -> None:
        self.path, self.rule, self.value, self.remedy = path, rule, value, remedy
        self.matches = tuple(matches)
        super().__init__(message)

    @classmethod
    def of(
        cls, path: str, rule: str, value: object, remedy: str = "", matches: Sequence[str] = ()
    ) -> Self:
        """Return the error with the message ``path: rule, got value. remedy``."""
        message = f"{path}: {rule}, got {value!r:.80}. {remedy}".rstrip()
        return cls(message, matches, path=path, rule=rule, value=value, remedy=remedy)


class WrongValueError(ValueError):
    """A value that cannot be read as its kind.

    `rule` is what it must be, `remedy` what to do, as a sentence.
    """

    def __init__(self, rule: str, value: object, remedy: str = "") -> None:
        self.rule, self.value, self.remedy = rule, value, remedy
        message = f"{rule}, got {value!r:.80}"
        if remedy:
            message += f". {remedy}"
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes the error again in another process."""
        return type(self), (self.rule, self.value, self.remedy)


class PrecisionTypeError(_SettingError, TypeError):
    """A value of the wrong type for its field.

    `path`, `rule`, `value` and `remedy` are the message's parts.

    Of several faults of one value they are those of the first.
    """

    def __init__(
        self,
        message: str,
        matches: Sequence[str] = (),
        *,
        faults: Sequence[WrongValueError] = (),
        **parts: Any,
    ) -> None:
        super().__init__(message, matches, **parts)
        self._faults = tuple(faults)

    @property
    def faults(self) -> tuple[WrongValueError, ...]:
        """Every fault of the value."""
        return self._faults or (WrongValueError(self.rule, self.value, self.remedy),)


class UnknownFieldError(_SettingError, AttributeError):
    """A field name that does not exist. `matches` holds the nearest names."""


class UnknownRecipeError(_SettingError, ValueError):
    """A recipe name that is not registered. `matches` holds the nearest names."""


class DuplicateRecipeError(BridgeError, ValueError):
    """Two different functions were registered under one name. `places` names both."""

    def __init__(self, name: str, places: tuple[str, str]) -> None:
        self.name, self.places = name, places
        super().__init__(
            f"Recipe {name!r} is defined twice: in {places[0]} and in {places[1]}. "
            "Rename one of the two functions, or give one another name with @register(name=...)."
        )


class RecipeSourceError(BridgeError):
    """A module, file or plugin of recipes that cannot be loaded or used."""


class UnknownPolicyError(_SettingError, ValueError):
    """A policy for conflicts that `synchronize` does not have. `matches` holds the nearest."""


class SyncError(_FindingsError, ValueError):
    """The synchroniser refuses. All owners are as they were."""


class SyncConflictError(SyncError):
    """An owner's own value differs from one of the recipe, and `on_conflict` is "error"."""


class SyncCheckError(SyncError):
    """The owners with the recipe's values do not pass Megatron's validation or our rules."""


class RunConfigError(_SettingError):
    """A key or value of the run's configuration that cannot be used.

    `matches` holds the nearest names.
    """


class UnreadFileError(RunConfigError):
    """A file in which no run was read: it describes none, or not in a form that is known here.

    `kind` says why in a few words, which are the same for many files.
    """

    def __init__(
        self,
        message: str,
        matches: Sequence[str] = (),
        *,
        kind: str = "it cannot be parsed",
        **parts: Any,
    ) -> None:
        self.kind = kind
        super().__init__(message, matches, **parts)


class PayloadError(_SettingError, ValueError):
    """A configuration of another system that this system would not take, or not its own."""


class BackendUnavailableError(BridgeError):
    """This machine has nothing that could run what the recipe asks for."""


class MissingExtraError(BridgeError):
    """A command needs packages of an extra that is not installed.

    `extra` and `missing` name both.
    """

    def __init__(self, message: str, *, extra: str, missing: Sequence[str]) -> None:
        self.extra, self.missing = extra, tuple(missing)
        super().__init__(message)


class DataError(BridgeError):
    """Training data that cannot be used."""


class CheckpointError(BridgeError):
    """A checkpoint that cannot be written or resumed from."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that must not be read; `reason` says why, as a clause."""

    def __init__(self, checkpoint: object, reason: str) -> None:
        self.checkpoint, self.reason = checkpoint, reason
        super().__init__(
            f"{checkpoint}: must be a whole checkpoint, and {reason}. Take the one before."
        )


class TrainingError(BridgeError):
    """The run itself failed."""

    exit_code = 1


class AuditError(TrainingError):
    """A step that did not run what was planned.

    `mismatches` are the rows of the plan and the record that differ.
    """

    shown = 12
    """Mismatches that the message lists; the others are counted."""

    def __init__(self, rule: str, mismatches: Sequence[object] = ()) -> None:
        self.rule, self.mismatches = rule, tuple(mismatches)
        lines = [f"audit: {rule}."]
        for mismatch in self.mismatches[: self.shown]:
            lines.append(f"  {mismatch}")
        if len(self.mismatches) > self.shown:
            lines.append(f"  and {len(self.mismatches) - self.shown} more")
        super().__init__("\n".join(lines))


def bounded(message: str) -> str:
    """Return a message as a person can read it.

    A long word or line loses its middle, and there are at most `MAX_LINES` lines. A value comes
    from a file and may be of any length; the path before it and the remedy behind it are kept.
    """
    shown = CONTROL_CHARACTERS.sub(lambda letter: repr(letter[0])[1:-1], message)
    shorter = LONG_WORD.sub(lambda word: _cut_middle(word[0], 200), shown)
    lines = [_cut_middle(line) for line in shorter.split("\n")]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = [f"  and {len(lines) - MAX_LINES + 1} more"]
    return "\n".join(lines)


def _cut_middle(text: str, limit: int = MAX_LINE_LENGTH) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ... {text[5 - limit // 2 :]}"


def close_matches(word: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return at most `limit` of `known` that look like `word`, nearest first.

    It is empty where nothing does.
    """
    from difflib import get_close_matches  # for a mistake alone

    known = list(known)
    folded = {name.lower().replace("-", "_"): name for name in reversed(known)}
    near = get_close_matches(word.lower().replace("-", "_"), folded, n=limit, cutoff=0.6)
    return [folded[name] for name in near if folded[name] != word]


def did_you_mean(matches: Sequence[str]) -> str:
    """Return ``Did you mean 'a', 'b' or 'c'?``, or an empty string without matches."""
    if not matches:
        return ""
    return f"Did you mean {listed(matches)}?"


def listed(names: Sequence[str]) -> str:
    """Return ``'a', 'b' or 'c'``; at least one name is needed."""
    *quoted, last = [repr(name) for name in names]
    if not quoted:
        return last
    return f"{', '.join(quoted)} or {last}"
