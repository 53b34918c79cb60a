"""Logs that NeMo-RL prints: lines in the form of nemo_rl/algorithms/sft.py and grpo_sync.py, 7ea279ab."""

from __future__ import annotations

from pathlib import Path

from bridge.read.logs.files import read_logs

BAR = "=" * 25


def step(number: int, steps: int, loss: float, *lines: str) -> str:
    return "\n".join(
        [
            f"\n{BAR} Step {number}/{steps} {BAR}",
            "▶ Taking a training step...",
            "\n📊 Training Results:",
            f"  • Loss: {loss:.4f}",
            *lines,
            "\n⏱️  Timing:",
            "  • Total step time: 41.20s",
            "  • policy_training: 30.00s (72.8%)",
            "",
        ]
    )


def test_a_log_of_sft_has_its_losses_times_and_validations(tmp_path: Path) -> None:
    validation = "\n📊 Validation Results:\n    • Validation loss: 2.7500\n    • Total validation time: 9.00s\n"
    flops = "  • Training FLOPS: 800.00 TFLOPS (100.00 TFLOPS per rank)"
    text = step(1, 100, 3.0, flops) + step(2, 100, 2.9, flops).replace("▶ Taking a", validation + "▶ Taking a")
    path = tmp_path / "sft.log"
    path.write_text(text)
    (log,) = read_logs(path)
    assert (log.source, log.train_iters, log.is_sampled, log.is_policy) == ("a log of NeMo-RL", 100, True, False)
    assert [(record.step, record.loss) for record in log.train] == [(1, 3.0), (2, 2.9)]
    assert (log.train[0].seconds_per_step, log.train[0].tflops_per_gpu) == (41.2, 100.0)
    assert log.validation == ((2, 2.75),)
    assert log.missing == [
        "gradient norm",
        "loss scale",
        "skipped steps",
        "learning rate",
        "arguments (precision and seed)",
    ]


def test_steps_of_a_second_epoch_follow_those_of_the_first(tmp_path: Path) -> None:
    first = f"\n{BAR} Epoch 1/2 {BAR}" + step(1, 2, 3.0) + step(2, 2, 2.9)
    second = f"\n{BAR} Epoch 2/2 {BAR}" + step(1, 2, 2.8) + step(2, 2, 2.7)
    path = tmp_path / "sft.log"
    path.write_text(first + second)
    (log,) = read_logs(path)
    assert [(record.step, record.loss) for record in log.train] == [(1, 3.0), (2, 2.9), (3, 2.8), (4, 2.7)]
    assert log.train_iters is None


def test_a_log_with_a_reward_is_of_a_policy_gradient(tmp_path: Path) -> None:
    path = tmp_path / "grpo.log"
    path.write_text(step(1, 10, 0.0012, "  • Generation KL Error: 0.0011", "  • Avg Reward: 0.2500"))
    (log,) = read_logs(path)
    assert log.is_policy
