"""The mode of a launch: stated by the script, or the default of a program whose whole command is there, or neither."""

import os
import re
import signal
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from bridge.cli.main import main
from bridge.convert.conversion import ImportedRun, convert, import_runs
from bridge.errors import PayloadError
from bridge.precision.mode import get_mode
from bridge.read.text.document import Document

WHOLE = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8"


def only(text: str, path: str = "run.sh", **context: object) -> ImportedRun:
    (run,) = import_runs(Document.from_text(f"#!/bin/bash\n{text}\n", path), None, context)
    return run


def test_the_default_of_a_whole_command_decides_and_is_recorded() -> None:
    run = only(WHOLE)
    assert (get_mode(run.imported.config), run.imported.decided_by, run.imported.semantics) == ("fp32", None, "fp32")
    assert [entry.field for entry in run.imported.unmapped if entry.reason == "implied default"] == ["--bf16"]


@pytest.mark.parametrize(
    ("text", "decided_by"),
    [
        (f"source conf.sh\n{WHOLE}", "conf.sh, which the script sources,"),
        (f"{WHOLE} $EXTRA_ARGS", "$EXTRA_ARGS, which only the run knows,"),
        (f'{WHOLE} "$@"', "$@, which only the run knows,"),
        (f"{WHOLE} --yaml-cfg a.yaml", "--yaml-cfg a.yaml"),
        (f"{WHOLE} --dtype bf16", "--dtype, which is no flag of Megatron-LM's,"),
        (WHOLE.replace("pretrain_gpt", "train"), "train.py, a program whose defaults are not known here,"),
        ('ARGS="--num-layers 2 --hidden-size 8"', "the script that uses these arguments"),
    ],
)
def test_elsewhere_the_mode_is_not_stated_and_what_decides_is_named(text: str, decided_by: str) -> None:
    run = only(text)
    assert (run.imported.decided_by, run.imported.semantics, run.imported.recipe) == (decided_by, "unstated", None)
    with pytest.raises(PayloadError, match="the precision must be stated; .* decides it") as caught:
        convert(run, "recipe")
    assert "the log of a run" in str(caught.value)
    assert get_mode(run.imported.assume_default().config) == "fp32"


DEEP = 'case "$D" in gpu) if [ "$H" = h100 ]; then if [ -n "$F" ]; then A="--bf16 --fp8-format hybrid"; fi; fi;; esac'
MANY = "\n".join(f'[ "$P{place}" = m ] && A="$A --fp8-margin {place}"' for place in range(80))
CANNOT_BE_READ = ': "${E:=$(( (24576 + ${G} - 1) / ${G} ))}"'


@pytest.mark.parametrize(
    ("text", "decided_by"),
    [
        (DEEP, "the branch at line 2, which holds --bf16,"),
        (f'{MANY}\n[ "$F" = fp8 ] && A="$A --bf16"', "the branch at line 82, which holds --bf16,"),
        ('if nvidia-smi | grep -q H100; then\nA+=" --bf16"; fi', "the branch at line 3, which holds --bf16,"),
        ('read P; [ "$P" = bf16 ] && A="--fp16"', "the branch at line 2, which holds --fp16,"),
        (
            "while [ $# -gt 0 ]; do case $1 in\n--p) A=--bf16;; esac; shift; done",
            "the branch at line 3, which holds --bf16,",
        ),
        ('A="${P:+--bf16}"', "${P:+--bf16}, which only the run knows,"),
        ("f() { A=--bf16; }", "line 2, which holds --bf16,"),
    ],
)
def test_text_that_is_not_executed_and_states_a_precision_leaves_the_mode_open(text: str, decided_by: str) -> None:
    first, *others = import_runs(Document.from_text(f"#!/bin/bash\n{text}\n{WHOLE} $A\n", "run.sh"))
    assert first.imported.decided_by == decided_by
    assert all(get_mode(run.imported.config) in ("bf16", "fp16") or run.imported.decided_by for run in others)
    with pytest.raises(PayloadError, match=re.escape(f"{decided_by} decides it")):
        convert(first, "megatron-lm")


@pytest.mark.parametrize(
    "text",
    [
        "# --bf16",
        "if [ -z $A ]; then echo use --bf16; fi",
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8 --bf16",
        CANNOT_BE_READ,
    ],
)
def test_a_comment_a_message_another_launch_and_an_unread_line_leave_no_mode_open(text: str) -> None:
    runs = import_runs(Document.from_text(f"#!/bin/bash\n{text}\n{WHOLE}\n", "run.sh"))
    assert (get_mode(runs[-1].imported.config), runs[-1].imported.decided_by) == ("fp32", None)


@pytest.mark.parametrize(
    "text",
    [
        "# Megatron-LM\npython prepare.py --num-layers 2",
        "cd Megatron-LM\npytest tests/unit_tests",
        "python pretrain_nemorun.py --max-steps 10",
        "python tools/checkpoint/convert.py --model-type GPT --target-tensor-parallel-size 2",
    ],
)
def test_a_word_or_one_shared_flag_makes_no_script_megatrons(text: str) -> None:
    with pytest.raises(PayloadError, match=r"^run\.sh: "):
        import_runs(Document.from_text(f"#!/bin/bash\n{text}\n", "run.sh"))


def test_a_misspelt_flag_gets_the_nearest_name() -> None:
    run = only(f"{WHOLE} --bf16 --fp8-fromat hybrid")
    (entry,) = [entry for entry in run.imported.unmapped if entry.field == "--fp8-fromat"]
    assert entry.remedy == "Did you mean '--fp8-format'?"


def test_a_file_beside_that_is_sourced_is_read(tmp_path: Path) -> None:
    (tmp_path / "common.sh").write_text('ARGS="--bf16 --fp8-format hybrid"\n')
    script = f'#!/bin/bash\nHERE=$(dirname "$0")\nsource "$HERE/common.sh"\n{WHOLE} $ARGS\n'
    (tmp_path / "run.sh").write_text(script)
    (run,) = import_runs(Document.load(tmp_path / "run.sh"))
    assert (run.imported.config.fp8, run.imported.decided_by) == ("hybrid", None)


def test_the_name_of_a_recipe_is_read_and_fields_go_over_it() -> None:
    run = only("python train.py mixed_precision=bf16_mixed mixed_precision.grad_reduce_in_fp32=false")
    assert (run.system.name, get_mode(run.imported.config)) == ("megatron-bridge", "bf16")
    assert run.imported.config.grad_reduce_in_fp32 is False


@pytest.mark.parametrize("switch", ["--bf16", "--fp16"])
def test_a_lone_switch_of_an_unknown_program_names_no_system(switch: str) -> None:
    helper = f"python inference.py --output_dir out --batch_size=8 {switch}"
    with pytest.raises(PayloadError, match="line 2, inference.py: no system here knows the program's arguments"):
        only(helper)
    for known in (f"pretrain_gpt.py {switch}", f"inference.py {switch} --tokenizer-type GPT2BPETokenizer"):
        assert get_mode(only(f"python {known}").imported.config) == switch.removeprefix("--")


def test_the_command_of_a_job_that_ray_submits_is_a_launch() -> None:
    run = only("ray job submit --address=a -- python3 train.py --bf16 --fp8-format hybrid")
    assert (run.imported.label, run.imported.config.fp8) == ("line 2, train.py", "hybrid")


@pytest.mark.parametrize("override", ["grad_reduce_in_fp32=false", "fp8_recipe=mxfp8"])
def test_overrides_of_a_recipe_that_is_not_read_state_no_mode(override: str) -> None:
    run = only(f"python run_recipe.py --recipe llama3_8b_pretrain_config mixed_precision.{override}")
    found = run.system.name, run.imported.decided_by, run.imported.semantics
    assert found == ("megatron-bridge", "the recipe llama3_8b_pretrain_config", "unstated")
    assert run.imported.config.stated == {override.partition("=")[0]}


@pytest.mark.parametrize(
    ("program", "decided_by"),
    [
        ("deepspeed main.py", "main.py, which reads these arguments,"),
        ("swift sft", "ms-swift, which chooses by torch_dtype,"),
        ("swift sft --deepspeed zero2", "ms-swift, which chooses by torch_dtype, or DeepSpeed's own configuration"),
    ],
)
def test_the_program_that_reads_a_trainers_arguments_is_named(program: str, decided_by: str) -> None:
    imported = only(f"{program} --output_dir out --per_device_train_batch_size 8").imported
    assert (imported.decided_by, imported.mode_is_stated) == (decided_by, False)


@pytest.mark.parametrize("program", ["swift sft", "swift rlhf --deepspeed zero2", "torchrun swift/cli/sft.py"])
@pytest.mark.parametrize(("dtype", "switch"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp16")])
def test_ms_swift_turns_on_the_switch_of_its_torch_dtype(program: str, dtype: str, switch: str) -> None:
    imported = only(f"{program} --torch_dtype {dtype} --output_dir out --per_device_train_batch_size 8").imported
    (record,) = [one for one in imported.unmapped if one.field == "--torch_dtype"]
    assert (record.reason, record.value) == ("implied default", dtype)
    assert switch in (get_mode(imported.config), imported.config.to_dict().get("autocast_dtype"))
    assert imported.mode_is_stated


def test_ms_swifts_megatron_is_not_read_with_the_switches_of_megatron_lm() -> None:
    with pytest.raises(PayloadError, match=r"looks like ms-swift \(it starts `megatron rlhf`\)"):
        only("megatron rlhf --external_plugins plugin.py --bf16 true --tensor_model_parallel_size 2")


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ('P=none\nif [ "$P" = bf16 ]; then A=--bf16; fi', [None]),
        ('P=fp16\n[ "$P" = bf16 ] && A=--bf16 || A=--fp16', ["fp16"]),
        ('P=${P:-none}\nif [ "$P" = bf16 ]; then A=--bf16; fi', [None, "bf16"]),
        ('for P in none bf16; do [ "$P" = bf16 ] && A=--bf16; done', [None, "bf16"]),
        (
            "P=${P:-bf16}\nif [ $P = fp16 ]; then A=--fp16; elif [ $P = bf16 ]; then A=--bf16; fi",
            ["bf16", "fp16", None],
        ),
    ],
)
def test_the_mode_of_a_script_whose_branches_test_a_value(text: str, modes: list[str | None]) -> None:
    found = [
        run.imported for run in import_runs(Document.from_text(f"#!/bin/bash\nA=\n{text}\n{WHOLE} $A\n", "run.sh"))
    ]
    assert [get_mode(one.config) if one.mode_is_stated else None for one in found] == modes


# -- what the run itself printed ---------------------------------------------------------------------------------------


def printed(prefix: str = "", **arguments: object) -> str:
    """A block as Megatron-LM's `_print_args` writes it."""
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(arguments.items())]
    lines += ["-------------------- end of arguments ---------------------"]
    return "".join(f"{prefix}{line}\n" for line in ["using world size: 8", *lines, "> building datasets"])


BLOCK = {
    "accumulate_allreduce_grads_in_fp32": True,
    "bf16": True,
    "fp16": False,
    "fp8": "hybrid",
    "fp8_recipe": "blockwise",
    "loss_scale": None,
    "main_grads_dtype": "torch.float32",
    "num_layers": 2,
    "params_dtype": "torch.bfloat16",
}


@pytest.mark.parametrize("prefix", ["", "0: ", "[default0]:", "2026-01-02 10:00:00 [rank0]: "])
def test_printed_arguments_are_the_run(prefix: str) -> None:
    (run,) = import_runs(Document.from_text(printed(prefix, **BLOCK), "out.log"))
    assert (get_mode(run.imported.config), run.imported.config.fp8_recipe) == ("bf16", "blockwise")
    assert (run.imported.recipe, run.imported.unmapped) == ("bf16_with_fp8_subchannel_scaling_mixed", ())


def test_printed_arguments_state_fp32_too() -> None:
    (run,) = import_runs(Document.from_text(printed(bf16=False, fp16=False, num_layers=2), "slurm-1.out"))
    assert (get_mode(run.imported.config), run.imported.decided_by) == ("fp32", None)


def test_an_incomplete_block_states_what_it_shows() -> None:
    for arguments in ({"num_layers": 2}, {"fp8": None, "num_layers": 2}):
        (run,) = import_runs(Document.from_text(printed(**arguments), "out.log"))
        assert run.imported.decided_by == "the rest of the log, since the block of arguments is incomplete,"
    for arguments, mode in (
        ({"bf16": False}, None),
        ({"bf16": False, "fp16": False}, "fp32"),
        ({"bf16": True}, "bf16"),
    ):
        text = printed(**arguments).partition("------ end of")[0].rpartition("\n")[0]
        imported = import_runs(Document.from_text(text, "out.log"))[0].imported
        assert (get_mode(imported.config) if imported.mode_is_stated else None) == mode
        assert ("arguments" in [entry.field for entry in imported.unmapped]) is (mode is not None)


def test_each_start_in_a_log_is_a_run_and_a_long_log_is_read(tmp_path: Path, capsys) -> None:
    text = printed(**BLOCK) + printed(**{**BLOCK, "fp8": None}) + printed(**BLOCK)
    (tmp_path / "out.log").write_text(text + "iteration 1\n" * 100_000)
    assert [run.imported.config.fp8 for run in import_runs(Document.load(tmp_path / "out.log"))] == ["hybrid", None]
    assert main(["convert", str(tmp_path / "out.log"), "--to", "megatron-lm"]) == 0
    assert "--fp8-recipe blockwise" in capsys.readouterr().out


# -- what a checkpoint holds -------------------------------------------------------------------------------------------


class Malicious:
    """Runs a command where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


def saved(path: Path, **content: object) -> Path:
    torch.save(content, path)
    return path


def test_the_arguments_in_a_checkpoint_are_the_run(tmp_path: Path) -> None:
    arguments = Namespace(**BLOCK | {"params_dtype": torch.bfloat16, "exit_signal": signal.SIGTERM})
    (run,) = import_runs(Document.load(saved(tmp_path / "common.pt", args=arguments, iteration=3)))
    assert (get_mode(run.imported.config), run.imported.config.fp8_recipe) == ("bf16", "blockwise")
    assert run.evidence == "is a checkpoint with the arguments of Megatron-LM"


def test_a_checkpoint_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "common.pt", args=Namespace(bf16=True), other=Malicious(tmp_path / "made"))
    with pytest.raises(PayloadError, match=r"common\.pt: a checkpoint must not name \w+\.mkdir\. "):
        Document.load(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [{"iteration": 3}, {"args": {"bf16": True}}])
def test_a_checkpoint_without_arguments_says_so(content: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="must hold `args` of Megatron-LM"):
        Document.load(saved(tmp_path / "common.pt", **content))


def test_a_damaged_checkpoint_is_one_sentence() -> None:
    with pytest.raises(PayloadError, match=r"^common\.pt: must be a file of torch\.save, got \w+\. "):
        Document.from_bytes(b"PK\x03\x04 and no more", "common.pt")
