"""YAML as data and nothing else: no tags that run code, no key twice, no depth and no aliases without end.

The text is read as a stream of libyaml's events, so that neither deep nesting nor aliases cost more than their own
text. Plain scalars mean what they mean to PyYAML, with three exceptions that every training framework makes or wants:
``1e-5`` is a number (YAML 1.2), ``12:30:00`` is not (YAML 1.1 counts in sixties), and a date stays text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from bridge.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_DEPTH", "MAX_NODES", "load_all"]

MAX_DEPTH = 64
MAX_NODES = 200_000
"""Of a document with every alias written out."""

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CORE = "tag:yaml.org,2002:"
WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    ".inf": float("inf"),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}
INTEGER = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|[1-9][0-9_]*|0)")
FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?")


class _Open:
    """A list or mapping that is being read."""

    def __init__(self, holder: list[Any] | dict[Any, Any], line: int, anchor: str | None) -> None:
        self.holder, self.line, self.anchor = holder, line, anchor
        self.key: Any = _NO_KEY
        self.size = 1
        self.merged: list[dict[Any, Any]] = []


_NO_KEY = object()


def load_all(text: str, path: str) -> tuple[Any, ...]:
    """Return the documents of a YAML text as plain Python values; an empty one is None.

    Args:
        text: The text.
        path: What it is called in messages.

    Raises:
        PayloadError: Not YAML, a key twice in one mapping, a tag other than YAML's own, or too deep or too large.
    """
    reader = _Reader(path)
    try:
        for event in _events(text):
            reader.take(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        what = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", None) or error).split())
        raise PayloadError(f"{path}{where}: must be YAML; {what}. Correct it there.") from None
    return tuple(reader.documents)


def _events(text: str) -> Iterator[Any]:
    yield from yaml.parse(text, Loader=LOADER)


class _Reader:
    """Builds values from events, with a stack of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.documents: list[Any] = []
        self.open: list[_Open] = []
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.nodes = 0
        self.begun = 0

    def take(self, event: Any) -> None:
        kind = type(event).__name__
        line = event.start_mark.line + 1
        if kind == "DocumentStartEvent":
            self.anchors, self.begun = {}, len(self.documents)
        elif kind == "DocumentEndEvent":
            if len(self.documents) == self.begun:
                self.documents.append(None)
        elif kind == "AliasEvent":
            if event.anchor not in self.anchors:
                raise self.wrong(line, f"the alias *{event.anchor} must follow its anchor", "Define the anchor first")
            value, size = self.anchors[event.anchor]
            self.put(value, size, line, merge=isinstance(value, dict | list))
        elif kind == "ScalarEvent":
            value = self.scalar(event, line)
            if event.anchor:
                self.anchors[event.anchor] = (value, 1)
            self.put(value, 1, line)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            self.begin(event, line)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self.end(line)

    def begin(self, event: Any, line: int) -> None:
        own = f"{CORE}map" if type(event).__name__ == "MappingStartEvent" else f"{CORE}seq"
        if event.tag not in (None, "!", own):
            raise self.tagged(event.tag, line)
        if len(self.open) >= MAX_DEPTH:
            raise self.wrong(line, f"nesting must not be deeper than {MAX_DEPTH}", "This is no configuration")
        self.open.append(_Open({} if own.endswith("map") else [], line, event.anchor))

    def end(self, line: int) -> None:
        done = self.open.pop()
        if isinstance(done.holder, dict):
            for merged in done.merged:
                for key, value in merged.items():
                    done.holder.setdefault(key, value)
        if done.anchor:
            self.anchors[done.anchor] = (done.holder, done.size)
        self.put(done.holder, done.size, line, counted=True)

    def put(self, value: Any, size: int, line: int, *, merge: bool = False, counted: bool = False) -> None:
        """Hand a finished value to what is being read."""
        if not counted:
            self.nodes += size
            if self.nodes > MAX_NODES:
                rule = f"must not hold more than {MAX_NODES} values, aliases written out"
                raise self.wrong(line, rule, "Anchors that multiply are refused")
        if not self.open:
            self.documents.append(value)
            return
        into = self.open[-1]
        into.size += size
        if isinstance(into.holder, list):
            into.holder.append(value)
        elif into.key is _NO_KEY:
            into.key = self.key(value, into, line)
        else:
            if into.key == "<<" and (merge or isinstance(value, dict | list)):
                into.merged += self.merged(value, line)
            else:
                into.holder[into.key] = value
            into.key = _NO_KEY

    def key(self, value: Any, into: _Open, line: int) -> Any:
        if isinstance(value, dict | list):
            raise self.wrong(line, "a key must be a word", "Quote it, or write `key: value`")
        if value in into.holder:
            raise self.wrong(line, f"the key {value!r} must not stand twice in one mapping", "Keep one of the two")
        return value

    def merged(self, value: Any, line: int) -> list[dict[Any, Any]]:
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) for part in parts):
            raise self.wrong(line, "<< must name mappings", "Give it an alias of a mapping")
        return parts

    def scalar(self, event: Any, line: int) -> Any:
        tag, text = event.tag, event.value
        if tag is None:
            return self.plain(text, line) if event.implicit[0] else text
        if tag in ("!", f"{CORE}str"):
            return text
        if tag in (f"{CORE}int", f"{CORE}float", f"{CORE}bool", f"{CORE}null"):
            return self.plain(text, line)
        raise self.tagged(tag, line)

    def plain(self, text: str, line: int) -> Any:
        if text in WORDS:
            return WORDS[text]
        if text.lower() in (".inf", "+.inf", "-.inf", ".nan"):
            return float(text.lower().replace(".", ""))
        first = text[0]
        if not (first.isdigit() or first in "+-."):
            return text
        try:
            if INTEGER.fullmatch(text):
                return _integer(text.replace("_", ""))
            if FLOAT.fullmatch(text):
                return float(text.replace("_", ""))
        except ValueError:
            raise self.wrong(line, "a number must have fewer digits", "This is no configuration") from None
        return text

    def tagged(self, tag: str, line: int) -> PayloadError:
        shown = tag.replace(CORE, "!!")
        rule = f"must be plain data, and the tag {shown!r} is not: it is refused and nothing was run"
        return self.wrong(line, rule, "Write the value without the tag")

    def wrong(self, line: int, rule: str, remedy: str) -> PayloadError:
        return PayloadError(f"{self.path}, line {line}: {rule}. {remedy}.")


def _integer(text: str) -> int:
    sign, digits = (text[0], text[1:]) if text[0] in "+-" else ("", text)
    if digits[:2] in ("0b", "0x", "0o"):
        return int(sign + digits, 0)
    return int(sign + digits, 8 if len(digits) > 1 and digits[0] == "0" else 10)
