"""`load_rows`: the content of a file in `bridge/read/rows`, which has facts about other systems."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import yaml

ROWS_FOLDER = files("bridge.read").joinpath("rows")
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's safe loader in C if it is installed: it takes a tenth of the time."""


def load_rows(name: str, folder: Traversable = ROWS_FOLDER) -> dict[str, Any]:
    """Return the content of `rows/NAME.yaml`.

    Args:
        name: The name of the file without its suffix.
        folder: The folder of the file.
    """
    text = folder.joinpath(f"{name}.yaml").read_text("utf-8")
    content: dict[str, Any] = yaml.load(text, YAML_LOADER)  # noqa: S506  a safe loader
    return content
