"""`bridge.check`, `bridge.load_run` and `bridge.Plan`: the same answers as on the command line, as objects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bridge import ConfigContainer, Plan, check, load_run
from bridge.cli.main import main
from bridge.errors import RunConfigError, UnknownRecipeError

TARGET = "h100x8,te2.9,cuda12.9,mcore0.16"
RUN = """\
mixed_precision: bf16_with_mxfp8_mixed
model: {num_layers: 4, hidden_size: 512, num_attention_heads: 8}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of a run in MXFP8, which no H100 has."""
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def test_check_reports_the_findings_of_the_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(file), "--target", TARGET, "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    report = check(load_run(config_file=file, strict=False), target=TARGET)
    assert report.exit_code() == 2
    assert [one.id for one in report.findings] == [one["id"] for one in printed["findings"]]
    assert [one.id for one in report.of("error")] == ["PB602"]


def test_check_takes_the_target_that_the_run_states(file: Path) -> None:
    file.write_text(f"target: {TARGET}\n{RUN}")
    run = load_run(config_file=file)
    assert check(run).verdict == "error"
    on_b200 = check(run, target="b200x8,te2.9,cuda12.9,mcore0.16")
    assert (on_b200.verdict, run.target) != ("error", None)
    assert on_b200.target.startswith("b200x8,")


def test_check_takes_a_container_and_a_mapping_of_sections() -> None:
    container = ConfigContainer(mixed_precision="bf16_with_mxfp8_mixed")
    sections = {"mixed_precision": "bf16_with_mxfp8_mixed"}
    reports = [check(run, target=TARGET) for run in (container, sections)]
    assert [report.verdict for report in reports] == ["error", "error"]
    assert container.mixed_precision == "bf16_with_mxfp8_mixed"


def test_a_silenced_rule_stands_apart(file: Path) -> None:
    run = load_run(config_file=file)
    (finding, *_) = check(run, target=TARGET).findings
    silenced = check(run, target=TARGET, silenced={finding.id: "tried by hand"})
    assert finding.id in [one.id for one in silenced.silenced]
    assert finding.id not in [one.id for one in silenced.findings]
    with pytest.raises(RunConfigError, match=r"^silence\.PB3O1: must name a rule"):
        check(run, silenced={"PB3O1": "misspelt"})


def test_a_plan_of_a_run_and_of_config_objects_is_the_same(file: Path) -> None:
    model = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
    plan = Plan.of("bf16_with_mxfp8_mixed", model=model)
    assert plan.diff(load_run(config_file=file).plan) == []
    assert plan.format_of(3, "linear_qkv") == "e4m3"
    assert isinstance(plan, Plan)
    with pytest.raises(UnknownRecipeError):
        Plan.of("bf61_mixed", model=model)


def test_the_face_answers_without_torch_megatron_and_hydra(file: Path) -> None:
    code = (
        f"import sys; from bridge import Plan, check, load_run\nrun = load_run(config_file={str(file)!r})\n"
        f"check(run, target={TARGET!r}); assert isinstance(run.plan, Plan)\n"
        "print([name for name in ('torch', 'megatron', 'hydra', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
