"""JSON as plain data: no key twice, bounded depth.

Comments and trailing commas are taken as DeepSpeed takes them.
"""

import json
import re
from typing import Any

from bridge.precision.strict_yaml import MAX_DEPTH, load_all

COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
"""A string, which is kept, or a comment."""


def loads(text: str, path: str) -> Any:
    """Return the value of a JSON text.

    PayloadError for no JSON, a key twice in one object, or too many levels.

    What is no JSON to the letter goes to the reader of YAML, which takes JSON too and names the
    line of a fault.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once)
        level: list[Any] = [[value]]
        for _ in range(MAX_DEPTH + 1):
            inside = [item.values() if isinstance(item, dict) else item for item in level]
            level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    except (ValueError, RecursionError):
        pass
    bare = COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)
    return next(iter(load_all(bare, path, form="JSON")), None)


def _once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    taken = dict(items)
    if len(taken) != len(items):
        raise ValueError("a key stands twice")
    return taken
