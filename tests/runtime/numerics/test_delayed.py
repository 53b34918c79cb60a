"""Delayed scaling: the update's rules, and the state that a module keeps."""

from __future__ import annotations

import math

import torch

from bridge.runtime.numerics import (
    DelayedScaling,
    GemmPrecision,
    scaled_linear,
    update_scaling_factors,
)


def updated(history: list[float], scale: float = 3.0, **options: object) -> tuple[list[float], float]:
    amax_history, scales = torch.tensor(history)[:, None], torch.tensor([scale])
    update_scaling_factors(amax_history, scales, torch.tensor([448.0]), **options)
    return amax_history[:, 0].tolist(), scales.item()


def test_amax_rolls_in_at_the_end_and_entry_0_is_cleared() -> None:
    assert updated([2.0, 7.0, 4.0]) == ([0.0, 4.0, 2.0], 64.0)
    assert updated([2.0, 7.0, 4.0], algo="most_recent") == ([0.0, 4.0, 2.0], 224.0)
    assert updated([2.0]) == ([0.0], 224.0)
    assert updated([2.0, 1.0]) == ([0.0, 2.0], 224.0)


def test_zero_changes_nothing() -> None:
    assert updated([0.0, 7.0, 4.0]) == ([0.0, 7.0, 4.0], 3.0)


def test_infinity_enters_the_history_and_keeps_the_scale_until_it_has_left() -> None:
    history, scale = updated([math.inf, 7.0, 4.0])
    assert (history, scale) == ([0.0, 4.0, math.inf], 3.0)
    history[0] = 2.0
    history, scale = updated(history, scale)
    assert (history, scale) == ([0.0, math.inf, 2.0], 3.0)
    history[0] = 1.0
    history, scale = updated(history, scale)
    assert (history, scale) == ([0.0, 2.0, 1.0], 3.0)
    history[0] = 1.0
    assert updated(history, scale)[1] == 224.0
    assert updated([2.0, math.inf], algo="most_recent")[1] == 224.0


def test_a_scale_that_overflows_is_fp32_max() -> None:
    assert updated([1e-45])[1] == torch.finfo(torch.float32).max


def test_a_reduced_amax_replaces_the_rank_s_own_unless_it_is_zero() -> None:
    assert updated([2.0, 0.0], reduced_amax=torch.tensor([8.0])) == ([0.0, 8.0], 56.0)
    assert updated([2.0, 0.0], reduced_amax=torch.tensor([0.0])) == ([0.0, 2.0], 224.0)


def delayed(**options: object) -> DelayedScaling:
    return DelayedScaling(GemmPrecision(scheme="delayed", amax_history_len=4, **options))


def test_the_first_step_runs_with_scale_1_and_the_next_with_its_amax(path: str) -> None:
    state = delayed(margin=1)
    x = torch.randn(32, 48).bfloat16().requires_grad_()
    w = torch.randn(64, 48).bfloat16().requires_grad_()
    scaled_linear(x, w, precision=state.precision, state=state).sum().backward()
    assert torch.equal(state.scale, torch.ones(3))
    assert torch.equal(state.amax_history[0], torch.stack([x.abs().max(), w.abs().max(), torch.tensor(1.0)]).float())
    state.update("forward")
    wanted = torch.tensor([448.0 / 2] * 2) / torch.stack([x.abs().max(), w.abs().max()]).float()
    assert torch.equal(state.scale[:2], wanted)
    assert state.scale[2] == 1.0
    state.update("backward")
    assert state.scale[2] == 57344.0 / 2
    assert not state.amax_history[0].any()


def test_nan_is_not_recorded_and_several_passes_keep_the_largest() -> None:
    state = delayed()
    for amax in (2.0, math.nan, 5.0, 1.0):
        state.record("input", amax)
    assert state.get_pending_amaxes("forward").tolist() == [5.0, 0.0]


def test_a_recomputed_forward_pass_repeats_the_first(path: str) -> None:
    state = delayed()
    x, w = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    first = scaled_linear(x, w, precision=state.precision, state=state)
    stashed = state.copy_scales()
    state.update("forward")
    with state.use_scales(stashed):
        again = scaled_linear(x, w, precision=state.precision, state=state)
    assert torch.equal(first, again)
    assert not state.get_pending_amaxes("forward").any()
    assert not torch.equal(scaled_linear(x, w, precision=state.precision, state=state), first)


def test_state_travels_through_checkpoints_and_stays_fp32() -> None:
    state, other = delayed(), delayed()
    state.record("weight", 3.0)
    state.update("forward")
    other.load_state_dict(state.state_dict())
    assert torch.equal(other.scale, state.scale)
    assert torch.equal(other.amax_history, state.amax_history)
    module = torch.nn.Sequential(state).bfloat16()
    assert module[0].scale.dtype == torch.float32
    assert torch.equal(module[0].scale, other.scale)
