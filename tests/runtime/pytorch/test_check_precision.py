"""What `check_precision` sees of real models and real steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bridge import MixedPrecisionConfig
from bridge.errors import PrecisionTypeError
from bridge.registry.registry import REGISTRY
from bridge.runtime.pytorch import autocast_for, emulate_linears
from bridge.runtime.pytorch.check_precision import PrecisionReport, check_precision


def built(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)
    return model, torch.optim.AdamW(model.parameters())


def step_of(model: nn.Module, optimizer: Any, name: str | None = None) -> Callable[[], None]:
    def step() -> None:
        x = torch.randn(4, 8, dtype=next(model.parameters()).dtype)
        if name is None:
            loss = model(x).float().sum()
        else:
            with autocast_for(REGISTRY.get(name), "cpu"):
                loss = model(x).float().sum()
        loss.backward()
        optimizer.step()

    return step


def test_nothing_runs_without_a_step() -> None:
    report = check_precision(*built())
    assert report.parameters == {"float32": 8 * 16 + 16 + 2 * 16 + 16 * 4 + 4}
    assert (report.gradients, report.optimizer_state, report.activations, report.matmuls) == ({}, {}, {}, {})


def test_autocast_shows_in_the_matmuls_and_not_in_the_parameters() -> None:
    model, optimizer = built()
    report = check_precision(model, optimizer, step_of(model, optimizer, "bf16_mixed"))
    assert set(report.parameters) == set(report.gradients) == set(report.optimizer_state) == {"float32"}
    assert set(report.matmuls) == {"bfloat16"}
    assert report.modules == {"0": "bfloat16", "1": "bfloat16", "2": "bfloat16"}  # on CUDA, the norm would be in FP32
    assert report.disagreements(REGISTRY.get("bf16_mixed")) == []


def test_a_forgotten_autocast_is_a_disagreement() -> None:
    model, optimizer = built()
    report = check_precision(model, optimizer, step_of(model, optimizer))
    (found,) = report.disagreements(REGISTRY.get("bf16_mixed"))
    assert found.startswith("No matmul ran in bfloat16: float32: ")
    assert report.disagreements(REGISTRY.get("fp32")) == []


def test_half_precision_throughout_loses_small_updates() -> None:
    model, optimizer = built(torch.bfloat16)
    report = check_precision(model, optimizer, step_of(model, optimizer))
    assert set(report.optimizer_state) == {"bfloat16"}
    found = report.disagreements(REGISTRY.get("bf16_mixed"))
    assert [sentence.partition(":")[0] for sentence in found] == [
        "Neither weights nor optimizer state are FP32",
        "Gradients are bfloat16, and grad_reduce_in_fp32 asks for float32.",
    ]


def test_attention_is_a_matmul() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    report = check_precision(model, None, lambda: model(x, x, x)[0].sum().backward())
    assert report.matmuls["float32"] >= 3


def test_the_report_reads_as_a_table() -> None:
    model, optimizer = built()
    text = str(check_precision(model, optimizer, step_of(model, optimizer, "bf16_mixed")))
    assert text.splitlines()[0] == "parameters       float32: 244 values"
    assert text.splitlines()[-1].startswith("matmuls          bfloat16: ")


def test_a_step_that_fails_leaves_no_hook_behind() -> None:
    model, optimizer = built()

    def broken() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        check_precision(model, optimizer, broken)
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model",), "model: must be a torch.nn.Module, got str"),
        ((nn.Linear(1, 1), 3), "optimizer: must have a state, got int"),
        ((nn.Linear(1, 1), None, 3), "step: must be a function, got int"),
    ],
)
def test_other_things_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PrecisionTypeError, match=message):
        check_precision(*arguments)


@pytest.mark.parametrize(
    ("name", "matmuls", "message"),
    [
        ("bf16_with_fp8_delayed_scaling_mixed", {"bfloat16": 5}, "No matmul ran in FP8: bfloat16: 5 calls. Were"),
        ("bf16_with_mxfp8_mixed", {"bfloat16": 5}, "No matmul ran in FP8"),
        ("bf16_with_nvfp4_mixed", {"bfloat16": 5}, "No matmul ran in FP4"),
        ("bf16_mixed", {"bfloat16": 2, "float32": 27}, "Most matmuls ran in float32, not in bfloat16: "),
        ("bf16_mixed", {"bfloat16": 5, "float16": 1}, "Matmuls ran in float16 and bfloat16: "),
        ("fp32", {"bfloat16": 2, "float32": 3}, "Matmuls ran in bfloat16 and float32: "),
        ("bf16_mixed", {"bfloat16": 27, "float32": 2}, None),
        ("bf16_with_fp8_delayed_scaling_mixed", {"float8_e4m3fn": 5, "bfloat16": 1}, None),
        ("fp32", {"float32": 3}, None),
    ],
)
def test_what_a_recipe_does_not_ask_for_is_a_disagreement(
    name: str, matmuls: dict[str, int], message: str | None
) -> None:
    report = PrecisionReport(parameters={}, buffers={}, gradients={}, optimizer_state={}, matmuls=matmuls)
    found = report.disagreements(name)
    assert len(found) == (message is not None)
    assert all(sentence.startswith(str(message)) for sentence in found)


def test_emulated_layers_are_converted_ones() -> None:
    name = "bf16_with_mxfp8_mixed"
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    emulate_linears(model, REGISTRY.get(name))

    def step() -> None:
        with autocast_for(REGISTRY.get(name), "cpu"):
            loss = model(torch.randn(32, 32)).float().sum()
        loss.backward()

    report = check_precision(model, None, step)
    assert report.matmuls == {"e4m3 x e4m3 (mxfp8)": 5}  # the input of the model has no gradient
    assert {(row.module, row.scheme) for row in report.gemms} == {("0", "mxfp8"), ("1", "mxfp8")}
    assert report.disagreements(name) == []
    assert report.disagreements("fp8_current") == [
        "planned e4m3 x e4m3 (tensorwise), ran e4m3 x e4m3 (mxfp8): 0, 1, fprop.",
        "planned e5m2 x e4m3 (tensorwise), ran e4m3 x e4m3 (mxfp8): 0, wgrad.",
        "planned e5m2 x e4m3 (tensorwise), ran e4m3 x e4m3 (mxfp8): 1, dgrad, wgrad.",
    ]
    (found,) = report.disagreements("bf16_mixed")
    assert found.startswith("No matmul ran in bfloat16: e4m3 x e4m3 (mxfp8): 5 calls.")


def test_nvfp4_is_no_fp8() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    emulate_linears(model, REGISTRY.get("nvfp4"))
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    report = check_precision(model.to(torch.bfloat16), None, lambda: model(x).float().sum().backward())
    assert any("(tensorwise), ran e2m1 x e2m1 (nvfp4): " in found for found in report.disagreements("fp8_current"))


def test_another_format_of_the_gradients_is_a_disagreement() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    e4m3 = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="tensorwise")
    emulate_linears(model, e4m3)
    report = check_precision(model, None, lambda: model(torch.randn(32, 32)).sum().backward())
    assert report.disagreements(e4m3) == []
    assert report.disagreements("fp8_current") == [
        "planned e5m2 x e4m3 (tensorwise), ran e4m3 x e4m3 (tensorwise): 0, wgrad.",
        "planned e5m2 x e4m3 (tensorwise), ran e4m3 x e4m3 (tensorwise): 1, dgrad, wgrad.",
    ]


def test_a_recipe_is_asked_for_and_nothing_else() -> None:
    report = check_precision(nn.Linear(1, 1))
    with pytest.raises(PrecisionTypeError, match="must be a recipe's name or a MixedPrecisionConfig, got 3"):
        report.disagreements(3)  # type: ignore[arg-type]
