"""Hydra and OmegaConf are used by their public interfaces, and nothing of theirs is replaced."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bridge
from bridge.errors import RunConfigError
from bridge.front.references import MAX_CHARACTERS, refuse_expanding_references
from bridge.preflight.origins import Origins

PACKAGE = Path(bridge.__file__).parent
WATCHED = """
import json, sys
from pathlib import Path
import hydra, omegaconf
from hydra._internal import config_loader_impl, config_repository, defaults_list, hydra as started, utils


def functions():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("hydra", "omegaconf") or ".core_plugins" in name:  # Hydra imports those again
            continue
        for owner in (module, *(held for held in list(vars(module).values()) if isinstance(held, type))):
            if not getattr(owner, "__module__", getattr(owner, "__name__", "")).startswith(("hydra", "omegaconf")):
                continue
            for key, held in list(vars(owner).items()):
                if callable(held) or isinstance(held, (staticmethod, classmethod, property)):
                    found[f"{name} {getattr(owner, '__qualname__', '')} {key}"] = held
    return found

before = functions()
seen = []

def note():
    now = functions()
    seen.append([name for name, held in before.items() if now.get(name) is not held])
"""
USED = """
import bridge.front.main, bridge.front.train, bridge.registry.hydra_group
note()
from bridge import MixedPrecisionConfig, register
from bridge.front.loader import load_run

@register
def noted() -> MixedPrecisionConfig:
    note()
    return MixedPrecisionConfig(bf16=True)

load_run(["mixed_precision=noted", "model=gpt_tiny"])
note()
print(json.dumps([len(before), seen]))
"""


def imported_by(file: Path) -> Iterator[str]:
    """Yield the modules that a file names in its imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_file_imports_a_private_part_of_hydra_or_omegaconf() -> None:
    private = []
    count = 0
    for file in PACKAGE.rglob("*.py"):
        for name in imported_by(file):
            library, *parts = name.split(".")
            if library in ("hydra", "omegaconf"):
                count += 1
                if any(part.startswith("_") for part in parts):
                    private.append(f"{file.relative_to(PACKAGE)}: {name}")
    assert count > 20
    assert private == []


def test_nothing_of_hydra_or_omegaconf_is_replaced_by_the_import_or_while_a_run_is_composed() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED + USED], capture_output=True, text=True, check=True)
    watched, replaced = json.loads(done.stdout.splitlines()[-1])
    assert watched > 500
    assert replaced == [[], [], []]


def test_a_replaced_method_would_be_seen() -> None:
    code = "note()\nomegaconf.base.Container.resolve_parse_tree = print\nnote()\nprint(json.dumps(seen))"
    done = subprocess.run([sys.executable, "-c", WATCHED + code], capture_output=True, text=True, check=True)
    nothing, replaced = json.loads(done.stdout)
    assert nothing == []
    assert "omegaconf.base Container resolve_parse_tree" in replaced


@pytest.mark.parametrize(
    ("lines", "path"),
    [
        ({"a": "${b}${b}", "b": "${c}${c}", "c": "x" * (MAX_CHARACTERS // 3)}, "a"),
        ({"top": {"a": "${.b}${..c}", "b": "x" * MAX_CHARACTERS}, "c": "x"}, "top.a"),
        ({"a": ["${b[0]}", "${b.1}"], "b": ["x", "${c}"], "c": {"d": "x" * 2 * MAX_CHARACTERS}}, "a.1"),
        ({"a": "${oc.select:b,1}", "b": "x" * 2 * MAX_CHARACTERS}, "a"),
        ({"a": "${hydra:job.name}", "hydra": {"job": {"name": "x" * 2 * MAX_CHARACTERS}}}, "a"),
        ({"a": "${b}", "b": "${a}"}, "a"),
        ({f"a{n}": f"${{a{n + 1}}}" for n in range(200)} | {"a200": 1}, "a0"),
    ],
)
def test_a_value_that_its_references_make_too_large_is_refused_with_its_key(
    lines: dict[str, object], path: str
) -> None:
    with pytest.raises(RunConfigError, match=rf"^{path}: cannot be resolved: references that multiply are refused"):
        refuse_expanding_references(lines, Origins())


def test_references_of_an_ordinary_size_are_taken() -> None:
    config = {"seed": 1, "data": {"seed": "${seed}", "twice": "${.seed}${.seed}", "env": "${oc.env:data,x}"}, "c": None}
    refuse_expanding_references(config, Origins())
