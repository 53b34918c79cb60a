"""Whole runs of the script: what reaches the configs, what is left in the run folder, and how failures end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from bridge.cli.explain.in_run import explain_in_run
from bridge.cli.main import main
from bridge.errors import RunConfigError
from bridge.report.table import render_plain_text
from bridge.report.watch import make_watch_view
from bridge.runtime.audit.early_warnings import WarningInputs, find_early_warnings
from bridge.runtime.audit.run_folder import RunFolder
from tests import warm

TINY = ("model=gpt_tiny", "train=smoke", "train.train_iters=2", "train.eval_iters=1", "logging.tensorboard=false")


@pytest.fixture(scope="module")
def run_dir(warm_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one run of a team's YAML recipe with overrides."""
    cwd = tmp_path_factory.mktemp("run")
    group = cwd / "team" / "mixed_precision"
    group.mkdir(parents=True)
    (group / "mine.yaml").write_text("defaults: [bf16_mixed, _self_]\ngrad_reduce_in_fp32: false\n")
    words = ("mixed_precision=mine", "mixed_precision.params_dtype=torch.bfloat16", "data.seed=${train.seed}")
    done = warm_run("--config-dir", "team", *TINY, *words, "optimizer.lr=1e-3", "train.seed=7", cwd=cwd)
    assert done.returncode == 0, done.stderr
    (folder,) = cwd.glob("outputs/*/*")
    return folder


def test_the_run_folder_is_hydras_and_holds_the_settled_config(run_dir: Path) -> None:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["mixed_precision"] == {
        "_recipe_": "mine",
        "bf16": True,
        "params_dtype": "bf16",
        "pipeline_dtype": "bf16",
        "grad_reduce_in_fp32": False,
    }
    assert (config["model"]["bf16"], config["model"]["params_dtype"]) == (True, "bf16")
    assert config["model"]["activation_func"] == "gelu"
    assert config["ddp"]["grad_reduce_in_fp32"] is False
    assert (config["optimizer"]["lr"], config["data"]["seed"]) == (0.001, 7)
    assert (run_dir / ".hydra" / "overrides.yaml").is_file()
    assert (run_dir / "train.log").is_file()
    assert (run_dir / "summary.json").is_file()


def test_the_sync_report_names_recipe_file_and_command_line_as_sources(run_dir: Path) -> None:
    rows = {
        f"{row['owner']}.{row['attribute']}": row for row in json.loads((run_dir / "sync.json").read_text())["rows"]
    }
    assert rows["model.bf16"]["by"] == "recipe bf16_mixed"
    assert rows["model.params_dtype"]["by"] == "command line"
    assert rows["ddp.grad_reduce_in_fp32"]["by"] == "mixed_precision/mine.yaml"
    assert "mixed_precision/mine.yaml" in (run_dir / "sync.txt").read_text()


def test_a_yaml_recipe_keeps_its_name_in_the_run_folder(run_dir: Path) -> None:
    label = "mine, params_dtype=bf16"
    assert json.loads((run_dir / "summary.json").read_text())["precision"] == label
    assert json.loads((run_dir / "sync.json").read_text())["precision"] == label
    assert label in (run_dir / "sync.txt").read_text().splitlines()[0]


def test_explain_says_who_set_a_field_in_a_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explain_in_run("grad_reduce_in_fp32", run_dir)["in_run"]
    assert [(row["new"], row["by"]) for row in found["rows"]] == [(False, "mixed_precision/mine.yaml")]
    assert found["ran"].endswith("gradient reduction bfloat16")
    assert explain_in_run("fp8", run_dir)["in_run"]["ran"] == "GEMMs of step 2: layers 1-3, output: bf16"
    scale = "Loss scale: 1 in the first record and 1 in the last, 0 steps skipped"
    assert explain_in_run("hysteresis", run_dir)["in_run"]["ran"] == scale
    with pytest.raises(RunConfigError, match="must be the folder of a run"):
        explain_in_run("bf16", run_dir.parent)
    for word in ("optimizer.lr", "lr"):
        setting = explain_in_run(word, run_dir)["setting"]
        assert (setting["key"], setting["value"], setting["default"], setting["by"]) == (
            *("optimizer.lr", 0.001, None),
            "command line",
        )
        assert list(setting["set_by"]) == ["optimizer/adam.yaml", "command line"]
        assert setting["ran"].startswith("Learning rate: ")
    by = {
        key: explain_in_run(key, run_dir)["setting"]["by"]
        for key in ("model.num_layers", "model.layernorm_zero_centered_gamma")
    }
    assert by == {"model.num_layers": "model/gpt_tiny.yaml", "model.layernorm_zero_centered_gamma": "default"}
    derived = explain_in_run("model.kv_channels", run_dir)["setting"]
    assert (derived["default"], derived["by"][:7]) == (None, "derived"), derived
    mirrored = explain_in_run("model.bf16", run_dir)
    assert (mirrored["setting"]["default"], mirrored["setting"]["by"]) == (False, "the sync")
    assert (mirrored["in_run"]["rows"][0]["new"], mirrored["in_run"]["rows"][0]["by"]) == (True, "recipe bf16_mixed")
    assert main(["explain", "data.seed", "--run", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("    Set by command line: '${train.seed}'; the ")
    for word, said in (("optimizer.lrr", "Did you mean 'optimizer.lr'"), ("seed", "must name one section")):
        with pytest.raises(RunConfigError, match=said):
            explain_in_run(word, run_dir)


def test_watch_shows_the_state_of_a_run_and_warns_by_its_records(run_dir: Path, tmp_path: Path) -> None:
    run = RunFolder.from_path(run_dir)
    shown = render_plain_text(make_watch_view(run))
    assert shown.startswith("mine, params_dtype=bf16: ")
    assert "2 of 2" in shown
    assert find_early_warnings(WarningInputs.from_run_folder(run)) == []
    last = run.read_metrics("train")[-1]
    (tmp_path / "config.yaml").write_text("train: {train_iters: 40}\noptimizer: {fp16: true, min_loss_scale: 1.0}\n")
    records = [{**last, "step": step, "loss": 2.0} for step in range(1, 20)]
    records.append({**last, "step": 20, "loss": 2.5, "grad_norm": 1e4, "skipped_steps": 3, "loss_scale": 1.0})
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "tra')  # the last one is being written
    names = [name for name, _ in find_early_warnings(WarningInputs.from_run_folder(RunFolder.from_path(tmp_path)))]
    assert names == ["loss-spike", "gradient-spike", "skipped-steps", "loss-scale-floor"]
    silenced = find_early_warnings(WarningInputs.from_run_folder(RunFolder.from_path(tmp_path), silenced=names[1:]))
    assert silenced == [
        ("loss-spike", "the loss is 2.5000, more than 1.2 times the median of the records before, 2.0000.")
    ]


class Page(HTMLParser):
    """The ids, links and figures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.figures: dict[str, str] = {}
        self.figure = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [str(found[name]) for name in ("id",) if name in found]
        self.links += [str(found[name]) for name in ("src", "href") if name in found]
        self.figure = str(found.get("data-figure") or "")

    def handle_data(self, data: str) -> None:
        if self.figure:
            self.figures[self.figure] = data
            self.figure = ""


def report(*runs: Path, out: Path) -> None:
    """Write the report of some runs with the command."""
    command = str(Path(sys.executable).with_name("precision-bridge"))
    done = warm.run([command, "report", *map(str, runs), "--format", out.suffix[1:], "--out", str(out)])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_report_is_one_file_whose_numbers_are_those_of_the_json_beside_it(run_dir: Path, tmp_path: Path) -> None:
    report(run_dir, run_dir, out=tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    content = json.loads((tmp_path / "report.json").read_text())[0]
    page = Page()
    page.feed(text)
    assert page.links == []
    assert "http" not in text
    assert len(page.ids) == len(set(page.ids)) == 4
    assert page.figures["validation_loss"] == f"{content['figures']['validation_loss']:,.4g}"
    assert page.figures["parameters"] == f"{content['figures']['parameters']:,}"
    assert [one["state"] for one in content["verdict"]][:2] == ["good", "good"]
    assert content["mismatches"] == []
    by = "mixed_precision/mine.yaml"
    changed = {"field": "grad_reduce_in_fp32", "base": "True", "run": "False", "by": by}
    assert content["base"] == {"name": "bf16_mixed", "fields": [changed]}
    assert content["commands"][0].startswith("python scripts/train.py model=gpt_tiny train=smoke ")
    assert "'data.seed=${train.seed}'" in content["commands"][0]
    assert f"<td>{by}</td>" in text
    assert "Plan = record" in text
    report(run_dir, out=tmp_path / "report.md")
    assert "| validation loss |" in (tmp_path / "report.md").read_text()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_tabs_of_a_report_work_and_the_console_is_silent(run_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report(run_dir, run_dir, out=page)
    press = "<script>document.getElementById('tab1').dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}))</script>"
    page.write_text(page.read_text().replace("</body>", f"{press}</body>"))
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=warm.LIMIT_SECONDS)
    assert "CONSOLE" not in done.stderr
    first, second = done.stdout.split('id="run1"')[1].split('id="run2"')
    assert ("hidden" in first.partition(">")[0], "hidden" in second.partition(">")[0]) == (True, False)


def test_a_job_of_a_sweep_does_not_see_the_environment_of_the_one_before(train, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from bridge.front.main import main\n\n"
        "def job(config):\n"
        "    return lambda run_dir: work(config, run_dir)\n\n"
        "def work(config, run_dir):\n"
        "    (run_dir / 'seen').write_text(os.environ.get('NVTE_FUSED_ATTN', 'unset'))\n"
        "    os.environ['NVTE_FUSED_ATTN'] = str(config.train.seed)\n\n"
        f"main(job, config_path=Path({str(Path(__file__).resolve().parents[2] / 'conf')!r}))\n"
    )
    done = train("--multirun", "train.seed=1,2", *TINY, script=str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in tmp_path.glob("multirun/*/*/*/seen")] == ["unset", "unset"]


def test_a_job_of_a_sweep_sees_the_environment_of_its_own_recipe_alone(train, tmp_path: Path) -> None:
    (tmp_path / "env_recipe.py").write_text(
        "import os\n"
        "from bridge import MixedPrecisionConfig, register\n\n"
        "@register\n"
        "def env_bf16() -> MixedPrecisionConfig:\n"
        "    os.environ['NVTE_FUSED_ATTN'] = 'of env_bf16'\n"
        "    return MixedPrecisionConfig(bf16=True)\n"
    )
    (tmp_path / "script.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from bridge.front.main import main\n\n"
        "def job(config):\n"
        "    return lambda run_dir: work(config, run_dir)\n\n"
        "def work(config, run_dir):\n"
        "    (run_dir / 'seen').write_text(os.environ.get('NVTE_FUSED_ATTN', 'unset'))\n\n"
        f"main(job, config_path=Path({str(Path(__file__).resolve().parents[2] / 'conf')!r}))\n"
    )
    words = ("recipes_from=env_recipe.py", "mixed_precision=env_bf16,bf16_mixed")
    done = train("--multirun", *words, *TINY, script=str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr
    seen = {path.parent.name: path.read_text() for path in tmp_path.glob("multirun/*/*/*/seen")}
    assert sorted(seen.values()) == ["of env_bf16", "unset"]
    assert all(("env_bf16" in name) == (text != "unset") for name, text in seen.items())


def test_without_a_recipe_the_owners_keep_their_own_settings(train, tmp_path: Path) -> None:
    done = train(
        *TINY, "mixed_precision=null", "model.bf16=true", "optimizer.bf16=true", "ddp.grad_reduce_in_fp32=true"
    )
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/*/*")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["mixed_precision"] is None
    assert config["model"]["bf16"] is True
    assert not (folder / "sync.json").exists()


def test_a_sweep_runs_each_recipe_in_a_folder_named_after_it(train, tmp_path: Path) -> None:
    done = train("--multirun", "mixed_precision=bf16_mixed,fp32", *TINY)
    assert done.returncode == 0, done.stderr
    found = {
        json.loads(path.read_text())["precision"]: path.parent for path in tmp_path.glob("multirun/*/*/*/sync.json")
    }
    assert sorted(found) == ["bf16_mixed", "fp32"]
    assert all(f"mixed_precision={name}" in folder.name for name, folder in found.items())
    assert "Compared with bf16_mixed" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "fp32: cannot tell. 2 steps with a warm-up of 2 and a record every 2 are too few. 14 steps would do, or a "
        "shorter logging.log_interval."
    )
    assert next(tmp_path.glob("multirun/*/*/comparison.json")).is_file()


def test_a_run_whose_steps_were_all_skipped_is_no_success(train, tmp_path: Path) -> None:
    done = train(*TINY, "mixed_precision=fp16_mixed")
    assert done.returncode == 1
    assert done.stderr == (
        "NOTHING WAS LEARNED: 2 of 2 steps had NaN or Inf in their gradients and updated nothing. The loss scale is "
        "2.14748e+09 and still falling: train longer, or lower initial_loss_scale.\n"
    )
    (summary,) = tmp_path.glob("outputs/*/*/summary.json")
    assert json.loads(summary.read_text())["skipped_steps"] == 2


def test_a_sweep_with_a_failing_job_runs_the_others_and_is_no_success(train, tmp_path: Path) -> None:
    done = train("--multirun", "mixed_precision.fp8=hibrid,null", *TINY)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(
        "The mixed-precision config 'bf16_mixed' can never be right:\n"
        "  mixed_precision.fp8: must be 'e4m3' or 'hybrid', got 'hibrid' (command line). Did you mean 'hybrid'?\n"
    )
    assert "[ERROR] This job failed. The mixed-precision config 'bf16_mixed' can never be right:" in done.stdout
    (folder,) = (path for path in tmp_path.glob("multirun/*/*/*") if path.is_dir())
    assert (folder / "summary.json").is_file()


def test_an_error_of_the_job_is_one_message_with_its_exit_code(train) -> None:
    done = train(*TINY, "train.global_batch_size=3")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("train.global_batch_size: must be a multiple of micro_batch_size 4")


def test_what_megatron_refuses_is_told_with_its_section(refused) -> None:
    message = refused(*TINY, "model.recompute_granularity=full")
    assert message.startswith("model: Megatron Core refuses these settings (ValueError: ")
    assert message.endswith("). Correct the fields it is about.")


def test_a_crash_shows_its_traceback_and_the_run_folder(train, tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text(
        "from pathlib import Path\n"
        "from bridge.front.main import main\n\n"
        "def job(config):\n"
        "    return lambda run_dir: work(config, run_dir)\n\n"
        "def work(config, run_dir):\n"
        "    raise ValueError('a fault of ours')\n\n"
        f"main(job, config_path=Path({str(Path(__file__).resolve().parents[2] / 'conf')!r}))\n"
    )
    done = train(*TINY, script=str(tmp_path / "crash.py"))
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "ValueError: a fault of ours\nRun folder: " in done.stderr
