"""What a script has set at one point of it: variables, arrays, references to them, and where their values come from.

A script says little by itself: `${PRECISION:-bf16}` holds only as long as the environment says nothing. `Variables`
therefore remembers for each value which of such defaults it depends on, so that a report can name those that decide.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["BEGIN", "END", "MARK", "MAX_FIELDS", "Frame", "Read", "Unknowns", "Value", "Variables", "is_unknown"]

BEGIN, END = "\ue000", "\ue001"
MARK = re.compile(f"{BEGIN}(\\d+){END}")
MAX_LENGTH = 65_536
"""Of a variable: a script that doubles a string forty times is not a launch script."""
MAX_FIELDS = 20_000
MAX_REFERENCES = 8
"""Of a reference to a reference; more are a circle."""

Value = str | list[str]
"""Of a variable: a text, or the words of an array."""
NONE: frozenset[str] = frozenset()


@dataclass(slots=True)
class Read:
    """The defaulted variables that what was read depends on."""

    origins: set[str] = field(default_factory=set)
    """For its value."""
    flags: set[str] = field(default_factory=set)
    """For the options in it that bear on precision."""

    def __bool__(self) -> bool:
        return bool(self.origins or self.flags)


Frame = dict[str, tuple[Value | None, Read, str | None]]


def is_unknown(text: str) -> bool:
    """Return whether a piece of the text is decided only when the script runs."""
    return BEGIN in text


class Unknowns:
    """The unknown pieces of one script."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.known: dict[str, str] = {}
        self.work = 0
        """Characters expanded so far."""

    def mark(self, source: str) -> str:
        """Return the mark of an unknown piece."""
        source = self.shown(source)
        if source not in self.known:
            self.known[source] = f"{BEGIN}{len(self.sources)}{END}"
            self.sources.append(source)
        return self.known[source]

    def shown(self, text: str) -> str:
        """Return the text with each mark as it was written."""
        return MARK.sub(lambda found: self.sources[int(found[1])], text) if BEGIN in text else text


class Variables:
    """Variables at one point of a script.

    Args:
        unknowns: Shared by all readings of the script.
        variables: Arrays as lists, everything else as text.
        stated: What somebody says of the run; it holds where the script sets a variable to something unknown.
    """

    def __init__(
        self,
        unknowns: Unknowns,
        variables: Mapping[str, Value] | None = None,
        stated: Mapping[str, str] | None = None,
    ) -> None:
        self.unknowns = unknowns
        self.stated = stated or {}
        self.variables: dict[str, Value] = dict(variables or {})
        self.defaulted: dict[str, str] = {}
        """Variables that nobody set and whose `${name:-default}` was taken."""
        self.origins: dict[str, frozenset[str]] = {}
        """Variable -> the defaulted ones that its value depends on."""
        self.flags: dict[str, frozenset[str]] = {}
        """Variable that holds options -> the defaulted ones on which those that bear on precision depend."""
        self.deciding: set[str] = set()
        """Defaulted variables that whatever is started from here on depends on."""
        self.read = Read()
        """What was read since somebody began to watch."""
        self.references: dict[str, str] = {}
        """Name of a `declare -n` -> the variable it stands for; empty until something is assigned to it."""
        self.frame: Frame | None = None
        """What the local variables of the function that runs were outside of it."""

    def copy_into(self, other: Variables) -> None:
        """Make another one say the same, independently."""
        other.variables = dict(self.variables)  # no list in it is ever changed
        other.defaulted, other.origins = dict(self.defaulted), dict(self.origins)
        other.flags, other.deciding, other.references = dict(self.flags), set(self.deciding), dict(self.references)
        other.frame = None if self.frame is None else dict(self.frame)

    def merge(self, other: Variables) -> None:
        """Take over what another way, which goes on together with this one, knows of defaults."""
        self.defaulted = {**other.defaulted, **self.defaulted}
        self.deciding |= other.deciding
        for name, origins in other.origins.items():
            self.origins[name] = self.origins.get(name, NONE) | origins
        for name, flags in other.flags.items():
            self.flags[name] = self.flags.get(name, NONE) | flags

    @contextmanager
    def watching(self) -> Iterator[Read]:
        """Collect the defaults that what is read within depends on."""
        outer, self.read = self.read, Read()
        try:
            yield self.read
        finally:
            outer.origins |= self.read.origins
            outer.flags |= self.read.flags
            self.read = outer

    def reading(self, name: str) -> Read:
        """Return what the value of a variable depends on."""
        return Read(set(self.origins.get(name, NONE)), set(self.flags.get(name, NONE)))

    def note_read(self, name: str) -> None:
        """Note that the value of a variable was read."""
        self.read.origins |= self.origins.get(name, NONE)
        self.read.flags |= self.flags.get(name, NONE)

    # -- names -------------------------------------------------------------------------------------------------------

    def resolved(self, name: str) -> str:
        """Return the variable that a name stands for."""
        for _ in range(MAX_REFERENCES):
            if not self.references.get(name):
                break
            name = self.references[name]
        return name

    def refer(self, name: str, target: str) -> None:
        """Make a name stand for a variable, whose name may be unknown."""
        self.references[name] = "" if target == name else target

    def make_local(self, name: str) -> None:
        """Give a name its own value until the function returns; outside of functions it stays what it is."""
        if self.frame is None:
            return
        if name not in self.frame:
            self.frame[name] = (self.variables.get(name), self.reading(name), self.references.get(name))
        self.references.pop(name, None)

    def enter(self) -> Frame | None:
        """Begin a function; returns what `leave` needs."""
        outer, self.frame = self.frame, {}
        return outer

    def leave(self, outer: Frame | None) -> None:
        """End a function: its local variables are gone."""
        for name, (value, read, reference) in (self.frame or {}).items():
            self.forget(name)
            self.references.pop(name, None)
            if value is not None:
                self.variables[name] = value
                self._note(name, read)
            if reference is not None:
                self.references[name] = reference
        self.frame = None if outer is None else dict(outer)

    # -- setting -----------------------------------------------------------------------------------------------------

    def set(self, name: str, value: Value, read: Read | None = None) -> None:
        """Set a variable to a value that depends on what was read for it."""
        name = self.resolved(name)
        self.variables[name] = value
        self._note(name, read or Read())

    def forget(self, name: str) -> None:
        """Make a variable one that the script never set."""
        for known in (self.variables, self.origins, self.flags):
            known.pop(name, None)

    def assign(self, name: str, value: str, *, append: bool = False) -> None:
        """Set or extend a variable; it depends on what was read since somebody began to watch."""
        if self.references.get(name) == "" and not append:
            self.references[name] = value
            return
        name = self.resolved(name)
        old = self.variables.get(name)
        self._note(name, self.read, append=append)
        if isinstance(old, list):
            self.variables[name] = [(old[0] if old and append else "") + value, *old[1:]]
            return
        joined = (old if old is not None else self.unknowns.mark(f"${name}")) + value if append else value
        self.variables[name] = joined if len(joined) <= MAX_LENGTH else self.unknowns.mark(f"${name}")

    def assign_list(self, name: str, words: list[str], *, append: bool = False) -> None:
        """Set or extend an array; it depends on what was read since somebody began to watch."""
        name = self.resolved(name)
        old = self.variables.get(name)
        before = (old if isinstance(old, list) else [old] if old else []) if append else []
        self._note(name, self.read, append=append)
        self.variables[name] = [*before, *words][:MAX_FIELDS]

    def assign_element(self, name: str, value: str) -> None:
        """Set an element of an array whose index does not matter: its words count."""
        self.assign_list(name, [value], append=True)

    def default(self, name: str, value: Value) -> None:
        """Set a variable to options that hold only where the environment has none."""
        self.defaulted.setdefault(name, value if isinstance(value, str) else " ".join(value))
        self.variables[name] = value
        self._note(name, Read({name}, {name}), append=True)

    def depend(self, names: Iterable[str], about: Iterable[str], *, flags: bool) -> None:
        """Note that the values of some variables depend on these defaults, or the options in them."""
        for name in names:
            self._note(name, Read(set() if flags else set(about), set(about) if flags else set()), append=True)

    def _note(self, name: str, read: Read, *, append: bool = False) -> None:
        for known, more in ((self.origins, read.origins), (self.flags, read.flags)):
            found = (known.get(name, NONE) if append else NONE) | more
            if found:
                known[name] = found
            else:
                known.pop(name, None)
