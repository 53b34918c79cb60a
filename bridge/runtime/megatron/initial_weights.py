"""Initial weights that are the same in every parallel layout.

Megatron draws the weights of a rank in sequence from the rank's random state. So the weights of a
pipeline stage, tensor-parallel shard or expert-parallel rank differ from those of a single process.
Here each weight of the whole model is drawn separately, from a seed made of the run's seed and the
weight's place: its name, and the numbers of layer and expert, in Megatron's distributed checkpoints.
A rank takes its part of the tensor.

While Megatron builds a chunk, its initialisation functions write a mark, a small constant, in place
of random values. A parameter that has a mark afterwards is drawn with the function of that mark.
Norms and biases keep their values. Megatron draws the convolution, decays and steps of a Mamba layer
or a gated delta net without such a function; here they are drawn from the same distributions. The
weights are equal in every layout on the same kind of device. A CPU and a GPU draw different values
from the same seed.
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

_INIT_METHOD_MARKS = {
    "init_method": 2.0**-10,
    "output_layer_init_method": 2.0**-11,
    "embedding_init_method": 2.0**-12,
}
"""Config field -> its mark: smaller than any weight's amax, which delayed
scaling keeps the larger one of.
"""


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
    """Draw every weight of a model that has a mark, and the weights that layers draw by themselves."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(
        metadata={"singleton_local_shards": False, "dp_cp_group": group}
    )
    places: dict[int, Any] = {}
    for entry in nested_values(state):
        if isinstance(entry, _SHARDED_ENTRIES):
            places[id(entry.data)] = entry
    methods: dict[int, Callable[[torch.Tensor], Any]] = {}
    for module in model.modules():
        for parameter, method in _list_mixer_parameters(module):
            methods[id(parameter)] = method
    for name, parameter in model.named_parameters():
        # of a weight that is stored in FP8 or FP4: the values that its master begins with
        initial_value = getattr(parameter, "get_high_precision_init_val", None)
        initial = None
        if initial_value is not None:
            initial = initial_value()
        filled = parameter
        if initial is not None:
            filled = initial
        mark = _find_mark(filled, marks)
        draw = methods.get(id(parameter))
        if mark is not None:
            draw = marks[mark]
        if draw is None:
            continue
        place = places.get(id(parameter), name)
        drawn = _draw_parameter(place, parameter, draw, seed).to(filled.dtype)
        parameter.copy_(drawn)  # the codes are those of the master
        if initial is not None:
            initial.copy_(drawn)


def _list_mixer_parameters(
    module: Any,
) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]:
    """Yield the parameters that a Mamba mixer or a gated delta net draws, and how.

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


_SHARDED_ENTRIES = (ShardedTensor, ShardedTensorFactory)


def _find_mark(weight: torch.Tensor, marks: InitMethods) -> float | None:
    """Return the mark that all elements of a weight have, or None.

    The elements may be the mark rounded to a low precision.
    """
    edges = torch.aminmax(weight.float())
    smallest, largest = float(edges.min), float(edges.max)
    for mark in marks:
        if 0.9 * mark < smallest <= largest < 1.1 * mark:
            return mark
    return None


def _draw_parameter(
    place: Any, parameter: torch.Tensor, method: Callable[[torch.Tensor], Any], seed: int
) -> torch.Tensor:
    """Return the values of a parameter, or of this rank's part of it.

    Args:
        place: Megatron's entry for the parameter in a sharded state dict. A parameter without an
            entry is drawn whole, and `place` is its name.
        parameter: Read for its shape and device.
        method: Initialisation function.
        seed: Seed of the run.
    """
    plain = torch.empty(parameter.shape, device=parameter.device)
    if isinstance(place, str):
        return _fill_seeded(plain, method, f"{seed} {place}")
    # a weight that is kept as several, as the gate of an MLP is
    if isinstance(place, ShardedTensorFactory):
        parts = place.build_fn(place.key, plain, place.replica_id, place.flattened_range)
        shards = dict_list_map_outplace(
            lambda part: _draw_shard(part, plain.device, method, seed), parts
        )
        drawn: torch.Tensor = place.merge_fn(shards)
        return drawn
    return _draw_shard(place, plain.device, method, seed)


def _draw_shard(
    part: Any, where: torch.device, method: Callable[[torch.Tensor], Any], seed: int
) -> torch.Tensor:
    """Draw a whole tensor, and return the part of it that an entry of a state dict has."""
    axes = part.prepend_axis_num  # of layer and expert
    whole = torch.empty(part.global_shape[axes:], device=where)
    _fill_seeded(whole, method, f"{seed} {part.key} {part.global_offset[:axes]}")
    places = zip(part.global_offset[axes:], part.local_shape, strict=True)
    for axis, (start, size) in enumerate(places):
        whole = whole.narrow(axis, start, size)
    return whole


def _fill_seeded(
    tensor: torch.Tensor, method: Callable[[torch.Tensor], Any], place: str
) -> torch.Tensor:
    """Fill a tensor with random values, seeded by its place, and keep the random states.

    `torch.manual_seed` would also queue a seed for devices that do not exist, each with a stack
    trace that is never freed.
    """
    number = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "big")
    devices = []
    if tensor.is_cuda:
        devices.append(tensor.device)
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(number)
        if tensor.is_cuda:
            torch.cuda.manual_seed_all(number)
        method(tensor)
    return tensor
