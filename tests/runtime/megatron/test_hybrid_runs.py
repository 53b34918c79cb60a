"""Hybrid models: the state-space layer in plain torch, and runs in every scheme."""

# ruff: noqa: N803, N806, PLR0917 tensors carry their shape in capitals

import pytest
import torch

from bridge.errors import RunConfigError
from bridge.runtime.megatron.hybrid.state_space import GatedRMSNorm, convolve_and_scan, scan_chunks
from bridge.training.loop import pretrain
from tests.runtime.megatron.test_model_kinds import SCHEMES, mismatches, parameters, run_of
from tests.training.loop_tiny import tiny, trace

HYBRID = {
    "hybrid_layer_pattern": "M-M*ME",
    "num_layers": 6,
    "mamba_num_heads": 32,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_state_dim": 24,
    "num_moe_experts": 4,
    "position_embedding_type": "none",
}


def mixer_inputs(tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of a scan of four heads in two groups, in FP32."""
    draw = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    vectors = {"B": normal(2, tokens, 2, 6), "C": normal(2, tokens, 2, 6)}
    return {"x": normal(2, tokens, 4, 8), "dt": normal(2, tokens, 4), "A": -normal(4).exp(), **vectors, "D": normal(4)}


def recurrence(x, dt, A, B, C, D):
    """Return y (B, L, H, P) in FP64, one token after the other; `dt` are the steps."""
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H = (part.double() for part in (x, dt, A, B, C, D))
    heads = x.shape[2] // B.shape[2]
    state_BHPN = x_BLHP.new_zeros(*x.shape[::2], x.shape[3], B.shape[3])
    outputs = []
    for token in range(x.shape[1]):
        B_BHN, C_BHN = (part[:, token].repeat_interleave(heads, 1) for part in (B_BLGN, C_BLGN))
        step_BH, x_BHP = dt_BLH[:, token], x_BLHP[:, token]
        added_BHPN = torch.einsum("bh,bhp,bhn->bhpn", step_BH, x_BHP, B_BHN)
        state_BHPN = state_BHPN * (step_BH * A_H).exp()[..., None, None] + added_BHPN
        outputs.append(torch.einsum("bhpn,bhn->bhp", state_BHPN, C_BHN) + D_H[:, None] * x_BHP)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("tokens", [5, 16, 37])
def test_the_scan_in_chunks_is_the_recurrence(tokens):
    given = mixer_inputs(tokens)
    y = scan_chunks(**given, chunk_size=16, dt_softplus=True)
    expected = recurrence(**{**given, "dt": torch.nn.functional.softplus(given["dt"].double())})
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_whole_mixer_is_convolution_scan_and_gate():
    given, draw = mixer_inputs(19), torch.Generator().manual_seed(8)
    z, taps, bias, dt_bias = (torch.randn(*s, generator=draw) for s in ((2, 19, 32), (56, 4), (56,), (4,)))
    flat = torch.cat([given[name].flatten(2) for name in ("x", "B", "C")], -1)
    packed = torch.cat([z, flat, given["dt"]], -1)
    y = convolve_and_scan(packed, taps, bias, dt_bias, given["A"], given["D"], 16, headdim=8, ngroups=2)
    convolution = torch.nn.Conv1d(56, 56, 4, groups=56, padding=3)
    convolution.weight.data, convolution.bias.data = taps[:, None], bias
    mixed = torch.nn.functional.silu(convolution(flat.transpose(1, 2))[..., :19]).transpose(1, 2)
    x, b, c = mixed.split([32, 12, 12], -1)
    steps = torch.nn.functional.softplus(given["dt"] + dt_bias)
    groups = {"B": b.unflatten(-1, (2, 6)), "C": c.unflatten(-1, (2, 6))}
    expected = recurrence(x.unflatten(-1, (4, 8)), steps, given["A"], D=given["D"], **groups).flatten(2)
    torch.testing.assert_close(y.double(), expected * torch.nn.functional.silu(z.double()), rtol=1e-4, atol=1e-4)


def test_the_gated_norm_is_that_of_each_group():
    x, z = torch.randn(3, 8), torch.randn(3, 8)
    norm = GatedRMSNorm(8, group_size=4, norm_before_gate=False)
    gated = x * torch.nn.functional.silu(z)
    expected = torch.cat([torch.nn.functional.rms_norm(half, (4,), eps=1e-5) for half in gated.split(4, -1)], -1)
    torch.testing.assert_close(norm(x, z), expected)


def test_a_hybrid_has_the_modules_and_the_formats_of_its_plan_in_every_scheme(tmp_path):
    for scheme in SCHEMES:
        summary, plan = run_of(tmp_path, HYBRID, scheme)
        assert mismatches(summary, plan) == [], scheme
        assert summary.parameters == parameters(plan), scheme


def test_a_hybrid_keeps_its_first_and_last_layers_in_bf16(tmp_path):
    summary, plan = run_of(tmp_path, {**HYBRID, "first_last_layers_bf16": True}, "tensorwise")
    assert mismatches(summary, plan) == []
    assert {row.layer for row in summary.gemms if row.scheme == "tensorwise"} == {"2", "3", "4", "5"}


def test_a_hybrid_continues_where_it_stopped(tmp_path):
    schedule = {"lr_decay_iters": 4, "eval_iters": 0}
    saved = str(tmp_path / "checkpoints")
    for folder, steps, files in (("whole", 4, {}), ("parts", 2, {"save": saved}), ("parts", 4, {"load": saved})):
        config = tiny(model=HYBRID, low="delayed", sharded=True, train={**schedule, "train_iters": steps}, **files)
        pretrain(config, run_dir=tmp_path / folder)
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")


@pytest.mark.parametrize("pattern", ["M+-M", "M*|-M", "M*-M/*"])
def test_a_pattern_that_this_megatron_cannot_build_is_refused(pattern, tmp_path):
    layers = {"num_layers": 4, "mtp_num_layers": 1 if "/" in pattern else None}
    with pytest.raises(RunConfigError) as raised:
        pretrain(tiny(model={**HYBRID, **layers, "hybrid_layer_pattern": pattern}), run_dir=tmp_path)
    assert str(raised.value) == (
        "PB702 model.hybrid_layer_pattern: a run builds layers of M, *, - and E; Megatron Core has |, / and other "
        f"layers from 0.17 on, got {pattern!r}. Write those alone."
    )
