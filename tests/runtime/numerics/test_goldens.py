"""The quantisers against vectors of Transformer Engine's own references, through the script that users run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
FIXTURE = Path(__file__).with_name("data") / "goldens.npz"
FULL = ROOT.parent / "shared" / "goldens" / "quantised.npz"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_goldens", ROOT / "scripts" / "check_goldens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["reference", "torch", "native"])
@pytest.mark.usefixtures("selection_restored")
def test_every_stored_record_is_matched_bit_for_bit(
    script: ModuleType, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(FIXTURE), "--path", name]) == 0
    assert f"{name:9}  all         58 / 58" in capsys.readouterr().out


@pytest.mark.skipif(not FULL.exists(), reason=f"needs the full set of vectors, {FULL}")
@pytest.mark.slow
@pytest.mark.usefixtures("selection_restored")
def test_every_record_of_the_full_set_is_matched_bit_for_bit(script: ModuleType) -> None:
    assert script.main([str(FULL)]) == 0


def changed(folder: Path, change: str) -> Path:
    """Write a copy of the fixture with one thing wrong."""
    file = dict(np.load(FIXTURE))
    records = json.loads(bytes(file["__meta__"]).decode())
    records = [record for record in records if record["recipe"] in ("tensorwise", "delayed")][:3] + records[-1:]
    name = records[0]["name"]
    if change == "code":
        file[f"{name}.q_t"] = file[f"{name}.q_t"] ^ (np.arange(file[f"{name}.q_t"].size) == 5).reshape(160, 96)
    elif change == "scale":
        file[f"{name}.scale_inv"] = np.nextafter(file[f"{name}.scale_inv"], np.float32(1), dtype=np.float32)
    elif change == "delayed":
        file[f"{records[-1]['name']}.scale"] = file[f"{records[-1]['name']}.scale"] * 2
    elif change == "recipe":
        records[0]["recipe"] = "hexwise"
    elif change == "option":
        records[0]["colour"] = "red"
    elif change == "array":
        del file[f"{name}.q"]
    file["__meta__"] = np.frombuffer(json.dumps(records).encode(), np.uint8)
    target = folder / "changed.npz"
    np.savez(target, **file)
    return target


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("code", "q_t"),
        ("scale", "scale_inv"),
        ("delayed", "scale"),
        ("recipe", "unknown record: recipe 'hexwise' is not known"),
        ("option", "unknown record: options ['colour'] are not known"),
        ("array", "unknown record: the file has no"),
    ],
)
@pytest.mark.usefixtures("selection_restored")
def test_a_mismatch_or_unknown_record_ends_with_exit_code_1(
    script: ModuleType, tmp_path: Path, change: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(changed(tmp_path, change)), "--path", "torch"]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert "3 / 4" in out


def test_a_missing_file_ends_with_exit_code_2(script: ModuleType, tmp_path: Path) -> None:
    assert script.main([str(tmp_path / "none.npz")]) == 2


def test_the_comparison_imports_neither_megatron_nor_transformer_engine() -> None:
    code = (
        "import runpy, sys\n"
        "runpy.run_path(sys.argv[1])\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'megatron', 'transformer_engine', 'torch'}))"
    )
    script = ROOT / "scripts" / "check_goldens.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code, script], check=True, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "['torch']"
