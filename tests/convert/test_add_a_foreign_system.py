"""The page about adding a system, run as it stands."""

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bridge.cli.main import main
from bridge.convert import conversion, systems
from bridge.read import foreign_system_signs
from bridge.read.foreign import table
from bridge.read.foreign.system import System
from bridge.registry.registry import REGISTRY
from tests.read.properties import check_export, check_import, check_return

PAGE = (Path(__file__).parents[2] / "docs/howto/add-a-foreign-system.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(yaml|python|console|text)\n(.*?)```", PAGE, re.DOTALL)
ROWS, CODE, ROW, LORA, SESSION = (text for _, text in BLOCKS)


@pytest.fixture
def litgpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    """The page's system, as if its three files were written."""
    (tmp_path / "litgpt.yaml").write_text(ROWS)
    given, known = table.load_table("litgpt", tmp_path), table.load_table
    monkeypatch.setattr(table, "load_table", lambda name: given if name == "litgpt" else known(name))
    module = ModuleType("bridge.convert.litgpt")
    exec(compile(CODE, "litgpt.py", "exec"), vars(module))  # noqa: S102  the page's own code
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kinds, modules = (ast.literal_eval(f"{{{line}}}") for line in ROW.splitlines())
    monkeypatch.setattr(foreign_system_signs, "DOCUMENT_KINDS", {**foreign_system_signs.DOCUMENT_KINDS, **kinds})
    monkeypatch.setattr(foreign_system_signs, "load_table", table.load_table)
    monkeypatch.setattr(conversion, "DOCUMENT_KINDS", foreign_system_signs.DOCUMENT_KINDS)
    monkeypatch.setattr(systems, "SYSTEM_MODULES", {**systems.SYSTEM_MODULES, **modules})
    return systems.get_system("litgpt")


def test_the_session_of_the_page_is_a_real_one(litgpt: System, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lora.yaml").write_text(LORA)
    command, _, shown = SESSION.partition("\n")
    assert main(command.removeprefix("$ precision-bridge ").split()) == 0
    assert capsys.readouterr().out == shown


def test_the_system_of_the_page_keeps_the_contract(litgpt: System) -> None:
    for recipe in (one for one in REGISTRY.recipes() if "misnamed" not in one.tags):
        config = REGISTRY.get(recipe.name)
        exported = litgpt.export(config)
        check_export(config, exported)
        check_return(config, exported, litgpt.import_(exported.payload))
    for word in ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", None):
        check_import(litgpt.import_({"precision": word, "devices": 8}))
