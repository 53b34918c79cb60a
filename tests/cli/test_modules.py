"""`precision-bridge plan --modules`: patterns and what they take."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from bridge.cli.main import main
from bridge.preflight.file_reading import INSTALLED_HERE, get_installed_reason
from bridge.target.versions import get_installed_text

RECIPE = "bf16_with_fp8_current_scaling_mixed"
ROWS = (
    'mixed_precision.modules=[{select:"*.linear_qkv",precision:bf16},'
    "{select:{layers:[0,-1],module:linear_fc2},precision:mxfp8}]"
)
FILE = """\
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
matchers:
  first: {type: glob, pattern: "*layers.0.*", config: bf16, enabled: true}
"""


def test_each_row_is_listed_with_its_modules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--modules", RECIPE, ROWS, "mixed_precision.fp8_param_gather=false"]) == 0
    printed = capsys.readouterr().out
    assert "*.linear_qkv" in printed
    assert "bf16 (the run's dtype)" in printed
    assert "linear_qkv of 1-6" in printed
    assert "linear_fc2 of 1, 6" in printed
    words = " ".join(printed.replace("(the run)", "").split())
    assert "linear_proj, linear_fc1, linear_fc2 of 2-5" in words
    assert "bf16 all the same: linear_proj, linear_fc1 of 1, 6" in words
    assert "error" not in printed


def test_a_pattern_that_takes_nothing_is_an_error_with_the_nearest_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--modules", RECIPE, 'mixed_precision.modules=[{select:"*.linear_q",precision:bf16}]', "--json"])
        == 2
    )
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found["findings"]] == ["PB281"]
    assert found["rows"][0]["takes"] == []
    assert "linear_qkv" in found["rows"][0]["nearest"]


def test_a_precision_outside_of_training_is_listed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = 'mixed_precision.modules=[{select:"*.linear_qkv",precision:tensorwise,evaluation:bf16}]'
    assert main(["plan", "--modules", RECIPE, row]) == 0
    assert "tensorwise; evaluation in bf16 (the run's dtype)" in capsys.readouterr().out
    payload = "{kitchen_config_type: QLinearParams, recipe_idx: 1}"
    (tmp_path / "kitchen.yaml").write_text(re.sub(r"\{transformer.*", payload, FILE))
    main(["plan", "--modules", RECIPE, "--file", str(tmp_path / "kitchen.yaml"), "--json"])
    assert json.loads(capsys.readouterr().out)["rows"][0]["precision"] == "kitchen"


def test_a_foreign_file_is_listed_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "te.yaml").write_text(FILE)
    words = ["model.num_layers=8", "model.pipeline_model_parallel_size=4", "--file", str(tmp_path / "te.yaml")]
    assert main(["plan", "--modules", RECIPE, ROWS, *words]) == 2
    error = "--file: takes the place of mixed_precision.modules, got ['*.linear_qkv', 'layers 0, -1: linear_fc2']. "
    assert capsys.readouterr().err == f"{error}Give the file or the rows.\n"
    assert main(["plan", "--modules", RECIPE, *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "matcher first chooses bf16 for layers 0, 2, 4, 6 under PP=4, and for layer 0 under PP=1" in printed


def test_the_files_of_a_run_are_written_one_per_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "te.yaml"
    assert main(["plan", "--modules", RECIPE, ROWS, "model.pipeline_model_parallel_size=2", "--write", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/te.stage0.yaml, {tmp_path}/te.stage1.yaml\n"
    patterns = [
        [
            row["pattern"]
            for row in yaml.safe_load((tmp_path / f"te.stage{stage}.yaml").read_text())["matchers"].values()
        ]
        for stage in range(2)
    ]
    assert patterns == [
        ["*.linear_qkv", "decoder.layers.0.linear_fc2", "decoder.layers.0.*.linear_fc2"],
        ["*.linear_qkv", "decoder.layers.2.linear_fc2", "decoder.layers.2.*.linear_fc2"],
    ]


def test_without_rows_the_linear_layers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--modules", "bf16_mixed", "model.num_layers=1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "bf16_mixed: nothing is chosen per module. Megatron's names of the linear layers (layers.0 is layer 1):",
        "  decoder.layers.0.self_attention.linear_qkv",
        "  decoder.layers.0.self_attention.linear_proj",
        "  decoder.layers.0.mlp.linear_fc1",
        "  decoder.layers.0.mlp.linear_fc2",
        f"  megatron-core {get_installed_text('mcore')} ({get_installed_reason(INSTALLED_HERE)}).",
    ]


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--modules", RECIPE, "--file", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_layer_in_which_a_row_takes_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    row = "mixed_precision.modules=[{select:{layers:[0,99],module:linear_fc2},precision:bf16}]"
    assert main(["plan", "--modules", RECIPE, row, "mixed_precision.fp8_param_gather=false"]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "row 0 takes nothing in layer 99: the model's layers are 0 to 5" in printed
    assert main(["plan", "--modules", RECIPE, row.replace("0,99", "99"), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert "PB292" in [one["id"] for one in found["findings"]]
    assert "PB281" not in [one["id"] for one in found["findings"]]
    hybrid = ["model.num_layers=4", "model.hybrid_layer_pattern='M*M-'", "model.is_hybrid_model=true"]
    assert main(["plan", "--modules", RECIPE, row.replace("0,99", "0,3"), *hybrid]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "row 0 takes nothing in layer 0: there is no such module there" in printed
    assert "error PB505" in printed


def test_layers_that_the_run_keeps_in_its_dtype_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    row = 'mixed_precision.modules=[{select:"*.linear_qkv",precision:mxfp8}]'
    assert main(["plan", "--modules", RECIPE, row, "mixed_precision.fp8_param_gather=false"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "mxfp8 linear_qkv of 2-5; in bf16 all the same: linear_qkv of 1, 6" in printed


def test_a_path_in_place_of_a_files_content_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "check"):
        assert main([command, RECIPE, "model.quant_recipe=te.yaml"]) == 2
        held = capsys.readouterr()
        printed = " ".join((held.out + held.err).split())
        assert "is the content of a file of configs and matchers, not its path" in printed
        assert "could not be judged" not in printed


def test_an_owners_recipe_that_rows_replace_is_kept_by_dropping_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    row = 'mixed_precision.modules=[{select:"*.linear_qkv",precision:bf16}]'
    main(["check", RECIPE, row, "model.quant_recipe={configs:{},matchers:{}}"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "PB123" in printed
    assert "rop mixed_precision.modules to keep it" in printed
