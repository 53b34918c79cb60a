"""The variables at one point of a script, and the expansion of words; pieces that only a run decides are marked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bridge.interop.launch.syntax import Part, Word

__all__ = ["BEGIN", "END", "MARK", "Unknowns", "Value", "Values", "is_unknown", "name_of"]

BEGIN, END = "\ue000", "\ue001"
MARK = re.compile(f"{BEGIN}(\\d+){END}")
UNPRINTABLE = "\ufffd"
MAX_LENGTH = 65_536
"""Of a variable: a script that doubles a string forty times is not a launch script."""
MAX_FIELDS = 20_000
MAX_WORK = 20_000_000
"""Characters that one script may expand to."""
NAME = re.compile(r"\$\{?(\w+)(?::?\?[^}]*)?\}?")

Value = str | list[str]
"""Of a variable: a text, or the words of an array."""


def is_unknown(text: str) -> bool:
    """Return whether a piece of the text is decided only when the script runs."""
    return BEGIN in text


class Unknowns:
    """The unknown pieces of one script."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.known: dict[str, str] = {}
        self.unset: set[str] = set()
        """Numbers of the marks that stand for variables which nothing sets."""
        self.work = 0

    @staticmethod
    def plain(text: str) -> str:
        """Return a text without the characters that mark unknown pieces."""
        return text.replace(BEGIN, UNPRINTABLE).replace(END, UNPRINTABLE)

    def mark(self, source: str, *, is_unset: bool = False) -> str:
        """Return the mark of an unknown piece."""
        source = self.shown(source)
        if source not in self.known:
            self.known[source] = f"{BEGIN}{len(self.sources)}{END}"
            if is_unset:
                self.unset.add(str(len(self.sources)))
            self.sources.append(source)
        return self.known[source]

    def shown(self, text: str) -> str:
        """Return the text with each mark as it was written."""
        return MARK.sub(lambda found: self.sources[int(found[1])], text) if BEGIN in text else text

    def with_nothing_set(self, text: str) -> str:
        """Return the text as bash has it with nothing set; the output of a command becomes a question mark."""
        return MARK.sub(self._nothing, text) if BEGIN in text else text

    def _nothing(self, found: re.Match[str]) -> str:
        source = self.sources[int(found[1])]
        return "0" if source == "$#" else "" if found[1] in self.unset else "?"

    def is_unset(self, text: str) -> bool:
        """Return whether a text is only variables that nothing sets."""
        return BEGIN in text and not self.with_nothing_set(text)


class Values:
    """Variables at one point of a script.

    Args:
        unknowns: Shared by all readings of the script.
        stated: What the user states of the run; it holds where the script sets a variable to something unknown.
        assumed: Values of variables that nothing sets, for the reading of another branch.
        open_: A variable that is read as unknown although the script has a default for it.
    """

    def __init__(
        self,
        unknowns: Unknowns,
        stated: Mapping[str, str],
        assumed: Mapping[str, str],
        open_: str,
    ) -> None:
        self.unknowns = unknowns
        self.stated = stated
        self.assumed = assumed
        self.open = open_
        self.variables: dict[str, Value] = dict(stated)
        self.defaulted: dict[str, str] = {}
        """Variables that nothing sets and whose `${name:-default}` was taken."""
        self.taken = 0
        """How often a default was taken."""

    def mark(self, source: str, *, is_unset: bool = False) -> str:
        """Return the mark of an unknown piece; of a variable whose value is assumed, that value."""
        name = name_of(source) if self.assumed and is_unset else ""
        return self.assumed[name] if name in self.assumed else self.unknowns.mark(source, is_unset=is_unset)

    def unknown(self, name: str) -> str:
        """Return the mark of a variable that nothing sets."""
        return self.mark(f"${name}", is_unset=True)

    def set(self, name: str, value: Value, *, append: bool = False) -> None:
        """Set a variable, or add to it."""
        old = self.variables.get(name)
        if append and isinstance(value, list):
            value = [*(old if isinstance(old, list) else [old] if old else []), *value]
        elif append and isinstance(value, str):
            value = [f"{old[0]}{value}", *old[1:]] if isinstance(old, list) and old else f"{old or ''}{value}"
        elif name in self.stated and self._gives_way(value, self.stated[name]):
            value = self.stated[name]
        self.variables[name] = value[:MAX_LENGTH] if isinstance(value, str) else value[:MAX_FIELDS]

    @staticmethod
    def _gives_way(value: Value, stated: str) -> bool:
        """Return whether a value may turn out to be what the user states."""
        if isinstance(value, list):
            return bool(value) and all(map(is_unknown, value))
        pieces = [re.escape(piece) for piece in re.split(f"{BEGIN}\\d+{END}", value)]
        return is_unknown(value) and re.fullmatch(".*".join(pieces), stated, re.DOTALL) is not None

    # -- expansion ---------------------------------------------------------------------------------------------------

    def text(self, word: Word) -> str:
        """Return a word as one text: as in an assignment, without splitting."""
        return "".join(part.text if not part.name and not part.is_late else self._joined(part) for part in word)[
            :MAX_LENGTH
        ]

    def words(self, word: Word) -> list[str]:
        """Return the words that one word becomes."""
        if len(word) == 1 and not word[0].name and not word[0].is_late:
            return [word[0].text]
        found: list[str] = []
        goes_on = False
        for part in word:
            begins = ends = False
            if part.quoted and part.name and (part.index == "@" or (part.name == "@" and not part.index)):
                pieces = self._items(part)
            elif part.name or part.is_late:
                text = self._joined(part)
                pieces = [text] if part.quoted else text.split()
                begins, ends = (not part.quoted and text[side].isspace() for side in (slice(1), slice(-1, None)))
            else:
                pieces = [part.text]
            goes_on = goes_on and not begins
            if goes_on and pieces:
                found[-1] += pieces[0]
            found += pieces[goes_on:]
            goes_on = (goes_on or bool(pieces)) and not ends
            if len(found) > MAX_FIELDS:
                break
        return found[:MAX_FIELDS]

    def all_words(self, words: Iterable[Word]) -> list[str]:
        """Return what several words become."""
        return [text for word in words for text in self.words(word)][:MAX_FIELDS]

    def _joined(self, part: Part) -> str:
        if part.is_late:
            return self.mark(part.text)
        return " ".join(self._items(part))

    def _items(self, part: Part) -> list[str]:
        """Return the words of a parameter, which is one unless it is a list."""
        name, operator = part.name, part.operator
        value = self.variables.get(name)
        self.unknowns.work += len(value) if value is not None else 1
        if self.unknowns.work > MAX_WORK:
            return [""]
        if operator in ("#name", "!name"):
            is_known = operator == "#name" and value is not None and (isinstance(value, list) or not is_unknown(value))
            return [str(len(value or ""))] if is_known else [self.mark(part.text)]
        is_list = part.index in ("@", "*") or name in ("@", "*")
        if value is None:
            items = None
        elif isinstance(value, str):
            items = [value] if part.index in ("", "0", "@", "*") else [self.mark(part.text)]
        elif is_list:
            items = value
        elif part.index in ("", "0"):
            items = value[:1]
        else:
            items = [value[int(part.index)]] if part.index.isdigit() and int(part.index) < len(value) else None
        text = "".join(items or ())
        if operator in (":-", "-", ":=", "="):
            if (items is None or (operator[0] == ":" and not text) or self.unknowns.is_unset(text)) and name:
                return self._default(part, text)
            return items or []
        if operator in (":+", "+"):
            nothing = items is None or not text or self.unknowns.is_unset(text)
            return [] if nothing else [self.text(part.argument)]
        if items is None:
            return [self.mark(part.text, is_unset=operator in ("", ":?", "?"))]
        return items if operator in ("", ":?", "?") else [self.mark(part.text)]

    def _default(self, part: Part, held: str) -> list[str]:
        """Return the default of a parameter that nothing sets, and note that it was taken."""
        name = name_of(self.unknowns.shown(held)) or part.name
        value = self.text(part.argument)
        if name == self.open:
            value = self.mark(f"${name}", is_unset=True)
        else:
            self.defaulted.setdefault(name, value)
            self.taken += 1
        if part.operator in (":=", "=") and not part.index:
            self.variables[part.name] = value
        return [value]


def name_of(text: str) -> str:
    """Return the variable that a text is: `$X`, `${X}`."""
    found = NAME.fullmatch(text)
    return found[1] if found else ""
