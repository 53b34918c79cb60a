"""The command `audit`, on records of runs."""

from __future__ import annotations

import json
from dataclasses import replace

from bridge.cli.main import main
from bridge.runtime.audit.record import GemmRow, Record

ROW = GemmRow(layer="1", module="linear_fc1", gemm="fprop", left="e4m3", right="e4m3", scheme="tensorwise")
RECORD = Record(gemms=(ROW,), backend="te", step=1)


def test_a_run_is_shown_with_its_audit(tmp_path, capsys):
    RECORD.write(tmp_path / "record.json")
    assert main(["audit", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "Step 1, te, layers from 1: layer 1: tensorwise, fprop e4m3 x e4m3 (linear_fc1).\nPlan = record.\n"
    )
    replace(RECORD, audit=("planned bf16, ran fp32: layer 1.",)).write(tmp_path / "record.json")
    assert main(["audit", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"] == ["planned bf16, ran fp32: layer 1."]


def test_two_runs_are_compared(tmp_path, capsys):
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    RECORD.write(files[0])
    replace(RECORD, gemms=(replace(ROW, scheme="delayed"),)).write(files[1])
    assert main(["audit", str(files[0]), str(files[0])]) == 0
    assert capsys.readouterr().out == "The records are equal.\n"
    assert main(["audit", *map(str, files)]) == 1
    assert capsys.readouterr().out == (
        "e4m3 x e4m3 (tensorwise) in the first, e4m3 x e4m3 (delayed) in the second: layer 1, linear_fc1, fprop.\n"
    )


def test_a_folder_without_a_record_is_one_sentence(tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    assert "record: must be a record of a run (No such file or directory), got" in capsys.readouterr().err
