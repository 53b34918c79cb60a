"""All exceptions that Precision Bridge raises for users.

`BridgeError` is the root. A command that raises one ends with exit code 2: it cannot do its task.
After a `TrainingError` the exit code is 1: the run itself failed.

`WrongValueError` (ValueError) is internal. A reader of plain data raises it for a value that it
cannot use. Its caller knows the path, and raises another error of this module. Errors have their
parts as attributes, so that no code parses the text of an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

MAX_LINE_LENGTH = 600
"""The largest number of characters in a line of a message."""
MAX_LINES = 50
"""The largest number of lines of a message."""
LONG_WORD = re.compile(r"\S{300,}")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters with which text from a file could control a terminal."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about a configuration: a fault or a setting without effect, with its remedy."""

    path: str
    """The setting: a field of the precision, or section.field."""
    rule: str
    """The rule as a clause without a full stop."""
    remedy: str
    """The remedy as one sentence."""
    value: object = None
    """The value of the setting."""
    where: str | None = None
    """The source that set the value."""
    severity: str = "error"
    """error, warning or info."""
    id: str = ""
    """The id of the rule. Empty: the finding has no rule, for example a refusal by Megatron."""

    def __str__(self) -> str:
        where = ""
        if self.where and self.where != "stated":
            where = f" ({self.where})"
        return bounded(f"{self.path}: {self.rule}, got {self.value!r}{where}. {self.remedy}")


class BridgeWarning(UserWarning):
    """Something works, but not as its name or its caller suggests."""


class BridgeError(Exception):
    """The root of all errors of this package.

    `exit_code` is the exit code of a command that raises the error.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the text and the attributes, from which another process makes the error again.

        The constructor is not called, because the constructors of subclasses differ.
        """
        return type(self).__new__, (type(self), *self.args), self.__dict__


class _FindingsError(BridgeError):
    """An error with a list of findings, one in each line of its message."""

    def __init__(self, headline: str, findings: Iterable[Finding]) -> None:
        self.headline = headline
        self.findings = tuple(findings)
        lines = [f"  {finding}" for finding in self.findings]
        super().__init__("\n".join([headline, *lines]))


class PrecisionConfigError(_FindingsError, ValueError):
    """A precision config is wrong in any run. `findings` has every fault."""


class CheckError(_FindingsError):
    """A run is known to fail or to go wrong. `findings` has the errors of the check."""


class _SettingError(BridgeError):
    """An error about one setting.

    `path`, `rule`, `value` and `remedy` are the parts of the message, as in a `Finding`. They are
    empty if the message is not about a single setting. `matches` has the nearest known names.
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
    """A value is not of its kind.

    `rule` is a clause with the requirement. `remedy` is a sentence.
    """

    def __init__(self, rule: str, value: object, remedy: str = "") -> None:
        self.rule, self.value, self.remedy = rule, value, remedy
        message = f"{rule}, got {value!r:.80}"
        if remedy:
            message += f". {remedy}"
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments with which another process makes the error again."""
        return type(self), (self.rule, self.value, self.remedy)


class PrecisionTypeError(_SettingError, TypeError):
    """A value has a wrong type for its field.

    `path`, `rule`, `value` and `remedy` are the parts of the message. If a value has several faults,
    they are the parts of the first fault.
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
    """A field name does not exist. `matches` has the nearest names."""


class UnknownRecipeError(_SettingError, ValueError):
    """A recipe name is not registered. `matches` has the nearest names."""


class DuplicateRecipeError(BridgeError, ValueError):
    """Two different functions were registered under the same name. `places` has both locations."""

    def __init__(self, name: str, places: tuple[str, str]) -> None:
        self.name, self.places = name, places
        super().__init__(
            f"Recipe {name!r} is defined twice: in {places[0]} and in {places[1]}. "
            "Rename one of the two functions, or give one another name with @register(name=...)."
        )


class RecipeSourceError(BridgeError):
    """A module, file or plugin of recipes cannot be loaded or used."""


class UnknownPolicyError(_SettingError, ValueError):
    """`synchronize` does not have this policy for conflicts. `matches` has the nearest policies."""


class SyncError(_FindingsError, ValueError):
    """A sync is refused, and the configs are restored. `findings` names values that stay changed."""


class SyncConflictError(SyncError):
    """A value that was set in a config differs from the recipe, and `on_conflict` is "error"."""


class SyncCheckError(SyncError):
    """Megatron's validation or a rule refuses the configs with the values of the recipe."""


class RunConfigError(_SettingError):
    """A key or value of the run's configuration cannot be used.

    `matches` has the nearest names.
    """


class UnreadFileError(RunConfigError):
    """A file describes no run, or has an unknown form.

    `kind` is a clause with the reason. Many files have the same.
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
    """A configuration of another system is refused by that system, or is of a third system."""


class BackendUnavailableError(BridgeError):
    """This machine cannot run the formats of the recipe."""


class MissingExtraError(BridgeError):
    """A command needs packages that are not installed.

    `missing` has the packages. `extra` is the extra that installs them.
    """

    def __init__(self, message: str, *, extra: str, missing: Sequence[str]) -> None:
        self.extra, self.missing = extra, tuple(missing)
        super().__init__(message)


class DataError(BridgeError):
    """Training data cannot be used."""

    @classmethod
    def of(
        cls, path: str, rule: str, value: object, remedy: str, *, where: str | None = None
    ) -> Self:
        """Return the error with the message of a `Finding`."""
        finding = Finding(path=path, rule=rule, value=value, remedy=remedy, where=where)
        return cls(str(finding))


class CheckpointError(BridgeError):
    """A checkpoint cannot be written, or a run cannot be resumed from it."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint must not be read. `reason` is a clause with the reason."""

    def __init__(self, checkpoint: object, reason: str) -> None:
        self.checkpoint, self.reason = checkpoint, reason
        super().__init__(
            f"{checkpoint}: must be a whole checkpoint, and {reason}. Take the one before."
        )


class TrainingError(BridgeError):
    """The run itself failed."""

    exit_code = 1


class AuditError(TrainingError):
    """A step did not run as planned.

    `mismatches` are the rows of the plan and the record that differ.
    """

    shown = 12
    """The number of mismatches that the message lists. The others are counted."""

    def __init__(self, rule: str, mismatches: Sequence[object] = ()) -> None:
        self.rule, self.mismatches = rule, tuple(mismatches)
        lines = [f"audit: {rule}."]
        for mismatch in self.mismatches[: self.shown]:
            lines.append(f"  {mismatch}")
        if len(self.mismatches) > self.shown:
            lines.append(f"  and {len(self.mismatches) - self.shown} more")
        super().__init__("\n".join(lines))


def bounded(message: str) -> str:
    """Return a message with limited length and without control characters.

    A value in a message may come from a file and have any length. So the middle of a long word or
    line is cut. The path before the value and the remedy after the value stay. The result has at
    most `MAX_LINES` lines.
    """
    printable = CONTROL_CHARACTERS.sub(lambda letter: repr(letter[0])[1:-1], message)
    shorter = LONG_WORD.sub(lambda word: _cut_middle(word[0], 200), printable)
    lines = [_cut_middle(line) for line in shorter.split("\n")]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = [f"  and {len(lines) - MAX_LINES + 1} more"]
    return "\n".join(lines)


def _cut_middle(text: str, limit: int = MAX_LINE_LENGTH) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ... {text[5 - limit // 2 :]}"


def close_matches(word: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return at most `limit` of the known names that are similar to `word`, the nearest first."""
    from difflib import get_close_matches  # only an error needs it

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
    """Return ``'a', 'b' or 'c'``. There must be at least one name."""
    *quoted, last = [repr(name) for name in names]
    if not quoted:
        return last
    return f"{', '.join(quoted)} or {last}"
