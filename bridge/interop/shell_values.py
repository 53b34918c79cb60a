"""What a script's words say once its own variables are filled in; what only a run would know stays marked as unknown.

A value is text in which each unknown piece is a mark between two private characters. Marks travel through
concatenation and word splitting like a letter; `Unknowns` knows what each one was in the script.
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

from bridge.interop.shell_number import calculated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.interop.shell_tokens import Part, Word

__all__ = ["Unknowns", "Values", "is_unknown"]

BEGIN, END = "\ue000", "\ue001"
MARK = re.compile(f"{BEGIN}(\\d+){END}")
MAX_LENGTH = 65_536
"""Of a variable: a script that doubles a string forty times is not a launch script."""
MAX_FIELDS = 20_000
MAX_WORK = 5_000_000
"""Characters that all expansions of one script may come to; from there on its variables count as unknown."""


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
        if source not in self.known:
            self.known[source] = f"{BEGIN}{len(self.sources)}{END}"
            self.sources.append(source)
        return self.known[source]

    def shown(self, text: str) -> str:
        """Return the text with each mark as it was written."""
        return MARK.sub(lambda found: self.sources[int(found[1])], text)


class Values:
    """Variables at one point of a script.

    Args:
        unknowns: Shared by all readings of the script.
        variables: Arrays as lists, everything else as text.
        stated: What somebody says of the run; it holds where the script sets a variable to something unknown.
    """

    def __init__(
        self,
        unknowns: Unknowns,
        variables: Mapping[str, str | list[str]] | None = None,
        stated: Mapping[str, str] | None = None,
    ) -> None:
        self.unknowns = unknowns
        self.stated = stated or {}
        self.variables: dict[str, str | list[str]] = dict(variables or {})
        self.defaulted: dict[str, str] = {}
        """Variables that nobody set and whose `${name:-default}` was taken."""

    def copy(self) -> Values:
        """Return an independent copy."""
        variables = {k: list(v) if isinstance(v, list) else v for k, v in self.variables.items()}
        other = Values(self.unknowns, variables, self.stated)
        other.defaulted = dict(self.defaulted)
        return other

    # -- setting -----------------------------------------------------------------------------------------------------

    def assign(self, name: str, value: str, *, append: bool = False) -> None:
        """Set or extend a variable."""
        old = self.variables.get(name)
        if isinstance(old, list):
            old[:1] = [(old[0] if old else "") + value] if append else [value]
            return
        joined = (old if old is not None else self.unknowns.mark(f"${name}")) + value if append else value
        self.variables[name] = joined if len(joined) <= MAX_LENGTH else self.unknowns.mark(f"${name}")

    def assign_list(self, name: str, words: list[str], *, append: bool = False) -> None:
        """Set or extend an array."""
        old = self.variables.get(name)
        before = (old if isinstance(old, list) else [old] if old else []) if append else []
        self.variables[name] = [*before, *words][:MAX_FIELDS]

    def assign_element(self, name: str, value: str) -> None:
        """Set an element of an array whose index does not matter: its words count."""
        self.assign_list(name, [value], append=True)

    def assigned(self, name: str, word: Word, start: int) -> str:
        """Return what an assignment sets, or what somebody said of it where only the run knows.

        Args:
            name: The variable.
            word: The whole assignment.
            start: Where its value begins in the text.
        """
        defaulted = dict(self.defaulted)
        text = self.text(word)[start:]
        if name not in self.stated or any(part.text == name for part in word.parts if part.kind == "parameter"):
            return text
        rest = [part for part in word.parts[1:] if part.kind != "text" or part.text]
        first = rest[0] if len(rest) == 1 and not word.parts[0].text[start:] else None
        guessed = first is not None and first.operator.endswith("-") and first.text not in self.variables
        if guessed:
            self.defaulted = defaulted
            return self.stated[name]
        return self.stated_or(name, text)

    def stated_or(self, name: str, text: str) -> str:
        """Return what somebody said of a variable where the text has unknown pieces that could come to it."""
        said = self.stated.get(name)
        return said if said is not None and is_unknown(text) and _may_be(text, said) else text

    def unknown(self, name: str) -> str:
        """Return the value of a variable that the run sets: what somebody said of it, or its mark."""
        return self.stated[name] if name in self.stated else self.unknowns.mark(f"${name}")

    # -- reading -----------------------------------------------------------------------------------------------------

    def text(self, word: Word | None) -> str:
        """Return a word as one text, without splitting."""
        if word is None:
            return ""
        return "".join(self._part(part) for part in word.parts)

    def words(self, word: Word) -> list[str]:
        """Return what a word becomes on a command line: none, one or several."""
        fields: list[str] = []
        current: str | None = None
        listed = any(part.quoted and self._is_list(part) for part in word.parts)
        for part in word.parts:
            if listed and not part.text:
                continue  # an empty array in quotes is no word at all
            if part.kind == "text" or (part.quoted and not self._is_list(part)):
                current = (current or "") + (part.text if part.kind == "text" else self._part(part))
                continue
            pieces = self._fields(part)
            if not part.quoted and pieces and current is not None and self._part(part)[:1].isspace():
                fields.append(current)
                current = None
            for place, piece in enumerate(pieces):
                if place:
                    fields.append(current or "")
                    current = None
                current = (current or "") + piece
            if not part.quoted and pieces and self._part(part)[-1:].isspace():
                fields.append(current or "")
                current = None
            if len(fields) > MAX_FIELDS:
                break
        if current is not None:
            fields.append(current)
        return fields

    def _is_list(self, part: Part) -> bool:
        return part.kind == "parameter" and (part.index == "[@]" or part.text == "@") and part.operator != "#"

    def _fields(self, part: Part) -> list[str]:
        if self._is_list(part) and part.quoted:
            value = self.variables.get(part.text)
            if isinstance(value, list) and not part.operator:
                return list(value)
            text = self._part(part)
            return [text] if text else []
        return self._part(part).split()

    def _part(self, part: Part) -> str:
        if part.kind == "text":
            return part.text
        if part.kind == "command":
            number = calculated(part.source[3:-2], self.variables) if part.source.startswith("$((") else None
            return self.unknowns.mark(part.source) if number is None else str(number)
        value = self._value(part)
        operator = part.operator
        self.unknowns.work += len(value or "")
        if self.unknowns.work > MAX_WORK:
            return self.unknowns.mark(part.source)
        if operator in (":-", "-", ":=", "="):
            return self._with_default(part, value)
        if operator in (":+", "+"):
            return self._alternative(part, value)
        if value is None:
            return self.unknowns.mark(part.source)
        if operator in ("", ":?", "?"):
            return value
        return self._edited(part, value)

    def _value(self, part: Part) -> str | None:
        """Return a variable as text, or None where the script never set it."""
        value = self.variables.get(part.text)
        if isinstance(value, list):
            if part.index in ("[@]", "[*]"):
                return " ".join(value)
            place = part.index.strip("[]") or "0"
            return value[int(place)] if place.isdigit() and int(place) < len(value) else None
        return value

    def _with_default(self, part: Part, value: str | None) -> str:
        if value is None or (not value and ":" in part.operator):
            default = self.text(part.argument)
            if value is None:
                self.defaulted[part.text] = default
            if "=" in part.operator:
                self.variables[part.text] = default
            return default
        return value

    def _alternative(self, part: Part, value: str | None) -> str:
        if value is None:
            return self.unknowns.mark(part.source) if not part.text.isdigit() else ""
        return "" if not value and ":" in part.operator else self.text(part.argument)

    def _edited(self, part: Part, value: str) -> str:
        """Return `${name#pattern}` and its kin for patterns that need no run, a mark for the rest."""
        operator, argument = part.operator, self.text(part.argument)
        if is_unknown(value) or is_unknown(argument):
            return self.unknowns.mark(part.source)
        if operator == "#" and not argument:
            stored = self.variables.get(part.text)
            return str(len(stored) if isinstance(stored, list) and part.index else len(value))
        if operator in ("^^", ",,"):
            return value.upper() if operator == "^^" else value.lower()
        if operator in ("//", "/") and not set(argument.partition("/")[0]) & set("*?["):
            old, _, new = argument.partition("/")
            return value.replace(old, new, -1 if operator == "//" else 1) if old else value
        if operator in ("#", "##", "%", "%%") and len(value) <= 512:
            return _trimmed(value, operator, argument)
        return self.unknowns.mark(part.source)


def _may_be(text: str, value: str) -> bool:
    """Return whether a text with unknown pieces could come to this value."""
    first, *between, last = re.split(f"{BEGIN}\\d+{END}", text)
    if not value.startswith(first) or not value.endswith(last) or len(value) < len(first) + len(last):
        return False
    at, end = len(first), len(value) - len(last)
    for piece in between:
        place = value.find(piece, at, end)
        if place < 0:
            return False
        at = place + len(piece)
    return True


def _trimmed(value: str, operator: str, pattern: str) -> str:
    """Return the value without the shortest or longest match of a glob at its start or end."""
    cuts = range(len(value) + 1) if operator in ("#", "%%") else range(len(value), -1, -1)
    for cut in cuts:
        matched, kept = (value[:cut], value[cut:]) if "#" in operator else (value[cut:], value[:cut])
        if fnmatch.fnmatchcase(matched, pattern):
            return kept
    return value
