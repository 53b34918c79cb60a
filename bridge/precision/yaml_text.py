"""`to_yaml` writes a precision as YAML text, and `from_yaml` reads it back."""

from __future__ import annotations

from typing import TypeVar

import yaml

from bridge.errors import PrecisionTypeError
from bridge.precision.precision_config import PrecisionConfig
from bridge.precision.strict_yaml import load_documents

ConfigT = TypeVar("ConfigT", bound=PrecisionConfig)


def to_yaml(precision: PrecisionConfig, *, full: bool = False) -> str:
    """Return `PrecisionConfig.to_dict` as YAML."""
    text: str = yaml.safe_dump(precision.to_dict(full=full), sort_keys=False)
    return text


def from_yaml(kind: type[ConfigT], text: str, *, source: str | None = None) -> ConfigT:
    """Return the config of a class that `to_yaml` describes.

    Raises:
        PrecisionTypeError: The text is not plain YAML, or a value has a wrong type.
        UnknownFieldError: A key is not a field.
    """
    documents = load_documents(text, "mixed_precision", error=PrecisionTypeError)
    values = None
    if documents:
        values = documents[0]
    if values is None:
        values = {}
    return kind.from_dict(values, source=source)
