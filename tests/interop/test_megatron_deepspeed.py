"""Megatron-LM under DeepSpeed: the engine's file decides, and is read where the script itself writes it."""

import pytest

from bridge.errors import PayloadError
from bridge.interop import deepspeed
from bridge.interop.contract import ImportReport
from bridge.interop.conversion import runs_of
from bridge.interop.megatron_lm import importer as megatron_lm
from bridge.interop.reading.document import Document
from tests.interop.properties import reasons

RUN = "deepspeed pretrain_gpt.py --num-layers 2 --fp16 --deepspeed"
BF16 = '"bf16": {"enabled": true}'
BLOCK = (
    '"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 500, "hysteresis": 3}'
)
SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def only(script: str) -> ImportReport:
    (run,) = megatron_lm.import_all(Document.of_text(script, "run.sh"))
    return run


def written(block: str, name: str = "ds.json") -> str:
    return f'cat <<EOT > {name}\n{{{block}, "train_batch_size": $GBS, "zero_optimization": {{"stage": 1}}}}\nEOT\n'


@pytest.mark.parametrize("options", ["--deepspeed_config ds.json", "--deepspeed_config=$FILE", ""])
def test_what_the_engines_file_decides_is_left_open(options: str) -> None:
    run = only(f"{RUN} {options}")
    assert (run.config.mode, run.recipe) == ("fp16", None)
    assert not {*SCALE, "grad_reduce_in_fp32"} & run.config.stated
    (loss,) = [loss for loss in run.unmapped if loss.field.startswith("--deepspeed")]
    assert loss.reason == "unsupported"


def test_arguments_of_megatrons_own_scaler_are_dead_under_the_engine() -> None:
    run = only(f"{RUN} --deepspeed_config ds.json --loss-scale 15 --hysteresis 2 --accumulate-allreduce-grads-in-fp32")
    for option in ("--loss-scale", "--hysteresis", "--accumulate-allreduce-grads-in-fp32"):
        assert reasons(run, option) == ["dead knob"]
    assert not {*SCALE, "grad_reduce_in_fp32"} & run.config.stated


def test_a_file_that_the_script_writes_is_read() -> None:
    script = f"config_json=./ds_$SLURM_JOB_ID.json\n{written(BLOCK, '$config_json')}"
    run = only(f"{script}{RUN} --loss-scale 15 --deepspeed_config ${{config_json}}")
    assert run.config.fp16
    assert (run.config.loss_scale, run.config.initial_loss_scale, run.config.min_loss_scale) == (None, 1024, 1)
    assert (run.config.loss_scale_window, run.config.hysteresis) == (500, 3)
    assert run.config.grad_reduce_in_fp32 is False
    assert reasons(run, "--loss-scale") == ["dead knob"]
    assert reasons(run, "./ds_$SLURM_JOB_ID.json: communication_data_type") == ["implied default"]
    assert not [loss for loss in run.unmapped if "heredoc" in loss.field or loss.field == "--deepspeed_config"]


def test_it_is_what_deepspeeds_own_file_means() -> None:
    alone = deepspeed.import_({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    run = only(f"{written(BF16)}{RUN.replace('fp16', 'bf16')} --deepspeed_config ds.json")
    assert run.semantics == alone.semantics
    assert alone.config.to_dict().items() <= run.config.to_dict().items()
    assert len([loss for loss in run.unmapped if loss.field.startswith("ds.json: ")]) == len(alone.unmapped)


def test_a_file_goes_over_the_command_line() -> None:
    run = only(f"{written(BF16)}{RUN} --deepspeed_config ds.json")
    assert (run.config.mode, run.config.is_stated("pipeline_dtype")) == ("bf16", False)
    assert reasons(run, "--fp16") == ["semantics"]


@pytest.mark.parametrize(
    "script",
    [
        "cp base.json ds.json",
        f"{written(BLOCK)}sed -i 's/true/false/' ds.json",
        f"{written(BLOCK)}python change.py > ds.json",
        "cat base.json - > ds.json <<EOF\n,\nEOF",
        written('"fp16": {"enabled": $ON}'),
        written('"fp16": {"enabled": true, "initial_scale_power": $SP}'),
        written('"fp16": {"enabled": true}, "bf16": {"enabled": true}'),
        written('"no" json'),
    ],
)
def test_a_file_that_cannot_be_read_is_named(script: str) -> None:
    run = only(f"{script}\n{RUN} --deepspeed_config ds.json")
    (loss,) = [loss for loss in run.unmapped if loss.field == "--deepspeed_config"]
    assert "it is not read, and can set the precision" in loss.detail
    assert run.recipe is None
    assert not set(SCALE) & run.config.stated


def test_a_default_of_a_setting_is_read_and_named_with_its_variable() -> None:
    block = '"fp16": {"enabled": true, "hysteresis": ${H:-4}},\n"wall_clock": ${W:-true}, "zero": {"stage": "$Z"}'
    run = only(f"{written(block)}{RUN} --deepspeed_config ds.json")
    assert run.config.hysteresis == 4
    assert (reasons(run, "$H"), reasons(run, "$W")) == (["implied default"], [])


def test_the_file_that_was_written_last_counts() -> None:
    last = written('"fp16": {"enabled": true, "loss_scale": 128}')
    assert only(f"{written(BLOCK)}{last}{RUN} --deepspeed_config ds.json").config.loss_scale == 128
    for change in ("echo '{}' > ds.json", "echo '{}' >> ds.json", "cat >> ds.json <<EOT\n,\nEOT"):
        run = only(f"{written(BLOCK)}{change}\n{RUN} --deepspeed_config ds.json")
        assert reasons(run, "--deepspeed_config") == ["unsupported"]
        assert not set(SCALE) & run.config.stated


def test_each_way_has_its_own_file() -> None:
    def branch(condition: str) -> str:
        files = written(BLOCK.replace("10", "8")), written(BLOCK)
        return f"if [ {condition} ]; then\n{files[0]}else\n{files[1]}fi\n{RUN} --deepspeed_config ds.json"

    runs = megatron_lm.import_all(Document.of_text(branch('"$A" = 1'), "run.sh"))
    assert [run.config.initial_loss_scale for run in runs] == [1024, 256]
    assert all(reasons(run, run.label.partition("; ")[2]) == ["unsupported"] for run in runs)
    runs = megatron_lm.import_all(Document.of_text(branch('"${A:-1}" = 1'), "run.sh"))
    assert [run.config.initial_loss_scale for run in runs] == [256, 1024]


def test_both_blocks_off_state_no_mode_unless_the_command_does() -> None:
    off = written('"fp16": {"enabled": false}, "bf16": {"enabled": false}')
    run = only(f"{off}{RUN} --deepspeed_config ds.json")
    assert (run.semantics, run.recipe, {"fp16", "fp32"} & run.config.stated) == ("unstated", None, set())
    assert run.decided_by == (
        "the dtype that the model is loaded in, which DeepSpeed 0.19.8 keeps with both blocks off, as ds.json has it, "
        "or --fp16"
    )
    assert only(f"{off}{RUN.replace('--fp16', '')} --deepspeed_config ds.json").config.mode == "fp32"
    (loss,) = [loss for loss in run.unmapped if loss.field == "mode"]
    assert loss.detail.endswith("decides")


def test_another_program_takes_its_precision_from_a_file_that_is_not_read() -> None:
    with pytest.raises(PayloadError, match="takes its precision from ds.json"):
        runs_of(Document.of_text(f"{written(BLOCK)}deepspeed train.py --deepspeed_config ds.json", "run.sh"))


def test_the_mode_of_a_file_that_the_script_writes_is_stated() -> None:
    script = written('"fp16": {"enabled": true}')
    run = only(
        f"source start.sh\n{script}\n{RUN.replace('--fp16', '').replace('--bf16', '')} --deepspeed_config ds.json"
    )
    assert (run.config.mode, run.decided_by, reasons(run, "mode")) == ("fp16", None, [])
