"""Rules of the house that a tool does not check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bridge
import bridge.training.mixed_precision as compatible

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for room in ("bridge", "recipes", "scripts") for path in (ROOT / room).rglob("*.py"))


def test_the_public_surface_is_what_it_was() -> None:
    assert bridge.__all__ == sorted(bridge.__all__, key=lambda name: (not name.isupper(), name))
    assert set(bridge.__all__) == {
        "MIXED_PRECISION_RECIPES",
        "BridgeError",
        "BridgeWarning",
        "ConfigContainer",
        "MixedPrecisionConfig",
        "SyncReport",
        "get_mixed_precision_config",
        "register",
        "runtime_config_update",
        "synchronize",
    }
    assert compatible.__all__ == sorted(compatible.__all__)
    assert {name for name in compatible.__all__ if not name.endswith("_mixed")} == {
        "MIXED_PRECISION_RECIPES",
        "MixedPrecisionConfig",
        "get_mixed_precision_config",
        "register",
        "update_config_with_precision_overrides",
    }
    for module in (bridge, compatible):
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_source_file_is_one_noun_without_asserts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.stem not in {"utils", "helpers", "common", "manager"}
    if path.parts[-2] != "scripts":
        tree = ast.parse(text)
        asserts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        assert asserts == [], "what a user can cause raises a class of bridge/errors.py"


def test_only_one_room_imports_megatron() -> None:
    for path in SOURCES:
        if "megatron" not in path.parts and path.parts[-2] != "scripts":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    typing_only = re.search(r"if TYPE_CHECKING:\n(?:    .*\n|\n)*", path.read_text(encoding="utf-8"))
                    line = ast.unparse(node)
                    if (node.module or "").startswith("megatron"):
                        assert typing_only is not None, path
                        assert line in typing_only[0], f"{path}: {line}"


def test_import_bridge_is_light() -> None:
    heavy = ["torch", "megatron", "hydra", "omegaconf", "numpy", "rich", "yaml", "recipes"]
    code = f"import sys, bridge; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
