"""Words of a launch that Megatron-LM's parser refuses or takes otherwise: check and convert say the same of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.cli.main import main
from bridge.front.loader import load_run
from bridge.read.launch.shell_word import ShellWord
from bridge.read.megatron_lm.importer import import_
from bridge.read.megatron_lm.parser_refusals import find_refusals
from bridge.read.megatron_lm.written_arguments import parse_runs

SIZES = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --vocab-size 1024 --hidden-dropout 0 --attention-dropout 0"
)
ALONE = "Megatron-LM's parser takes no value after it and refuses to start; it is read as {state}"
NO_NEGATION = "Megatron-LM's parser has no such flag and refuses to start; {flag} stays as it is"


def launch(words: str, program: str = "pretrain_gpt.py") -> str:
    return f"torchrun --nproc-per-node 8 {program} {SIZES} {words}\n"


@pytest.fixture
def asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the exit code of a check of a script, and its answer."""

    def ask(script: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "run.sh"
        file.write_text(script)
        code = main(["check", "--config", str(file), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return ask


@pytest.mark.parametrize(
    ("words", "option", "value", "rule"),
    [
        ("--bf16=True", "--bf16", "True", ALONE.format(state="on")),
        ("--bf16 true", "--bf16", "true", ALONE.format(state="on")),
        ("--bf16 --use-distributed-optimizer=1", "--use-distributed-optimizer", "1", ALONE.format(state="on")),
        ("--bf16 --swiglu false", "--swiglu", "false", ALONE.format(state="off")),
        ("--bf16 --no-bf16", "--no-bf16", True, NO_NEGATION.format(flag="--bf16")),
        (
            "--bf16 --no-sequence-parallel",
            "--no-sequence-parallel",
            True,
            NO_NEGATION.format(flag="--sequence-parallel"),
        ),
    ],
)
def test_a_word_that_the_parser_refuses_is_an_error_of_check_in_the_words_of_convert(
    asked: Any, words: str, option: str, value: Any, rule: str
) -> None:
    code, answer = asked(launch(words))
    (found,) = [one for one in answer["findings"] if one["id"] == "PB134"]
    assert (code, found["severity"], found["path"], found["value"], found["rule"]) == (2, "error", option, value, rule)
    assert answer["precision"].startswith("bf16")
    (record,) = [one for one in import_(_words(words)).unmapped if one.field == option]
    assert record.detail.replace(" 0.20", "") == rule


def _words(words: str) -> list[str]:
    return [*SIZES.split(), *words.split()]


def test_under_a_program_of_which_the_parser_is_not_known_a_refused_word_is_a_warning(asked: Any) -> None:
    code, answer = asked(launch("--bf16=True", "train_mine.py"))
    (found,) = [one for one in answer["findings"] if one["id"] == "PB134"]
    assert (code, found["severity"]) == (0, "warning")


@pytest.mark.parametrize(
    "words",
    [
        "--bf16 --no-rope-fusion --no-bias-swiglu-fusion --disable-bias-linear",
        "--bf16 --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion",
        "--bf16 --attention-backend auto --split 1",
        "--bf16 $EXTRA",
        "--bf16 --my-own-switch true --no-own-thing",
    ],
)
def test_words_that_the_parser_takes_or_that_are_a_forks_own_are_not_refused(asked: Any, words: str) -> None:
    _, answer = asked(launch(words))
    assert [one for one in answer["findings"] if one["id"] == "PB134"] == []


def test_a_misspelt_option_is_a_warning_with_the_argument_that_is_meant(asked: Any) -> None:
    code, answer = asked(launch("--bf16 --fp8-formt hybrid"))
    (found,) = [one for one in answer["findings"] if one["id"] == "PB134"]
    assert (code, found["severity"], found["path"], found["value"]) == (0, "warning", "--fp8-formt", "hybrid")
    assert "Write --fp8-format" in str(found)


def test_keys_of_an_argument_file_have_values_and_are_not_refused() -> None:
    (run,) = parse_runs({"MODEL_ARGS": {"--bf16": True, "--swiglu": True, "--no-bf16": False}})
    assert find_refusals(run) == []
    (run,) = parse_runs([ShellWord("--bf16"), ShellWord("false")])
    assert [one.setting for one in find_refusals(run)] == ["--bf16"]


KEPT = "--grad-reduce-in-bf16"
WANTED = "--accumulate-allreduce-grads-in-fp32"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"--bf16 {KEPT} {WANTED}", False),
        (f"--bf16 {WANTED} {KEPT}", False),
        (f"--bf16 {KEPT}", False),
        (f"--bf16 {WANTED}", True),
        ("--bf16", True),
        (f"--fp16 {WANTED} {KEPT}", True),
        (f"--fp16 {KEPT}", False),
    ],
)
def test_check_and_convert_reduce_gradients_as_the_parser_does(tmp_path: Path, words: str, expected: bool) -> None:
    (tmp_path / "run.sh").write_text(launch(words))
    run = load_run([], config_file=tmp_path / "run.sh")
    values = run.prediction.values["ddp"]
    assert bool(values["grad_reduce_in_fp32"]) is expected
    assert import_(_words(words)).config.grad_reduce_in_fp32 is expected
