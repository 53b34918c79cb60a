"""The parts of a report's page: charts, and the colours of its heat maps."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.cli.main import main
from bridge.precision.formats import FORMATS
from bridge.report.comparison import collect_answers
from bridge.report.html.chart import MAX_POINTS, draw_line_chart
from bridge.report.html.page import render_markdown, render_page
from bridge.report.html.run_content import RunContent
from bridge.runtime.audit.early_warnings import WarningInputs, find_early_warnings
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.compare.arm import Arm
from bridge.runtime.compare.comparison import compare_arms
from bridge.runtime.compare.gap import LossCurve
from bridge.runtime.numerics import GemmPrecision, quantise

LISTS = ("verdict", "plan", "mismatches", "heat", "memory", "sync", "findings", "silenced", "commands", "train")
EMPTY: dict[str, Any] = {name: [] for name in (*LISTS, "validation")} | {
    "figures": {"unigram_entropy": None},
    "warnings": {},
    "environment": {},
    "base": None,
    "source": None,
    "compared": None,
    "ran": "",
    "backend": "",
}
STEP = {"kind": "train", "loss": 2.0, "grad_norm": 1.0, "loss_scale": 1.0, "skipped": False, "tokens_per_second": 1.0}


@pytest.mark.parametrize(
    ("scheme", "operand"), [("tensorwise", "input"), ("tensorwise", "grad_output"), ("nvfp4", "input")]
)
def test_the_healthy_ratio_of_a_format_is_that_of_a_normal_sample(scheme: str, operand: str) -> None:
    spec = GemmPrecision(scheme=scheme, format="e2m1" if scheme == "nvfp4" else "hybrid").spec(operand)
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    noise = quantise(x, spec).dequantise().float() - x.float()
    measured = 10 * torch.log10(x.float().square().sum() / noise.square().sum()).item()
    assert measured == pytest.approx(FORMATS[spec.format].healthy_db, abs=1.0)


def test_a_chart_escapes_names_thins_lines_and_leaves_out_what_is_not_finite() -> None:
    points = [(float(step), float("nan") if step == 3 else 2.0) for step in range(2000)]
    chart = draw_line_chart({"<a&b>": points}, title="t", unit="loss")
    assert "<a&b>" not in chart
    assert "&lt;a&amp;b&gt;" in chart
    assert "nan" not in chart
    zigzag = draw_line_chart({"s": [(float(step), float(step % 7)) for step in range(2000)]}, title="t", unit="loss")
    assert 0.5 * MAX_POINTS < max(path.count("L ") for path in zigzag.split(' d="')) < MAX_POINTS
    assert draw_line_chart({"empty": []}, title="t", unit="loss") == ""
    assert "from 4 to 1024" in draw_line_chart({"s": [(0, 4.0), (1, 1024.0)]}, title="t", unit="y", log=True)
    assert draw_line_chart({"one record": [(1, 4.0)]}, title="t", unit="y") == ""


def test_runs_of_one_precision_have_names_of_their_own() -> None:
    folders = ("sweep/lr=1,seed=1", "sweep/lr=1,seed=2", "other")
    runs = [RunContent(**EMPTY, name="bf16_mixed", folder=folder) for folder in folders[:2]]
    page = render_page([*runs, RunContent(**EMPTY, name="fp32", folder="other")])
    tabs = re.findall(r'tabindex="-?\d">(.*?)</button>', page)
    assert tabs == ["bf16_mixed, seed=1", "bf16_mixed, seed=2", "fp32"]
    assert page.count("Too few records for a curve.") == 3


@pytest.mark.parametrize(("skipped", "warns"), [(1, False), (2, True)])
def test_a_single_skipped_step_of_a_few_is_no_share_of_them(skipped: int, warns: bool, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {train_iters: 3}\n")
    lines = [{**STEP, "step": step, "skipped_steps": skipped * (step == 3)} for step in (1, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = dict(find_early_warnings(WarningInputs.from_run_folder(RunFolder.from_path(tmp_path))))
    assert ("skipped-steps" in found) is warns


def test_the_page_begins_with_the_verdict_of_a_comparison_each_answer_once(tmp_path: Path) -> None:
    arms = [_arm(tmp_path / f"{name}-{seed}", name, seed) for name in ("bf16_mixed", "low") for seed in (1, 2)]
    compared = collect_answers(compare_arms(arms))
    runs = []
    for arm in arms:
        run = RunContent(**EMPTY, name=f"{arm.label}-{arm.seed[0]}", folder=str(arm.folder))
        runs.append(replace(run, compared=compared[arm.folder]))
    page, text = render_page(runs), render_markdown([replace(run, figures={}) for run in runs])
    verdict = "low: outside 1 %. The whole interval is above the gate."
    assert compared[arms[2].folder].state == "bad"
    assert compared[arms[2].folder].sentence.startswith(verdict)
    assert page.count(f"<b>Problem.</b> {verdict}") == text.count(f"- **Problem.** {verdict}") == 1
    assert page.index("<h2>Comparison</h2>") < page.index('role="tablist"')
    assert collect_answers(compare_arms(arms[:2])) == {}


def _arm(folder: Path, label: str, seed: int) -> Arm:
    losses = tuple(4.0 - 0.1 * step + 0.001 * seed + 0.2 * (label == "low") * step / 10 for step in range(1, 11))
    return Arm(
        folder=folder,
        label=label,
        precision={"mixed_precision.fp8": label == "low"},
        rest={"train.global_batch_size": 4, "model.seq_length": 8},
        seed=(seed, seed),
        warm_up=0,
        curve=LossCurve(steps=tuple(range(1, 11)), losses=losses),
        summary={"iteration": 10},
    )


def test_a_dash_as_the_file_prints_the_report_and_writes_none(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("train: {train_iters: 3}\n")
    assert main(["report", "run", "--format", "json", "--out", "-"]) == 0
    (content,) = json.loads(capsys.readouterr().out)
    assert content["figures"]["train_iters"] == 3
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["config.yaml"]
