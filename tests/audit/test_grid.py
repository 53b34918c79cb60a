"""Plan = record for recipes, kinds of models and layouts: a run whose audit finds a mismatch ends with an error."""

from __future__ import annotations

import re

import pytest

from bridge import get_mixed_precision_config
from bridge.audit.record import Record
from bridge.registry.registry import REGISTRY
from bridge.training.config import runtime_config_update
from bridge.training.loop import pretrain
from tests.megatron.test_model_kinds import KINDS, SCHEMES
from tests.training.grid import slow
from tests.training.loop_tiny import in_two_processes, tiny

STEPS = {"train_iters": 2, "eval_iters": 0, "global_batch_size": 4}
LAYOUTS = {
    "TP2 with sequence parallelism": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
}
RECIPES = sorted(REGISTRY.names())
FAST = ("bf16_with_fp8_current_scaling_mixed", "bf16_with_nvfp4_mixed")


def assert_as_planned(folder, *, is_low: bool) -> None:
    """The record of a run has no mismatch, a row of each kind, and low precision where it is asked for."""
    record = Record.read(folder / "record.json")
    assert (record.step, record.audit) == (2, ()), folder
    assert {"output"} < {row.layer for row in record.gemms}, folder
    assert any(row.scheme != "none" for row in record.gemms) == is_low, folder
    assert all(row.error <= row.limit for row in record.health), folder


@pytest.mark.parametrize("recipe", [name if name in FAST else slow(name) for name in RECIPES])
def test_every_recipe_runs_as_planned_in_every_kind_of_model(recipe, tmp_path):
    precision = get_mixed_precision_config(recipe)
    kept = max(getattr(precision, name) or 0 for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"))
    kinds = dict(list(KINDS.items())[:1]) if recipe in FAST else KINDS
    for kind, model in kinds.items():
        layers = {"num_layers": 2 * kept + 2}
        if "moe_layer_freq" in model:
            layers["moe_layer_freq"] = [0, 1] * (kept + 1)
        config = tiny("bf16", sharded=True, model={**model, **layers}, train=STEPS)
        config.mixed_precision = precision
        config.logging.quantisation_interval = 0
        runtime_config_update(config)
        folder = tmp_path / re.sub(r"\W+", "-", kind)
        pretrain(config, run_dir=folder)
        assert_as_planned(folder, is_low=precision.scheme is not None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_model_runs_as_planned_in_two_processes(layout, kind, tmp_path):
    model = {**KINDS[kind], **LAYOUTS[layout]}
    plans = {str(scheme): {"low": scheme, "model": model, "train": STEPS} for scheme in SCHEMES}
    in_two_processes(plans, tmp_path)
    for name, plan in plans.items():
        assert_as_planned(tmp_path / name, is_low=plan["low"] is not None)
