"""`loads`: parses JSON. A repeated key is an error, and so is too deep nesting.

Comments and trailing commas are allowed, as in DeepSpeed.
"""

import json
import re
from typing import Any

from bridge.precision.strict_yaml import MAX_DEPTH, load_documents

COMMENT_PATTERN = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
"""A string, which is kept, or a comment."""


def loads(text: str, path: str) -> Any:
    """Return the value of a JSON text.

    A text that is not strict JSON is read as YAML. YAML contains JSON, and its reader names the
    line of a fault.

    Args:
        text: The JSON.
        path: The file's name in messages.

    Raises:
        PayloadError: The text is not JSON, has a key twice in an object, or has too many levels.
    """
    try:
        value = json.loads(text, object_pairs_hook=_make_mapping)
        is_strict = not _is_too_deep(value)
    except (ValueError, RecursionError):
        is_strict = False
    if is_strict:
        return value
    bare = COMMENT_PATTERN.sub(_replace_comment, text)
    documents = load_documents(bare, path, form="JSON")
    return documents[0] if documents else None


def _is_too_deep(value: object) -> bool:
    """Return whether a value has more than `MAX_DEPTH` levels of mappings and lists."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        next_level: list[object] = []
        for item in level:
            if isinstance(item, dict):
                next_level += item.values()
            elif isinstance(item, list):
                next_level += item
        level = [item for item in next_level if isinstance(item, dict | list)]
    return bool(level)


def _replace_comment(match: re.Match[str]) -> str:
    """Return a string unchanged. Return only the line ends of a comment, to keep line numbers."""
    return match[1] or "\n" * match[0].count("\n")


def _make_mapping(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mapping of a JSON object.

    Raises:
        ValueError: A key occurs twice.
    """
    mapping = dict(items)
    if len(mapping) != len(items):
        raise ValueError("a key stands twice")
    return mapping
