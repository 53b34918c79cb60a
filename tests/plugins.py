"""Plugins of recipes that the environment of this machine has: hidden from the tests and the processes they start.

Of several distributions with one name Python takes the first on its path. So a copy of the plugin's metadata, without
its recipes, stands in a folder that every process of the tests searches first.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import Distribution, entry_points
from pathlib import Path

from tests import releases

GROUP = "bridge.recipes"
OURS = "precision-bridge"
FOLDER = Path(__file__).resolve().parents[1] / ".pytest_cache" / "plugins"


def hide_others() -> None:
    """Hide every plugin but the built-in one from this process and those that it starts."""
    found = {point.dist.name: point.dist for point in entry_points(group=GROUP) if point.dist is not None}
    for name, distribution in found.items():
        if name.replace("_", "-").lower() != OURS:
            _write_without_recipes(name, distribution)
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
        os.environ["PYTHONPATH"] = python_path(*filter(None, [os.environ.get("PYTHONPATH")]))


def python_path(*folders: str | Path) -> str:
    """Return a value of PYTHONPATH with some folders, which hides the plugins, and keeps the release under test."""
    first = [FOLDER] if FOLDER.is_dir() else []
    return os.pathsep.join(map(str, [*first, *releases.first_folders(), *folders]))


def _write_without_recipes(name: str, distribution: Distribution) -> None:
    place = FOLDER / f"{name.replace('-', '_')}-{distribution.version}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    kept = [point for point in distribution.entry_points if point.group != GROUP]
    sections = "".join(f"[{point.group}]\n{point.name} = {point.value}\n" for point in kept)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {distribution.version}\n")
    (place / "entry_points.txt").write_text(sections)
