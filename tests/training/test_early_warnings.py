"""Early warnings: a run that goes wrong logs its warning when it begins to stand, and an undisturbed one logs none."""

from __future__ import annotations

import logging
import math
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path

from bridge.front.train import write_run_files
from bridge.preflight.silence import EARLY_WARNING_NAMES
from bridge.runtime.audit.early_warnings import EARLY_WARNINGS, WarningInputs, find_early_warnings
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.megatron.trainer import Trainer
from bridge.training.loop import pretrain
from tests.runtime.audit.sabotage import no_first_microbatch
from tests.training.loop_tiny import tiny

STEPS = 13
FAULT = 12
FP16 = {"initial_loss_scale": 1.0, "min_loss_scale": 1.0}


def test_every_early_warning_can_be_silenced() -> None:
    assert tuple(EARLY_WARNINGS) == EARLY_WARNING_NAMES


@contextmanager
def gradient_times(factor, monkeypatch):
    """Multiply the gradient that leaves the FC2 of layer 2, in the step `FAULT`."""
    run_micro_batches, taken = Trainer.forward_backward, []

    def forward_backward(self, batches):
        taken.append(None)
        if len(taken) != FAULT:
            return run_micro_batches(self, batches)
        (fc2,) = (module for name, module in self.model[0].named_modules() if name.endswith("layers.1.mlp.linear_fc2"))
        handle = fc2.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * factor, *gradients[1:]))
        try:
            return run_micro_batches(self, batches)
        finally:
            handle.remove()

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "forward_backward", forward_backward)
        yield


def warned(caplog, run_dir, fault, silence=None, **arguments):
    """Train with a fault; return the name -> sentence of each warning that was logged."""
    config = tiny(**arguments, train={"train_iters": STEPS, "audit": "warn", "eval_iters": 0, "global_batch_size": 8})
    config.logging.quantisation_interval = 3
    config.silence = silence or {}
    caplog.clear()
    with caplog.at_level(logging.INFO), fault:
        pretrain(config, run_dir=run_dir)
    write_run_files(run_dir, config, None)
    return dict(re.findall(r"^Early warning ([\w-]+): (.*)$", "\n".join(caplog.messages), re.MULTILINE))


def test_a_run_warns_of_the_fault_it_has(caplog, tmp_path, monkeypatch):
    def times(factor):
        return gradient_times(factor, monkeypatch)

    delayed = {"low": "delayed", "model": {"fp8_amax_history_len": 16}}  # of four steps
    runs = {
        "": (nullcontext(), delayed),
        "gradients-not-finite": (times(math.inf), {}),
        "amax-history": (times(64.0), delayed),
        "underflow-rising": (times(2.0**-30), delayed),
        "loss-scale-floor": (nullcontext(), {"mode": "fp16", "optimizer": FP16}),
        "stale-weights": (no_first_microbatch(), {"low": "tensorwise"}),
    }
    found = {name: warned(caplog, tmp_path / name, *run[:1], **run[1]) for name, run in runs.items()}
    assert {name: [*one] for name, one in found.items()} == {name: [name] if name else [] for name in runs}
    assert found["gradients-not-finite"]["gradients-not-finite"] == (
        "gradients were not finite in 1 of the last 12 records; the last time after the dgrad of layer 2, "
        "mlp.linear_fc2, first in the wgrad of layer 2, mlp.linear_fc1, then in those of 11 modules further back."
    )
    assert re.match(
        r"at step 12 the amax of the grad_output of layer 2, mlp\.linear_fc1 is [\d.]+ times what its scale can",
        found["amax-history"]["amax-history"],
    )
    assert re.fullmatch(
        r"[\d.]+ % of the grad_output of layer 2, mlp\.linear_fc1 became zero at step 12, 0 % in the median of the .*",
        found["underflow-rising"]["underflow-rising"],
    )
    assert "multiplied an older weight" in found["stale-weights"]["stale-weights"]
    standing = [
        name
        for name in runs
        if name and name in dict(find_early_warnings(WarningInputs.from_run_folder(RunFolder(tmp_path / name))))
    ]
    assert standing == ["gradients-not-finite", "loss-scale-floor", "stale-weights"]  # the others passed


def test_the_config_silences_a_warning_in_the_run_and_in_its_folder(caplog, tmp_path, monkeypatch):
    silence = {"gradients-not-finite": "a test"}
    assert warned(caplog, tmp_path, gradient_times(math.inf, monkeypatch), silence=silence) == {}
    assert find_early_warnings(WarningInputs.from_run_folder(RunFolder(tmp_path))) == []


def test_a_spike_is_put_down_to_a_change_of_the_loss_scale_for_five_records():
    common = {"skipped": False, "grad_norm": 1.0, "skipped_steps": 0}
    steps = [{"step": step, "loss": 2.0, "loss_scale": 512.0, **common} for step in range(1, 20)]
    spike = {"step": 20, "loss": 2.3, "loss_scale": 1024.0, **common}
    assert find_early_warnings(WarningInputs(train=[*steps, spike], smallest_scale=1.0)) == [
        (
            "spike-after-scale-change",
            "the loss is 2.3000, more than 1.1 times that before the loss scale went from 512 to 1024 by step 20, "
            "2.0000.",
        )
    ]
    later = [{**spike, "step": step, "loss": 2.0} for step in range(20, 25)]
    assert find_early_warnings(WarningInputs(train=[*steps, *later, {**spike, "step": 25}], smallest_scale=1.0)) == []


def test_the_first_fall_of_a_loss_scale_is_no_warning_and_many_skipped_steps_later_are():
    def record(step, skipped, skipped_steps):
        values = {"loss": 5.0, "loss_scale": 2.0**20, "grad_norm": None, "not_finite": "after the loss"}
        return {**values, "step": step, "skipped": skipped, "skipped_steps": skipped_steps}

    fall = [record(step, True, step) for step in range(1, 18)]
    healthy = {**record(18, False, 17), "not_finite": None}
    assert find_early_warnings(WarningInputs(train=fall, smallest_scale=1.0)) == []
    assert find_early_warnings(WarningInputs(train=[*fall, healthy], smallest_scale=1.0)) == []
    later = [*fall, healthy, *(record(step, True, step - 1) for step in range(19, 22))]
    assert [name for name, _ in find_early_warnings(WarningInputs(train=later, smallest_scale=1.0))] == [
        "gradients-not-finite",
        "skipped-steps",
    ]


def test_the_page_lists_every_warning_with_its_threshold():
    page = (Path(__file__).parents[2] / "docs/howto/report.md").read_text()
    assert [name for name, row in EARLY_WARNINGS.items() if f"| `{name}` | {row.threshold} |" not in page] == []
