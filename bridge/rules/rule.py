"""A rule as a row: what it is about, when it speaks, what it says, the ways out, where it was read.

A predicate is a plain function of a `Setup`. It returns something falsy for silence, True, a mapping of values for the
message, or several mappings for several findings. `path`, `value` and `where` in a mapping take the place of the row's.
The message and the ways out are format strings over these values and ``s``, the setup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding
from bridge.rules.versions import VersionRange

if TYPE_CHECKING:
    from bridge.preflight.setup import Setup

__all__ = ["EVIDENCE", "SEVERITIES", "Predicate", "Rule", "RuleFinding", "fires", "mcore", "te"]

Predicate = Callable[["Setup"], Any]

SEVERITIES = ("error", "warning", "info")
"""Worst first. An error means that the run will not start, or will be another run than the one asked for."""

EVIDENCE = {
    "verified": "read in the source that is named, or executed",
    "reported": "reported by users or maintainers in the thread that is named, not reproduced here",
    "weak": "few or conflicting reports",
}
"""What a rule rests on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One row."""

    id: str
    """PB and three digits; the first says the topic."""
    severity: str
    """error, warning or info."""
    title: str
    """What is wrong, in a few words."""
    path: str
    """The setting it is about: a field of the precision, or section.field."""
    predicate: Predicate
    """When it speaks."""
    message: str
    """What holds, or would have to hold, as a clause without a full stop."""
    remedies: tuple[str, ...]
    """The set of ways out, each an imperative clause without a full stop."""
    source: str
    """File and version, or thread and date."""
    evidence: str = "verified"
    """A key of `EVIDENCE`."""
    gate: str | None = None
    """Attribute of `Setup` that has to be truthy for the rule to apply at all."""
    versions: tuple[VersionRange, ...] = ()
    """Versions it holds for. Where one is not known, the finding says so and is one step milder."""
    explanation: str = ""
    """What happens and why, for `explain` and the reference page."""


@dataclass(frozen=True, kw_only=True)
class RuleFinding(Finding):
    """What a rule says about one setup."""

    title: str = ""
    """Of the rule."""
    source: str = ""
    """Of the rule."""
    evidence: str = "verified"
    """Of the rule."""
    ways_out: tuple[str, ...] = ()
    """Of the rule, filled in."""
    depends_on: str | None = None
    """The version that would decide whether it holds, where that is not known."""
    silenced: str | None = None
    """Why it was silenced; None where it was not."""


def mcore(*, since: str | None = None, until: str | None = None) -> VersionRange:
    """Return a range of megatron-core versions."""
    return _range("mcore", since, until)


def te(*, since: str | None = None, until: str | None = None) -> VersionRange:
    """Return a range of Transformer Engine versions."""
    return _range("te", since, until)


def _range(product: str, since: str | None, until: str | None) -> VersionRange:
    first, last = (tuple(map(int, text.split("."))) if text else None for text in (since, until))
    return VersionRange(product=product, since=first, until=last)


def fires(found: Any) -> tuple[Mapping[str, Any], ...]:
    """Return what a predicate's answer means: the values of each finding."""
    if not found:
        return ()
    if found is True:
        return ({},)
    if isinstance(found, Mapping):
        return (found,)
    return tuple(found) if isinstance(found, list | tuple) else ({},)
