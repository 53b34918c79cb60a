"""`check`, `plan` and `memory` of several files and folders: a line a run."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge.cli.main import main
from bridge.cli.run_arguments import RunArguments

ROOT = Path(__file__).parents[2]
SHOWCASE = ROOT / "docs" / "showcase"
SIZES = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1024"
MORE = "--max-position-embeddings 128 --micro-batch-size 1 --swiglu"
LAUNCH = f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} {MORE}"
TWO = f"{LAUNCH} --bf16\n{LAUNCH} --bf16 --fp8-format hybrid --fp8-recipe tensorwise\n"
WRONG = f"{LAUNCH} --bf16 --tensor-model-parallel-size 3\n"
TARGET = ("--target", "h100x8,te2.9,cuda12.9,mcore0.19.2")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with runs, files that are none, and a hidden folder."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "two.sh").write_text(TWO)
    (tmp_path / "scripts" / "wrong.sh").write_text(WRONG)
    (tmp_path / "scripts" / "install.sh").write_text("pip install .\n")
    for name in ("ci", "compose", "pages", "labels", "mkdocs"):
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\njobs: {{build: 1}}\n")
    (tmp_path / "broken.yaml").write_text("model: {num_layers: [\n")
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "run.sh").write_text(TWO)
    shutil.copy(SHOWCASE / "llama3_70b.yaml", tmp_path / "llama.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    code = main([*words])
    return code, capsys.readouterr().out.splitlines()


def answer_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main([*words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return found


@pytest.mark.usefixtures("project")
def test_each_run_of_a_folder_is_a_line_and_each_reason_of_files_that_are_not_read_is_one(capsys) -> None:
    code, lines = lines_of(capsys, "check", ".")
    assert code == 2, "that of scripts/wrong.sh"
    assert lines[0] == "llama.yaml: bf16 with tensorwise scaling; nothing found"
    assert lines[1].startswith("scripts/two.sh --launch 1 (line 1, pretrain_gpt.py): bf16; ")
    assert lines[2].startswith("scripts/two.sh --launch 2 (line 2, pretrain_gpt.py): bf16 with tensorwise scaling; ")
    assert lines[3].startswith("scripts/wrong.sh: bf16; ")
    assert " errors (PB408" in lines[3]
    assert lines[4:] == [
        "not read, it cannot be parsed: 1 file (broken.yaml)",
        "not read, no sections of a run: 5 files (ci.yaml, compose.yaml, labels.yaml, mkdocs.yaml and 1 more)",
        "not read, starts no run of Megatron-LM: 1 file (scripts/install.sh)",
        "4 runs in 3 files, 1 of them with an error or refused",
    ]


@pytest.mark.usefixtures("project")
def test_json_is_one_document_with_the_findings_of_each_run_and_the_reason_of_each_file(capsys) -> None:
    found = answer_of(capsys, "check", "llama.yaml", "scripts", "ci.yaml", *TARGET)
    assert [(row["file"], row["launch"] and row["launch"]["number"]) for row in found["runs"]] == [
        ("llama.yaml", None),
        ("scripts/two.sh", 1),
        ("scripts/two.sh", 2),
        ("scripts/wrong.sh", None),
    ]
    assert [(row["mode"], row["scheme"]) for row in found["runs"]][:3] == [
        ("bf16", "tensorwise"),
        ("bf16", None),
        ("bf16", "tensorwise"),
    ]
    for row in found["runs"]:
        words = ["--launch", str(row["launch"]["number"])] if row["launch"] else []
        main(["check", "--config", row["file"], *words, *TARGET, "--json"])
        alone = json.loads(capsys.readouterr().out)
        assert (row["findings"], row["exit_code"]) == (alone["findings"], alone["exit_code"])
    assert [(one["file"], one["kind"]) for one in found["not_read"]] == [
        ("scripts/install.sh", "starts no run of Megatron-LM"),
        ("ci.yaml", "no sections of a run"),
    ]
    assert found["not_read"][1]["reason"].startswith("ci.yaml: must have the sections of a run")


@pytest.mark.usefixtures("project")
def test_memory_and_plan_say_the_same_of_a_run_as_alone(capsys) -> None:
    memory = answer_of(capsys, "memory", "llama.yaml", "scripts/two.sh")["runs"]
    shares = answer_of(capsys, "plan", "llama.yaml", "scripts/two.sh")["runs"]
    main(["memory", "--config", "llama.yaml", "--json"])
    alone = json.loads(capsys.readouterr().out)
    largest = max(alone["ranks"], key=lambda rank: rank["total"])
    assert (memory[0]["bytes"], memory[0]["stage"]) == (largest["total"], largest["stage"])
    assert memory[0]["gpu_bytes"] == alone["gpu_bytes"]
    assert [(row["low_precision"], row["linear_layers"]) for row in shares] == [
        ({"tensorwise": 312}, 321),
        ({}, 17),
        ({"tensorwise": 16}, 17),
    ]
    code, lines = lines_of(capsys, "memory", "llama.yaml", "scripts/two.sh")
    assert code == 0
    assert lines[0] == "llama.yaml: bf16 with tensorwise scaling; 58.9 GiB of 79.0 GiB on stage 0: fits"
    assert lines_of(capsys, "plan", "--brief", "llama.yaml")[1] == [
        "llama.yaml: bf16 with tensorwise scaling; 312 of 321 linear layers in tensorwise",
        "1 run in 1 file",
    ]


@pytest.mark.usefixtures("project")
def test_a_run_that_cannot_be_planned_is_refused_in_its_line_and_the_others_are_answered(capsys) -> None:
    Path("open.sh").write_text(f"python train.py {SIZES}\n")
    code, lines = lines_of(capsys, "plan", "open.sh", "llama.yaml")
    assert code == 2
    assert lines[0].startswith("open.sh: the mode is not stated; train.py, a program whose defaults are not known here")
    assert lines[1].startswith("llama.yaml: ")
    code, lines = lines_of(capsys, "check", "open.sh", "llama.yaml")
    assert code == 0, "a mode that nothing states is no error"
    assert lines[0].startswith("open.sh: mode not stated (train.py, a program whose defaults are not known here, ")


@pytest.mark.usefixtures("project")
def test_overrides_are_written_over_every_run(capsys) -> None:
    found = answer_of(capsys, "check", "llama.yaml", "scripts/two.sh", "mixed_precision=bf16_with_mxfp8_mixed", *TARGET)
    assert {row["scheme"] for row in found["runs"]} == {"mxfp8"}
    assert found["exit_code"] == 2, "an H100 has no MXFP8"


@pytest.mark.usefixtures("project")
def test_a_file_that_describes_no_run_does_not_count_in_a_brief_answer_and_is_refused_alone(capsys) -> None:
    code, lines = lines_of(capsys, "check", "--brief", "ci.yaml")
    assert (code, lines) == (0, ["not read, no sections of a run: 1 file (ci.yaml)", "0 runs in 0 files"])
    assert main(["check", "ci.yaml"]) == 2


@pytest.mark.usefixtures("project")
def test_one_file_is_answered_in_full_however_it_is_named(capsys) -> None:
    for command in ("check", "plan", "memory"):
        assert lines_of(capsys, command, "llama.yaml") == lines_of(capsys, command, "--config", "llama.yaml")
    Path("runs").mkdir()
    shutil.copy("llama.yaml", "runs/config.yaml")
    assert lines_of(capsys, "check", "runs") == lines_of(capsys, "check", "--config", "runs")


@pytest.mark.usefixtures("project")
def test_sarif_has_the_findings_of_each_file_in_one_run(capsys) -> None:
    assert main(["check", "scripts", "llama.yaml", *TARGET, "--sarif", "all.sarif"]) == 2
    capsys.readouterr()
    (run,) = json.loads(Path("all.sarif").read_text())["runs"]
    files = {one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for one in run["results"]}
    assert "scripts/wrong.sh" in files
    assert [one["file"] for one in run["properties"]["checked"]] == [
        "scripts/two.sh",
        "scripts/two.sh",
        "scripts/wrong.sh",
        "llama.yaml",
    ]
    found = answer_of(capsys, "check", "scripts", "llama.yaml", *TARGET)
    ids = [one["id"] for row in found["runs"] for one in (*row["findings"], *row["silenced"])]
    assert [one["ruleId"] for one in run["results"]] == ids


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["check", "scripts", "nowhere.yaml"], "nowhere.yaml: there is no such file or folder. Give the path of one."),
        (
            ["check", "scripts", "--launch", "2"],
            "--launch: is about one script, got 2. Give one file, without --brief.",
        ),
        (
            ["check", "scripts", "--context", "variables=TP=2"],
            "--context: is about one script, got 'variables=TP=2'. Give one file, without --brief.",
        ),
        (["memory", "scripts", "--fit"], "--fit: is about one run, got several. Give one file, without --brief."),
        (
            ["plan", "--csv", "llama.yaml", "scripts/two.sh"],
            "llama.yaml: this command, or one of its options, is about one run, got 'scripts/two.sh' too. Give one "
            "file.",
        ),
        (
            ["plan", "--csv", "--brief", "llama.yaml"],
            "--csv: is about one run, and --brief about several. Leave one of them out.",
        ),
        (["check", "--brief"], "--brief: is about files, got none. Give files or folders."),
    ],
)
def test_what_is_about_one_run_is_refused_for_several(words: list[str], sentence: str, capsys) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"{sentence}\n"


@pytest.mark.usefixtures("project")
def test_a_word_is_a_file_by_its_end_by_a_slash_or_because_it_is_there_and_no_recipe() -> None:
    Path("bf16_mixed").mkdir()  # the recipe of this name is meant
    Path("sweep").mkdir()
    Path("sweep/lr=3").mkdir()
    files = ["scripts", "llama.yaml", "gone.sh", "some/where", "./bf16_mixed", "sweep/lr=3", "train.yaml"]
    overrides = [
        "bf16_mixed",
        "fp8_current",
        "model.num_layers=4",
        "~mixed_precision.fp8",
        "data.path=a/b.txt",
        "scirpts",
    ]
    for words in ([*files, *overrides], [*overrides, *files]):
        found = RunArguments.from_args(argparse.Namespace(config="first.yaml", overrides=words))
        assert found == RunArguments(files=("first.yaml", *files), overrides=tuple(overrides))


def test_a_folder_is_checked_without_torch_and_megatron(project: Path) -> None:
    code = (
        "import sys\nfrom bridge.cli.main import main\nmain(['check', '.'])\n"
        "print([name for name in ('torch', 'megatron', 'hydra') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
