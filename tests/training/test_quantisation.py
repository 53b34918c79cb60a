"""What quantisation did to a run: measured beside the training, and by the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from bridge.errors import RunConfigError
from bridge.precision.schemes import COMPARED_SCHEMES
from bridge.runtime.numerics import (
    GemmPrecision,
    compute_what_if_sqnr,
    make_operand,
    measure_quantisation_error,
    quantise,
)
from bridge.training.loop import pretrain
from bridge.training.measurements import measure_quantisation
from tests import warm
from tests.training.grid import slow
from tests.training.loop_tiny import losses, tiny

PNG = b"\x89PNG"


def rows_of(run_dir):
    return list(csv.DictReader((run_dir / "quantisation.csv").open()))


@pytest.mark.parametrize(
    ("scheme", "stored"),
    [
        ("tensorwise", False),
        ("mxfp8", True),
        slow("tensorwise", True),
        slow("mxfp8", False),
        *(slow(scheme, stored) for scheme in ("delayed", "nvfp4") for stored in (False, True)),
    ],
)
def test_a_run_measures_each_operand_of_each_layer_and_trains_as_without(scheme, stored, tmp_path):
    for interval in (0, 3):
        config = tiny(sharded=True, low=scheme, stored=stored)
        config.logging.quantisation_interval = interval
        config.logging.plots = True
        pretrain(config, run_dir=tmp_path / str(interval))
    assert losses(tmp_path / "3") == losses(tmp_path / "0")
    assert not (tmp_path / "0" / "quantisation.csv").exists()
    rows = rows_of(tmp_path / "3")
    assert len(rows) == 2 * 2 * 4 * 3  # steps, layers, modules, operands
    assert {row["step"] for row in rows} == {"3", "6"}
    least = 14 if scheme in ("nvfp4", "delayed") else 22  # a gradient may outgrow the scale of the step before
    assert all(least < float(row["sqnr_db"]) < 45 for row in rows)
    assert all(float(row["amax"]) > 0 for row in rows)
    if scheme in ("tensorwise", "nvfp4"):  # the same scheme, from a sample
        assert all(abs(float(row[f"{scheme}_db"]) - float(row["sqnr_db"])) < 2 for row in rows)
    assert all(float(row["mxfp8_db"]) > 25 > float(row["nvfp4_db"]) for row in rows)
    assert all(bool(row["scale"]) == (scheme in ("tensorwise", "delayed")) for row in rows)
    assert (tmp_path / "3" / "quantisation.png").read_bytes().startswith(PNG)


def test_bf16_run_measures_nothing(tmp_path):
    config = tiny()
    config.logging.quantisation_interval = 1
    pretrain(config, run_dir=tmp_path)
    assert not (tmp_path / "quantisation.csv").exists()


@pytest.mark.parametrize(("scheme", "format_"), [("tensorwise", "e4m3"), ("blockwise", "e4m3"), ("nvfp4", "e2m1")])
def test_error_is_that_of_the_dequantised_tensor(scheme, format_):
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0] = 0
    spec = GemmPrecision(scheme=scheme, format=format_).spec("input")
    found = measure_quantisation_error(x, make_operand(x, spec, "input"))
    back = quantise(x, spec, columnwise=False).dequantise(torch.float32).double()
    exact = x.double()
    noise = (exact - back).square().sum()
    assert found["sqnr_db"] == pytest.approx(10 * torch.log10(exact.square().sum() / noise).item(), abs=1e-4)
    assert found["underflow"] == pytest.approx(((back == 0) & (exact != 0)).sum().item() / (exact != 0).sum().item())
    assert found["amax"] == exact.abs().max().item()


def test_saturation_under_a_stale_scale_is_counted():
    x = torch.tensor([[1.0, 2.0, 448.0, 449.0, 1000.0, -2000.0, float("inf"), 0.0]])
    spec = GemmPrecision(scheme="delayed").spec("input")
    found = measure_quantisation_error(x, make_operand(x, spec, "input", tensor_scale=1.0))
    assert found["saturated"] == 4 / 8
    assert found["scale"] == 1.0


def test_an_operand_is_asked_for_other_schemes_without_a_draw_from_the_training():
    x = torch.randn(1000, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[7, 3] = 5000  # an outlier takes the scale of its tile, and under tensorwise scaling that of all
    before = torch.get_rng_state()
    found = compute_what_if_sqnr(x, "input", fp8_format="hybrid", amax=5000.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert min(found["mxfp8"], found["blockwise"]) > 31
    spec = GemmPrecision(scheme="tensorwise", format="hybrid").spec("input")
    assert found["tensorwise"] == pytest.approx(
        measure_quantisation_error(x, make_operand(x, spec, "input"))["sqnr_db"], abs=3
    )
    assert set(compute_what_if_sqnr(x[:0], "grad_output", fp8_format=None, amax=0.0)) == set(
        COMPARED_SCHEMES
    )  # an expert without tokens
    assert set(compute_what_if_sqnr(x * torch.nan, "weight", fp8_format=None, amax=0.0)) == set(COMPARED_SCHEMES)


def test_exact_tensor_has_no_noise():
    spec = GemmPrecision(scheme="delayed").spec("input")
    found = measure_quantisation_error(
        x := torch.tensor([[1.0, -2.0, 0.5, 448.0]]), make_operand(x, spec, "input", tensor_scale=1.0)
    )
    assert found["sqnr_db"] == float("inf")
    assert found["underflow"] == found["saturated"] == 0


def test_recipe_without_low_precision_has_nothing_to_measure():
    config = tiny()
    config.mixed_precision = "bf16_mixed"
    with pytest.raises(RunConfigError) as raised:
        measure_quantisation(config, steps=0)
    assert str(raised.value) == (
        "mixed_precision: must have FP8 or FP4 matmuls to be measured, got 'bf16_mixed'. `precision-bridge recipes` "
        "lists those that have."
    )


def test_command_measures_the_weights_of_a_bf16_checkpoint(tmp_path):
    root = Path(__file__).resolve().parents[2]
    tiny_run = ["model=gpt_tiny", "train=smoke", "train.train_iters=4", f"hydra.run.dir={tmp_path / 'run'}"]
    folder = tmp_path / "team"
    (folder / "mixed_precision").mkdir(parents=True)
    trained = warm.run(["python", "scripts/train.py", *tiny_run, f"checkpoint.save={tmp_path / 'saved'}"], cwd=root)
    assert trained.returncode == 0, trained.stderr[-2000:]
    words = ["fp8_delayed", "model=gpt_tiny", "train=smoke", "--checkpoint", str(tmp_path / "saved"), "--json"]
    words += [
        "mixed_precision.fp8_margin=14",
        "--target=h100x8",
        "--propose",
        str(folder / "mixed_precision/proposed.yaml"),
    ]
    measured = warm.run(["precision-bridge", "quantisation-error", *words, "--out", str(tmp_path / "out")], cwd=root)
    assert measured.returncode == 0, measured.stderr[-2000:]
    rows = json.loads(measured.stdout)
    assert len(rows) == 3 * 4 * 3
    assert {row["step"] for row in rows} == {4}
    assert all(row["sqnr_db"] < 30 < row["tensorwise_db"] for row in rows if row["operand"] == "input")
    assert (tmp_path / "out" / "quantisation.png").read_bytes().startswith(PNG)
    assert "layer 0, mlp.linear_fc1: " in measured.stderr
    shown = warm.run(
        ["precision-bridge", "plan", "--modules", "proposed", "--config-dir", str(folder), "--json"], cwd=root
    )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["rows"][0]["precision"] == "tensorwise"
