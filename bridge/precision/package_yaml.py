"""`load_package_yaml`: the content of a YAML file that the package ships."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable
    from pathlib import Path


def load_package_yaml(file: Path | Traversable) -> Any:
    """Return the content of a YAML file of the package.

    PyYAML's safe loader in C reads the file if it is installed. It takes an eighth of the time of
    the loader in Python.
    """
    import yaml  # most commands read no such file

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(file.read_text(encoding="utf-8"), loader)  # noqa: S506  a safe loader
