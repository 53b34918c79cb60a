"""Training with a precision per module: the run's own record of its GEMMs against the plan."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.quantization.quant_config import RecipeConfig

from bridge import MixedPrecisionConfig
from bridge.errors import BridgeError
from bridge.plan.precision_plan import precision_plan
from bridge.runtime.audit.plan_comparison import format_gemms
from bridge.training.config import runtime_config_update
from bridge.training.fingerprint import compute_fingerprint
from bridge.training.loop import pretrain
from tests.training.loop_tiny import SIX, losses, tiny

MIXED = [
    {"select": "*.linear_qkv", "precision": "bf16"},
    {"select": "*.linear_fc1", "precision": "mxfp8"},
    {"select": "*.linear_fc2", "precision": "blockwise"},
]
BY_LAYER = [
    {"select": {"layers": [0, 3], "module": "linear_fc1"}, "precision": "nvfp4"},
    {"select": "*.self_attention.*", "precision": "bf16"},
]
ON_STORED = [
    {"select": "*.linear_qkv", "precision": "bf16"},
    {"select": {"layers": [0, 2], "module": "linear_fc1"}, "precision": "tensorwise", "evaluation": "bf16"},
]
CURRENT = {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}


def run(folder: Any, rows: list[dict[str, Any]], precision: dict[str, Any], **settings: Any) -> Any:
    """Train a tiny model with these rows; return the summary and the plan."""
    config = tiny(**settings)
    config.mixed_precision = MixedPrecisionConfig(**precision, modules=rows)
    plan = precision_plan(config.mixed_precision, config.model, optimizer=config.optimizer, ddp=config.ddp)
    runtime_config_update(config)
    return pretrain(config, run_dir=folder), plan


@pytest.mark.parametrize(
    ("rows", "precision", "model"),
    [
        (MIXED, CURRENT, {}),
        (MIXED, {"bf16": True}, {}),
        (BY_LAYER, {**CURRENT, "first_last_layers_bf16": True}, SIX),
        (ON_STORED, {**CURRENT, "fp8_param_gather": True, "first_last_layers_bf16": True}, SIX),
    ],
    ids=["in FP8", "in BF16", "by layer", "on stored weights"],
)
def test_every_gemm_runs_in_what_the_plan_says(rows, precision, model, tmp_path):
    summary, plan = run(tmp_path, rows, precision, model=model, train={"train_iters": 2}, sharded=True)
    seen = {(record.layer, record.module): record.scheme for record in summary.gemms if record.layer != "output"}
    planned = {
        (layer.label, module.name): module.scheme or "none"
        for layer in plan.layers
        if layer.number is not None
        for module in layer.modules
        if module.kind == "linear"
    }
    assert seen == planned
    assert len(set(seen.values())) > 1


def test_the_table_of_gemms_names_each_choice(tmp_path):
    summary, _ = run(tmp_path, MIXED, CURRENT, train={"train_iters": 1})
    assert format_gemms(summary.gemms) == (
        "layers 1-2: mxfp8, fprop e4m3 x e4m3, dgrad e4m3 x e4m3, wgrad e4m3 x e4m3 (linear_fc1) and blockwise, fprop "
        "e4m3 x e4m3, dgrad e5m2 x e4m3, wgrad e5m2 x e4m3 (linear_fc2) and tensorwise, fprop e4m3 x e4m3, dgrad e5m2 "
        "x e4m3, wgrad e5m2 x e4m3 (linear_proj) and bf16 (linear_qkv); output: bf16"
    )


def test_weights_of_a_bf16_run_are_quantised_anew_in_each_step(tmp_path):
    """Rows that put every linear layer into a scheme train exactly as the run that has the scheme itself."""
    rows = [{"select": "*.linear_*", "precision": "tensorwise", "fp8": "hybrid"}]
    run(tmp_path / "rows", rows, {"bf16": True, "grad_reduce_in_fp32": True})
    run(tmp_path / "run", [], {**CURRENT, "grad_reduce_in_fp32": True})
    assert losses(tmp_path / "rows") == losses(tmp_path / "run")


def test_a_row_of_bf16_for_every_module_trains_as_bf16_does(tmp_path):
    run(tmp_path / "rows", [{"select": "*.linear_qkv", "precision": "bf16"}], {"bf16": True})
    run(tmp_path / "run", [], {"bf16": True})
    assert losses(tmp_path / "rows") == losses(tmp_path / "run")


@pytest.mark.parametrize(
    ("row", "precision", "message"),
    [
        (
            {"fp8_recipe": "custom", "fp8_quantizer_factory": "team.factory"},
            CURRENT,
            "This low-precision recipe cannot be run:\n  scheme: must be one of blockwise, delayed, mxfp8, nvfp4, "
            "tensorwise, got 'custom'. Run a custom factory on Transformer Engine.",
        ),
        (
            {"precision": "mxfp8"},
            {**CURRENT, "fp8_param_gather": True},
            "PB296 model.quant_recipe: matcher row_0 asks for mxfp8 on weights that the run stores in tensorwise, "
            "which Transformer Engine refuses in the first step, got '*.linear_qkv'. Store the weights in bf16 "
            "(fp8_param_gather=False); or choose bf16.",
        ),
    ],
)
def test_a_choice_that_is_not_emulated_is_refused_by_name(row, precision, message, tmp_path):
    with pytest.raises(BridgeError) as caught:
        run(tmp_path, [{"select": "*.linear_qkv", **row}], precision, sharded=True)
    assert str(caught.value) == message


def test_the_fingerprint_of_a_run_covers_rows_foreign_recipes_and_phases():
    def settings(rows=None, schedule=None, **model):
        config = tiny(model=model, train={"train_iters": 6})
        config.mixed_precision = MixedPrecisionConfig(**CURRENT, modules=rows)
        config.precision_schedule = schedule
        runtime_config_update(config)
        return compute_fingerprint(config, {})

    def differing(one, two):
        return {name for name in {*one, *two} if one.get(name) != two.get(name)}

    def row(**more):
        return [{"select": {"layers": [0], "module": "linear_fc1"}, "fp8_recipe": "tensorwise", **more}]

    rows = "mixed_precision.modules"
    assert rows in differing(settings(row()), settings(row(evaluation="bf16")))
    assert rows in differing(settings(row(tp_only_amax_red=True)), settings(row(fp8_param=True)))
    foreign = [
        RecipeConfig.from_config_dict({"configs": {"a": {"training_recipe": {}}}, "matchers": {"m": matcher}})
        for matcher in ({"type": "glob", "config": "a", "enabled": True, "pattern": name} for name in ("*fc1", "*fc2"))
    ]
    first, second = (settings(quant_recipe=recipe) for recipe in foreign)
    assert differing(first, second) == {"model.quant_recipe"}
    phases = [[{"until": last}, {"recipe": "bf16_mixed"}] for last in (2, 3)]
    first, second = (settings(schedule=schedule) for schedule in phases)
    assert {name.partition(".")[0] for name in differing(first, second)} == {"precision_schedule"}
