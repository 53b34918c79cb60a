"""`Way`: the state of one way through a launch script, and which ways are the same as far as precision goes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from bridge.interop.contract import Loss
from bridge.interop.launch import MEGATRON_FLAGS, Launch
from bridge.interop.shell_choices import told, united
from bridge.interop.shell_values import is_unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bridge.interop.shell_choices import Choice, Path
    from bridge.interop.shell_values import Values

__all__ = ["PRECISION_WORDS", "Stop", "Way", "bears", "distinct", "held", "relevant"]

PRECISION_WORDS = re.compile(
    r"fp8|fp4|fp16|bf16|fp32|fp64|tf32|bfloat|float(?:16|32|8)|\bhalf\b|dtype|precision|loss[-_]?scale|amax|mxfp|nvfp"
    r"|hysteresis|grads[-_]in|grad[-_]reduce[-_]in|quant|transformer[-_]impl|QK_LAYER|query[-_]key[-_]layer|kitchen"
    r"|--use-(?:megatron|custom|torch)-fsdp|yaml[-_]cfg|deepspeed[-_]config",
    re.IGNORECASE,
)
"""What a piece of a script that bears on precision looks like."""


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
    ran: set[str] = field(default_factory=set)
    """Names of files that the script runs."""
    stray: list[tuple[int, list[str]]] = field(default_factory=list)
    """Options that stand where a command should, with their lines."""
    stop: Stop | None = None
    """Set while the last command was one that started something."""

    def copy(self) -> Way:
        """Return an independent copy."""
        return replace(
            self,
            values=self.values.copy(),
            launches=list(self.launches),
            exported=dict(self.exported),
            ran=set(self.ran),
            stray=list(self.stray),
        )

    def take(self, choice: Choice) -> None:
        """Take one alternative of an undecided branch."""
        self.paths = tuple((*path, choice) for path in self.paths)

    def join(self, others: Iterable[Way]) -> None:
        """Go on for other ways of the same precision too: with what they started and what they could not read."""
        for other in others:
            self.take_over(other)
            self.stray += [one for one in other.stray if one not in self.stray]
            self.values.defaulted = {**other.values.defaulted, **self.values.defaulted}

    def take_over(self, other: Way) -> None:
        """Remember what another way started, ran and could not read."""
        known = {id(launch) for launch in self.launches}
        self.launches += [launch for launch in other.launches if id(launch) not in known]
        self.ran |= other.ran
        for note in other.notes:
            self.note(note)

    def launch(
        self,
        line: int,
        program: str,
        arguments: Iterable[str],
        *,
        runner: Iterable[str] = (),
        environment: Mapping[str, str],
    ) -> Launch:
        """Return a launch as it happens on this way."""
        unknowns = self.values.unknowns
        return Launch(
            line=line,
            program=unknowns.shown(program),
            arguments=tuple(arguments),
            runner=tuple(runner),
            environment=dict(environment),
            paths=self.paths,
            notes=self.notes,
            defaulted=dict(self.values.defaulted),
            unknowns=unknowns,
        )

    def note(self, what: str) -> None:
        """Remember something that was not read."""
        if what not in self.notes:
            self.notes = (*self.notes, what)

    def lose(self, loss: Loss, first: int) -> None:
        """Note a loss of every launch from the place `first` on."""
        self.launches[first:] = [replace(launch, losses=(*launch.losses, loss)) for launch in self.launches[first:]]

    def finished(self) -> list[Launch]:
        """Return the launches now that the whole script is known."""
        found = [
            replace(launch, written="") if _is_among(launch.written, self.ran) else launch for launch in self.launches
        ]
        place = next((at for at, launch in enumerate(found) if not launch.is_printed), None)
        if place is not None:
            found[place] = replace(found[place], losses=(*found[place].losses, *self._lost()))
        return found

    def _lost(self) -> Iterable[Loss]:
        """Return the records of options that no program is given."""
        for line, words in self.stray:
            if relevant(words) or MEGATRON_FLAGS & set(words):
                shown = self.values.unknowns.shown(" ".join(words))
                detail = f"on line {line} it stands where a command should, and no program is given it"
                remedy = "Join it to the command that it belongs to."
                yield Loss(field=shown, value=None, reason="dead knob", detail=detail, remedy=remedy)

    def precision(self) -> object:
        """What of this way bears on precision: ways that agree on it are one."""
        held = {}
        for name, value in self.values.variables.items():
            words = value if isinstance(value, list) else value.split()
            about = tuple(words) if bears(name) else relevant(words)
            if about:
                held[name] = about
        return held, sorted({relevant(launch.arguments) for launch in self.launches})


def distinct(found: list[Launch]) -> tuple[Launch, ...]:
    """Return the launches by line, one for each precision; a decision that changes nothing is left out."""
    grouped: dict[object, list[Launch]] = {}
    for launch in found:
        about = (relevant(launch.arguments), tuple(launch.environment.items()))
        grouped.setdefault((_place(launch), about), []).append(launch)
    precisions: dict[object, int] = {}
    for group in grouped.values():
        precisions[_place(group[0])] = precisions.get(_place(group[0]), 0) + 1
    merged = [_merged(group, alone=precisions[_place(group[0])] == 1) for group in grouped.values()]
    return tuple(sorted(merged, key=lambda launch: (launch.is_printed, bool(launch.written), launch.line)))


def _place(launch: Launch) -> tuple[object, ...]:
    return launch.line, launch.program, launch.written, launch.is_printed


def _merged(group: list[Launch], *, alone: bool) -> Launch:
    """Return the one launch that stands for several of the same precision."""
    paths = united(path for launch in group for path in launch.paths)
    defaulted: dict[str, str] = {}
    for launch in reversed(group):
        defaulted.update(launch.defaulted)
    return replace(
        group[0],
        paths=paths,
        decisions=told(paths, alone=alone),
        notes=tuple(dict.fromkeys(note for launch in group for note in launch.notes)),
        losses=tuple({str(loss): loss for launch in group for loss in launch.losses}.values()),
        defaulted=defaulted,
    )


def _is_among(file: str, names: set[str]) -> bool:
    return bool(file) and file.rpartition("/")[2] in names


@lru_cache(maxsize=4096)
def bears(text: str) -> bool:
    """Return whether a piece of a script bears on precision."""
    return PRECISION_WORDS.search(text) is not None


def relevant(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that bear on precision: such flags with their values, and unknown words that may hold some."""
    found = []
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        value = before.startswith("--") and not word.startswith("--")
        if (
            bears(word)
            or (value and bears(before))
            or (is_unknown(word if not word.startswith("--") else word.partition("=")[0]) and not value)
            or word.startswith("@")
        ):
            found.append(word)
    return tuple(found)


def held(way: Way) -> Launch:
    """Return the arguments that variables hold, for a file that others source."""
    holders = {}
    for name, value in way.values.variables.items():
        words = value if isinstance(value, list) else value.split()
        if any(word.startswith("--") for word in words):
            holders[name] = [piece for word in words for piece in word.split()]
    merged = {name: words for name, words in holders.items() if not _inside(name, words, holders)}
    arguments = [word for words in merged.values() for word in words]
    arguments += [word for _, words in way.stray for word in words]
    return way.launch(0, ", ".join(merged), arguments, environment=way.exported)


def _inside(name: str, words: list[str], holders: dict[str, list[str]]) -> bool:
    """Return whether another variable holds all of these words: it was made of this one."""
    text = " ".join(words)
    return any(other != name and len(held) > len(words) and text in " ".join(held) for other, held in holders.items())
