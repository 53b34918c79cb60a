"""Recipes in plain PyTorch, run."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from bridge.errors import BackendUnavailableError, PrecisionTypeError
from bridge.precision.coercion import get_torch_dtype
from bridge.precision.mode import get_scheme
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.runtime import pytorch
from bridge.runtime.pytorch.loop import get_compute_dtype, make_scaler_settings
from bridge.runtime.pytorch.loss_scaler import LossScaler
from tests import warm
from tests.read.properties import configs

RECIPES = [row.name for row in REGISTRY.recipes() if "misnamed" not in row.tags]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_a_small_model(name: str) -> None:
    config = REGISTRY.get(name)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    replaced = pytorch.emulate_linears(model, config, skip=("2",))
    assert replaced == (["0"] if get_scheme(config) else [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scaler = pytorch.grad_scaler_for(config, "cpu")
    x = torch.randn(64, 32)
    y = x.sum(1, keepdim=True) / 4
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with pytorch.autocast_for(config, "cpu"):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "enabled", "dtype"),
    [("fp32", False, None), ("bf16_mixed", True, torch.bfloat16), ("fp16_mixed", True, torch.float16)],
)
def test_autocast_casts_to_the_mode(name: str, enabled: bool, dtype: torch.dtype | None) -> None:
    with pytorch.autocast_for(REGISTRY.get(name), "cpu"):
        assert torch.is_autocast_enabled("cpu") is enabled
        out = nn.Linear(4, 4)(torch.ones(2, 4))
    assert out.dtype == (dtype or torch.float32)


def megatron_rule(overflows: list[bool], scale: float, window: int, hysteresis: int, least: float) -> list[float]:
    """The published rule of Megatron's DynamicGradScaler, written out again."""
    good, left, seen = 0, hysteresis, []
    for overflow in overflows:
        if overflow:
            good, left = 0, left - 1
            if left <= 0:
                scale = max(scale * 0.5, least)
        else:
            good += 1
            if good == window:
                good, left, scale = 0, hysteresis, scale * 2
        seen.append(scale)
    return seen


@pytest.mark.parametrize(("window", "hysteresis", "least"), [(2, 2, 1.0), (3, 1, 4.0), (1, 3, 0.25)])
def test_the_scaler_follows_megatrons_rule(window: int, hysteresis: int, least: float) -> None:
    config = MixedPrecisionConfig(
        fp16=True, initial_loss_scale=16.0, loss_scale_window=window, hysteresis=hysteresis, min_loss_scale=least
    )
    scaler = pytorch.grad_scaler_for(config, "cpu")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    overflows = [False, True, True, False, False, True, False, False, True, True, True, False, False, False]
    seen = []
    for index, overflow in enumerate(overflows):
        if index == 7:  # a checkpoint in between changes nothing
            again = pytorch.grad_scaler_for(config, "cpu")
            again.load_state_dict(scaler.state_dict())
            scaler = again
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.tensor([float("inf")]) if overflow else weight.grad
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    assert seen == megatron_rule(overflows, 16.0, window, hysteresis, least)


def test_a_stated_scale_is_constant_and_still_skips_overflows() -> None:
    scaler = pytorch.grad_scaler_for(MixedPrecisionConfig(bf16=True, loss_scale=128.0), "cpu")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    weight.grad = torch.tensor([float("nan")])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert weight.item() == 1.0


def test_nothing_is_scaled_without_fp16() -> None:
    for name in ("fp32", "bf16_mixed", "bf16_autocast_mixed"):
        assert not pytorch.grad_scaler_for(REGISTRY.get(name), "cpu").is_enabled()
    assert isinstance(pytorch.grad_scaler_for(REGISTRY.get("fp16_mixed"), "cpu"), LossScaler)


NEW = "torch.backends.fp32_precision = 'tf32'"
OLD = "torch.set_float32_matmul_precision('high')"


@pytest.mark.parametrize(
    ("before", "tf32", "answer"),
    [("", True, "tf32"), ("", None, None), (NEW, False, "ieee"), (NEW, True, "tf32"), (OLD, False, "ieee")],
)
def test_tf32_is_set_after_either_interface_and_both_can_be_read(
    before: str, tf32: bool | None, answer: str | None
) -> None:
    code = (
        f"import torch\n{before}\n"
        "from bridge.runtime.pytorch import apply_tf32\n"
        "from bridge.registry.mixed_precision_config import MixedPrecisionConfig\n"
        f"answer = apply_tf32(MixedPrecisionConfig(bf16=True, tf32={tf32}))\n"
        "read = torch.get_float32_matmul_precision() if answer else None\n"
        "print(answer, read, torch.backends.cuda.matmul.fp32_precision)"
    )
    done = warm.run(["python", "-c", code])
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[0] == str(answer)
    if answer is not None:
        assert words[1:] == [{"tf32": "high", "ieee": "highest"}[answer], answer]


def test_torch_leaves_tf32_off_for_matmuls_unless_told() -> None:
    code = "import torch; print(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["highest", "True"]


@given(config=configs())
def test_the_objects_are_what_the_data_says(config: MixedPrecisionConfig) -> None:
    autocast, scaler = pytorch.autocast_for(config, "cpu"), pytorch.grad_scaler_for(config, "cpu")
    compute = get_compute_dtype(config)
    with autocast:
        assert torch.is_autocast_enabled("cpu") is (compute != "fp32")
        if compute != "fp32":
            assert torch.get_autocast_dtype("cpu") == get_torch_dtype(compute)
    written = make_scaler_settings(config)
    assert scaler.is_enabled() is written["enabled"]
    if written["enabled"]:
        assert scaler.get_scale() == written["init_scale"]
        assert scaler.get_growth_interval() == written.get("growth_interval", 1000)


def test_a_policy_writes_both_dtypes_out() -> None:
    policy = pytorch.fsdp_policy_for(REGISTRY.get("bf16_mixed"))
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    low = pytorch.fsdp_policy_for(REGISTRY.get("fp16_mixed"), version=1)
    assert (low.param_dtype, low.reduce_dtype) == (torch.float16, torch.float16)
    with pytest.raises(PrecisionTypeError, match="version: must be 1 or 2, got 3"):
        pytorch.fsdp_policy_for(REGISTRY.get("bf16_mixed"), version=3)


def test_fully_shard_runs_with_the_policy() -> None:
    code = """
import torch, torch.distributed as dist, tempfile
from torch.distributed.fsdp import fully_shard
from bridge import get_mixed_precision_config
from bridge.runtime.pytorch import fsdp_policy_for
store = tempfile.mktemp()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
from torch.distributed.device_mesh import init_device_mesh
policy = fsdp_policy_for(get_mixed_precision_config("bf16_mixed"))
fully_shard(model, mp_policy=policy, mesh=init_device_mesh("cpu", (1,)))
seen = []
model[0].register_forward_hook(lambda m, i, o: seen.append((m.weight.dtype, o.dtype)))
model(torch.randn(4, 8)).sum().backward()
print(seen, next(model.parameters()).dtype, next(model.parameters()).grad.dtype)
dist.destroy_process_group()
"""
    done = warm.run(["python", "-W", "ignore", "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(torch.bfloat16, torch.bfloat16)] torch.float32 torch.float32"


@pytest.mark.parametrize(
    ("model", "skip", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), ("nope",), "skip: must name nn.Linear modules of the model, got 'nope'"),
        (nn.Sequential(nn.Linear(2, 2)), "12", "skip: must name nn.Linear modules of the model, got '12'"),
        (nn.Linear(2, 2), (), "model: must contain nn.Linear modules to replace, got a bare Linear"),
    ],
)
def test_what_cannot_be_emulated_is_refused(model: nn.Module, skip: Any, message: str) -> None:
    with pytest.raises(PrecisionTypeError, match=message):
        pytorch.emulate_linears(model, REGISTRY.get("bf16_with_mxfp8_mixed"), skip=skip)


def test_a_model_is_emulated_once_and_a_string_is_one_name() -> None:
    config = REGISTRY.get("bf16_with_mxfp8_mixed")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert pytorch.emulate_linears(model, config, skip="1") == ["0"]
    with pytest.raises(PrecisionTypeError, match="model: must not be emulated already"):
        pytorch.emulate_linears(model, config)


def test_torchao_has_no_nvfp4() -> None:
    with pytest.raises(BackendUnavailableError, match="torchao has no nvfp4 scaling"):
        pytorch.float8_linear_config_for(REGISTRY.get("bf16_with_nvfp4_mixed"))


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_set_for_convolutions_too(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not tf32)
    before = torch.get_float32_matmul_precision()
    try:
        pytorch.apply_tf32(MixedPrecisionConfig(tf32=tf32))
        assert torch.backends.cudnn.allow_tf32 is tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_config_of_torchao_refuses_rows_of_modules() -> None:
    config = REGISTRY.get("bf16_with_fp8_current_scaling_mixed")
    config.override(modules=[{"select": "*.linear_qkv", "precision": "bf16"}])
    with pytest.raises(BackendUnavailableError) as raised:
        pytorch.float8_linear_config_for(config)
    assert str(raised.value) == (
        "mixed_precision.modules: one config of torchao holds no choice of modules, got 1 row. "
        "Use convert_linears(model, config), which follows them."
    )
