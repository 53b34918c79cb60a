"""Megatron-LM under DeepSpeed: the engine's file decides, and is named."""

from pathlib import Path

import pytest

from bridge.convert.conversion import import_runs
from bridge.errors import PayloadError
from bridge.front.loader import load_run
from bridge.precision.mode import get_mode
from bridge.preflight.rule_check import check
from bridge.read.foreign.reports import ImportReport
from bridge.read.megatron_lm import importer as megatron_lm
from bridge.read.text.document import Document
from tests.read.properties import reasons

RUN = "deepspeed pretrain_gpt.py --num-layers 2 --fp16 --deepspeed"
BLOCK = (
    '"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 500, "hysteresis": 3}'
)
SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def only(script: str) -> ImportReport:
    (run,) = megatron_lm.import_all(Document.from_text(script, "run.sh"))
    return run


def written(block: str) -> str:
    return f'cat <<EOT > ds.json\n{{{block}, "train_batch_size": $GBS, "zero_optimization": {{"stage": 1}}}}\nEOT\n'


@pytest.mark.parametrize("options", ["--deepspeed_config ds.json", "--deepspeed_config=$FILE", ""])
def test_what_the_engines_file_decides_is_left_open(options: str) -> None:
    run = only(f"{RUN} {options}")
    assert (get_mode(run.config), run.recipe) == ("fp16", None)
    assert not {*SCALE, "grad_reduce_in_fp32"} & run.config.stated
    (loss,) = [loss for loss in run.unmapped if loss.field.startswith("--deepspeed")]
    assert loss.reason == "unsupported"


def test_arguments_of_megatrons_own_scaler_are_dead_under_the_engine() -> None:
    run = only(f"{RUN} --deepspeed_config ds.json --loss-scale 15 --hysteresis 2 --accumulate-allreduce-grads-in-fp32")
    for option in ("--loss-scale", "--hysteresis", "--accumulate-allreduce-grads-in-fp32"):
        assert reasons(run, option) == ["dead knob"]
    assert not {*SCALE, "grad_reduce_in_fp32"} & run.config.stated


@pytest.mark.parametrize("change", ["sed -i 's/true/false/' ds.json", "python change.py > ds.json"])
def test_a_file_that_the_script_writes_and_changes_is_named(change: str) -> None:
    run = only(f"{written(BLOCK)}{change}\n{RUN} --deepspeed_config ds.json")
    (loss,) = [loss for loss in run.unmapped if loss.field == "--deepspeed_config"]
    assert "it is not read, and can set the precision" in loss.detail
    assert reasons(run, "heredoc on line 1") == ["unsupported"]
    assert run.recipe is None
    assert not set(SCALE) & run.config.stated


@pytest.mark.parametrize("mode", ["--fp16", "--bf16", ""])
def test_a_file_that_the_script_writes_decides(mode: str) -> None:
    run = only(f"{written(BLOCK)}{RUN.replace('--fp16', mode)} --loss-scale 12 --deepspeed_config ds.json")
    assert run.decided_by is None
    assert (get_mode(run.config), run.config.initial_loss_scale, run.config.loss_scale_window) == ("fp16", 1024, 500)
    assert run.config.loss_scale is None
    assert [one for one in run.unmapped if one.field.startswith("heredoc")] == []
    (record,) = [one for one in run.unmapped if one.field == "--deepspeed_config"]
    assert record.detail == "the engine decides by that file, read from the script, which writes it"


def test_a_file_next_to_the_script_decides_too(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(f"{{{BLOCK}}}")
    (tmp_path / "run.sh").write_text(f"{RUN} --deepspeed_config ds.json")
    (run,) = megatron_lm.import_all(Document.load(tmp_path / "run.sh"))
    assert (get_mode(run.config), run.config.initial_loss_scale) == ("fp16", 1024)


def test_another_program_takes_its_precision_from_a_file_that_is_not_read() -> None:
    with pytest.raises(PayloadError, match="takes its precision from ds.json"):
        import_runs(Document.from_text(f"{written(BLOCK)}deepspeed train.py --deepspeed_config ds.json", "run.sh"))


@pytest.mark.parametrize(("words", "size"), [("--pad-vocab-size-to 250880", 250880), ("", None)])
def test_an_option_of_a_fork_states_the_size_of_the_padded_vocabulary(
    tmp_path: Path, words: str, size: int | None
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{RUN} --hidden-size 64 --num-attention-heads 4 --tokenizer-type PretrainedFromHF {words}")
    run = load_run(config_file=script, strict=False)
    assert run.model.get("vocab_size") == size


def test_outputs_between_stages_are_freed_whatever_the_arguments_say(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun pretrain_gpt.py --num-layers 2 --bf16 --pipeline-model-parallel-size 2")
    run = load_run(config_file=script, strict=False)
    (freed,) = [value for value in run.reading.derived if value.path == "model.deallocate_pipeline_outputs"]
    assert (freed.value, freed.because) == (True, "whatever the arguments say")


@pytest.mark.parametrize(("numbers", "is_named"), [("64 64 128", True), ("64", False)])
def test_several_numbers_of_experts_are_named(tmp_path: Path, numbers: str, is_named: bool) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "deepspeed pretrain_gpt.py --deepspeed --fp16 --num-layers 6 --hidden-size 64 --num-attention-heads 4 "
        f"--num-experts {numbers} --micro-batch-size 1 --seq-length 64\n"
    )
    run = load_run(config_file=file)
    sentence = f"--num-experts {numbers}: layers have numbers of experts of their own"
    assert any(line.startswith(sentence) for line in run.reading.lines) is is_named
    assert ("model.num_moe_experts" in run.reading.uncertainty.unread_sources) is is_named


SPLIT_RUN = "deepspeed pretrain_gpt.py --deepspeed --fp16 --hidden-size 64 --num-attention-heads 4 --seq-length 64"


@pytest.mark.parametrize(
    ("method", "layers", "counts"),
    [("type:transformer|embedding", 6, [1, 2, 2, 1]), ("type:transformer", 8, [2, 2, 2, 2])],
)
def test_layers_are_split_as_deepspeed_splits_them(tmp_path: Path, method: str, layers: int, counts: list[int]) -> None:
    file = tmp_path / "run.sh"
    words = f"--num-layers {layers} --pipeline-model-parallel-size 4 --pp-partition-method '{method}'"
    file.write_text(f"{SPLIT_RUN} --micro-batch-size 1 {words}\n")
    run = load_run(config_file=file)
    chunks = run.prediction.parallel.split_layers(layers)
    assert [len(chunk.layers) for chunk in chunks] == counts
    assert not [line for line in run.reading.lines if line.startswith("--pp-partition-method")]


def test_layers_of_one_stage_are_not_split(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"{SPLIT_RUN} --num-layers 7 --micro-batch-size 1 --pp-partition-method parameters\n")
    assert not [line for line in load_run(config_file=file).reading.lines if line.startswith("--pp-partition-method")]


def test_training_of_biases_alone_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"{SPLIT_RUN} --num-layers 7 --micro-batch-size 1 --bitfit\n")
    assert any(line.startswith("--bitfit: not read here") for line in load_run(config_file=file).reading.lines)


def test_an_uneven_split_has_no_plan_and_is_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    words = "--num-layers 6 --pipeline-model-parallel-size 4 --pp-partition-method type:transformer"
    file.write_text(f"{SPLIT_RUN} --micro-batch-size 1 {words}\n")
    run = load_run(config_file=file, strict=False)
    sentence = "--pp-partition-method type:transformer: DeepSpeed splits 6 layers unevenly over 4 stages"
    assert (run.reading.uncertainty.no_plan_reason or "").startswith(sentence)
    assert [one for one in check(run).findings if one.severity == "error"] == []


def test_a_field_is_not_called_absent_from_a_release_that_is_assumed(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"{SPLIT_RUN} --num-layers 2 --micro-batch-size 1 --no-async-tensor-model-parallel-allreduce\n")
    field = "model.async_tensor_model_parallel_allreduce"
    assert not [note for note in load_run(config_file=file).plan.settings.notes if note.startswith(field)]
    stated = load_run(["target='h100x1,mcore0.20'"], config_file=file)
    assert [note for note in stated.plan.settings.notes if note.startswith(field)]
