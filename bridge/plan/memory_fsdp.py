"""Megatron-FSDP's buffers: how it groups parameters, how it pads a group, and the part of it that a rank keeps.

Parameters of one dtype, of experts or not, and of one FSDP unit (a layer, under `optim_grads_params`) make a group. Its
widest row decides the grid: each parameter begins on the grid or fills the rest of a cell, and the group ends at a
multiple of the grid times the ranks. What is sharded follows `data_parallel_sharding_strategy`. With several optimizer
instances (HSDP) weights and gradients are sharded inside an instance, and with `outer_dp_sharding_strategy` masters and
optimizer state over all of them. What is sharded is gathered while it is used: two units at a time, or one unit and
the largest other group. Without `fsdp_double_buffer` Megatron may gather more, ahead of its use.

Source: megatron-core 0.16.1 distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py. A Mamba layer is no unit
there, and is one in Megatron-LM's development branch, as here; that changes padding alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bridge.plan.memory_buffers import Buffer, Group
from bridge.plan.memory_parameters import Parameter
from bridge.rules.shape.parallel import Parallel

SHARDED = {"no_shard": "", "optim": "O", "optim_grads": "OG", "optim_grads_params": "OGP"}
"""Strategy -> whether optimizer (with the masters), gradients and parameters are sharded."""
GATHERED = ("optim_grads", "optim_grads_params")
"""Strategies under which something is gathered while it is used."""
OUTSIDE = ("enorm", "hnorm", "eh_proj", "final_layernorm")
"""Modules of multi-token prediction that are in none of its layers."""


def fsdp_groups(
    parameters: Sequence[Parameter], parallel: Parallel, ddp: Mapping[str, Any], data_rank: int
) -> list[Group]:
    """Return the groups of a model chunk's parameters, given in the order of Megatron's modules."""
    strategy = str(ddp["data_parallel_sharding_strategy"])
    sharded = SHARDED.get(strategy, "OGP")
    instances = ddp["num_distributed_optimizer_instances"] or 1
    is_outer = instances > 1 and ddp["outer_dp_sharding_strategy"] != "no_shard"
    found = []
    grouped = _grouped(parameters, "P" in sharded, bucket_size=ddp["bucket_size"], splits_shared=bool(sharded))
    for group in grouped:
        everywhere = parallel.expert_data if group[0].is_expert else parallel.data * parallel.context
        inner = max(1, everywhere // instances)
        outer = everywhere if is_outer else inner
        buffer = _laid_out(group, ranks=outer if sharded else None)
        is_frozen = group[0].is_frozen
        found.append(
            Group(
                parameters=tuple(group),
                whole=buffer.numel,
                weights=buffer.numel // (inner if "P" in sharded else 1),
                gradients=0 if is_frozen else buffer.numel // (inner if "G" in sharded else 1),
                masters=0 if is_frozen else buffer.numel // (outer if sharded else 1),
                states=0 if is_frozen else buffer.shard(data_rank % outer, outer) if sharded else buffer.held,
                unit=_unit(group[0]) if "P" in sharded else None,
            )
        )
    return found


def gathered(groups: Sequence[Group], sizes: Sequence[float]) -> float:
    """Return the bytes of groups that are gathered at a time, given the bytes of each whole group."""
    units: dict[str, float] = {}
    for group, size in zip(groups, sizes, strict=True):
        if group.unit is not None:
            units[group.unit] = units.get(group.unit, 0.0) + size
    outside = [size for group, size in zip(groups, sizes, strict=True) if group.unit is None]
    unit = max(units.values(), default=0.0)
    return unit + max(unit, *outside) if outside else 2 * unit


def _unit(parameter: Parameter) -> str | None:
    if parameter.layer.isdigit() or (parameter.layer.startswith("mtp") and parameter.module not in OUTSIDE):
        return parameter.layer
    return None


def _grouped(
    parameters: Sequence[Parameter], in_units: bool, *, bucket_size: int | None, splits_shared: bool
) -> Iterator[list[Parameter]]:
    """Yield the groups: by attributes, cut at a shared embedding, and outside of units at the bucket size."""
    alike: dict[tuple[object, bool, bool, str | None], list[Parameter]] = {}
    for parameter in parameters:
        unit = _unit(parameter) if in_units else None
        is_expert = parameter.module.startswith("experts.")
        key = (parameter.is_stored_low or parameter.storage, is_expert, parameter.is_frozen, unit)
        alike.setdefault(key, []).append(parameter)
    for (_, _, _, unit), group in alike.items():
        bucket: list[Parameter] = []
        for parameter in group:
            alone = parameter.shares_embedding and splits_shared
            if alone and bucket:
                yield bucket
                bucket = []
            bucket.append(parameter)
            is_full = unit is None and bucket_size and sum(one.numel for one in bucket) >= bucket_size
            if alone or is_full:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def _width(parameter: Parameter) -> int:
    """Return the elements of a row; Megatron's vectors are columns."""
    return parameter.columns if parameter.rows > 1 else 1


def _grid(parameters: Sequence[Parameter]) -> int:
    grid = _width(parameters[0])
    for one in parameters:
        fits = _width(one) == grid or (grid % _width(one) == 0 and one.numel % grid == 0)
        if not (fits or one.numel < grid):
            grid = math.lcm(grid, _width(one))
    return grid


def _laid_out(group: Sequence[Parameter], *, ranks: int | None) -> Buffer:
    """Return the places of a group's parameters: the widest first, and remainders together in a cell of the grid."""
    ordered = sorted(group, key=_width, reverse=True)
    grid = _grid(ordered)
    small = [one for one in ordered if one.numel < grid]
    large = [one for one in ordered if one.numel >= grid]
    spans: list[tuple[Parameter, int, int]] = []
    cursor = 0
    while large:
        one = large.pop(0)
        spans.append((one, cursor, cursor + one.numel))
        rest = one.numel % grid
        gap, space = cursor + one.numel, grid - rest
        cursor += -(-one.numel // grid) * grid
        if not rest:
            continue
        pair = next((other for other in large if 0 < other.numel % grid <= space), None)
        if pair is not None:
            large.remove(pair)
            begin = cursor - pair.numel % grid
            spans.append((pair, begin, begin + pair.numel))
            space -= pair.numel % grid
            cursor += pair.numel // grid * grid
        for fragment in list(small):
            if fragment.numel <= space:
                spans.append((fragment, gap, gap + fragment.numel))
                gap, space = gap + fragment.numel, space - fragment.numel
                small.remove(fragment)
    for fragment in small:
        spans.append((fragment, cursor, cursor + fragment.numel))
        cursor += fragment.numel
    step = ranks * grid if ranks is not None else 1
    spans.sort(key=lambda span: span[1])
    return Buffer(spans=tuple(spans), buckets=((0, -(-cursor // step) * step),))
