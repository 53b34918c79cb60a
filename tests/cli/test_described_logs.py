"""Logs of other trainers through `compare --runs`, `report`, `report --watch` and `explain --run`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from bridge.cli.main import main
from tests.read.logs.test_golden_values import golden
from tests.read.logs.test_mlflow import write as write_mlflow
from tests.read.logs.test_nemo_rl import step

SAMPLES = Path(__file__).parents[1] / "read" / "logs" / "samples"
STEPS = range(1, 31)
BF16, FP8 = (str(SAMPLES / f"megatron_lm_{name}.log") for name in ("bf16", "fp8"))


def losses(factor: float) -> dict[int, float]:
    return {step: (2 + 8 / step) * factor for step in STEPS}


def printed_by_megatron_lm(folder: Path, name: str, _factor: float) -> Path:
    return Path({"a": BF16, "b": FP8}[name])


def printed_by_megatron_bridge(folder: Path, name: str, _factor: float) -> Path:
    path = folder / f"{name}.log"
    path.write_text((SAMPLES / "megatron_bridge.log").read_text())
    return path


def printed_by_nemo_rl(folder: Path, name: str, factor: float) -> Path:
    path = folder / f"{name}.log"
    path.write_text("".join(step(number, 30, loss) for number, loss in losses(factor).items()))
    return path


def of_tensorboard(folder: Path, name: str, factor: float) -> Path:
    writer = SummaryWriter(str(folder / name))
    for number, loss in losses(factor).items():
        writer.add_scalar("lm loss", loss, number)
    writer.close()
    return folder / name


def of_wandb_csv(folder: Path, name: str, factor: float) -> Path:
    path = folder / f"{name}.csv"
    lines = [f"{number},{loss}" for number, loss in losses(factor).items()]
    path.write_text("\n".join(["Step,run - train/loss", *lines]))
    return path


def of_wandb_json(folder: Path, name: str, factor: float) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps([{"_step": number, "lm loss": loss} for number, loss in losses(factor).items()]))
    return path


def of_mlflow(folder: Path, name: str, factor: float) -> Path:
    lines = [f"17 {loss} {number}" for number, loss in losses(factor).items()]
    write_mlflow(folder / name, name, **{"lm loss": "\n".join(lines) + "\n"})
    return folder / name


def of_mlflow_csv(folder: Path, name: str, factor: float) -> Path:
    path = folder / f"{name}.csv"
    lines = [f"a,lm loss,{loss},{number},17" for number, loss in losses(factor).items()]
    path.write_text("\n".join(["run_id,key,value,step,timestamp", *lines]))
    return path


def of_golden_values(folder: Path, name: str, factor: float) -> Path:
    path = folder / name / "golden_values.json"
    path.parent.mkdir()
    path.write_text(golden(**{"lm loss": {str(number): loss for number, loss in losses(factor).items()}}))
    return path


SOURCES: dict[str, Callable[[Path, str, float], Path]] = {
    "a log of Megatron-LM": printed_by_megatron_lm,
    "a log of Megatron Bridge": printed_by_megatron_bridge,
    "a log of NeMo-RL": printed_by_nemo_rl,
    "a TensorBoard folder": of_tensorboard,
    "a history of W&B": of_wandb_csv,
    "a history of W&B, JSON": of_wandb_json,
    "an MLflow run": of_mlflow,
    "a history of MLflow": of_mlflow_csv,
    "a file of golden values": of_golden_values,
}


@pytest.mark.parametrize("source", SOURCES)
def test_each_kind_of_log_is_compared_and_reported(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = SOURCES[source]
    first, second = make(tmp_path, "a", 1.0), make(tmp_path, "b", 1.002)
    assert main(["compare", "--runs", str(first), str(second), "--json", "--output", str(tmp_path / "out")]) in (0, 3)
    (comparison,) = json.loads(capsys.readouterr().out)
    assert comparison["rows"][1]["gap"]["verdict"] in ("cannot tell", "within")
    assert any(note.startswith("The gate is 1 % of the baseline's loss.") for note in comparison["notes"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"comparison.{suffix}" for suffix in ("md", "json", "png")
    }
    page = tmp_path / "report.html"
    assert main(["report", str(first), str(second), "--out", str(page)]) == 0
    html = page.read_text()
    assert "<h3>Curves</h3>\n<figure" in html
    assert "Written by the sync" not in html
    runs = json.loads(page.with_suffix(".json").read_text())
    assert [run["source"] for run in runs] == [source.partition(",")[0]] * 2
    assert all(run["train"] and run["compared"] for run in runs)


def test_two_logs_with_arguments_are_labelled_by_their_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--runs", BF16, FP8]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Compared with bf16"
    assert lines[-4].startswith("Twins as far as the arguments show: ")
    assert lines[-4].endswith("(model.fp8_recipe, optimizer.fp8_recipe, model.fp8).")
    assert lines[-1] == (
        "bf16 with fp8 tensorwise: cannot tell. One seed has no interval. 2 seeds are the least. "
        "Steps 25 to 40: +0.16 % of the loss of bf16."
    )


def folder_of_ours(folder: Path, name: str, factor: float, *, fp8: str | None = None) -> Path:
    run = folder / name
    run.mkdir()
    (run / "config.yaml").write_text(
        "train: {lr_warmup_iters: 0, global_batch_size: 4, seed: 1}\ndata: {seed: 1}\n"
        f"model: {{seq_length: 8, fp8: {json.dumps(fp8)}}}\nmixed_precision: {{_recipe_: {name}}}\n"
    )
    records = [{"kind": "train", "step": number, "loss": loss} for number, loss in losses(factor).items()]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    (run / "summary.json").write_text(json.dumps({"iteration": 30, "precision": name, "tokens_per_second": 64.0}))
    return run


def test_folders_of_our_own_runs_are_compared_as_those_of_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (folder_of_ours(tmp_path, name, 1.0, fp8=fp8) for name, fp8 in (("bf16", None), ("fp8", "hybrid")))
    assert main(["compare", "--runs", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "Twins: 3 fields of the runs are equal, and 2 fields of precision differ." in out
    assert "fp8: within 1 %. Every loss is the baseline's, bit for bit." in out
    assert main(["compare", "--runs", str(first), BF16]) == 2
    assert capsys.readouterr().err == (
        "--runs: compares runs of ours with each other, or logs with each other, got both. Give the runs of one kind.\n"
    )


def test_a_log_that_lost_its_loss_is_outside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--runs", BF16, str(SAMPLES / "megatron_lm_nan.log")]) == 1
    assert "megatron_lm_nan: outside 1 %. Its loss is not finite from step 15 on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--runs", BF16), "--runs: compares two runs or more, got 1."),
        (("--runs", BF16, BF16), f"--runs: compares two runs or more, and the same one is given twice, got {BF16!r}."),
        (("--runs", BF16, "nothere.log"), "nothere.log: cannot be read: No such file or directory."),
        (("--runs", BF16, FP8, "--gate", "1"), "gate: must be a share of the baseline's loss, got '1'. Write gate=1%."),
        (
            ("--twin", BF16, "--gate", "1%"),
            "--gate: acts with --runs alone, got --twin. Leave --gate out.\n",
        ),
        (
            ("--gradients", "bf16_mixed", "fp8_current", "--output", "band.md"),
            "--output: acts with --twin and --runs alone, got --gradients. Leave --output out.\n",
        ),
        (
            ("--gradients", "bf16_mixed", "fp8_current", "--base", "fp16_mixed"),
            "--base: acts with --twin alone, got --gradients. Leave --base out.\n",
        ),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused_in_a_sentence(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words]) == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_a_log_is_watched_with_its_warnings_and_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    log = str(SAMPLES / "megatron_lm_nan.log")
    assert main(["report", "--watch", log]) == 1
    out = capsys.readouterr().out
    assert "20 of 20" in out
    assert "Not in this log: arguments (precision and seed)." in out
    assert "loss-not-finite: the loss is not finite from step 15 on." in out
    assert main(["report", "--watch", log, "--json", "--silence", "loss-not-finite"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["ended"], state["train"][0]["loss"], state["warnings"]) == (True, None, {})


def test_a_report_of_a_log_has_the_plan_of_its_arguments(tmp_path: Path) -> None:
    page = tmp_path / "report.json"
    assert main(["report", FP8, "--format", "json", "--out", str(page)]) == 0
    (run,) = json.loads(page.read_text())
    assert run["name"] == "bf16 with fp8 tensorwise, megatron_lm_fp8"
    assert {row["forward"] for row in run["plan"]} >= {"e4m3", "bf16"}
    assert run["commands"][0] == f"precision-bridge check {FP8}"
    assert run["figures"]["tflops_per_gpu"] == pytest.approx(59.5)


@pytest.mark.parametrize(
    ("field", "log", "sentence"),
    [
        ("initial_loss_scale", "fp16", "  Loss scale: 256 in the first record and 256 in the last, 12 steps skipped."),
        ("lr", "fp8", "  Learning rate: 3e-05 in the first record, 0.0003 at most, 0.00015 in the last."),
        ("fp8_recipe", "fp8", f"model.fp8_recipe is 'tensorwise' in {FP8}: megatron_lm_fp8.log."),
        ("lr", "nan", "  Learning rate: 3e-05 in the first record, 0.0003 at most, 0.000279904 in the last."),
        ("fp8", "nan", "  Its value in LOG is not known: a log of Megatron-LM without arguments."),
    ],
)
def test_a_field_is_explained_by_the_arguments_and_the_records_of_a_log(
    field: str, log: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(SAMPLES / f"megatron_lm_{log}.log")
    assert main(["explain", field, "--run", path]) == 0
    assert sentence.replace("LOG", path) in capsys.readouterr().out.splitlines()


CELLS = "iteration {step:8d}/      30 | consumed samples: {step:12d} | lm loss: {loss} | loss scale: 1.0 |"


def log_with(path: Path, losses_at: dict[int, float]) -> Path:
    path.write_text("".join(f"{CELLS.format(step=number, loss=loss)}\n" for number, loss in losses_at.items()))
    return path


@pytest.mark.parametrize("cut", ["lm lo", "lm loss: ", "lm loss: 2.38", " | loss scale: 1."])
def test_a_log_that_is_cut_in_its_last_line_is_the_log_before_it(
    cut: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_with(tmp_path / "train.log", {number: loss for number, loss in losses(1.0).items() if number < 21})
    last = CELLS.format(step=21, loss="2.380952E+00")
    log.write_text(log.read_text() + last[: last.index(cut) + len(cut)])
    assert main(["report", "--watch", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"][-1]["step"] == 20


def test_a_loss_that_is_finite_again_is_lost_at_its_step_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = log_with(tmp_path / "sound.log", losses(1.0))
    once = log_with(tmp_path / "once.log", losses(1.0) | {21: float("nan")})
    assert main(["report", "--watch", str(once)]) == 1
    assert "loss-not-finite: the loss is not finite at step 21." in capsys.readouterr().out
    assert main(["compare", "--runs", str(sound), str(once)]) == 1
    assert "Its loss is not finite at step 21 in 1 of 1 seeds." in capsys.readouterr().out


@pytest.mark.filterwarnings("error")
def test_a_baseline_whose_losses_are_zero_tells_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = log_with(tmp_path / "zero.log", dict.fromkeys(STEPS, 0.0))
    sound = log_with(tmp_path / "sound.log", losses(1.0))
    assert main(["compare", "--runs", str(zero), str(sound)]) == 3
    out = capsys.readouterr().out
    assert "nan" not in out
    assert "The mean of the baseline's loss in steps 16 to 30 is 0, and a gap is a share of a loss above 0." in out
    assert main(["compare", "--runs", str(zero), str(sound), "--json", "--output", str(tmp_path / "out")]) == 3
    assert json.loads(capsys.readouterr().out)[0]["rows"][1]["gap"]["share"] is None


@pytest.mark.parametrize(("given", "out"), [("d.log", "d.log"), ("d.json", "d.html"), ("d.log", "../{name}/d.log")])
def test_a_report_does_not_overwrite_the_log_that_it_reads(
    given: str, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_with(tmp_path / given, losses(1.0))
    before = log.read_bytes()
    assert main(["report", str(log), "--out", str(tmp_path / out.format(name=tmp_path.name))]) == 2
    assert capsys.readouterr().err.startswith("--out: must not be a file that is read, as it would be overwritten, got")
    assert log.read_bytes() == before
    assert [*tmp_path.iterdir()] == [log]


def test_a_report_does_not_overwrite_a_file_of_the_run_that_it_reads(tmp_path: Path) -> None:
    run = folder_of_ours(tmp_path, "bf16", 1.0)
    before = (run / "summary.json").read_bytes()
    assert main(["report", str(run), "--out", str(run / "summary.html")]) == 2
    assert (run / "summary.json").read_bytes() == before
    assert not (run / "summary.html").exists()
