"""Faults during training: NaN and Inf never reach a weight that is kept, and an ending says how it went."""

from __future__ import annotations

import math

import pytest
import torch

from bridge.errors import AuditError, TrainingError
from bridge.runtime.checkpoint.folder import read_latest_iteration
from bridge.runtime.megatron.trainer import Trainer
from bridge.training.loop import pretrain
from tests.training.loop_tiny import records, tiny

PRECISIONS = {
    "bf16": {"mode": "bf16"},
    "fp32": {"mode": "fp32"},
    "fp8": {"mode": "bf16", "low": "tensorwise"},
    "sharded": {"mode": "bf16", "sharded": True},
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch):
    """Return a function that puts a value into one gradient of some steps, counted from 1."""

    def poison(value: float, *steps: int) -> None:
        compute = Trainer.forward_backward
        taken = iter(range(1, 1000))

        def forward_backward(self, batches):
            losses = compute(self, batches)
            if next(taken) in steps:
                self.model[0].buffers[0].grad_data[0] = value
            return losses

        monkeypatch.setattr(Trainer, "forward_backward", forward_backward)

    return poison


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(precision, value, poisoned, tmp_path) -> None:
    poisoned(value, 2)
    summary = pretrain(tiny(**PRECISIONS[precision], train={"train_iters": 3, "eval_iters": 0}), run_dir=tmp_path)
    steps = records(tmp_path)
    assert [step["skipped"] for step in steps] == [False, True, False]
    assert steps[1]["learning_rate"] == steps[2]["learning_rate"]
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert (summary.skipped_steps, summary.failure) == (1, None)


def test_the_weights_after_a_skipped_last_step_are_those_before_it(poisoned, tmp_path) -> None:
    schedule = {"train_iters": 2, "lr_decay_iters": 3, "eval_iters": 1}
    sound = pretrain(tiny(train=schedule, save=str(tmp_path / "sound")), run_dir=tmp_path / "two")
    poisoned(math.nan, 3)
    saved = tmp_path / "skipped"
    other = pretrain(tiny(train={**schedule, "train_iters": 3}, save=str(saved)), run_dir=tmp_path / "three")
    assert other.skipped_steps == 1
    assert other.validation_loss == sound.validation_loss
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "3\n"


def test_gradients_that_stay_not_finite_end_the_run(poisoned, tmp_path) -> None:
    poisoned(math.nan, *range(3, 100))
    with pytest.raises(TrainingError) as raised:
        pretrain(tiny(train={"train_iters": 40, "eval_iters": 0}), run_dir=tmp_path)
    text = str(raised.value)
    assert text.startswith(
        "optimizer: gradients must be finite, got NaN or Inf in 10 steps in a row, the last one step 12 (loss "
    )
    assert text.endswith(
        "These steps changed no weight, and no lower loss scale is left. Lower optimizer.lr, look at the data of these "
        "steps, or choose a recipe with a wider range."
    )
    assert len(records(tmp_path)) == 12


@pytest.mark.parametrize(
    ("low", "stored"), [("delayed", False), ("delayed", True), ("tensorwise", True), ("mxfp8", False), ("nvfp4", False)]
)
def test_a_learning_rate_beyond_reason_ends_the_run_by_its_gradients_or_loss_and_not_by_the_audit(
    low, stored, tmp_path
) -> None:
    diverges = {"lr": 1e9, "min_lr": 0.0}
    train = {"train_iters": 40, "eval_iters": 0}
    config = tiny(low=low, stored=stored, sharded=stored, optimizer=diverges, train=train)
    with pytest.raises(TrainingError, match=r"Lower optimizer\.lr") as raised:
        pretrain(config, run_dir=tmp_path)
    assert not isinstance(raised.value, AuditError)


def test_a_constant_loss_scale_that_is_too_high_is_what_to_lower(tmp_path) -> None:
    with pytest.raises(TrainingError) as raised:
        pretrain(tiny("fp16", optimizer={"loss_scale": 1e12}, train={"train_iters": 40}), run_dir=tmp_path)
    assert "no lower loss scale is left. Lower the constant loss scale, or optimizer.lr" in str(raised.value)


@pytest.mark.parametrize("mode", ["bf16", "fp32", "fp16"])
def test_a_checkpoint_with_a_weight_that_is_not_finite_is_not_written(mode, monkeypatch, tmp_path) -> None:
    step = Trainer.step

    def broken(self, batches, *, stop):
        result = step(self, batches, stop=stop)
        if self.scheduler.num_steps == 5 * 4:
            next(iter(self.model[0].parameters())).data.view(-1)[7] = math.inf
        return result

    monkeypatch.setattr(Trainer, "step", broken)
    saved = tmp_path / "saved"
    optimizer = {"initial_loss_scale": 256.0} if mode == "fp16" else {}
    train = {"train_iters": 5, "eval_iters": 0}
    with pytest.raises(TrainingError) as raised:
        pretrain(tiny(mode, optimizer=optimizer, train=train, save=str(saved), save_interval=2), run_dir=tmp_path)
    assert str(raised.value) == (
        "checkpoint.save: a checkpoint must hold finite weights and optimizer state, got NaN or Inf at step 5. Nothing "
        "was written. The newest one stays that of step 4. Lower optimizer.lr."
    )
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    assert not (saved / "iter_0000005").exists()


def test_fp16_at_the_floor_of_its_loss_scale_ends(poisoned, tmp_path) -> None:
    poisoned(math.inf, *range(4, 100))
    optimizer = {"initial_loss_scale": 4.0, "hysteresis": 1}
    train = {"train_iters": 40, "eval_iters": 0, "check_for_nan_in_loss": False}
    with pytest.raises(TrainingError, match="in 10 steps in a row, the last one step 15 .*loss scale 1, "):
        pretrain(tiny("fp16", optimizer=optimizer, train=train), run_dir=tmp_path)


def test_fp16_with_weights_beyond_its_range_ends_at_once(tmp_path) -> None:
    optimizer = {"lr": 1e9, "min_lr": 0.0, "initial_loss_scale": 256.0}
    train = {"train_iters": 40, "eval_iters": 0, "check_for_nan_in_loss": False}
    saved = tmp_path / "saved"
    with pytest.raises(TrainingError, match="got NaN or Inf at step") as raised:
        pretrain(tiny("fp16", optimizer=optimizer, train=train, save=str(saved)), run_dir=tmp_path)
    assert raised.value.exit_code == 1
    assert read_latest_iteration(saved) is None
    assert not list(saved.glob("iter_*"))


@pytest.mark.parametrize(
    ("mode", "optimizer", "sentence"),
    [
        (
            "fp16",
            {"initial_loss_scale": 2.0**32, "hysteresis": 1},
            "NOTHING WAS LEARNED: 4 of 4 steps had NaN or Inf in their gradients and updated nothing. The loss scale "
            "is 2.68435e+08 and still falling: train longer, or lower initial_loss_scale.",
        ),
        (
            "fp16",
            {"initial_loss_scale": 2.0, "hysteresis": 1},
            "NOTHING WAS LEARNED: 4 of 4 steps had NaN or Inf in their gradients and updated nothing. The loss scale "
            "is at its floor, 1: lower optimizer.lr, or choose a recipe with a wider range.",
        ),
        (
            "fp16",
            {"loss_scale": 8.0},
            "NOTHING WAS LEARNED: 4 of 4 steps had NaN or Inf in their gradients and updated nothing. The loss scale "
            "is constant at 8: lower it.",
        ),
        (
            "bf16",
            {},
            "NOTHING WAS LEARNED: 4 of 4 steps had NaN or Inf in their gradients and updated nothing. Lower "
            "optimizer.lr, or look at the data of these steps.",
        ),
    ],
)
def test_a_run_of_skipped_steps_is_no_success(mode, optimizer, sentence, poisoned, tmp_path) -> None:
    poisoned(math.inf, *range(1, 100))
    train = {"train_iters": 4, "eval_iters": 0, "check_for_nan_in_loss": False}
    assert pretrain(tiny(mode, optimizer=optimizer, train=train), run_dir=tmp_path).failure == sentence


def test_most_steps_skipped_is_no_success_and_half_of_them_is_one(poisoned, tmp_path) -> None:
    poisoned(math.nan, 2, 3, 5)
    train = {"train_iters": 5, "eval_iters": 0}
    summary = pretrain(tiny(train=train), run_dir=tmp_path / "most")
    assert summary.failure is not None
    assert summary.failure.startswith("MOST STEPS WERE SKIPPED: 3 of 5 steps had NaN or Inf")
    half = pretrain(tiny(train={**train, "train_iters": 6}), run_dir=tmp_path / "sound")
    assert half.failure is None


def test_largest_magnitude_sees_every_value_that_is_not_finite() -> None:
    from bridge.runtime.megatron.record.not_finite import are_finite

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in (math.nan, math.inf, -math.inf):
            tensor = torch.ones(4099, dtype=dtype)
            assert are_finite([tensor, torch.zeros(0)])
            tensor[4098] = value
            assert not are_finite([torch.ones(3), tensor])
