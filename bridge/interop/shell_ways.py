"""`Way`: the state of one way through a launch script, and which ways are the same as far as precision goes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bridge.interop.launch import Launch
from bridge.interop.shell_values import is_unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bridge.interop.shell_values import Values

__all__ = ["PRECISION_WORDS", "Way", "distinct", "held"]

PRECISION_WORDS = re.compile(
    r"fp8|fp4|fp16|bf16|fp32|fp64|tf32|bfloat|float(?:16|32|8)|\bhalf\b|dtype|precision|loss[-_]?scale|amax|mxfp|nvfp"
    r"|hysteresis|grads[-_]in|grad[-_]reduce[-_]in|quant|transformer[-_]impl|QK_LAYER|query[-_]key[-_]layer",
    re.IGNORECASE,
)
"""What a piece of a script that bears on precision looks like."""


@dataclass(slots=True)
class Way:
    """One way through a script, up to where it is read."""

    values: Values
    launches: list[Launch] = field(default_factory=list)
    decisions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    exported: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Way:
        """Return an independent copy."""
        return Way(self.values.copy(), list(self.launches), self.decisions, self.notes, dict(self.exported))

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
            decisions=self.decisions,
            notes=self.notes,
            defaulted=dict(self.values.defaulted),
            unknowns=unknowns,
        )

    def note(self, what: str) -> None:
        """Remember something that was not read."""
        if what not in self.notes:
            self.notes = (*self.notes, what)

    def precision(self) -> object:
        """What of this way bears on precision: ways that agree on it are one."""
        held = {}
        for name, value in self.values.variables.items():
            words = value if isinstance(value, list) else value.split()
            about = tuple(words) if PRECISION_WORDS.search(name) else _relevant(words)
            if about:
                held[name] = about
        return held, sorted({_relevant(launch.arguments) for launch in self.launches})


def distinct(found: list[Launch]) -> tuple[Launch, ...]:
    """Return the launches by line, one for each precision; a decision that changes nothing is left out."""
    grouped: dict[object, Launch] = {}
    for launch in found:
        key = (launch.line, launch.program, _relevant(launch.arguments), tuple(launch.environment.items()))
        same = grouped.setdefault(key, launch)
        if same.decisions != launch.decisions:
            grouped[key] = replace(same, decisions=())
    return tuple(sorted(grouped.values(), key=lambda launch: launch.line))


def _relevant(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that bear on precision: such flags with their values, and unknown words that may hold some."""
    found = []
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        value = before.startswith("--") and not word.startswith("--")
        if (
            PRECISION_WORDS.search(word)
            or (value and PRECISION_WORDS.search(before))
            or (is_unknown(word) and not value)
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
    return way.launch(0, ", ".join(merged), arguments, environment=way.exported)


def _inside(name: str, words: list[str], holders: dict[str, list[str]]) -> bool:
    """Return whether another variable holds all of these words: it was made of this one."""
    text = " ".join(words)
    return any(other != name and len(held) > len(words) and text in " ".join(held) for other, held in holders.items())
