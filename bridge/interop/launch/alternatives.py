"""`launches`: what a script starts on the branch that bash takes with nothing set, and on the others."""

from collections.abc import Mapping
from dataclasses import replace

from bridge.errors import PayloadError
from bridge.interop.launch.branches import FIRST, Choice
from bridge.interop.launch.files import Sources
from bridge.interop.launch.launches import Launch, trainings
from bridge.interop.launch.reader import Reader
from bridge.interop.launch.variables import Unknowns

MAX_READINGS = 60
MAX_WORK = 20_000
"""Commands of all readings of a script together."""
MAX_LISTED = 32
MAX_CHOICES = 3
"""Branches of one condition that are followed behind a default that is not taken."""


def launches(text: str, path: str = "<script>", variables: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """Return the launches of a script, in source order, first those of the branch that bash takes with nothing set.

    A launch of another branch is listed where its precision differs, and names the branch. Without any launch, one is
    made of the arguments that the script's variables hold.

    Files that the script sources are read from the folder of `path`; `variables` is what the user states of the
    environment.
    """
    stated = {name: Unknowns.plain(value) for name, value in (variables or {}).items()}
    try:
        return trainings(_Explorer(Sources(text, path), stated).explore())
    except RecursionError:
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None


class _Explorer:
    """Reads a script again for each branch that may be taken otherwise, and for each default that may decide."""

    def __init__(self, sources: Sources, stated: Mapping[str, str]) -> None:
        self.sources, self.stated = sources, stated
        self.first = Reader(sources, stated).read()
        self.readings, self.work = 1, self.first.steps
        self.others: list[Launch] = []

    def read(self, choice: Choice = FIRST, open_: str = "") -> Reader | None:
        """Return one reading, None where there were enough."""
        if self.readings >= MAX_READINGS or self.work > MAX_WORK:
            return None
        found = Reader(self.sources, self.stated, choice, open_).read()
        self.readings += 1
        self.work += found.steps
        return found

    def explore(self) -> list[Launch]:
        """Return the launches of all readings."""
        first, deciding = self.first, dict[tuple[int, int], dict[str, None]]()
        for taken, alternatives in first.points.values():
            for choice in alternatives:
                reading = self.read(choice)
                if reading is not None:
                    self.compare(reading, choice.label)
                    for place in _changed(first, reading):
                        deciding.setdefault(place, {})[taken] = None
        about = self.defaults()
        found = [
            replace(launch, decisions=tuple(deciding.get(launch.at, ())), defaulted=about.get(launch.at, {}))
            for launch in first.launches
        ]
        others = [replace(launch, defaulted=about.get(launch.at, {})) for launch in self.others[:MAX_LISTED]]
        if any(launch.line for launch in others):
            found = [launch for launch in found if launch.line or launch.arguments]
        return [*found, *sorted(others, key=lambda launch: launch.line)]

    def compare(self, reading: Reader, label: str) -> None:
        """Add the launches of another branch whose precision is new at their place."""
        places = {launch.at for launch in reading.launches}
        moved = [(one.name, one.known) for one in self.first.launches if one.at not in places]
        for launch in reading.launches:
            if not launch.line and self.first.launches[0].line:
                continue
            same = [one for one in (*self.first.launches, *self.others) if one.at == launch.at]
            is_new = all(one.known != launch.known for one in same)
            if is_new and (same or (launch.name, launch.known) not in moved):
                self.others.append(replace(launch, decisions=(label,)))

    def defaults(self) -> dict[tuple[int, int], dict[str, str]]:
        """Return the defaults of variables that the precision of each launch depends on; list the branches behind."""
        about: dict[tuple[int, int], dict[str, str]] = {}
        for name, default in self.first.values.defaulted.items():
            reading = self.read(open_=name) if name not in self.stated else None
            if reading is None:
                continue
            readings = [reading]
            for key, (_, alternatives) in reading.points.items():
                if key in self.first.points:
                    continue
                for choice in alternatives[:MAX_CHOICES]:
                    other = self.read(choice, name)
                    if other is not None:
                        readings.append(other)
                        if key == f"${name}":
                            self.compare(other, choice.label)
            for launch in self.first.launches:
                there = (one for other in readings for one in other.launches if one.at == launch.at)
                if any(one.known != launch.known for one in there):
                    about.setdefault(launch.at, {})[name] = self.sources.unknowns.shown(default)
        return about


def _changed(first: Reader, reading: Reader) -> list[tuple[int, int]]:
    """Return where the first reading has launches that another branch changes."""
    there = {one.at: one.known for one in reading.launches}
    others = {(one.name, one.known) for one in reading.launches}
    return [
        launch.at
        for launch in first.launches
        if there.get(launch.at) != launch.known and (launch.at in there or (launch.name, launch.known) not in others)
    ]
