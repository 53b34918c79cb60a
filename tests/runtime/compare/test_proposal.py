"""Rows of `modules` that follow from measured errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import MixedPrecisionConfig
from bridge.precision.formats import BIT_DB, FORMATS
from bridge.precision.statements import get_field_value
from bridge.precision.yaml_text import from_yaml, to_yaml
from bridge.runtime.compare.proposal import make_module_rows, propose_precisions

OPERANDS = (("input", "e4m3"), ("weight", "e4m3"), ("grad_output", "e5m2"))


def module(layer: int, name: str = "mlp.linear_fc2", step: int = 9, **lost: float) -> list[Any]:
    """Return the operands of a module under tensorwise scaling; a named one has this ratio, mxfp8 alone is better."""
    rows = []
    for operand, form in OPERANDS:
        own = lost.get(operand, FORMATS[form].healthy_db)
        others = {"tensorwise_db": own, "blockwise_db": own, "mxfp8_db": 31.4, "nvfp4_db": 19.0}
        rows.append(
            SimpleNamespace(step=step, layer=layer, module=name, operand=operand, format=form, sqnr_db=own, **others)
        )
    return rows


def test_formats_have_the_ratio_of_their_bits() -> None:
    assert [round(FORMATS[name].healthy_db, 1) for name in ("e4m3", "e5m2", "e2m1")] == [31.5, 25.5, 19.4]


def test_a_module_that_lost_more_than_a_bit_gets_the_scheme_that_takes_its_outliers() -> None:
    rows = [
        *module(1),
        *module(3, input=17.4),
        *module(4, input=12.0),
        *module(2, "mlp.linear_fc1"),
        *module(7, input=1),
    ]
    found = propose_precisions(rows, scheme="tensorwise", fp8_format="hybrid", num_layers=6)
    assert [str(one) for one in found] == [
        "layer 2, mlp.linear_fc2: input has 17.4 dB of 31.5; mxfp8, where it loses 14 dB less",
        "layer 3, mlp.linear_fc2: input has 12.0 dB of 31.5; mxfp8, where it loses 19 dB less",
    ]
    proposed = make_module_rows(found)
    assert proposed == [{"select": {"layers": [2, 3], "module": "mlp.linear_fc2"}, "precision": "mxfp8"}]
    recipe = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", modules=proposed)
    recipe.finalize()
    assert get_field_value(from_yaml(MixedPrecisionConfig, to_yaml(recipe)), "modules") == get_field_value(
        recipe, "modules"
    )
    hopper = propose_precisions(
        rows, scheme="tensorwise", fp8_format="hybrid", num_layers=6, schemes=("tensorwise", "blockwise")
    )
    assert {one.precision for one in hopper} == {"bf16"}


@given(st.floats(-BIT_DB + 0.01, 20), st.sampled_from(["input", "weight", "grad_output"]))
def test_an_operand_near_its_formats_ratio_changes_nothing(distance: float, operand: str) -> None:
    own = dict(OPERANDS)[operand]
    rows = module(1, **{operand: FORMATS[own].healthy_db + distance})
    assert propose_precisions(rows, scheme="tensorwise", fp8_format="hybrid", num_layers=1) == []


def test_the_last_measured_step_counts() -> None:
    rows = [*module(1, step=3, input=10.0), *module(1, step=9)]
    assert propose_precisions(rows, scheme="tensorwise", fp8_format="hybrid", num_layers=1) == []
    assert propose_precisions([], scheme="mxfp8", fp8_format="e4m3", num_layers=1) == []
    (kept,) = propose_precisions(module(1, input=10.0), scheme="mxfp8", fp8_format="e4m3", num_layers=1)
    assert (kept.precision, kept.gained_db) == ("bf16", None)
    assert kept.healthy_db == pytest.approx(31.5, abs=0.1)
