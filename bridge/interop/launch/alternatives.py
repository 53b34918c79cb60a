"""`launches`: what a script starts on the branch that bash takes with nothing set, and on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.launch.files import Sources
from bridge.interop.launch.launches import trainings
from bridge.interop.launch.reader import Assumptions, Reader, Reading
from bridge.interop.launch.relevance import loose
from bridge.interop.launch.values import Unknowns
from bridge.interop.launch.words import HOLDS_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.interop.launch.launches import Launch

__all__ = ["launches"]

MAX_READINGS = 60
MAX_WORK = 40_000
"""Commands of all readings of a script together."""
MAX_LISTED = 32
"""Launches of other branches."""


def launches(text: str, path: str = "<script>", variables: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """Return the launches of a script, in source order, first those of the branch that bash takes with nothing set.

    A launch of another branch is listed where its precision differs, and names the branch. Without any launch, one is
    made of the arguments that the script's variables hold.

    Args:
        text: The script.
        path: Where it stands; files that it sources are read from there.
        variables: What the environment sets, where the user states it.

    Raises:
        PayloadError: The script is nested too deeply, or cannot be a launch script.
    """
    stated = {name: Unknowns.plain(value) for name, value in (variables or {}).items()}
    try:
        return trainings(_Explorer(Sources(text, path), stated).explore())
    except RecursionError:
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None


class _Explorer:
    """Reads a script again for each branch that may be taken otherwise, and for each default that may decide."""

    def __init__(self, sources: Sources, stated: Mapping[str, str]) -> None:
        self.sources = sources
        self.given = Assumptions(stated=stated)
        self.readings = self.work = 0

    def read(self, given: Assumptions) -> Reading | None:
        """Return one reading, None where there were enough."""
        if self.readings >= MAX_READINGS or self.work > MAX_WORK:
            return None
        self.readings += 1
        reader = Reader(self.sources, given)
        found = reader.read()
        self.work += reader.steps
        return found

    def explore(self) -> list[Launch]:
        """Return the launches of all readings."""
        first = self.read(self.given) or Reading()
        names: dict[tuple[int, int], dict[str, None]] = {}
        deciding: dict[tuple[int, int], dict[str, None]] = {}
        others: list[Launch] = []
        for taken, alternatives in first.points.values():
            for choice in alternatives:
                reading = self.read(replace(self.given, choice=choice))
                if reading is not None:
                    _compare(first, reading, names, others, choice.label)
                    for place in _changed(first, reading):
                        deciding.setdefault(place, {})[taken] = None
        about = self._defaults(first)
        found = [
            replace(
                launch,
                decisions=tuple(deciding.get(launch.at, ())),
                names=tuple(names.get(launch.at, ())),
                defaulted=about.get(launch.at, {}),
            )
            for launch in first.launches
        ]
        others = [replace(launch, defaulted=about.get(launch.at, {})) for launch in others[:MAX_LISTED]]
        if any(launch.line for launch in others):
            found = [launch for launch in found if launch.line or launch.arguments]
        return [*found, *sorted(others, key=lambda launch: launch.line)]

    def _defaults(self, first: Reading) -> dict[tuple[int, int], dict[str, str]]:
        """Return the defaults of variables that the precision of each launch depends on."""
        about: dict[tuple[int, int], dict[str, str]] = {}
        for name, default in first.defaulted.items():
            if name in self.given.stated:
                continue
            reading = self.read(replace(self.given, open=name))
            if reading is None:
                break
            readings = [reading]
            for key, (_, alternatives) in reading.points.items():
                for choice in alternatives[:3] if key not in first.points else ():
                    other = self.read(replace(self.given, open=name, choice=choice))
                    readings += [other] if other is not None else []
            for launch in first.launches:
                if any(_differs(launch, one) for one in readings):
                    about.setdefault(launch.at, {})[name] = self.sources.unknowns.shown(default)
        return about


def _compare(
    first: Reading,
    reading: Reading,
    names: dict[tuple[int, int], dict[str, None]],
    others: list[Launch],
    label: str,
) -> None:
    """Add the launches of another branch whose precision is new at their place, and other names of the same ones."""
    places = {launch.at for launch in reading.launches}
    moved = [(one.name, one.known) for one in first.launches if one.at not in places]
    for launch in reading.launches:
        if not launch.line and first.launches[0].line:
            continue
        same = [one for one in (*first.launches, *others) if one.at == launch.at]
        alike = [one for one in same if one.known == launch.known]
        if alike and launch.name != alike[0].name:
            names.setdefault(launch.at, {alike[0].name: None})[launch.name] = None
        elif not alike and (same or (launch.name, launch.known) not in moved):
            others.append(replace(launch, decisions=(label,)))


def _changed(first: Reading, reading: Reading) -> list[tuple[int, int]]:
    """Return where the first reading has launches that another branch changes."""
    there = {one.at: one.known for one in reading.launches}
    others = {(one.name, one.known) for one in reading.launches}
    return [
        launch.at
        for launch in first.launches
        if there.get(launch.at) != launch.known and (launch.at in there or (launch.name, launch.known) not in others)
    ]


def _differs(launch: Launch, reading: Reading) -> bool:
    """Return whether a launch has another precision in a reading, or unknown words that may hold options."""
    other = next((one for one in reading.launches if one.at == launch.at), None)
    if other is None or other.known != launch.known:
        return other is not None
    more = set(loose(other.arguments)) - set(loose(launch.arguments))
    return any(HOLDS_OPTIONS.search(other.unknowns.shown(word)) for word in more)
