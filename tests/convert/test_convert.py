"""`precision-bridge convert`, as people call it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.cli.main import main
from bridge.convert.systems import SYSTEM_MODULES
from bridge.read.text.document import Document

SAMPLES = Path(__file__).parents[1] / "read" / "samples"


def convert(capsys, *words: object) -> tuple[int, str, str]:
    code = main(["convert", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def as_json(capsys, *words: object) -> Any:
    code, out, err = convert(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_json_has_source_semantics_config_payload_and_losses(capsys) -> None:
    told = as_json(capsys, SAMPLES / "gpt_arrays.sh", "--to", "megatron-bridge")
    assert {"source", "semantics", "config", "payload", "losses"} <= set(told)
    assert told["source"]["system"] == "megatron-lm"
    assert told["source"]["recipe"] == "bf16_with_fp8_delayed_scaling_mixed"
    assert told["source"]["evidence"].startswith("has --fp8-format")
    assert told["semantics"] == "megatron_o2"
    assert told["config"]["fp8_recipe"] == "delayed"
    assert told["payload"]["mixed_precision"]["fp8_recipe"] == "delayed"
    assert {"field", "value", "reason", "detail", "remedy", "on"} == set(told["losses"][0])


def test_several_runs_are_all_in_the_json(capsys) -> None:
    told = as_json(capsys, SAMPLES / "several.sh", "--to", "recipe")
    assert [run["source"]["recipe"] for run in told["runs"]] == ["fp16_mixed", None, None, None]
    assert told["runs"][1]["decided_by"] == "--$dtype, which only the run knows,"
    assert told["config"] == told["runs"][0]["config"]


def test_the_payload_is_on_stdout_and_the_report_on_stderr(capsys) -> None:
    code, out, err = convert(capsys, SAMPLES / "conf_only.sh", "--to", "nemo1")
    assert code == 0
    assert yaml.safe_load(out)["model"]["megatron_amp_O2"] is True
    assert err.splitlines() == [
        "recipe: bf16_mixed",
        f"{SAMPLES / 'conf_only.sh'}: Megatron-LM; it has --accumulate-allreduce-grads-in-fp32, --num-layers, which "
        "Megatron-LM's parser reads.",
        "run: arguments in MODEL_ARGS",
        "semantics: megatron_o2: half-precision weights everywhere, FP32 master weights in the optimizer",
        *err.splitlines()[4:],
    ]
    _, _, verbose = convert(capsys, SAMPLES / "conf_only.sh", "--to", "nemo1", "-v")
    assert "  grad_reduce_in_fp32=True" in verbose.splitlines()


def test_the_report_begins_with_the_nearest_recipe_and_groups_what_is_lost(capsys) -> None:
    _, out, _ = convert(capsys, SAMPLES / "axolotl" / "fp8_fsdp2.yaml")
    lines = out.splitlines()
    assert lines[0].startswith(
        "recipe: none means the same; the nearest is bf16_with_fp8_current_scaling_mixed, but grad_reduce_in_fp32=False"
    )
    heads = [line for line in lines if line.endswith("):")]
    assert heads == ["losses that change what a run computes (2):", "nearest settings taken (2):"]
    assert lines[-1].startswith("defaults that decide, and settings without an effect (-v explains them): ")


@pytest.mark.parametrize("to", [*SYSTEM_MODULES, "recipe"])
def test_every_system_can_be_written_or_says_that_it_cannot(to: str, capsys) -> None:
    code, out, err = convert(capsys, SAMPLES / "model_config.yaml", "--to", to)
    assert code in (0, 2)
    if code == 2:
        assert err.startswith("--to: ")
    else:
        assert "Traceback" not in err
        assert out


def test_out_writes_the_payload_and_it_reads_back(tmp_path: Path, capsys) -> None:
    code, out, err = convert(capsys, SAMPLES / "moe_args.yaml", "--to", "megatron-lm", "--out", tmp_path / "args.sh")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"wrote {tmp_path / 'args.sh'}"
    assert as_json(capsys, tmp_path / "args.sh", "--to", "recipe")["source"]["recipe"] == "bf16_with_mxfp8_mixed"


def test_context_says_what_the_file_cannot(capsys, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": "auto"}, "zero_optimization": {}}')
    told = as_json(capsys, file, "--to", "megatron-lm", "--context", "auto=bf16", "num_layers=4")
    assert told["config"]["bf16"] is True
    code, _, err = convert(capsys, file, "--to", "recipe", "--context", "atuo=bf16")
    assert (code, err) == (2, "--context: 'atuo' is no key of deepspeed. Did you mean 'auto'?\n")
    code, _, err = convert(capsys, file, "--to", "recipe", "--context", "2.0")
    assert (code, err) == (2, "--context: must be KEY=VALUE, got '2.0'. Write auto=bf16, for example.\n")


def test_variables_decide_branches(capsys) -> None:
    told = as_json(
        capsys, SAMPLES / "branches.sh", "--to", "recipe", "--context", "variables=USE_FP8=0 PRECISION=fp16 1=0"
    )
    assert "runs" not in told
    assert told["config"]["fp16"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["missing.sh", "--to", "recipe"],
            "missing.sh: cannot be read: No such file or directory. Give the path of a file.\n",
        ),
        (
            ["bad.yaml", "--to", "recipe"],
            "bad.yaml, line 2: the key 'bf16' must not stand twice in one mapping. Keep one of the two.\n",
        ),
        (
            ["ok.yaml", "--to", "megatorn-lm"],
            "no system is called 'megatorn-lm'. Did you mean 'megatron-lm' or 'megatron-bridge'?\n",
        ),
        (
            ["ok.yaml", "--to", "recipe", "--out", "no/such/place"],
            "--out: cannot be written (no such file or directory), got 'no/such/place'. Give another file.\n",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(words, message: str, capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("bf16: 1\nbf16: 2\n")
    Path("ok.yaml").write_text("mixed_precision: bf16_mixed\n")
    assert convert(capsys, *words) == (2, "", message)


def test_documents_of_one_file_are_runs(capsys, tmp_path: Path) -> None:
    (tmp_path / "runs.yaml").write_text("mixed_precision: bf16_mixed\n---\nmixed_precision: fp16_mixed\n")
    told = as_json(capsys, tmp_path / "runs.yaml", "--to", "deepspeed")
    assert [run["source"]["run"] for run in told["runs"]] == ["document 1", "document 2"]
    assert [run["payload"]["fp16"]["enabled"] for run in told["runs"]] == [False, True]


def test_convert_imports_no_framework() -> None:
    code = (
        "import sys\nfrom bridge.cli.main import main\n"
        f"main(['convert', {str(SAMPLES / 'gpt_arrays.sh')!r}, '--to', 'megatron-bridge', '--json'])\n"
        "frameworks = ('torch', 'megatron', 'transformers', 'numpy', 'omegaconf')\n"
        "print([name for name in frameworks if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "sample", sorted(path.name for path in SAMPLES.iterdir() if path.is_file() and path.stem != "te_precision")
)
def test_every_sample_converts(sample: str, capsys) -> None:
    told = as_json(capsys, SAMPLES / sample, "--to", "recipe")
    assert told["config"]
    assert Document.from_text(yaml.safe_dump(told["config"]), "r.yaml").content == told["config"]


def test_the_session_in_the_documentation_is_a_real_one(capsys, tmp_path: Path, monkeypatch) -> None:
    page = (Path(__file__).parents[2] / "docs/howto/convert.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(page.partition("```sh\n")[2].partition("```")[0])
    Path("ds.json").write_text('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}')
    Path("args.yaml").write_text("bf16: true\n")
    first, second, _, strict = page.split("```console\n")[1:]
    for session, exit_code in ((first, 0), (second, 2), (strict, 1)):
        command, _, shown = session.partition("```")[0].partition("\n")
        code, out, err = convert(capsys, *command.removeprefix("$ precision-bridge convert ").split())
        assert (code, err + out) == (exit_code, shown)


def test_a_mode_that_only_a_default_would_decide_is_not_stated(capsys, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}')
    code, out, err = convert(capsys, tmp_path / "ds.json", "--json")
    read = json.loads(out)
    assert (code, err, read["mode"], read["payload"], read["semantics"]) == (0, "", None, None, "unstated")
    code, out, err = convert(capsys, tmp_path / "ds.json", "--to", "megatron-lm")
    assert (code, out) == (2, "")
    assert "the precision must be stated; the layer above" in err.splitlines()[-1]
    read = as_json(capsys, tmp_path / "ds.json", "--to", "recipe", "--assume-defaults")
    assert (read["mode"], read["decided_by"], read["config"]["fp32"]) == ("fp32", None, True)
    assert [loss["reason"] for loss in read["losses"] if loss["field"] == "mode"] == ["implied default"]
    assert as_json(capsys, tmp_path / "ds.json", "--to", "recipe", "--context", "auto=fp16")["mode"] == "fp16"


STRICT = {
    ("huggingface", "bf16", "megatron-bridge"): "autocast_enabled=True",
    ("huggingface", "bf16", "nemo2"): "autocast_enabled=True",
    ("huggingface", "bf16", "megatron-lm"): "autocast_dtype='bf16', autocast_enabled=True",
    ("megatron-bridge", "fp16_mixed", "huggingface"): "fp16=True, params_dtype='fp16', grad_reduce_in_fp32=False, "
    "initial_loss_scale=4294967296, loss_scale_window=1000, hysteresis=2",
    ("megatron-bridge", "bf16_mixed", "deepspeed"): "",  # and ZeRO stage 1, under which the numbers do not change
    ("megatron-bridge", "bf16_mixed", "megatron-lm"): "",
    ("megatron-bridge", "bf16_mixed", "recipe"): "",
    ("huggingface", "bf16", "huggingface"): "",
}
"""System, recipe and target -> settings that `--strict` names."""
FOLLOW = "Follow the remedies of the report, or convert without --strict."


@pytest.mark.parametrize("case", STRICT, ids=" ".join)
def test_strict_exits_1_and_names_what_is_lost(case: tuple[str, str, str], capsys, tmp_path: Path, monkeypatch) -> None:
    system, recipe, target = case
    monkeypatch.chdir(tmp_path)
    content = {"mixed_precision": recipe} if system == "megatron-bridge" else {"bf16": True, "tf32": True}
    Path("in.yaml").write_text(yaml.safe_dump(content))
    words = ("in.yaml", "--from", system, "--to", target)
    named = STRICT[case]
    code, out, err = convert(capsys, *words, "--strict")
    plain_code, payload, report = convert(capsys, *words)
    line = f"in.yaml: precision is lost for {target}: {named}. {FOLLOW}\n" if named else ""
    assert (code, out, err) == (int(bool(named)), "" if named else payload, report + line)
    assert (plain_code, bool(payload)) == (0, True)
    assert convert(capsys, *words, "--strict", "--out", "out.txt")[0] == code
    assert Path("out.txt").exists() is not bool(named), "a payload that loses precision is not written"
    code_json, out, err = convert(capsys, *words, "--strict", "--json")
    assert (code_json, err) == (code, line)
    assert json.loads(out)["lost"] == [setting.partition("=")[0] for setting in named.split(", ") if setting]


def test_strict_reads_too_what_no_recipe_holds(capsys, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"bf16": true, "torch_dtype": "float32", "load_in_4bit": true}')
    code, _, err = convert(capsys, tmp_path / "a.json", "--strict", "--from", "huggingface")
    assert code == 1
    assert err.endswith(f"precision is lost: load_in_4bit=True. {FOLLOW}\n")


def test_a_key_of_the_context_is_given_once(capsys) -> None:
    words = ("--context", "variables=A=1", "variables=A=2")
    code, _, err = convert(capsys, SAMPLES / "conf_only.sh", "--to", "nemo1", *words)
    assert (code, err) == (
        2,
        "--context: variables must be given once, got it again as 'A=2'. Keep one of the two.\n",
    )
