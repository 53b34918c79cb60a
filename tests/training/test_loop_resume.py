"""Checkpoints: a resumed run is the run that was never interrupted, bit for bit."""

from __future__ import annotations

import json
import logging

import pytest

from bridge.errors import CheckpointError
from bridge.training.loop import pretrain
from tests.training.grid import slow
from tests.training.loop_tiny import losses, records, tiny

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FP16 = {"initial_loss_scale": 2.0**24, "hysteresis": 1, "loss_scale_window": 2}


def trace(run_dir):
    """What must be equal, step by step."""
    return [(step["step"], step["loss"], step["grad_norm"], step["loss_scale"]) for step in records(run_dir)]


@pytest.mark.parametrize(
    ("mode", "sharded"),
    [
        ("fp16", True),  # the most to restore: a loss scale, masters in shards
        slow("fp16", False),
        *(slow(mode, sharded) for mode in ("bf16", "fp32", "autocast") for sharded in (False, True)),
    ],
)
def test_resumed_run_is_exact(mode, sharded, tmp_path):
    optimizer = FP16 if mode == "fp16" else {}
    schedule = {"train_iters": 6, "lr_decay_iters": 6, "eval_iters": 0}
    arguments = {"sharded": sharded, "model": DROPOUT, "optimizer": optimizer}
    saved = str(tmp_path / "checkpoints")
    pretrain(tiny(mode, **arguments, train=schedule), run_dir=tmp_path / "whole")
    pretrain(tiny(mode, **arguments, train={**schedule, "train_iters": 3}, save=saved), run_dir=tmp_path / "parts")
    pretrain(tiny(mode, **arguments, train={**schedule, "seed": 99}, load=saved), run_dir=tmp_path / "parts")
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_resuming_before_the_first_successful_step_is_exact(sharded, tmp_path):
    schedule = {"train_iters": 12, "lr_decay_iters": 12, "eval_iters": 0}
    arguments = {"sharded": sharded, "optimizer": {**FP16, "initial_loss_scale": 2.0**26}}
    saved = str(tmp_path / "checkpoints")
    pretrain(tiny("fp16", **arguments, train=schedule), run_dir=tmp_path / "whole")
    first = pretrain(
        tiny("fp16", **arguments, train={**schedule, "train_iters": 2}, save=saved), run_dir=tmp_path / "parts"
    )
    assert first.skipped_steps == 2
    pretrain(tiny("fp16", **arguments, train=schedule, load=saved), run_dir=tmp_path / "parts")
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")


def test_buckets_with_padding_between_them_resume_bit_for_bit(tmp_path):
    schedule = {"train_iters": 3, "lr_decay_iters": 3, "eval_iters": 0}
    arguments = {"sharded": True, "ddp": {"overlap_grad_reduce": True, "bucket_size": 4000}}
    saved = str(tmp_path / "checkpoints")
    pretrain(tiny(**arguments, train=schedule), run_dir=tmp_path / "whole")
    pretrain(tiny(**arguments, train={**schedule, "train_iters": 2}, save=saved), run_dir=tmp_path / "parts")
    pretrain(tiny(**arguments, train=schedule, load=saved), run_dir=tmp_path / "parts")
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")


def test_folder_is_laid_out_as_megatron_does(tmp_path):
    saved = tmp_path / "checkpoints"
    pretrain(tiny(save=str(saved), save_interval=4), run_dir=tmp_path)
    assert sorted(path.name for path in saved.iterdir()) == [
        "iter_0000004",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    ]
    assert json.loads((saved / "iter_0000006" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_the_last_checkpoint_and_the_pictures_can_be_left_out(tmp_path):
    saved = tmp_path / "checkpoints"
    pretrain(tiny(save=str(saved), save_interval=4, save_last=False), run_dir=tmp_path / "run")
    assert [path.name for path in saved.glob("iter_*")] == ["iter_0000004"]
    assert not (tmp_path / "run" / "loss.png").exists()


def test_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError) as raised:
        pretrain(tiny(load=str(tmp_path / "none")), run_dir=tmp_path)
    assert str(raised.value) == (
        f"checkpoint.load: no checkpoint there, got '{tmp_path / 'none'}'. Give the folder that "
        "an earlier run saved to, or leave it at None to start fresh."
    )


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_another_schedule_than_the_checkpoints_is_warned_of(sharded, checkpoint, tmp_path, caplog):
    if sharded:
        checkpoint = tmp_path / "sharded"
        pretrain(tiny(sharded=True, save=str(checkpoint)), run_dir=tmp_path / "first")
    config = tiny(sharded=sharded, load=str(checkpoint), train={"train_iters": 8}, optimizer={"lr": 3e-3})
    pretrain(config, run_dir=tmp_path / "second")
    assert [step["learning_rate"] for step in records(tmp_path / "second")] == [2e-4, 2e-4]
    ours = [record for record in caplog.records if record.name.startswith("bridge.")]  # 0.19 warns of DDP's layout
    assert [record.getMessage() for record in ours if record.levelname == "WARNING"] == [
        f"{key}: the learning-rate schedule of the checkpoint is kept, where it is {before}, got {now}. Give a run "
        "that will be resumed the value of all its steps from the start."
        for key, before, now in (("optimizer.lr", 0.002, 0.003), ("train.lr_decay_iters", 6, 8))
    ]


def test_the_same_schedule_is_not_warned_of(checkpoint, tmp_path, caplog):
    pretrain(tiny(load=str(checkpoint)), run_dir=tmp_path)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    pretrain(tiny(save=str(folder)), run_dir=folder / "run")
    return folder


def test_checkpoint_of_another_model_names_every_difference(checkpoint, tmp_path):
    config = tiny(sharded=True, model={"hidden_size": 32, "num_attention_heads": 4}, load=str(checkpoint))
    with pytest.raises(CheckpointError) as raised:
        pretrain(config, run_dir=tmp_path)
    assert str(raised.value) == (
        f"checkpoint.load: {checkpoint / 'iter_0000006'} is of another run: model.hidden_size is 32 here and 64 "
        "there; model.kv_channels is 8 here and 16 there; optimizer.use_distributed_optimizer is True here and False "
        "there. Use the configuration that wrote it."
    )


def test_unfinished_checkpoint_is_an_error(checkpoint, tmp_path):
    for name in ("latest_checkpointed_iteration.txt",):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    (tmp_path / "iter_0000006").mkdir()
    with pytest.raises(CheckpointError) as raised:
        pretrain(tiny(load=str(tmp_path)), run_dir=tmp_path / "run")
    assert str(raised.value) == (
        f"checkpoint.load: must hold a whole checkpoint, got '{tmp_path}' (step 6: manifest.json, which is written "
        "last, is missing). Give another folder, or leave it at None to start fresh."
    )


def test_folder_of_a_longer_run_is_not_written_into(checkpoint, tmp_path):
    with pytest.raises(CheckpointError) as raised:
        pretrain(tiny(save=str(checkpoint)), run_dir=tmp_path)
    assert str(raised.value) == (
        f"checkpoint.save: the folder holds a checkpoint of step 6, and this run begins at step 0, got '{checkpoint}'. "
        f"Resume with checkpoint.load={checkpoint}, or save elsewhere."
    )


def test_finished_run_can_be_resumed_for_nothing(checkpoint, tmp_path):
    summary = pretrain(tiny(load=str(checkpoint)), run_dir=tmp_path)
    assert (summary.iteration, summary.steps, summary.train_loss, summary.tokens_per_second) == (6, 0, None, None)


def test_skipped_steps_go_on_in_a_resumed_run(tmp_path):
    schedule = {"train_iters": 4, "lr_decay_iters": 4, "eval_iters": 0}
    optimizer = {**FP16, "initial_loss_scale": 2.0**26}
    saved = str(tmp_path / "checkpoints")
    first = pretrain(
        tiny("fp16", optimizer=optimizer, train={**schedule, "train_iters": 2}, save=saved), run_dir=tmp_path
    )
    second = pretrain(tiny("fp16", optimizer=optimizer, train=schedule, load=saved), run_dir=tmp_path)
    steps = records(tmp_path)
    assert first.skipped_steps == 2
    assert [step["skipped_steps"] for step in steps] == [sum(s["skipped"] for s in steps[: n + 1]) for n in range(4)]
    assert second.skipped_steps == steps[-1]["skipped_steps"] >= first.skipped_steps
    assert (second.steps, second.iteration) == (2, 4)


FP32_HAS_NONE = (
    "mixed_precision mode: fp32 in the checkpoint, bf16 in this run (impossible: an FP32 run has no master weights, so "
    "the optimizer's states have other entries)"
)
ROUNDED = (
    "mixed_precision mode: bf16 in the checkpoint, fp16 in this run (needs resume.allow_precision_change=true: weights "
    "are rounded again from the FP32 master weights, and the loss scale begins at initial_loss_scale)"
)
BEGINS = "scales and amax histories begin again: a scale is 1 until the first amax is known"
CHANGES = (
    ("fp32", "bf16", False, FP32_HAS_NONE),
    ("fp32", "bf16", True, FP32_HAS_NONE),
    ("bf16", "fp16", False, ROUNDED),
    ("bf16", "fp16", True, None),
    ("constant", "fp16", False, None),
    ("delayed", "longer", False, None),
)
"""Precision of the checkpoint, that of the run, whether a change is allowed, and the refusal."""


def test_another_precision_is_re_derived_asked_for_or_impossible(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    kinds = {
        "fp32": {"mode": "fp32"},
        "bf16": {"mode": "bf16"},
        "fp16": {"mode": "fp16", "optimizer": {"initial_loss_scale": 2.0**10}},
        "constant": {"mode": "fp16", "optimizer": {"loss_scale": 64.0}},
        "delayed": {"mode": "bf16", "low": "delayed"},
        "longer": {"mode": "bf16", "low": "delayed", "model": {"fp8_amax_history_len": 8}},
    }
    schedule = {"train_iters": 2, "lr_decay_iters": 3, "eval_iters": 0}
    for name in ("fp32", "bf16", "constant", "delayed"):
        pretrain(tiny(**kinds[name], train=schedule, save=str(tmp_path / name)), run_dir=tmp_path)
    expected = losses(tmp_path)[-1]
    for before, now, is_allowed, refusal in CHANGES:
        config = tiny(**kinds[now], train={**schedule, "train_iters": 3}, load=str(tmp_path / before))
        config.resume.allow_precision_change = is_allowed
        run_dir = tmp_path / f"{before}-{now}"
        if refusal is not None:
            with pytest.raises(CheckpointError) as raised:
                pretrain(config, run_dir=run_dir)
            assert str(raised.value).splitlines()[1:] == [f"  {refusal}"]
            continue
        pretrain(config, run_dir=run_dir)
        assert losses(run_dir)[-1] == pytest.approx(expected, rel=0.05)
    changed = f"model.fp8_amax_history_len: 4 in the checkpoint, 8 in this run (re-derived: {BEGINS})."
    assert changed in caplog.messages
