"""Branches that a script leaves open: the alternative that a way took, and what ways that come together still share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Branch", "Branches", "Choice", "Path", "excludes", "told", "united"]

MAX_PATHS = 16
MAX_SHOWN = 4


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A branch that the file does not decide, with every alternative as a report shows it; one object for each."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was taken at a branch."""

    branch: Branch
    taken: frozenset[int]
    """Which of its alternatives lead here."""

    def __str__(self) -> str:
        return " or ".join(self.branch.texts[at] for at in sorted(self.taken))


class Branches:
    """The undecided branches of one script, so that all who come by speak of the same one."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[str, ...]], Branch] = {}

    def alternatives(self, place: int, texts: Iterable[str]) -> list[Choice]:
        """Return one choice for each alternative of the branch at an offset."""
        known = tuple(texts)
        branch = self._known.setdefault((place, known), Branch(known))
        return [Choice(branch, frozenset({at})) for at in range(len(known))]


Path = tuple[Choice, ...]
"""The choices on the way to one place, first to last."""


def excludes(one: Path, other: Path) -> bool:
    """Return whether no run of the script takes both paths: they part at a branch."""
    return any(mine.branch is theirs.branch and not mine.taken & theirs.taken for mine in one for theirs in other)


def united(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return fewer paths that say the same: a choice all of whose alternatives lead on alike is left out."""
    found = list(dict.fromkeys(paths))[:MAX_PATHS]
    joined = len(found) > 1
    while joined:
        joined = False
        for one, other in combinations(found, 2):
            both = _joined(one, other)
            if both is not None:
                found = [both if path is one else path for path in found if path is not other]
                joined = True
                break
    return tuple(found)


def _joined(one: Path, other: Path) -> Path | None:
    """Return the one path that stands for two, or None where two are needed."""
    if len(one) != len(other):
        short, long = sorted((one, other), key=len)
        return short if set(short) <= set(long) else None
    differing = [at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
    if not differing:
        return one
    at = differing[0]
    first, second = one[at], other[at]
    if len(differing) > 1 or first.branch is not second.branch:
        return None
    taken = first.taken | second.taken
    kept = () if len(taken) == len(first.branch.texts) else (Choice(first.branch, taken),)
    return (*one[:at], *kept, *one[at + 1 :])


def told(paths: Iterable[Path], *, alone: bool) -> tuple[str, ...]:
    """Return what the paths to one launch say, as a report shows it.

    Args:
        paths: The ways that lead there.
        alone: All that is started there has this precision, so that choices in which the ways differ decide nothing.
    """
    known = united(paths)
    if not known:
        return ()
    shared = [choice for choice in known[0] if all(choice in path for path in known)]
    found = tuple(dict.fromkeys(map(str, shared)))
    if len(known) == 1 or alone:
        return found
    rest = [" and ".join(str(choice) for choice in path if choice not in shared) for path in known]
    more = [f"{len(rest) - MAX_SHOWN} more ways"] if len(rest) > MAX_SHOWN else []
    return (*found, "; or ".join([*rest[:MAX_SHOWN], *more]))
