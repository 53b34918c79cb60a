"""The audit in loops of others: attached to a model and its optimizer, and in Megatron Bridge's callback manager."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bridge.errors import AuditError, PrecisionTypeError, UnknownRecipeError
from bridge.runtime.audit.record import Record
from bridge.trainers.audit import AuditCallback, AuditOptions, attach_audit
from bridge.trainers.audit.slime import before_train_step
from tests import warm
from tests.recipes.test_peer import PEER
from tests.trainers.live import Live, live

ROOT = Path(__file__).parents[2]
CALLBACKS = PEER / "training" / "callbacks.py"
ZERO = (
    "audit: step 1 must run what is planned (on_mismatch='warn' goes on). "
    "0 of {} linear layers planned in FP8 or FP4 ran in it ({})."
)


def lose_fp8(run: Live) -> None:
    """Let the config of a model in BF16 ask for FP8, as where the layers were built before the config was written."""
    config = run.model[0].config
    config.fp8, config.fp8_recipe, config.fp8_wgrad = "hybrid", "tensorwise", True


def test_two_steps_are_audited_and_nothing_is_left(tmp_path: Path) -> None:
    with live(low="tensorwise", sharded=True) as run:
        before = run.hooks()
        attached = attach_audit(run.model, run.optimizer, folder=tmp_path)
        assert "step" in vars(run.optimizer)
        for _ in range(3):
            run.step()
        assert (run.hooks(), "step" in vars(run.optimizer)) == (before, False)
        audits = attached.audits
        assert (audits.steps, audits.record.step, audits.mismatches) == (2, 2, ())
        assert {row.scheme for row in audits.record.gemms if row.module == "linear_fc1"} == {"tensorwise"}
    written = Record.read(tmp_path / "record.json")
    assert (written.step, written.audit) == (2, ())
    assert {row.kind for row in written.census} > {"master weights", "gradients", "activations"}


def test_passes_that_keep_no_gradients_begin_no_step() -> None:
    with live() as run:
        attached = attach_audit(run.model, run.optimizer)
        with torch.no_grad():
            run.trainer.evaluate(run.batches, 1)
        assert not attached.audits.is_recording
        run.step()
        attached.detach()
        attached.detach()


def test_fp8_that_never_reached_the_layers_ends_the_step_with_a_count() -> None:
    with live() as run:
        before = run.hooks()
        attach_audit(run.model, run.optimizer)
        lose_fp8(run)
        with pytest.raises(AuditError) as raised:
            run.step()
        headline, mismatch = str(raised.value).splitlines()[:2]
        assert headline == ZERO.format(8, "bf16 with fp8 tensorwise, without a recipe")
        assert mismatch.startswith(
            "  planned e4m3 x e4m3 (tensorwise), ran bf16: layers 1-2, linear_qkv, linear_fc1, fprop; "
        )
        assert (run.hooks(), "step" in vars(run.optimizer)) == (before, False)


def test_a_recipe_shows_a_precision_that_the_configs_have_lost(caplog: pytest.LogCaptureFixture) -> None:
    with live(model={"num_layers": 4}) as run:
        options = {"precision": "bf16_with_fp8_current_scaling_mixed", "on_mismatch": "warn"}
        attach_audit(run.model, run.optimizer, **options)
        with caplog.at_level(logging.WARNING, "bridge.trainers"):
            run.step()
            run.step()
    expected = ZERO.format(8, "bf16_with_fp8_current_scaling_mixed")
    texts = [record.getMessage() for record in caplog.records if record.name == "bridge.trainers"]
    assert [text.splitlines()[0] for text in texts] == [expected, expected.replace("step 1", "step 2")]


def test_a_recipe_that_leaves_every_layer_in_bf16_is_no_fp8_run() -> None:
    with live() as run:
        attach_audit(run.model, run.optimizer, precision="bf16_with_fp8_current_scaling_mixed")
        with pytest.raises(AuditError) as raised:
            run.step()
    assert str(raised.value) == (
        "audit: step 1 must multiply in FP8 or FP4 in a layer, as bf16_with_fp8_current_scaling_mixed asks."
    )


def test_a_later_step_is_audited_at_the_interval() -> None:
    with live() as run:
        attached = attach_audit(run.model, run.optimizer, interval=4)
        for _ in range(5):
            run.step()
        assert (attached.audits.record.step, attached.audits.steps) == (4, 5)
        attached.detach()


def test_two_stages_are_one_record_and_other_settings_of_a_rank_are_refused(tmp_path: Path) -> None:
    ranks = warm.launch(["python", "-m", "tests.trainers.live", tmp_path], processes=2, cwd=ROOT)
    assert [done.returncode for done in ranks] == [0, 0], ranks[0].stderr[-4000:]
    first, second = (json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1))
    for seen in (first, second):
        assert (seen["step"], seen["layers"]) == (2, ["1", "2", "3", "4", "output"])
        assert "optimizer.lr: 0.004 on rank 1" in seen["error"]
        assert (seen["hooks"], seen["wrapped"]) == (first["hooks"], False)
    assert Record.read(tmp_path / "record.json").audit == ()


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(PrecisionTypeError, match="on_mismatch: must be error or warn, got 'raise'"):
        AuditOptions(on_mismatch="raise")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"interval": -3}, "interval: must be a whole number from 0 on, got -3. Write 0"),
        ({"interval": 1.5}, "interval: must be a whole number from 0 on, got 1.5. Write 0"),
        ({"precision": "nope"}, "nope"),
        ({"folder": 3}, "folder: must be a path, got 3. Name a folder"),
    ],
)
def test_an_option_that_no_audit_can_use_is_refused_before_the_run(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((PrecisionTypeError, UnknownRecipeError), match=sentence):
        AuditCallback(**options)


def test_slimes_hook_attaches_once() -> None:
    with live(low="tensorwise") as run:
        wrapped = set()
        for step in range(3):
            before_train_step(SimpleNamespace(), 0, step, run.model, run.optimizer, None)
            wrapped.add("step" in vars(run.optimizer))
            run.step()
        assert wrapped == {True, False}, "the third call finds an optimizer whose two steps were audited"


@pytest.fixture
def callbacks() -> ModuleType:
    """Megatron Bridge's own module of callbacks."""
    if not CALLBACKS.exists():
        pytest.skip("needs Megatron Bridge's file beside the environment: make setup")
    spec = importlib.util.spec_from_file_location("peer_callbacks", CALLBACKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_callbacks"] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["peer_callbacks"]


def fired(callbacks: ModuleType, run: Live, callback: Any, steps: int) -> None:
    """Train as Megatron Bridge's loop does: with its manager, its events and its context."""
    manager = callbacks.normalize_callbacks([callback])

    def fire(event: str) -> None:
        if callbacks.should_fire(manager, event):
            context = callbacks.CallbackContext(
                state=SimpleNamespace(), model=run.model, user_state=manager.user_state, optimizer=run.optimizer
            )
            manager.fire(event, context)

    fire("on_train_start")
    for _ in range(steps):
        fire("on_train_step_start")
        run.step()
        fire("on_train_step_end")
    fire("on_train_end")


def test_megatron_bridges_manager_audits_two_steps(callbacks: ModuleType, tmp_path: Path) -> None:
    callback = AuditCallback(folder=tmp_path)
    with live(low="tensorwise", sharded=True) as run:
        before = run.hooks()
        fired(callbacks, run, callback, steps=3)
        assert run.hooks() == before
    assert callback.audits is not None
    assert (callback.audits.record.step, callback.audits.mismatches) == (2, ())
    assert Record.read(tmp_path / "record.json").step == 2


def test_megatron_bridges_manager_passes_the_error_on(callbacks: ModuleType) -> None:
    with live() as run:
        lose_fp8(run)
        with pytest.raises(AuditError, match="0 of 8 linear layers"):
            fired(callbacks, run, AuditCallback(), steps=1)
