"""What a script's words say once its own variables are filled in; what only a run would know stays marked as unknown.

A value is text in which each unknown piece is a mark between two private characters. Marks travel through
concatenation and word splitting like a letter; `Unknowns` knows what each one was in the script.
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.shell_number import calculated
from bridge.interop.shell_variables import BEGIN, END, MAX_FIELDS, Read, Unknowns, Variables, is_unknown
from bridge.interop.shell_words import Lexer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridge.interop.shell_tokens import Part, Word

__all__ = ["Piece", "Unknowns", "Values", "is_unknown"]

MAX_WORK = 5_000_000
"""Characters that all expansions of one script may come to; from there on its variables count as unknown."""
DEFAULTS = frozenset({":-", "-", ":=", "="})
NAME = re.compile(r"[A-Za-z_]\w*")
PRINTED = re.compile(r"(?:\$\(|`)\s*echo\s+([^|;&<>()`\\]+?)(?:\|\s*xargs\s*)?[)`]")
"""A substitution that prints what the script itself knows, perhaps trimmed by xargs."""

Piece = tuple[str, frozenset[str]]
"""A piece of a word, and the defaulted variables that it depends on."""


class Values(Variables):
    """Variables at one point of a script, and what its words say there."""

    def copy(self) -> Values:
        """Return an independent copy."""
        other = Values(self.unknowns, None, self.stated)
        self.copy_into(other)
        return other

    # -- what somebody states ----------------------------------------------------------------------------------------

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
            self.read.origins.clear()
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

    def pieces(self, word: Word) -> list[Piece]:
        """Return the pieces of a word, each with the defaults that it depends on.

        A variable that holds options depends on none here: those were looked at when its value was put together.
        """
        found: list[Piece] = []
        for part in word.parts:
            if part.kind == "text":
                found.append((part.text, frozenset()))
                continue
            with self.watching() as read:
                text = self._part(part)
            held = part.kind == "parameter" and not self._takes_default(part, self._value(part))
            composed = held and any(one.startswith("-") for one in text.split())
            found.append((text, frozenset() if composed else frozenset(read.origins)))
        return found

    def _fields(self, part: Part) -> list[str]:
        if self._is_list(part) and part.quoted:
            name = self.resolved(part.text)
            value = self.variables.get(name)
            if isinstance(value, list) and not part.operator:
                self.note_read(name)
                return list(value)
            text = self._part(part)
            return [text] if text else []
        return self._part(part).split()

    def _part(self, part: Part) -> str:
        if part.kind == "text":
            return part.text
        if part.kind == "command":
            return self._command(part.source)
        value = self._value(part)
        operator = part.operator
        self.unknowns.work += len(value or "")
        if self.unknowns.work > MAX_WORK:
            return self.unknowns.mark(part.source)
        if operator in DEFAULTS:
            return self._with_default(part, value)
        if operator in (":+", "+"):
            return self._alternative(part, value)
        if value is None:
            return self.unknowns.mark(part.source)
        if operator in ("", ":?", "?"):
            return value
        return self._edited(part, value)

    def _command(self, source: str) -> str:
        """Return what a substitution comes to, its mark where that takes a run."""
        self.read_by(NAME.findall(source))
        if source.startswith("$(("):
            number = calculated(source[3:-2], self.variables)
            return self.unknowns.mark(source) if number is None else str(number)
        printed = PRINTED.fullmatch(source)
        if printed is not None and self.unknowns.work <= MAX_WORK:
            try:
                tokens = Lexer(printed[1]).tokens()
            except PayloadError:
                tokens = []
            words = [text for token in tokens if token.word is not None for text in self.words(token.word)]
            said = " ".join(words)
            if words and not words[0].startswith("-") and not is_unknown(said) and not set(said) & set("'\"*?["):
                return " ".join(said.split())
        return self.unknowns.mark(source)

    def read_by(self, names: Iterable[str]) -> None:
        """Note that the values of some variables were read."""
        for name in names:
            self.note_read(self.resolved(name))

    def _value(self, part: Part) -> str | None:
        """Return a variable as text, or None where the script never set it."""
        name = self.resolved(part.text)
        if part.operator.startswith("!"):
            name = self._pointed(name)
        if name == "#" and isinstance(self.variables.get("@"), list):
            return str(len(self.variables["@"]))
        value = self.variables.get(name)
        self.note_read(name)
        if isinstance(value, list):
            if part.index in ("[@]", "[*]"):
                return " ".join(value)
            place = part.index.strip("[]") or "0"
            return value[int(place)] if place.isdigit() and int(place) < len(value) else None
        return value

    def _pointed(self, name: str) -> str:
        """Return the variable whose name another one holds, as `${!name}` reads it."""
        value = self.variables.get(name)
        self.note_read(name)
        return self.resolved(value) if isinstance(value, str) and NAME.fullmatch(value) else ""

    def _takes_default(self, part: Part, value: str | None) -> bool:
        """Return whether `${name:-default}` is its default."""
        return part.operator in DEFAULTS and (value is None or (not value and ":" in part.operator))

    def _with_default(self, part: Part, value: str | None) -> str:
        if value is not None and not self._takes_default(part, value):
            return value
        default = self.text(part.argument)
        name = self.resolved(part.text)
        if value is None:
            self.defaulted[name] = default
            self.read.origins.add(name)
        if "=" in part.operator:
            self.set(name, default, Read(origins={name} if value is None else set(self.origins.get(name, ()))))
        return default

    def _alternative(self, part: Part, value: str | None) -> str:
        if value is None:
            return self.unknowns.mark(part.source) if not part.text.isdigit() else ""
        return "" if not value and ":" in part.operator else self.text(part.argument)

    def _edited(self, part: Part, value: str) -> str:
        """Return `${name#pattern}` and its kin for patterns that need no run, a mark for the rest."""
        operator, argument = part.operator.removeprefix("!"), self.text(part.argument)
        if part.operator == "!" and not part.index:
            return value
        if is_unknown(value) or is_unknown(argument):
            return self.unknowns.mark(part.source)
        if operator == "#" and not argument:
            stored = self.variables.get(self.resolved(part.text))
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
