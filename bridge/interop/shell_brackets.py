"""Where a bracket of a shell script closes: past quotes, comments, heredocs and brackets within it."""

from __future__ import annotations

import re

__all__ = ["closing"]

HEREDOC = re.compile(r"<<(-?)\s*(['\"\\]?)(\w+)\2")
MAX_DEPTH = 40


def closing(text: str, opened: int, level: int = 0) -> int | None:
    """Return the offset of the bracket that closes the one at `opened`, or None where none does.

    Args:
        text: The script.
        opened: Offset of an opening round bracket.
        level: How many substitutions it is already inside of.
    """
    if level > MAX_DEPTH:
        return None
    depth, at, size = 0, opened, len(text)
    waiting: list[tuple[str, bool]] = []
    while at < size:
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "'\"":
            end = text.find("'", at + 1) if char == "'" else _quote_end(text, at, level)
            if end is None or end < 0:
                return None
            at = end
        elif char == "#" and text[at - 1].isspace():
            end = text.find("\n", at)
            at = (size if end < 0 else end) - 1
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return at
        elif char == "<" and (heredoc := HEREDOC.match(text, at)):
            waiting.append((heredoc[3], bool(heredoc[1])))
            at = heredoc.end() - 1
        elif char == "\n" and waiting:
            at = _past(text, at, waiting)
            waiting = []
        at += 1
    return None


def _quote_end(text: str, at: int, level: int) -> int | None:
    """Return the offset of the double quote that closes the one at `at`."""
    at += 1
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == '"':
            return at
        elif text.startswith("$(", at):
            end = closing(text, at + 1, level + 1)
            if end is None:
                return None
            at = end
        at += 1
    return None


def _past(text: str, at: int, waiting: list[tuple[str, bool]]) -> int:
    """Return the offset of the line end after the bodies of the heredocs that wait at the line end `at`."""
    for delimiter, tabs in waiting:
        while True:
            start = at + 1
            end = text.find("\n", start)
            line = text[start : end if end >= 0 else len(text)]
            if (line.lstrip("\t") if tabs else line) == delimiter:
                at = start + len(line) - 1 if end < 0 else end
                break
            if end < 0:
                return len(text)
            at = end
    return at
