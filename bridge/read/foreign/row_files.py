"""`load_rows`: the content of a file in `bridge/read/rows`, the facts about other systems as YAML."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from bridge.precision.package_yaml import package_yaml

ROWS_FOLDER = files("bridge.read").joinpath("rows")


def load_rows(name: str, folder: Traversable = ROWS_FOLDER) -> dict[str, Any]:
    """Return the content of `rows/NAME.yaml`."""
    content: dict[str, Any] = package_yaml(folder.joinpath(f"{name}.yaml"))
    return content
