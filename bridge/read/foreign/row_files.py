"""`load_rows`: the content of a file in `bridge/read/foreign/tables`, which has facts about other systems."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from bridge.precision.package_yaml import load_package_yaml

ROWS_FOLDER = files("bridge.read").joinpath("foreign", "tables")


def load_rows(name: str, folder: Traversable = ROWS_FOLDER) -> dict[str, Any]:
    """Return the content of `foreign/tables/NAME.yaml`.

    Args:
        name: The name of the file without its suffix.
        folder: The folder of the file.
    """
    content: dict[str, Any] = load_package_yaml(folder.joinpath(f"{name}.yaml"))
    return content
