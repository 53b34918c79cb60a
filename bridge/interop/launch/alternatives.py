"""`launches`: what a script starts on the branch that bash takes with nothing set, and on the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.document import MAX_BYTES
from bridge.interop.launch.reader import Assumptions, Reader, Reading
from bridge.interop.launch.relevance import loose
from bridge.interop.launch.syntax import parse
from bridge.interop.launch.trainings import trainings
from bridge.interop.launch.values import MARK, Unknowns
from bridge.interop.launch.words import HOLDS_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.interop.launch.launches import Launch
    from bridge.interop.launch.reader import Choice
    from bridge.interop.launch.syntax import Script

__all__ = ["launches"]

MAX_READINGS = 60
MAX_TOGETHER = 2
"""Branches that are taken otherwise at the same time."""
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
    plain = Unknowns.plain(text)
    script = parse(plain, path)
    try:
        return trainings(_Explorer(script, path, stated).explore())
    except RecursionError:
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None


class _Explorer:
    """Reads a script again for each branch that may be taken otherwise, and for each default that may decide."""

    def __init__(self, script: Script, path: str, stated: Mapping[str, str]) -> None:
        self.script, self.path = script, path
        self.unknowns = Unknowns()
        self.given = Assumptions(stated=stated)
        self.texts: dict[str, str | None] = {}
        self.scripts: dict[str, Script] = {}
        self.readings = self.work = 0
        self.names: dict[tuple[int, int], dict[str, None]] = {}
        """Programs that a command starts, one on each branch."""

    def read(self, given: Assumptions) -> Reading | None:
        """Return one reading, None where there were enough."""
        if self.readings >= MAX_READINGS or self.work > MAX_WORK:
            return None
        self.readings += 1
        reader = Reader(self.script, self.path, given, self)
        found = reader.read()
        self.work += reader.steps
        return found

    def beside(self, name: str) -> str | None:
        """Return the text of a file next to the script, None where there is none."""
        rest = MARK.split(name)[-1].lstrip("/") if MARK.search(name) else name
        if not rest or rest.startswith(("/", "~")) or "\0" in rest:
            return None
        if rest not in self.texts:
            self.texts[rest] = _text(Path(self.path).parent / rest)
        return self.texts[rest]

    def parsed(self, text: str) -> Script:
        """Return the commands of a string that is a script; every reading asks for the same ones."""
        if text not in self.scripts:
            self.scripts[text] = parse(text, self.path)
        return self.scripts[text]

    def explore(self) -> list[Launch]:
        """Return the launches of all readings."""
        first = self.read(self.given) or Reading()
        found = list(first.launches)
        deciding: dict[int, list[str]] = {}
        waiting: list[tuple[Reading, tuple[Choice, ...]]] = [(first, ())]
        others: list[Launch] = []
        while waiting:
            base, choices = waiting.pop(0)
            for taken, alternatives in base.points.values():
                for choice in alternatives:
                    if any(one.label == choice.label for one in choices):
                        continue
                    reading = self.read(replace(self.given, choices=(*choices, choice)))
                    if reading is None:
                        continue
                    new = self._new(first, reading, choices=(*choices, choice), found=others)
                    self._decide(first, reading, taken if not choices else "", deciding)
                    if len(choices) + 1 < MAX_TOGETHER and new is not None:
                        more = {key: value for key, value in reading.points.items() if key not in base.points}
                        if more:
                            waiting.append((replace_points(reading, more), (*choices, choice)))
        found = [
            replace(
                launch,
                decisions=tuple(dict.fromkeys(deciding.get(place, ()))),
                names=tuple(self.names.get((launch.line, launch.place), ())),
            )
            for place, launch in enumerate(found)
        ]
        found = self._defaults(first, found)
        by_place = {(launch.line, launch.place): launch.defaulted for launch in found}
        others = [
            replace(launch, defaulted=by_place.get((launch.line, launch.place), {})) for launch in others[:MAX_LISTED]
        ]
        if any(launch.line for launch in others):
            found = [launch for launch in found if launch.line or launch.arguments]
        return [*found, *sorted(others, key=lambda launch: launch.line)]

    def _new(self, first: Reading, reading: Reading, choices: tuple[Choice, ...], found: list[Launch]) -> Reading:
        """Add the launches of another branch whose precision is new at their place."""
        labels = tuple(choice.label for choice in choices)
        for launch in reading.launches:
            if not launch.line and first.launches[0].line:
                continue
            there = (launch.line, launch.place)
            same = [one for one in (*first.launches, *found) if (one.line, one.place) == there]
            alike = [one for one in same if one.known == launch.known]
            if alike and launch.name != alike[0].name:
                self.names.setdefault(there, {alike[0].name: None})[launch.name] = None
            elif not alike and not (not same and self._stands_for(launch, first, reading)):
                found.append(replace(launch, decisions=labels))
        return reading

    @staticmethod
    def _stands_for(launch: Launch, first: Reading, reading: Reading) -> bool:
        """Return whether a launch is one of the first reading on another line, which this reading does not come to."""
        places = {(one.line, one.place) for one in reading.launches}
        return any(
            one.name == launch.name and one.known == launch.known and (one.line, one.place) not in places
            for one in first.launches
        )

    def _decide(self, first: Reading, reading: Reading, taken: str, deciding: dict[int, list[str]]) -> None:
        """Note for each launch of the first reading that another branch changes it."""
        if not taken:
            return
        there = {(one.line, one.place): one.known for one in reading.launches}
        others = {(one.name, one.known) for one in reading.launches}
        for place, launch in enumerate(first.launches):
            known = there.get((launch.line, launch.place))
            if known != launch.known and (known is not None or (launch.name, launch.known) not in others):
                deciding.setdefault(place, []).append(taken)

    def _defaults(self, first: Reading, found: list[Launch]) -> list[Launch]:
        """Return the launches with the defaults of variables that their precision depends on."""
        about: list[dict[str, str]] = [{} for _ in found]
        for name, default in first.defaulted.items():
            if name in self.given.stated:
                continue
            reading = self.read(replace(self.given, open=frozenset({name})))
            if reading is None:
                break
            readings: list[Reading] = [reading]
            for key, (_, alternatives) in reading.points.items():
                if key not in first.points:
                    for choice in alternatives[:3]:
                        other = self.read(replace(self.given, open=frozenset({name}), choices=(choice,)))
                        readings += [other] if other is not None else []
            for place, launch in enumerate(found):
                if any(self._differs(launch, one) for one in readings):
                    about[place][name] = self.unknowns.shown(default)
        return [replace(launch, defaulted=values) for launch, values in zip(found, about, strict=True)]

    @staticmethod
    def _differs(launch: Launch, reading: Reading) -> bool:
        """Return whether a launch has another precision in a reading."""
        other = next((one for one in reading.launches if (one.line, one.place) == (launch.line, launch.place)), None)
        return other is not None and (other.known != launch.known or _may_say_more(launch, other))


def _may_say_more(launch: Launch, other: Launch) -> bool:
    """Return whether an unknown word of the second may hold options that the first does not have."""
    more = set(loose(other.arguments)) - set(loose(launch.arguments))
    return any(HOLDS_OPTIONS.search(other.unknowns.shown(word)) for word in more)


def replace_points(reading: Reading, points: dict[str, tuple[str, list[Choice]]]) -> Reading:
    """Return a reading with some of its conditions only."""
    return replace(reading, points=points)


def _text(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return Unknowns.plain(path.read_text(encoding="utf-8").replace("\r\n", "\n"))
    except (OSError, ValueError):
        return None
