"""The modules that a fresh interpreter loads for an import of the package and for each command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.cli.commands import COMMAND_GROUPS, COMMANDS, RENAMED_COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SAVED = "docs/showcase/llama3_70b.yaml"
HEAVY = ("torch", "megatron", "numpy", "matplotlib", "transformer_engine")
HYDRA = ("hydra", "omegaconf", "antlr4")
ENGINE = ("bridge.rules.rulebook", "bridge.sync", "bridge.plan", "bridge.preflight")
"""What judges, writes and plans a run."""


def loaded(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after some code."""
    end = "\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout.splitlines()[-1]))


def packages_in(modules: set[str], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(module == name or module.startswith(f"{name}.") for module in modules)]


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import bridge", (*HEAVY, *HYDRA, *ENGINE, "yaml", "rich", "bridge.errors", "bridge.registry")),
        (
            "import bridge.training.mixed_precision",
            (*HEAVY, *HYDRA, *ENGINE, "yaml", "rich", "bridge.front", "bridge.cli", "bridge.rules"),
        ),
        (
            "from bridge import MixedPrecisionConfig, register",
            (*HEAVY, *HYDRA, *ENGINE, "yaml", "rich", "bridge.training", "bridge.rules"),
        ),
    ],
)
def test_an_import_loads_neither_rules_nor_sync_nor_planner(code: str, absent: tuple[str, ...]) -> None:
    assert packages_in(loaded(code), absent) == []


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (("recipes",), (*HYDRA, *ENGINE, "yaml", "rich", "bridge.front")),
        (("recipes", "bf16_mixed"), (*HYDRA, "rich", "bridge.sync", "bridge.plan", "bridge.preflight", "bridge.front")),
        (("recipes", "bf16_mixed", "mxfp8"), (*HYDRA, "rich", "bridge.sync", "bridge.plan", "bridge.preflight")),
        (("explain", "fp8", "mxfp8"), (*HYDRA, "rich", "bridge.preflight", "bridge.front")),
        (
            ("check", "--config", SAVED),
            (*HYDRA, "rich", "bridge.front.compose", "bridge.runtime.megatron", "bridge.read.megatron_lm"),
        ),
        (
            ("check",),
            (
                "rich",
                "psutil",
                "bridge.plan.memory_report",
                "bridge.preflight.auto_recipe",
                "bridge.read.megatron_lm",
            ),
        ),
        (
            ("plan", "--config", SAVED),
            (*HYDRA, "bridge.front.compose", "bridge.preflight.auto_recipe", "bridge.read.megatron_lm"),
        ),
        (
            ("memory", "--config", SAVED),
            (*HYDRA, "bridge.front.compose", "bridge.preflight.auto_recipe", "bridge.read.megatron_lm"),
        ),
    ],
)
def test_a_command_loads_what_it_asks_and_no_more(words: tuple[str, ...], absent: tuple[str, ...]) -> None:
    found = loaded(f"from bridge.cli.main import main\nmain({list(words)!r})")
    assert packages_in(found, (*HEAVY, *absent)) == []
    others = {f"bridge.cli.{command.module}" for name, command in COMMANDS.items() if name != words[0]}
    assert found & others == set(), "the module of another command"


def test_the_help_loads_no_command_and_lists_each_under_the_moment_of_its_use() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bridge.cli.main", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [name for name in listed if not name.startswith("-")] == list(COMMANDS)
    assert [moment for moment in COMMAND_GROUPS if f"\n{moment}:\n" in done.stdout] == list(COMMAND_GROUPS)
    found = loaded("from bridge.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass")
    assert found & {f"bridge.cli.{command.module}" for command in COMMANDS.values()} == set()


@pytest.mark.parametrize("name", RENAMED_COMMANDS)
def test_a_name_from_before_is_answered_with_words_that_work(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bridge.cli.main", name, "--help"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 2
    sentence, _, words = done.stderr.strip().partition(" Run: precision-bridge ")
    assert sentence == f"`{name}` is `{RENAMED_COMMANDS[name]}` since 0.2."
    again = [sys.executable, "-m", "bridge.cli.main", *words.split()]
    usage = subprocess.run(again, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    options = [word for word in RENAMED_COMMANDS[name].split() if word.startswith("--")]
    assert all(option in usage for option in options)


def test_an_unknown_command_is_compared_with_all_of_them() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bridge.cli.main", "memroy"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (2, "precision-bridge: no command 'memroy'. Did you mean 'memory'?\n")
