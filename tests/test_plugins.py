"""Somebody's installed plugin of recipes is not in the tests' way."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests import plugins

HOUSE = "[bridge.recipes]\nhouse = house_recipes\n[console_scripts]\nhouse = house_recipes:main\n"


def test_a_plugin_of_this_machine_is_hidden_with_its_recipes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "site" / "house_recipes-1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: house-recipes\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text(HOUSE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    monkeypatch.setattr(plugins, "FOLDER", tmp_path / "hidden")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(place.parent)])))
    assert "house" in {point.name for point in entry_points(group=plugins.GROUP)}
    plugins.hide_others()
    assert "house" not in {point.name for point in entry_points(group=plugins.GROUP)}
    assert "house" in {point.name for point in entry_points(group="console_scripts")}
    code = (
        f"from importlib.metadata import entry_points\nprint([p.name for p in entry_points(group={plugins.GROUP!r})])"
    )
    path = plugins.python_path(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert "house" not in done.stdout
