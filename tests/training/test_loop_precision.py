"""What the tensors of a run are, mode by mode, read from the live objects."""

from __future__ import annotations

import itertools

import pytest

from bridge.training.loop import pretrain
from tests.training.loop_tiny import records, tiny

COPIES, THEMSELVES = "the optimizer's own copies", "the parameters themselves"
EXPECTED = {
    "fp32": {"parameters": "float32", "activations": "float32", "gradients": "float32", "master": THEMSELVES},
    "bf16": {"parameters": "bfloat16", "activations": "bfloat16", "gradients": "float32", "master": COPIES},
    "fp16": {"parameters": "float16", "activations": "float16", "gradients": "float32", "master": COPIES},
    "autocast": {"parameters": "float32", "activations": "bfloat16", "gradients": "float32", "master": THEMSELVES},
}


def census_of(summary):
    return {
        kind: [(row.dtype, row.read_from) for row in summary.census if row.kind == kind]
        for kind in dict.fromkeys(row.kind for row in summary.census)
    }


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("mode", EXPECTED)
def test_census(mode, sharded, tmp_path):
    expected = EXPECTED[mode]
    summary = pretrain(
        tiny(mode, sharded=sharded, optimizer={"initial_loss_scale": 1024.0}, train={"train_iters": 3}),
        run_dir=tmp_path,
    )
    census = census_of(summary)
    assert [dtype for dtype, _ in census["parameters"]] == [expected["parameters"]]
    assert [dtype for dtype, _ in census["activations"]] == [expected["activations"]]
    assert census["activations"][0][1] == "outputs of 9 linear layers in one step"
    assert census["gradients"] == [(expected["gradients"], "parameter.main_grad")]
    assert [dtype for dtype, _ in census["gradient reduction"]] == [expected["gradients"]]
    assert census["master weights"] == [("float32", expected["master"])]
    assert [dtype for dtype, _ in census["optimizer state"]] == ["float32", "float32"]


def test_census_of_gradients_reduced_in_bf16(tmp_path):
    census = census_of(pretrain(tiny(ddp={"grad_reduce_in_fp32": False}), run_dir=tmp_path))
    assert census["gradients"] == [("bfloat16", "parameter.main_grad")]
    assert census["gradient reduction"] == [("bfloat16", "bucket.grad_data of 1 bucket, reduced over 1 rank")]


def test_census_counts_bytes(tmp_path):
    summary = pretrain(tiny(), run_dir=tmp_path)
    rows = {row.kind: row.bytes for row in summary.census}
    assert rows["parameters"] == 2 * summary.parameters
    assert rows["master weights"] == 4 * summary.parameters
    # 2 samples x 64 tokens x (2 layers x (3*64 + 64 + 128 + 64) + 256) outputs x 2 bytes
    assert rows["activations"] == 2 * 64 * (2 * (192 + 64 + 128 + 64) + 256) * 2


def test_fp16_skips_steps_visibly_until_the_scale_fits(tmp_path, caplog):
    caplog.set_level("INFO")
    config = tiny("fp16", optimizer={"initial_loss_scale": 2.0**24, "hysteresis": 1}, train={"train_iters": 16})
    config.logging.log_interval = 100  # skipped steps are recorded all the same
    summary = pretrain(config, run_dir=tmp_path)
    steps = records(tmp_path)
    skipped = [step for step in steps if step["skipped"]]
    assert summary.skipped_steps == len(skipped) > 0
    assert steps[0]["skipped"]
    assert [step["loss_scale"] for step in skipped] == [2.0 ** (24 - halvings) for halvings in range(len(skipped))]
    assert all(step["grad_norm"] is None for step in skipped)
    assert [step["skipped_steps"] for step in skipped] == list(range(1, len(skipped) + 1))
    assert not steps[-1]["skipped"]
    assert sum("SKIPPED: NaN or Inf in the gradients" in message for message in caplog.messages) == len(skipped)


def test_skipped_step_does_not_advance_the_schedule(tmp_path):
    config = tiny("fp16", optimizer={"initial_loss_scale": 2.0**24, "hysteresis": 1}, train={"train_iters": 16})
    pretrain(config, run_dir=tmp_path)
    steps = records(tmp_path)
    pairs = list(itertools.pairwise(steps))
    assert all((step["learning_rate"] == after["learning_rate"]) == step["skipped"] for step, after in pairs)


def test_autocast_differs_from_fp32_and_learns_alike(tmp_path):
    for mode in ("fp32", "autocast"):
        pretrain(tiny(mode), run_dir=tmp_path / mode)
    plain, cast = ([step["loss"] for step in records(tmp_path / mode)] for mode in ("fp32", "autocast"))
    assert plain != cast
    assert cast == pytest.approx(plain, rel=2e-3)


def test_small_gradients_vanish_in_fp16_without_a_loss_scale(tmp_path):
    """The scale reaches the backward pass: without it the gradient of FP16 weights has lost its small values."""
    norms = []
    for scale in (1.0, 1024.0):
        pretrain(tiny("fp16", optimizer={"loss_scale": scale}), run_dir=tmp_path / str(scale))
        norms.append([step["grad_norm"] for step in records(tmp_path / str(scale))])
    assert norms[0] != norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)
