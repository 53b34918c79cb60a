"""Plan = record: cells of `scripts/audit_grid.py`, which runs all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.runtime.audit.sabotage import patched
from tests.runtime.megatron.test_te_cpu import needs_te

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
DENSE = {"kind": "dense", "layout": "1 process", "backend": "emulated"}


@pytest.fixture(scope="module")
def grid():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import audit_grid

        yield audit_grid
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("recipe", ["bf16_with_fp8_current_scaling_mixed", "bf16_with_nvfp4_mixed"])
def test_every_row_of_a_plan_is_recorded(grid, recipe, tmp_path):
    cell = {**DENSE, "recipe": recipe}
    cell |= grid.trained(grid.expand_words(cell), tmp_path)
    assert cell["rows"] == cell["equal"] == 51  # four layers of four modules, and the output layer, three GEMMs each
    assert grid.is_planned(cell)


def test_a_row_that_is_not_planned_is_counted_and_named(grid, tmp_path):
    cell = {**DENSE, "recipe": "bf16_with_fp8_current_scaling_mixed"}

    def without_the_last(own):
        def update(config):
            own(config)
            config.model.num_layers_at_end_in_bf16 = 0

        return update

    with patched("bridge.training.config:runtime_config_update", without_the_last):
        cell |= grid.trained(grid.expand_words(cell), tmp_path)
    assert (cell["rows"], cell["equal"]) == (51, 39)
    assert "ran e4m3 x e4m3 (tensorwise): layer 4, linear_qkv" in cell["failed"]
    assert not grid.is_planned(cell)
    assert grid.outcome(cell).startswith(
        "bf16_with_fp8_current_scaling_mixed, dense, 1 process, emulated: 39 of 51 rows"
    )


ROWS = (
    "{select:linear_fc2,precision:bf16}",
    "{select:{layers:[1,2],module:linear_proj},precision:blockwise}",
    "{select:{layers:[-1],module:linear_qkv},precision:tensorwise}",
)
OTHER_KINDS = {
    "biases": ("dense", ["model.add_bias_linear=true"]),
    "shared experts": ("MoE", ["model.moe_shared_expert_intermediate_size=64"]),
    "no latent of queries": ("MLA", ["model.q_lora_rank=null"]),
    "a scheme per module": (
        "dense",
        ["mixed_precision.fp8_param_gather=false", f"mixed_precision.modules=[{','.join(ROWS)}]"],
    ),
}
"""Kind of model that the grid does not have -> the kind that it is made from, and the further overrides."""


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP2 SP", "PP2"])
def test_kinds_of_models_outside_of_the_grid_run_as_planned_in_two_processes(grid, layout):
    for backend in grid.BACKENDS:
        cell = {"recipe": "bf16_with_fp8_current_scaling_mixed", "layout": layout, "backend": backend}
        cells = [{**cell, "kind": kind, "words": words} for kind, words in OTHER_KINDS.values()]
        done = list(grid.run(cells))
        assert [grid.outcome(cell) for cell in done if not grid.is_planned(cell)] == []
        assert len(done) == len(cells)


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1 process", "TP2 SP", "PP2", "PP2 VPP2", "DP2, distributed optimizer"])
def test_every_kind_of_model_runs_as_planned_in_every_layout(grid, layout):
    for recipe in ("bf16_with_fp8_delayed_scaling_mixed", "bf16_with_mxfp8_mixed"):
        for backend in grid.BACKENDS:
            cells = [{"recipe": recipe, "kind": kind, "layout": layout, "backend": backend} for kind in grid.KINDS]
            done = list(grid.run(cells))
            assert [grid.outcome(cell) for cell in done if not grid.is_planned(cell)] == []
            assert len(done) == len(cells)


OF_KINDS = (
    ("nemotron_h_bf16_with_fp8_current_scaling_mixed", "hybrid_tiny", 8),
    ("bf16_with_mxfp8_mixed", "hybrid_tiny", 8),
    ("nemotron_3_super_bf16_with_nvfp4_mixed", "nemotron_3_super_tiny", 18),
    ("bf16_with_fp8_current_scaling_mixed", "delta_tiny", 4),
    ("bf16_with_mxfp8_mixed", "delta_tiny", 4),
    ("bf16_with_fp8_current_scaling_mixed", "sparse_tiny", 3),
    ("bf16_with_mxfp8_mixed", "sparse_tiny", 3),
)
"""Recipe, a model whose layers are of other kinds than the grid's, and its number of layers."""


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "model", "layers"), OF_KINDS)
@pytest.mark.parametrize("backend", ["emulated", "te_cpu"])
def test_each_kind_of_layer_runs_as_planned_in_recipes_of_its_models(grid, recipe, model, layers, backend):
    cell = {**DENSE, "recipe": recipe, "backend": backend, "model": model, "words": [f"model.num_layers={layers}"]}
    (done,) = grid.run([cell])
    assert done["rows"] == done["equal"] > 3 * layers, grid.outcome(done)
    assert "refused" not in done
