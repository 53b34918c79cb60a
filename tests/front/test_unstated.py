"""A value that nothing states is named as such: no mode is assumed, no verdict rests on it, and each way out works."""

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.cli.main import main
from bridge.front.loader import load_run

SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --vocab-size 96"
RL = f"ray job submit -- python3 train.py {SIZES} --use-precision-aware-optimizer\n"
BRANCHES = f"""
PR=$1
if [ $PR = fp16 ]; then
    options="--fp16"
elif [ $PR = bf16 ]; then
    options="--bf16"
fi
torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} ${{options}}
"""
TARGET = ("--target", "h100x8,te2.9,cuda12.9")


@pytest.fixture
def asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what a command answers about a script: its exit code, what it printed, and its errors."""

    def ask(command: str, script: str, *words: str) -> tuple[int, str, str]:
        file = tmp_path / "run.sh"
        file.write_text(script)
        code = main([*command.split(), "--config", str(file), *words])
        out, error = capsys.readouterr()
        return code, out, error

    return ask


def test_an_unknown_program_decides_the_mode_and_no_error_rests_on_its_defaults(asked: Any) -> None:
    code, out, _ = asked("check", RL, *TARGET)
    assert code == 0
    assert out.startswith("mode not stated (train.py, a program whose defaults are not known here, decides) against")
    assert "fp32" not in out
    assert "\nerror" not in out
    assert "\nwarning" not in out
    assert (
        "info PB346 optimizer.use_distributed_optimizer = False (assumed): cannot be judged: "
        "optimizer.use_distributed_optimizer, ddp.use_megatron_fsdp and ddp.use_custom_fsdp are not known, since "
        "train.py may set them; the rule is about: precision-aware optimizer that is not distributed.\n"
    ) in out
    assert out.endswith(
        "The mode is not stated. Add mixed_precision=bf16_mixed, or another recipe; or add model.bf16=true.\n"
    )


@pytest.mark.parametrize("command", ["plan", "memory", "plan --align", "rehearse", "manifest", "plan --modules"])
def test_commands_that_need_a_mode_refuse_with_one_sentence(asked: Any, command: str) -> None:
    code, out, error = asked(command, RL)
    assert (code, out) == (2, "")
    assert error.removesuffix("\n").endswith(
        "run.sh: the mode is not stated; train.py, a program whose defaults are not known here, decides. Add "
        "mixed_precision=bf16_mixed, or another recipe; or add model.bf16=true."
    )


@pytest.mark.parametrize("word", ["mixed_precision=bf16_mixed", "model.bf16=true"])
def test_each_way_to_state_the_mode_works_and_raises_no_finding_of_its_own(asked: Any, word: str) -> None:
    code, out, _ = asked("check", RL, *TARGET, word, "optimizer.use_distributed_optimizer=true")
    assert code == 0
    assert out.startswith("bf16")
    assert [one for one in ("PB123", "PB124", "PB346") if one in out] == []
    assert asked("plan", RL, word)[0] == 0


def test_the_branches_of_a_script_are_answered_one_after_the_other(asked: Any) -> None:
    code, out, _ = asked("plan", BRANCHES)
    assert code == 0
    headings = [line for line in out.splitlines() if line.startswith("run ")]
    assert headings == [
        "run 1: line 8, pretrain_gpt.py; line 3, not [ $PR = fp16 ]",
        "run 2: line 8, pretrain_gpt.py; line 3, if [ $PR = fp16 ]",
        "run 3: line 8, pretrain_gpt.py; line 5, elif [ $PR = bf16 ]",
    ]
    assert "the mode is not stated; the branch at line 4, which holds --fp16, decides." in out
    assert out.index("fp16, without a recipe") < out.index("bf16, without a recipe")


def test_a_branch_that_trains_without_megatron_core_leaves_the_others_answered(asked: Any) -> None:
    script = (
        "if [ $BACKEND = fsdp ]; then\n  WORDS=(--train-backend fsdp)\nelse\n  WORDS=(--fp16)\nfi\n"
        f"ray job submit -- python3 train.py --hf-checkpoint m --load m_miles/ {SIZES} ${{WORDS[@]}}\n"
    )
    code, out, _ = asked("check", script)
    assert code == 0
    assert out.startswith("fp16, without a recipe against")
    assert "this is run 1, " in out
    refused = "run 2 trains nothing on Megatron Core: line 6, train.py; line 1, if [ $BACKEND = fsdp ]"
    assert f"({refused})" in out
    assert "trains on PyTorch's FSDP" in asked("check", script, "--launch", "2")[2]


def test_json_has_the_branches_below_the_first_run(asked: Any) -> None:
    code, out, _ = asked("check", BRANCHES, *TARGET, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["read"]["mode_decided_by"] == "the branch at line 4, which holds --fp16,"
    assert answer["gradients"] is None
    assert [one["precision"] for one in answer["branches"]] == ["fp16, without a recipe", "bf16, without a recipe"]
    refused = json.loads(asked("memory", BRANCHES, "--json")[1])
    assert "the mode is not stated" in refused["refused"]
    assert [one["parameters"] > 0 for one in refused["branches"]] == [True, True]


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        (("--launch", "2"), "fp16, without a recipe"),
        (("--context", "variables='PR=bf16'"), "bf16, without a recipe"),
        (("--context", "variables=1=bf16", "--launch", "1"), "bf16, without a recipe"),
        (("--context", "variables='options=--bf16'", "--launch", "1"), "bf16, without a recipe"),
        (("--context", "variables='PR=bf16'", "model.num_layers=2"), "bf16, without a recipe"),
        (("model.fp16=true",), "fp16, without a recipe"),
        (("mixed_precision=bf16_mixed",), "bf16_mixed"),
        (("model.bf16=false", "model.fp16=false"), "fp32, without a recipe"),
    ],
)
def test_a_branch_a_variable_or_an_override_chooses_one_answer(
    asked: Any, words: tuple[str, ...], precision: str
) -> None:
    code, out, _ = asked("plan", BRANCHES, *words, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["precision"] == precision
    assert "branches" not in answer


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--launch", "4"),
            "--launch: must be from 1 to 3, the runs of {file}, got 4. Give the number of one of them.",
        ),
        (
            ("--context", "lang=en"),
            "--context: must be variables='NAME=value' or checkpoint=FOLDER, got 'lang=en'. Write one of them.",
        ),
    ],
)
def test_a_run_that_there_is_not_is_refused(asked: Any, tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    assert asked("plan", BRANCHES, *words) == (2, "", sentence.format(file=tmp_path / "run.sh") + "\n")


def test_a_program_of_megatron_lm_with_all_its_arguments_is_in_fp32_by_its_default(asked: Any) -> None:
    code, out, _ = asked("check", f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES}\n", *TARGET)
    assert code == 0
    assert out.startswith("fp32, without a recipe against")


def test_memory_gives_no_verdict_that_rests_on_an_unknown_program(asked: Any) -> None:
    code, out, _ = asked("memory", RL.replace("--use", "--bf16 --use"), *TARGET)
    assert code == 0
    assert "no verdict, since train.py may change what is counted." in out
    assert "are left" not in out
    assert "Rests on values that nothing states: model.tensor_model_parallel_size, " in out


def test_an_error_on_stated_values_stays_one_under_an_unknown_program(asked: Any) -> None:
    script = RL.replace("--use", "--bf16 --tensor-model-parallel-size 3 --use")
    code, out, _ = asked("check", script, *TARGET)
    assert code == 2
    assert "error PB408 model.num_attention_heads = 4 (run.sh): does not divide by TP 3" in out


def test_a_value_that_only_the_run_decides_judges_nothing(asked: Any) -> None:
    script = f"torchrun pretrain_gpt.py --bf16 {SIZES} --tensor-model-parallel-size $TP --sequence-parallel\n"
    code, out, _ = asked("check", script, *TARGET)
    assert code == 0
    assert "model.tensor_model_parallel_size: the value $TP is decided when the run starts" in out
    stated = script.replace("$TP", "3")
    assert asked("check", stated, *TARGET)[0] == 2
    assert asked("check", script, *TARGET, "--context", "variables='TP=3'")[0] == 2


def test_explain_says_what_may_set_a_value(asked: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(RL)
    file = tmp_path / "run.sh"
    assert main(["explain", "bf16", "--config", str(file)]) == 0
    assert f"model.bf16 is not known from {file}: train.py may set it; False is assumed." in capsys.readouterr().out


def test_the_program_decides_before_its_unread_options_and_words_do(asked: Any) -> None:
    script = f"source models.sh\npython3 train.py {SIZES} ${{MODEL_ARGS[@]}} --engine-kv-cache-dtype fp8_e4m3\n"
    assert "(train.py, a program whose defaults are not known here, decides)" in asked("check", script)[1]


def test_the_variable_that_chooses_a_branch_is_offered_and_works(asked: Any) -> None:
    script = BRANCHES.replace("torchrun", 'if [ $AC = full ]; then more="--recompute-activations"; fi\ntorchrun')
    script = script.replace("${options}", "${more} ${options}")
    _, out, _ = asked("check", script)
    assert "add --context variables='PR=VALUE'" in out
    answer = json.loads(asked("plan", script, "--context", "variables='PR=bf16'", "--json")[1])
    assert answer["precision"] == "bf16, without a recipe"


def test_an_option_that_is_not_read_does_not_open_what_is_stated(asked: Any) -> None:
    layout = "--bf16 --tensor-model-parallel-size 3 --pipeline-model-parallel-size 2 --allgather-cp"
    code, out, _ = asked("check", f"python3 train.py {SIZES} {layout}\n", *TARGET)
    assert code == 2
    assert "error PB408 model.num_attention_heads = 4 (run.sh): does not divide by TP 3" in out


def test_a_value_of_a_wrong_type_is_no_value_that_the_run_decides(asked: Any) -> None:
    script = f"torchrun pretrain_gpt.py --bf16 {SIZES}\n".replace("--num-layers 4", "--num-layers abc")
    code, out, _ = asked("check", script)
    assert code == 2
    assert "error PB121 model.num_layers = 'abc' (run.sh): must be a whole number" in out
    assert "is decided when the run starts" not in out


def test_a_recipe_of_a_program_has_no_default_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "python scripts/training/run_recipe.py --recipe llama3_8b_pretrain_mxfp8_config train.train_iters=10\n"
    )
    assert main(["convert", str(file), "--assume-defaults"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mode: not stated; the recipe llama3_8b_pretrain_mxfp8_config decides\n")
    assert "--assume-defaults" not in out
    assert "fp32" not in out


FSDP = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --bf16 --use-megatron-fsdp --hidden-dropout 0\n"


@pytest.mark.parametrize(
    ("words", "first", "target"),
    [
        ((), "megatron-core 0.20 assumed", "megatron-core 0.20 assumed"),
        (("--target", "h100x8"), "H100x8, megatron-core 0.20 assumed", "H100x8, megatron-core 0.20 assumed"),
        (("--target", "h100x8,mcore0.20"), "H100x8,mcore0.20", "H100x8,mcore0.20"),
    ],
)
def test_a_release_that_nothing_states_is_shown_as_assumed(asked: Any, words: Any, first: str, target: str) -> None:
    _, out, _ = asked("check", FSDP, *words)
    assert out.splitlines()[0].lower().endswith(f"against {first}".lower())
    (finding,) = [line for line in out.splitlines() if "PB328" in line]
    is_assumed = target.endswith("assumed")
    assert ("the release is not stated, and 0.20 is assumed" in finding) is is_assumed
    assert finding.startswith("info" if is_assumed else "warning")
    assert "does not say which" not in finding
    assert json.loads(asked("check", FSDP, *words, "--json")[1])["target"].lower() == target.lower()


def test_an_origin_is_open_until_somebody_states_the_value(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    layout = "--bf16 --tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 --allgather-cp"
    file.write_text(f"torchrun pretrain_gpt.py {SIZES} {layout}\n")
    paths = ("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.qk_layernorm")
    run = load_run(config_file=file)
    assert [run.origin_of(path) for path in paths] == ["open", "run.sh", "default"]
    run = load_run([f"{paths[0]}=2"], config_file=file)
    assert run.origin_of(paths[0]) == "command line"
