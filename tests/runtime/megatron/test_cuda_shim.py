"""The CPU device shim: what it replaces, and that it leaves nothing behind."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel import p2p_communication, schedules

from bridge.runtime.megatron import cuda_shim
from bridge.runtime.megatron.patching import resolve_patches

pytestmark = pytest.mark.skipif(cuda_shim.has_cuda(), reason="the shim does nothing where CUDA is present")


def state():
    """Every callable that the shim replaces, as it is now."""
    return [(name, getattr(owner, name)) for owner, name, _ in resolve_patches(cuda_shim.CUDA_PATCHES)]


def test_everything_is_as_before_after_the_block():
    before = state()
    with cuda_shim.cpu_as_cuda():
        assert cuda_shim.is_shim_installed()
        during = state()
    assert not cuda_shim.is_shim_installed()
    assert state() == before
    assert all(old != new for old, new in zip(before, during, strict=True))


def test_a_stage_may_empty_the_output_that_it_sends(monkeypatch: pytest.MonkeyPatch):
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "isend", lambda tensor, **_: sent.append(tensor))
    group = SimpleNamespace(size=lambda: 4, rank=lambda: 0)
    nothing = dict.fromkeys(("tensor_send_prev", "tensor_recv_prev", "tensor_recv_next"))
    output = torch.ones(4, requires_grad=True) * 2
    with cuda_shim.cpu_as_cuda():
        p2p_communication._p2p_ops(
            **nothing, tensor_send_next=output, group=group, prev_pipeline_rank=3, next_pipeline_rank=1
        )
        schedules.deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
    assert output.shape == (1,)
    assert sent[0].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("name", ["dist_all_gather_func", "dist_reduce_scatter_func"])
def test_a_collective_of_one_rank_leaves_its_own_tensor_where_it_is(monkeypatch: pytest.MonkeyPatch, name: str):
    asked: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(param_and_grad_buffer, name, lambda *tensors, **_: asked.append(tensors))
    buffer, other = torch.ones(4), torch.empty(4)
    with cuda_shim.cpu_as_cuda():
        collective = getattr(param_and_grad_buffer, name)
        collective(buffer, buffer[:4], group=SimpleNamespace(size=lambda: 1), async_op=False)
        assert asked == []
        collective(other, buffer, group=SimpleNamespace(size=lambda: 1), async_op=False)
        collective(buffer, buffer[:2], group=SimpleNamespace(size=lambda: 2), async_op=False)
    assert [result is other for result, _ in asked] == [True, False]


def test_everything_is_as_before_after_an_error():
    before = state()
    with pytest.raises(RuntimeError, match="on the way"), cuda_shim.cpu_as_cuda():
        raise RuntimeError("on the way")
    assert state() == before


def test_inner_block_leaves_the_outer_one_installed():
    with cuda_shim.cpu_as_cuda():
        with cuda_shim.cpu_as_cuda():
            pass
        assert cuda_shim.is_shim_installed()
    assert not cuda_shim.is_shim_installed()


def test_every_row_says_who_needs_it_and_what_happens_without():
    reasons = yaml.safe_load(Path(cuda_shim.__file__).with_suffix(".yaml").read_text())
    assert reasons.keys() == cuda_shim.CUDA_PATCHES.keys()
    assert all(reason["needed_by"] for reason in reasons.values())
    assert sum(reason["without"].startswith("SILENT") for reason in reasons.values()) == 5


@pytest.mark.parametrize("make", [lambda d: torch.zeros(2, device=d), lambda d: torch.tensor([1.0], device=d)])
@pytest.mark.parametrize("where", ["cuda", "cuda:0", torch.device("cuda")])
def test_factories_make_cpu_tensors(make, where):
    with cuda_shim.cpu_as_cuda():
        assert make(where).device.type == "cpu"


def test_other_devices_are_left_alone():
    with cuda_shim.cpu_as_cuda():
        assert torch.zeros(2, device="meta").device.type == "meta"


def test_type_names_and_conversions():
    with cuda_shim.cpu_as_cuda():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_tracked_random_states_differ_and_are_restored():
    from megatron.core import parallel_state, tensor_parallel

    from bridge.runtime.megatron.gpt import GPTConfig
    from bridge.runtime.megatron.process import training_process

    model = GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    with training_process(model, seed=5):
        assert parallel_state.model_parallel_is_initialized()
        tracker = tensor_parallel.get_cuda_rng_tracker()
        outside = torch.get_rng_state()
        with tracker.fork():
            first = torch.rand(4)
        assert torch.equal(torch.get_rng_state(), outside)
        with tracker.fork():
            second = torch.rand(4)
        assert not torch.equal(first, second)
        states = [tuple(state.tolist()) for state in tracker.get_states().values()]
        assert len(set(states)) == len(states)


def test_cuda_autocast_acts_on_the_cpu_and_ends():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with cuda_shim.cpu_as_cuda(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert (x @ w).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
    assert (x @ w).dtype == torch.float32


def test_backward_of_a_linear_under_autocast_matches_the_forward_dtype():
    """Megatron's linear runs its backward GEMMs under the autocast its forward had (custom_fwd/custom_bwd)."""
    from megatron.core.tensor_parallel.layers import (
        linear_with_grad_accumulation_and_async_allreduce,
    )

    from bridge.runtime.megatron.gpt import GPTConfig
    from bridge.runtime.megatron.process import training_process

    with training_process(GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=1), seed=5):
        x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = linear_with_grad_accumulation_and_async_allreduce(x, w, None, False, False, False)
        out.backward(torch.ones_like(out))
    assert out.dtype == torch.bfloat16
    assert x.grad.dtype == w.grad.dtype == torch.float32
    rounded = torch.ones(3, 8).bfloat16() @ w.detach().bfloat16()
    assert torch.equal(x.grad, rounded.float())
