"""`precision-bridge check`, `support-matrix` and `explain RULE`, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.preflight.file_reading import INSTALLED_HERE, get_installed_reason
from bridge.target.versions import get_installed_text
from tests import warm

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("precision-bridge")
H100 = "h100x8,te2.9,cuda12.9,mcore0.19.2"


def run(*arguments: str, folder: Path = ROOT, **environment: str) -> warm.Done:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NVTE_", "ACCELERATE_"))}
    return warm.run([COMMAND, *arguments], cwd=folder, env={**inherited, **environment})


def report(*arguments: str, **more: Any) -> dict[str, Any]:
    done = run("check", *arguments, "--json", **more)
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["exit_code"] == done.returncode
    return told


def test_the_default_run_is_checked_without_torch_and_megatron() -> None:
    code = (
        "import sys\nfrom bridge.cli.main import main\ncode = main(['check'])\n"
        "print([name for name in ('torch', 'megatron', 'transformer_engine') if name in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-3:] == [
        "nothing found",
        f"  megatron-core {get_installed_text('mcore')} ({get_installed_reason(INSTALLED_HERE)}).",
        "[] 0",
    ]


def test_findings_are_told_with_who_set_the_value_and_every_way_out() -> None:
    done = run("check", "mixed_precision=bf16_with_mxfp8_mixed", "mixed_precision.fp8=hybrid", "--target", "b200,te2.9")
    assert done.returncode == 0
    assert done.stdout.startswith("bf16_with_mxfp8_mixed, fp8=hybrid against b200,te2.9\n  gradients: mxfp8 wgrad GEMM")
    assert (
        "warning PB206 mixed_precision.fp8 = 'hybrid' (command line): MXFP8 is meant for 'e4m3' in every operand: "
        "E5M2 gradients were found to diverge.\n    - Use fp8='e4m3'.\n    - Use fp8_recipe='tensorwise' for E5M2 "
        "gradients.\n    source: NVIDIA-NeMo/Megatron-Bridge issue 638, 2025-09-14; legal in Transformer Engine 2.20, "
        "and run in NVIDIA's own CI from megatron-core 0.14 to 0.16 (reported by users or "
        "maintainers in the thread that is named, not reproduced here)\n"
    ) in done.stdout


def test_exit_codes_are_0_1_with_warnings_under_strict_and_2_with_errors() -> None:
    warned = ("mixed_precision.fp8_margin=2", "mixed_precision=bf16_with_fp8_current_scaling_mixed", "--target", H100)
    assert run("check").returncode == 0
    assert run("check", *warned).returncode == 0
    assert run("check", *warned, "--strict").returncode == 1
    assert run("check", *warned, "--strict", "--silence", "PB210=we switch to delayed next week").returncode == 0
    assert run("check", "mixed_precision=bf16_with_nvfp4_mixed", "--target", H100).returncode == 2


def test_all_findings_come_at_once_those_of_the_precision_alone_too() -> None:
    told = report(
        "mixed_precision=bf16_with_fp8_delayed_scaling_mixed",
        "mixed_precision.first_last_layers_bf16=true",
        "mixed_precision.fp8_amax_compute_algo=largest",
        "optimizer.optimizer_cpu_offload=true",
        "--target",
        "a100x3",
    )
    assert {"PB203", "PB263", "PB341", "PB602"} <= {one["id"] for one in told["findings"]}
    assert told["target"] == "a100x3"
    assert told["verdict"] == "error"


def test_a_silenced_finding_is_in_the_report_with_its_reason() -> None:
    told = report(
        "mixed_precision=bf16_with_nvfp4_mixed", "--target", H100, "--silence", "PB602=the cluster arrives in May"
    )
    assert "PB602" not in {one["id"] for one in told["findings"]}
    assert [(one["id"], one["silenced"]) for one in told["silenced"]] == [("PB602", "the cluster arrives in May")]


@pytest.mark.parametrize("name", ["llama3_70b", "deepseek_v3", "nemotron_h"])
def test_a_file_is_checked_against_the_target_it_names(name: str) -> None:
    told = report("--config", f"docs/showcase/{name}.yaml")
    assert told["verdict"] in ("ok", "info")
    assert told["target"].partition("x")[0] in ("h100", "h200", "b200")
    assert report("--config", f"docs/showcase/{name}.yaml", "--target", "a100x64")["verdict"] == "error"


def test_megatron_bridges_yaml_is_checked_as_it_is(tmp_path: Path) -> None:
    dtype = {"_target_": "torch.bfloat16", "_call_": False}
    path = tmp_path / "run_config.yaml"
    run_config = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "mixed_precision": {
            "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
            "bf16": True,
            "params_dtype": dtype,
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 1,
        },
        "model": {"_target_": "x.GPTModelProvider", "num_layers": 8, "hidden_size": 4096, "params_dtype": dtype},
        "optimizer": {"_target_": "x.OptimizerConfig", "use_distributed_optimizer": True},
        "ddp": {"_target_": "x.DistributedDataParallelConfig", "use_distributed_optimizer": True},
        "checkpoint": {"_target_": "x.CheckpointConfig", "save": "/tmp"},  # noqa: S108
        "logger": {"_target_": "x.LoggerConfig"},
    }
    path.write_text(yaml.safe_dump(run_config))
    told = report("--config", str(path), "--target", H100)
    assert {"PB263"} <= {one["id"] for one in told["findings"]}


def test_a_run_folders_config_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "mixed_precision: {fp16: true, params_dtype: fp16}\nmodel: {num_layers: 4, fp16: true, params_dtype: fp16, "
        "hidden_dropout: 0.0, attention_dropout: 0.0}\n"
        "optimizer: {fp16: true, optimizer: muon}\nddp: {check_for_nan_in_grad: false}\n"
    )
    assert {one["id"] for one in report("--config", str(path))["findings"]} == {"PB147"}


def test_auto_is_chosen_for_the_target_and_told() -> None:
    told = report("mixed_precision=auto:fp8", "model.num_layers=4", "--target", "b200x8,te2.8,cuda12.9,mcore0.18")
    assert told["precision"] == "bf16_with_mxfp8_mixed"
    assert told["auto"]["request"] == "auto:fp8"
    assert told["auto"]["reason"] == "it is the FP8 scheme for Blackwell"
    done = run("check", "mixed_precision=auto", "--target", "te2.8")
    assert done.returncode == 2
    assert "declare the target: target=h100x8,te2.8,cuda12.9,mcore0.16." in done.stderr


def test_sarif_has_every_rule_and_a_result_per_finding(tmp_path: Path) -> None:
    path = tmp_path / "check.sarif"
    arguments = ("mixed_precision=bf16_with_nvfp4_mixed", "--target", H100, "--silence", "PB249=known")
    done = run("check", *arguments, "--sarif", str(path))
    log = json.loads(path.read_text())
    (one,) = log["runs"]
    rules = one["tool"]["driver"]["rules"]
    told = report(*arguments)
    assert (log["version"], done.returncode) == ("2.1.0", 2)
    assert [row["ruleId"] for row in one["results"]] == [row["id"] for row in [*told["findings"], *told["silenced"]]]
    for row in one["results"]:
        assert rules[row["ruleIndex"]]["id"] == row["ruleId"]
        assert row["level"] in ("error", "warning", "note")
        location = row["locations"][0]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "conf/config.yaml"
        assert location["logicalLocations"][0]["fullyQualifiedName"]
    (suppressed,) = (row for row in one["results"] if "suppressions" in row)
    assert suppressed["suppressions"] == [{"kind": "external", "justification": "known"}]
    assert all(rule["shortDescription"]["text"] and rule["help"]["text"] for rule in rules)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--target", "h20x8"),
            "target: must be a GPU such as h100x8 or a version such as te2.8, got 'h20x8'. "
            "Did you mean 'h200' or 'gh200'?\n",
        ),
        (
            ("--silence", "PB306"),
            "--silence: needs a reason, got 'PB306'. Write PB306=why it is all right.\n",
        ),
        (
            ("--config-path", "cnf"),
            "--config-path: there is no such folder, got 'cnf'. Did you mean 'conf'?\n",
        ),
        (
            ("--config", "nowhere.yaml"),
            "nowhere.yaml: cannot be read: No such file or directory. Give the path of a file.\n",
        ),
        (
            ("mixed_precision=bf16_mixd",),
            None,
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], message: str | None) -> None:
    done = run("check", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    if message is not None:
        assert done.stderr == message


def test_the_matrix_is_printed_as_text_markdown_and_json() -> None:
    text = run("recipes", "--support")
    markdown = run("recipes", "--support", "--markdown")
    data = json.loads(run("recipes", "--support", "--json").stdout)
    assert data["bf16_with_nvfp4_mixed"]["Hopper 9.0"]["verdict"] == "no"
    assert data["bf16_with_mxfp8_mixed"]["Blackwell 10.0"]["needs"] == {"te": "2.1", "cuda": "12.8"}
    assert markdown.stdout.startswith("| recipe | Volta 7.0 | Turing 7.5 | Ampere 8.0 |")
    assert [word for word in text.stdout.split() if word in data] == list(data)
    one = json.loads(run("recipes", "--support", "--target", "h100,te2.2,cuda12.9", "--json").stdout)
    assert one["recipes"]["bf16_with_fp8_current_scaling_mixed"]["verdict"] == "native"


def test_a_rule_is_explained_by_its_id() -> None:
    done = run("explain", "PB206")
    assert done.stdout == (
        "PB206, warning: format that the scheme was not made for\n"
        "  The finding of a run that breaks it:\n"
        "    warning mixed_precision.fp8: MXFP8 is meant for 'e4m3' in every operand: E5M2 gradients were found to "
        "diverge, got 'hybrid'. Use fp8='e4m3'; or use fp8_recipe='tensorwise' for E5M2 gradients.\n"
        "  Source: NVIDIA-NeMo/Megatron-Bridge issue 638, 2025-09-14; legal in Transformer Engine 2.20, and run in "
        "NVIDIA's own CI from megatron-core 0.14 to 0.16.\n"
        "  Evidence: reported (reported by users or maintainers in the thread that is named, not reproduced here).\n"
        "  Silence it with --silence PB206=REASON; the reason is kept with the run.\n"
    )
    assert json.loads(run("explain", "pb206", "--json").stdout)["id"] == "PB206"
    assert run("explain", "rules").stdout.startswith("PB101  error    more than one mode\n")
    unknown = run("explain", "PB299")
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "Unknown rule 'PB299'. `precision-bridge explain rules` lists them.\n",
    )
