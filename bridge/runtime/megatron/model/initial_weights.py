"""Initial weights that are the same in every parallel layout.

Megatron draws the weights of a rank in sequence from the rank's random state. So the weights of a
pipeline stage, tensor-parallel shard or expert-parallel rank differ from the weights of a single
process.
Here each weight of the whole model is drawn separately. Its seed is made of the run's seed and the
weight's identity in Megatron's distributed checkpoints: its name, and the numbers of layer and
expert. A rank draws the whole weight, and takes its part.

1. `mark_weights`: while Megatron builds a chunk, its initialisation functions write a mark, a small
   constant, in place of random values.
2. `draw_weights`: a parameter that has a mark is drawn with the function of the mark. Norms and
   biases keep their values. Megatron draws the convolution, decays and steps of a Mamba layer or a
   gated delta net without such a function, and here they are drawn from the same distributions.

The weights are equal in every layout on the same kind of device. A CPU and a GPU draw different
values from the same seed.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from bridge.runtime.megatron.patching import Patch, apply_patches

InitMethods = dict[float, "Callable[[torch.Tensor], Any]"]
"""Mark -> initialisation function, which fills a tensor."""

_INIT_METHOD_MARKS = {
    "init_method": 2.0**-10,
    "output_layer_init_method": 2.0**-11,
    "embedding_init_method": 2.0**-12,
}
"""Field of a model config -> its mark.

A stored weight is quantised while it has the mark, and delayed scaling records the mark as an amax.
The mark is smaller than the amax of any drawn weight, and the history keeps the larger one.
"""
_SHARDED_ENTRIES = (ShardedTensor, ShardedTensorFactory)
"""Megatron's classes of the entries of parameters in a sharded state dict."""


@contextmanager
def mark_weights(config: Any) -> Iterator[InitMethods]:
    """Let a config's initialisation functions write their marks; yield mark -> function."""
    marks: InitMethods = {}
    changes: list[Patch] = []
    for name, mark in _INIT_METHOD_MARKS.items():
        method = getattr(config, name, None)
        if method is not None:
            marks[mark] = method
            changes.append((config, name, partial(torch.nn.init.constant_, val=mark)))
    with apply_patches(changes):
        yield marks


@torch.no_grad()
def draw_weights(model: Any, marks: InitMethods, *, seed: int) -> None:
    """Draw every weight of a model that has a mark, and the weights that layers draw by themselves.

    Args:
        model: A chunk.
        marks: The result of `mark_weights`.
        seed: Seed of the run.
    """
    entries = _get_sharded_entries(model)
    methods: dict[int, Callable[[torch.Tensor], Any]] = {}
    for module in model.modules():
        for parameter, method in _list_mixer_parameters(module):
            methods[id(parameter)] = method
    for name, parameter in model.named_parameters():
        # A weight that is stored in FP8 or FP4 also has the values from which its master is made.
        get_initial_value = getattr(parameter, "get_high_precision_init_val", None)
        initial_value = None
        if get_initial_value is not None:
            initial_value = get_initial_value()
        marked = parameter
        if initial_value is not None:
            marked = initial_value
        mark = _find_mark(marked, marks)
        draw = methods.get(id(parameter))
        if mark is not None:
            draw = marks[mark]
        if draw is None:
            continue
        entry = entries.get(id(parameter), name)
        drawn = _draw_parameter(entry, parameter, draw, seed).to(marked.dtype)
        parameter.copy_(drawn)  # a stored weight quantises the values
        if initial_value is not None:
            initial_value.copy_(drawn)


def _get_sharded_entries(model: Any) -> dict[int, Any]:
    """Return id of a parameter -> its entry in Megatron's sharded state dict of a chunk."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "dp_cp_group": group}
    entries: dict[int, Any] = {}
    for entry in nested_values(model.sharded_state_dict(metadata=metadata)):
        if isinstance(entry, _SHARDED_ENTRIES):
            entries[id(entry.data)] = entry
    return entries


def _list_mixer_parameters(
    module: Any,
) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]:
    """Yield the parameters that a Mamba mixer or a gated delta net draws, with functions to draw them.

    Source: megatron-core 0.16.1 ssm/mamba_mixer.py:287-337 and ssm/gated_delta_net.py:220-244.
    """
    if not hasattr(module, "A_log"):
        return
    convolution = _get_convolution(module)
    bound = convolution[0].shape[-1] ** -0.5
    for parameter in convolution:
        yield parameter, partial(torch.nn.init.uniform_, a=-bound, b=bound)
    yield module.A_log, lambda decays: decays.uniform_(1, 16).log_()
    if hasattr(module, "D"):  # the steps of a delta net begin with a constant
        yield module.dt_bias, _draw_time_step_bias


def _get_convolution(module: Any) -> list[torch.Tensor]:
    """Return weight and bias of a layer's convolution.

    The convolution is a module, or parameters from megatron-core 0.19 on.
    """
    if hasattr(module, "conv1d"):
        return list(module.conv1d.parameters())
    return [module.conv1d_weight, module.conv1d_bias]


def _draw_time_step_bias(bias: torch.Tensor) -> None:
    """Fill the biases of a Mamba layer's steps.

    The softplus of a bias is log-uniform between 0.001 and 0.1.
    """
    steps = bias.uniform_(math.log(0.001), math.log(0.1)).exp()
    bias.copy_(steps + torch.log(-torch.expm1(-steps)))


def _find_mark(weight: torch.Tensor, marks: InitMethods) -> float | None:
    """Return the mark that all elements of a weight have, or None without it.

    The elements may be the mark rounded to a low precision.
    """
    edges = torch.aminmax(weight.float())
    smallest, largest = float(edges.min), float(edges.max)
    for mark in marks:
        if 0.9 * mark < smallest <= largest < 1.1 * mark:  # FP8 and FP4 scales round the mark
            return mark
    return None


def _draw_parameter(
    entry: Any, parameter: torch.Tensor, method: Callable[[torch.Tensor], Any], seed: int
) -> torch.Tensor:
    """Return the values of a parameter, or of this rank's part of it, in FP32.

    Args:
        entry: The parameter's entry in a sharded state dict, or its name. A parameter without an
            entry is the same on all ranks.
        parameter: Read for its shape and device.
        method: Initialisation function.
        seed: Seed of the run.
    """
    unfilled = torch.empty(parameter.shape, device=parameter.device)
    device = unfilled.device
    if isinstance(entry, str):
        return _fill_seeded(unfilled, method, f"{seed} {entry}")
    # A checkpoint keeps such a parameter as several tensors, for example the halves of a gated MLP.
    if isinstance(entry, ShardedTensorFactory):
        parts = entry.build_fn(entry.key, unfilled, entry.replica_id, entry.flattened_range)
        shards = dict_list_map_outplace(lambda part: _draw_shard(part, device, method, seed), parts)
        drawn: torch.Tensor = entry.merge_fn(shards)
        return drawn
    return _draw_shard(entry, device, method, seed)


def _draw_shard(
    entry: Any, device: torch.device, method: Callable[[torch.Tensor], Any], seed: int
) -> torch.Tensor:
    """Draw a whole tensor, and return the part of it that an entry of a state dict has."""
    axes = entry.prepend_axis_num  # of layer and expert
    tensor = torch.empty(entry.global_shape[axes:], device=device)
    _fill_seeded(tensor, method, f"{seed} {entry.key} {entry.global_offset[:axes]}")
    ranges = zip(entry.global_offset[axes:], entry.local_shape, strict=True)
    for axis, (start, size) in enumerate(ranges):
        tensor = tensor.narrow(axis, start, size)
    return tensor


def _fill_seeded(
    tensor: torch.Tensor, method: Callable[[torch.Tensor], Any], seed_text: str
) -> torch.Tensor:
    """Fill a tensor with random values, and restore the random states.

    `torch.manual_seed` is not called. It would also queue a seed for devices that do not exist,
    each with a stack trace that is never freed.

    Args:
        method: Initialisation function.
        seed_text: A text from which the seed is made.
    """
    number = int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:8], "big")
    devices = []
    if tensor.is_cuda:
        devices.append(tensor.device)
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(number)
        if tensor.is_cuda:
            torch.cuda.manual_seed_all(number)
        method(tensor)
    return tensor
