"""`precision-bridge checkpoint`: contents, differences and damage, with exit codes, and no code of a file is run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.training.loop import pretrain
from tests.training.loop_tiny import tiny

STEPS = {"train_iters": 2, "eval_iters": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two folders of checkpoints: delayed with stored weights, and FP16."""
    folder = tmp_path_factory.mktemp("saved")
    stored = tiny(low="delayed", stored=True, train=STEPS, save=str(folder / "delayed"))
    pretrain(stored, run_dir=folder)
    pretrain(tiny("fp16", train=STEPS, save=str(folder / "fp16")), run_dir=folder)
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_inspect_shows_the_run_and_the_tensors_by_part(folder: Path, capsys) -> None:
    code, text = answer(capsys, "inspect", folder / "delayed")
    assert code == 0
    for part, dtype in (("weights", "bfloat16"), ("delayed scales", "float32"), ("master weights", "float32")):
        assert re.search(rf"{part} +{dtype} +\d", text)
    assert "about one MXFP8 scale in twenty" in text
    code, text = answer(capsys, "inspect", folder / "delayed" / "iter_0000002", "--json")
    content = json.loads(text)
    assert (code, content["run"]["iteration"], content["run"]["settings"]["model.fp8_recipe"]) == (0, 2, "delayed")
    weights = next(part for part in content["parts"] if part["part"] == "weights")
    assert weights["bytes"] == 2 * weights["elements"]


def test_diff_says_what_resuming_in_the_other_precision_means(folder: Path, capsys) -> None:
    assert answer(capsys, "diff", folder / "fp16", folder / "fp16")[0] == 0
    code, text = answer(capsys, "diff", folder / "delayed", folder / "fp16", "--json")
    content = json.loads(text)
    assert code == 1
    outcomes = {row["path"]: row["outcome"] for row in content["precision"]}
    assert outcomes["mixed_precision mode"] == "needs resume.allow_precision_change=true"
    assert outcomes["model.fp8"] == outcomes["model.fp8_param"] == "re-derived"
    assert "model.bf16" not in {row["setting"] for row in content["settings"]}
    assert any(row["b"] == "absent" for row in content["tensors"])
    assert "needs resume.allow_precision_change=true" in answer(capsys, "diff", *folder.glob("[df]*"))[1]


def test_verify_finds_a_changed_file_and_a_changed_manifest(folder: Path, capsys, tmp_path: Path) -> None:
    checkpoint = folder / "fp16" / "iter_0000002"
    code, text = answer(capsys, "verify", folder / "fp16")
    (digest,) = re.findall(r"manifest sha256 ([0-9a-f]{64})", text)
    assert code == 0
    assert answer(capsys, "verify", checkpoint, "--digest", digest)[0] == 0
    code, text = answer(capsys, "verify", checkpoint, "--digest", "0" * 64)
    assert (code, text) == (1, f"{checkpoint}: manifest.json is another one than the digest is of.\n")
    code, text = answer(capsys, "verify", tmp_path)
    assert (code, text.partition(": ")[0]) == (2, str(tmp_path))
    (checkpoint / "manifest.json").rename(tmp_path / "manifest.json")
    assert answer(capsys, "verify", checkpoint)[0] == 2
    assert answer(capsys, "inspect", checkpoint)[0] == 0  # another program's checkpoint can be looked at
    (tmp_path / "manifest.json").rename(checkpoint / "manifest.json")
    largest = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    code, text = answer(capsys, "verify", checkpoint, "--json")
    assert (code, json.loads(text)["sound"]) == (1, False)


def test_certify_measures_the_masters_of_a_checkpoint(folder: Path, capsys) -> None:
    code, text = answer(capsys, "certify", folder / "delayed", "--json")
    content = json.loads(text)
    found = {(one["scheme"], one["form"]): one for one in content["round_trips"]}
    assert code == 0
    assert content["source"].endswith("4 tensors of linear layers, 4 of them FP32")
    assert found["mxfp8", "bf16"]["values_changed"] == found["blockwise", "bf16"]["codes_changed"] == 0
    assert found["mxfp8", "masters"]["codes_changed"] > 0
    text = " ".join(answer(capsys, "certify")[1].split())
    assert "mxfp8 quantised values in BF16 4.57% 1496 of 32768 0 0" in text
