"""`get_dotted_value`: a value by its dotted name in mappings within each other."""

from collections.abc import Mapping
from typing import Any


def get_dotted_value(content: Any, name: str, default: Any = None) -> Any:
    """Return the value of "fp16.enabled" in `content`, or `default` where it is not there."""
    value = content
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value
