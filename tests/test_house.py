"""Rules of the house that a tool does not check."""

import ast
import graphlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import grimp
import pytest

import bridge
import bridge.training.mixed_precision as compatible
from bridge.precision.precision_config import FIELDS

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
        "Plan",
        "PrecisionSchedule",
        "SyncReport",
        "check",
        "get_mixed_precision_config",
        "load_run",
        "register",
        "runtime_config_update",
        "synchronize",
        "to_config",
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


def test_a_config_has_few_public_names_next_to_its_fields() -> None:
    public = {name for name in dir(bridge.MixedPrecisionConfig) if not name.startswith("_")}
    assert public - {*FIELDS} == {
        "finalize",
        "from_dict",
        "override",
        "setup",
        "sources",
        "state",
        "stated",
        "to_cfg_dict",  # called by the containers of Megatron Bridge
        "to_dict",
    }


def test_a_public_function_says_what_type_each_argument_has() -> None:
    functions = [getattr(bridge, name) for name in bridge.__all__ if inspect.isroutine(getattr(bridge, name))]
    functions += [bridge.MixedPrecisionConfig.setup, bridge.Plan.of, compatible.update_config_with_precision_overrides]
    untyped = []
    for function in functions:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.annotation in {Any, "Any", parameter.empty} and parameter.name not in {"self", "cls"}:
                untyped.append(f"{function.__qualname__}: {parameter.name}")
    assert len(functions) > 8
    assert untyped == []


def test_a_source_file_is_one_noun_without_asserts() -> None:
    vague = [path for path in SOURCES if path.stem in {"utils", "helpers", "common", "manager"}]
    assert vague == []
    asserts = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if path.parts[-2] != "scripts"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert asserts == [], "what a user can cause raises a class of bridge/errors.py"


EXAMPLES = {"record.json", "summary.json", "config.json", "iter_0000100/", "mixed_precision/", "run_recipe.py"}
"""Names in package docstrings of what a run, another program or a user writes."""


def test_each_path_that_a_package_docstring_names_exists() -> None:
    pattern = re.compile(r"(?<![\w./*-])[\w*./-]*(?:\.(?:py|yaml|json|c)\b|\w/(?![\w*]))")
    named, missing = 0, []
    for package in (path for path in SOURCES if path.name == "__init__.py"):
        docstring = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
        for path in pattern.findall(docstring):
            if path in EXAMPLES or re.search(r"\b(?:NAME|SYSTEM)\b", path):
                continue
            named += 1
            if not any(any(folder.glob(path)) for folder in (package.parent, ROOT / "bridge", ROOT)):
                missing.append(f"{package.relative_to(ROOT)}: {path}")
    assert named > 200
    assert missing == []


def test_nothing_inspects_code_objects() -> None:
    found = [path for path in SOURCES if re.search(r"\b__code__\b", path.read_text(encoding="utf-8"))]
    assert found == [], "inspect.signature and inspect.getfile answer the same questions"


def test_files_import_each_other_without_a_cycle() -> None:
    graph = grimp.build_graph("bridge", "recipes", exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail("imports in a circle: " + " <- ".join(error.args[1]))


def test_the_import_contracts_have_no_exceptions() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    assert contracts[0]["type"] == "layers"
    assert [contract["name"] for contract in contracts if "ignore_imports" in contract] == []


def test_import_bridge_is_light() -> None:
    heavy = ["torch", "megatron", "hydra", "omegaconf", "numpy", "rich", "yaml", "recipes"]
    code = f"import sys, bridge; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
