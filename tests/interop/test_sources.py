"""`precision-bridge sources`: what a project says about its precision, in how many places."""

import json
import shutil
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.errors import PayloadError
from bridge.interop.project import ORDER, survey

SAMPLES = Path(__file__).parent / "samples"
ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 8\n"
)
DEEPSPEED = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "accelerate.yaml").write_text(ACCELERATE)
    (tmp_path / "configs" / "ds.json").write_text(DEEPSPEED)
    (tmp_path / ".env").write_text("export ACCELERATE_MIXED_PRECISION=fp8\nNVIDIA_TF32_OVERRIDE='0'\nOTHER=1\n")
    (tmp_path / "ci.yaml").write_text("on: push\njobs: {test: {runs-on: ubuntu}}\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "ds.json").write_text(DEEPSPEED)
    shutil.copy(SAMPLES / "te_precision.yaml", tmp_path / "te.yaml")
    return tmp_path


def test_each_source_says_what_it_says(project: Path) -> None:
    found = survey(project, {"ACCELERATE_MIXED_PRECISION": "bf16", "PATH": "/bin"})
    told = {(source.path, source.system): (source.kind, source.precision) for source in found.sources}
    assert told == {
        (".env", "accelerate"): (".env file", "bf16 + fp8"),
        (".env", "torch"): (".env file", None),
        ("configs/accelerate.yaml", "accelerate"): ("accelerate file", "fp16"),
        ("configs/ds.json", "deepspeed"): ("deepspeed", "bf16"),
        ("te.yaml", "te-precision-file"): ("per module", None),
        ("environment", "accelerate"): ("process", "bf16"),
    }
    assert list(found.unread) == ["broken.yaml"]
    assert "must be YAML" in found.unread["broken.yaml"]


def test_a_te_precision_file_says_which_modules_run_in_what(project: Path) -> None:
    (source,) = [source for source in survey(project, {}).sources if source.kind == "per module"]
    assert source.says == "*output_layer* -> high precision; * -> nvfp4"


def test_they_disagree_and_the_order_decides(project: Path) -> None:
    found = survey(project, {})
    assert not found.agree
    assert found.winner is not None
    assert found.winner.path == "configs/ds.json"
    shutil.copy(SAMPLES / "conf_only.sh", project / "run.sh")
    assert survey(project, {}).winner.path == "run.sh"


def test_two_of_one_kind_that_differ_have_no_winner(project: Path) -> None:
    shutil.copy(SAMPLES / "several.sh", project / "run.sh")
    assert survey(project, {}).winner is None


def test_sources_that_agree_say_so(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.json").write_text(DEEPSPEED)
    (tmp_path / "b.yaml").write_text(ACCELERATE.replace("fp16", "bf16"))
    assert survey(tmp_path, {}).agree
    assert main(["sources", str(tmp_path)]) == 0
    assert "All agree: bf16." in capsys.readouterr().out


def test_variables_that_a_script_exports_are_sources(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "awkward.sh", tmp_path / "run.sh")
    said = {source.says for source in survey(tmp_path, {}).sources}
    assert {"NVIDIA_TF32_OVERRIDE=0", "NVTE_FP8_DPA_BWD=1"} <= said


def test_the_command_prints_a_verdict(project: Path, capsys, monkeypatch) -> None:
    for name in ("ACCELERATE_MIXED_PRECISION", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["sources", str(project)]) == 0
    out = capsys.readouterr().out
    assert f"configs/ds.json wins (deepspeed): {dict(ORDER)['deepspeed']}." in out
    assert "They disagree: configs/ds.json says bf16, configs/accelerate.yaml says fp16, .env says bf16 + fp8." in out
    assert "not read: broken.yaml: broken.yaml, line 2: must be YAML" in out


def test_the_command_prints_json(project: Path, capsys) -> None:
    assert main(["sources", str(project), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"sources", "agree", "winner", "unread"}
    assert told["winner"]["path"] == "configs/ds.json"


def test_an_empty_project_has_no_source(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert main(["sources", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("No source of precision was found.")
    with pytest.raises(PayloadError, match="must be a folder"):
        survey(tmp_path / "missing")
