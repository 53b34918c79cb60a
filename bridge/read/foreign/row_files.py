"""`load_rows`: the content of a file in `bridge/read/rows`, the facts about other systems as YAML."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import yaml

ROWS_FOLDER = files("bridge.read").joinpath("rows")
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C takes a tenth of the time, where the C library is there."""


def load_rows(name: str, folder: Traversable = ROWS_FOLDER) -> dict[str, Any]:
    """Return the content of `rows/NAME.yaml`."""
    text = folder.joinpath(f"{name}.yaml").read_text("utf-8")
    content: dict[str, Any] = yaml.load(text, YAML_LOADER)  # noqa: S506  safe
    return content
