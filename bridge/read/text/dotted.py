"""`get_dotted_value`: a value in nested mappings, by its dotted name."""

from collections.abc import Mapping
from typing import Any


def get_dotted_value(content: object, name: str, default: Any = None) -> Any:
    """Return the value of a name such as "fp16.enabled", or `default` if it is absent."""
    value: Any = content
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value
