"""`Way`: the state of one way through a launch script, and which ways are the same as far as precision goes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bridge.interop.contract import Unmapped
from bridge.interop.launch import MEGATRON_FLAGS, Launch
from bridge.interop.shell_files import Files
from bridge.interop.shell_precision import PRECISION_WORDS, bearing, bears, options, relevant
from bridge.interop.shell_variables import is_unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bridge.interop.shell_choices import Choice, Path
    from bridge.interop.shell_values import Values
    from bridge.interop.shell_variables import Value

__all__ = ["PRECISION_WORDS", "Stop", "Way"]


@dataclass(slots=True, kw_only=True)
class Stop:
    """The end of a command that started something."""

    line: int
    why: str
    """Why it ends there although the next line seems to go on with it; empty where nothing says why."""


@dataclass(slots=True)
class Way:
    """One way through a script, up to where it is read; more than one where they came to the same."""

    values: Values
    launches: list[Launch] = field(default_factory=list)
    paths: tuple[Path, ...] = ((),)
    """The choices of each way."""
    notes: tuple[str, ...] = ()
    exported: dict[str, str] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    """Names of files that the script writes and that would start something."""
    ran: set[str] = field(default_factory=set)
    """Names of files that the script runs."""
    stray: list[tuple[int, list[str]]] = field(default_factory=list)
    """Options that stand where a command should, with their lines."""
    stop: Stop | None = None
    """Set while the last command was one that started something."""
    files: Files = field(default_factory=lambda: Files(str))
    """What it has written so far."""
    scripts: list[Launch] = field(default_factory=list)
    """Other shell scripts that it runs: they may start something with what they are given."""

    @classmethod
    def first(cls, values: Values) -> Way:
        """Return the way that enters a script."""
        return cls(values, files=Files(values.unknowns.shown))

    def copy(self) -> Way:
        """Return an independent copy."""
        return replace(
            self,
            values=self.values.copy(),
            launches=list(self.launches),
            exported=dict(self.exported),
            ran=set(self.ran),
            stray=list(self.stray),
            files=self.files.copy(),
            scripts=list(self.scripts),
        )

    def take(self, choice: Choice) -> None:
        """Take one alternative of an undecided branch."""
        self.paths = tuple((*path, choice) for path in self.paths)

    def join(self, others: Iterable[Way]) -> None:
        """Go on for other ways of the same precision too: with what they started and what they could not read.

        A variable in which they differ is one that only the run knows from here on, so that a branch that it decides
        later is followed both ways.
        """
        for other in others:
            self._forget(other)
            self.take_over(other)
            self.stray += [one for one in other.stray if one not in self.stray]
            self.values.merge(other.values)

    def _forget(self, other: Way) -> None:
        """Make unknown what another way says otherwise; options stay, and are a default where the other has none."""
        ours, theirs = self.values.variables, other.values.variables
        for name in self.changed(theirs):
            here, there = ours.get(name), theirs.get(name)
            said = [word for value in (here, there) for word in ([value] if isinstance(value, str) else value or [])]
            composed = any(word.startswith("-") for one in said for word in one.split())
            if composed and None in (here, there):
                self.values.default(name, here or there or "")
            elif not composed and not isinstance(here, list) and not isinstance(there, list):
                ours[name] = self.values.unknowns.mark(f"${name}")

    def take_over(self, other: Way) -> None:
        """Remember what another way started, ran and could not read."""
        known = {id(launch) for launch in self.launches}
        self.launches += [launch for launch in other.launches if id(launch) not in known]
        known = {id(script) for script in self.scripts}
        self.scripts += [script for script in other.scripts if id(script) not in known]
        self.files.known = {**other.files.known, **self.files.known}
        self.ran |= other.ran
        self.written |= other.written
        for note in other.notes:
            self.note(note)

    def launch(
        self,
        line: int,
        program: str,
        arguments: Iterable[str],
        about: Iterable[str] = (),
        *,
        runner: Iterable[str] = (),
        environment: Mapping[str, str],
        at: int = 0,
    ) -> Launch:
        """Return a launch as it happens on this way; `about`: the defaults on which its options depend."""
        values, unknowns = self.values, self.values.unknowns
        deciding = {*values.deciding, *about}
        for name in bearing(environment.items()):
            deciding |= values.origins.get(name, frozenset())
        return Launch(
            line=line,
            program=unknowns.shown(program),
            arguments=tuple(arguments),
            runner=tuple(runner),
            environment={name: unknowns.shown(value) for name, value in environment.items()},
            late=frozenset(name for name, value in environment.items() if is_unknown(value)),
            at=at,
            paths=self.paths,
            notes=self.notes,
            defaulted=self.decided(deciding),
            files=self.files.known,
            unknowns=unknowns,
        )

    def decided(self, names: Iterable[str]) -> dict[str, str]:
        """Return the defaults of these variables, as a report shows them."""
        values = self.values
        return {
            name: " ".join(values.unknowns.shown(values.defaulted[name]).split())
            for name in sorted(names)
            if name in values.defaulted
        }

    def depend(self, names: Iterable[str], first: int) -> None:
        """Note that the precision of the launches from `first` on depends on these defaults."""
        about = self.decided(names)
        self.launches[first:] = [
            replace(launch, defaulted={**launch.defaulted, **about}) for launch in self.launches[first:]
        ]

    def note(self, what: str) -> None:
        """Remember something that was not read."""
        if what not in self.notes:
            self.notes = (*self.notes, what)

    def report(self, loss: Unmapped, first: int) -> None:
        """Note a loss of every launch from the place `first` on."""
        self.launches[first:] = [replace(launch, unmapped=(*launch.unmapped, loss)) for launch in self.launches[first:]]

    def finished(self) -> list[Launch]:
        """Return the launches now that the whole script is known."""
        found = [
            replace(launch, written="") if _is_among(launch.written, self.ran) else launch for launch in self.launches
        ]
        place = next((at for at, launch in enumerate(found) if not launch.is_printed), None)
        if place is not None:
            found[place] = replace(found[place], unmapped=(*found[place].unmapped, *self._lost()))
        return found

    def _lost(self) -> Iterable[Unmapped]:
        """Return the records of options that no program is given."""
        for line, words in self.stray:
            if relevant(words) or MEGATRON_FLAGS & set(words):
                shown = self.values.unknowns.shown(" ".join(words))
                detail = f"on line {line} it stands where a command should, and no program is given it"
                remedy = "Join it to the command that it belongs to."
                yield Unmapped(field=shown, value=None, reason="dead knob", detail=detail, remedy=remedy)

    def changed(self, before: Mapping[str, Value]) -> set[str]:
        """Return the variables that are no longer what they were."""
        ours = self.values.variables
        return {name for name in {**before, **ours} if before.get(name) != ours.get(name)}

    def precision(self, names: Iterable[str]) -> object:
        """What of this way, in these variables, bears on precision: ways that agree on it are one."""
        held = {}
        for name in names:
            value = self.values.variables.get(name, "")
            words = value if isinstance(value, list) else value.split()
            program = words[-1] if words and words[-1].endswith(".py") else ""
            about = tuple(words) if bears(name) else (*relevant(words), program) if program else relevant(words)
            if about:
                held[name] = about
        return held, self.files.precise(), {launch.relevant for launch in self.launches}

    def weigh(self, other: Way, about: set[str], first: int) -> None:
        """Note what depends on the defaults that decided a branch: what another way through it makes different.

        Args:
            other: A way through another alternative of the branch that this one took.
            about: The defaults.
            first: How many launches both had before it.
        """
        ours, theirs = self.values.variables, other.values.variables
        names = self.changed(theirs)
        self.values.depend(names, about, flags=False)
        held = [name for name in names if options(ours.get(name)) != options(theirs.get(name))]
        self.values.depend(held, about, flags=True)
        self.files.depend(other.files, self.decided(about))
        mine, others = self.launches[first:], other.launches[first:]
        if mine and others and {launch.relevant for launch in mine} != {launch.relevant for launch in others}:
            self.depend(about, first)
        if any((note in self.notes) != (note in other.notes) for note in (*self.notes, *other.notes) if bears(note)):
            self.values.deciding |= about
            self.depend(about, first)


def _is_among(file: str, names: set[str]) -> bool:
    return bool(file) and file.rpartition("/")[2] in names
