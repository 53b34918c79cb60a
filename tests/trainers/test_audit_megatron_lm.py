"""The audit around Megatron-LM's own training loop, on the CPU: its `train`, its `train_step`, its schedules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import AuditError
from bridge.runtime.audit.record import Record
from bridge.trainers.audit import audited_training
from tests import releases
from tests.trainers.live import Live, live

training = pytest.importorskip("megatron.training.training", reason=releases.NO_TRAINING)
from megatron.core import num_microbatches_calculator, rerun_state_machine  # noqa: E402
from megatron.training import arguments, global_vars  # noqa: E402

RUN = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "128"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--lr", "2e-3", "--train-iters", "3", "--log-interval", "1", "--eval-iters", "0", "--bf16"),
    *("--use-distributed-optimizer", "--no-gradient-accumulation-fusion", "--vocab-size", "256"),
)


@pytest.fixture
def globals_of_megatron_lm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron-LM's parsed and validated arguments, its timers and its two singletons."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *RUN])
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.padded_vocab_size, args.iteration, args.num_floating_point_operations_so_far = 256, 0, 0
    args.do_valid = False
    global_vars.set_global_variables(args, build_tokenizer=False)
    yield
    global_vars.unset_global_variables()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()


def forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
    """Run a micro-batch forward, as `pretrain_gpt.py` does."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


def loss_of(mask: Any, losses: Any) -> tuple[Any, dict[str, Any]]:
    loss = (losses.float().view(-1) * mask.view(-1)).sum() / mask.sum()
    return loss, {"lm loss": loss.detach().view(1)}


def train(run: Live) -> None:
    """Train three steps in Megatron-LM's own loop."""
    config = run.model[0].config
    config.finalize_model_grads_func = config.no_sync_func = None
    training.train(
        forward_step, run.model, run.optimizer, run.trainer.scheduler, run.batches, None, None, config, {}, None
    )


@pytest.mark.usefixtures("globals_of_megatron_lm")
def test_megatron_lms_loop_is_audited_and_left_as_it_was(tmp_path: Path) -> None:
    theirs = training.train_step
    with live(low="tensorwise", sharded=True) as run:
        before = run.hooks()
        with audited_training(folder=tmp_path):
            train(run)
        assert run.hooks() == before
    assert training.train_step is theirs
    record = Record.read(tmp_path / "record.json")
    assert (record.step, record.audit) == (2, ())
    assert {row.gemm for row in record.gemms if row.module == "linear_fc1"} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.usefixtures("globals_of_megatron_lm")
def test_a_lost_precision_ends_megatron_lms_loop_in_its_first_step() -> None:
    theirs = training.train_step
    with live(sharded=True) as run:
        config = run.model[0].config
        config.fp8, config.fp8_recipe, config.fp8_wgrad = "hybrid", "tensorwise", True
        with pytest.raises(AuditError, match=r"step 1 .* 0 of 8 linear layers"), audited_training():
            train(run)
    assert training.train_step is theirs
