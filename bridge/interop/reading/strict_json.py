"""JSON as data: no key twice, no depth without end; comments and trailing commas are taken as DeepSpeed takes them."""

import json
import re
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.reading.settings import shown
from bridge.precision.strict_yaml import MAX_DEPTH

TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/\*.*?\*/|[{}\[\],:]', re.DOTALL)


def loads(text: str, path: str) -> Any:
    """Return the value of a JSON text; PayloadError for no JSON, a key twice in one object, or too many levels."""
    try:
        return _parse(text, path)
    except json.JSONDecodeError as error:
        relaxed = _relaxed(text)
        if relaxed != text:
            try:
                return _parse(relaxed, path)
            except json.JSONDecodeError:
                pass
        what = error.msg[:1].lower() + error.msg[1:]
        raise PayloadError(f"{path}, line {error.lineno}: must be JSON; {what}. Correct it there.") from None


def _parse(text: str, path: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        taken = dict(items)
        if len(taken) != len(items):
            line, key = _second(text)
            rule = f"the key {shown(key)} must not stand twice in one object"
            raise PayloadError(f"{path}, line {line}: {rule}. Keep one of the two.")
        return taken

    try:
        value = json.loads(text, object_pairs_hook=pairs)
        level: list[Any] = [[value]]
        for _ in range(MAX_DEPTH + 1):
            inside = [item.values() if isinstance(item, dict) else item for item in level]
            level = [item for items in inside for item in items if isinstance(item, dict | list)]
    except RecursionError:
        level = [text]
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | PayloadError):
            raise
        raise PayloadError(f"{path}: a number must have fewer digits. This is no configuration.") from None
    if level:
        raise PayloadError(f"{path}: nesting must not be deeper than {MAX_DEPTH}. This is no configuration.")
    return value


def _relaxed(text: str) -> str:
    """Return the text without comments and without commas before a closing bracket."""
    bare = TOKEN.sub(lambda found: "\n" * found[0].count("\n") if found[0][0] in "/#" else found[0], text)
    pieces = re.split(r'("(?:[^"\\\n]|\\.)*")', bare)
    return "".join(piece if piece.startswith('"') else re.sub(r",(\s*[}\]])", r"\1", piece) for piece in pieces)


def _second(text: str) -> tuple[int, str]:
    """Return line and name of the first key that its object already has."""
    levels: list[set[str]] = []
    last: tuple[str, int] | None = None
    for found in TOKEN.finditer(text):
        sign = found[0]
        if sign in "{[":
            levels.append(set())
        elif sign in "}]" and levels:
            levels.pop()
        elif sign == ":" and last is not None and levels:
            key = json.loads(last[0], strict=False)
            if key in levels[-1]:
                return text.count("\n", 0, last[1]) + 1, key
            levels[-1].add(key)
        last = (sign, found.start()) if sign.startswith('"') else None
    return 1, "?"
