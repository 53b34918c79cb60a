"""The buffers of parameters and gradients that Megatron allocates: their padding, their buckets, and each rank's shard.

Without Megatron-FSDP the parameters of one storage lie in reverse order. Under the distributed optimizer each begins at
a multiple of 64 elements, each bucket ends at a multiple of lcm(ranks, 128) (and 2^16 with
`pad_buckets_for_high_nccl_busbw`), and rank r owns the r-th part of every bucket.
Source: megatron-core 0.16.1 distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py.

Under Megatron-FSDP parameters of one dtype, of experts or not, and of one unit make a group. A unit is a layer, under
`optim_grads_params`, and from 0.20 on under every strategy that shards (distributed/fsdp/mcore_fsdp_adapter.py).
Its widest row decides the grid, and the group ends at a multiple of the grid times the ranks. Gaps of
less than a row between its parameters are not counted, since small parameters fill them. With several optimizer
instances (HSDP) weights and gradients are sharded inside an instance, and with `outer_dp_sharding_strategy` masters and
optimizer state over all of them. What is sharded is gathered while it is used: two units at a time, or one unit and the
largest other group.
Source: megatron-core 0.16.1 distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py. A Mamba layer is no unit
there, and is one in Megatron-LM's development branch, as here; that changes padding alone.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.model.layout import Parallel, Place
from bridge.model.modules import OF_MTP
from bridge.plan.memory_parameters import Parameter, padded
from bridge.plan.precision_plan import PrecisionPlan
from bridge.plan.settings import Settings
from bridge.precision.grouping import grouped


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters of one buffer, or the frozen ones of one storage, in elements of this rank."""

    parameters: tuple[Parameter, ...]
    whole: int
    """All of its elements, padding included."""
    weights: int
    gradients: int = 0
    masters: int = 0
    states: int = 0
    """Elements of parameters alone: an optimizer keeps nothing for padding."""
    unit: str | None = None
    """The unit of Megatron-FSDP that it is part of."""

    @property
    def is_gathered(self) -> bool:
        """Whether its weights are gathered before they are used."""
        return self.weights < self.whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One contiguous buffer."""

    spans: tuple[tuple[Parameter, int, int], ...]
    """(parameter, start, end) in elements, by start."""
    buckets: tuple[tuple[int, int], ...]
    """(start, end) of each bucket, its padding included."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def held(self) -> int:
        """Elements of its parameters."""
        return sum(parameter.numel for parameter, _, _ in self.spans)

    def shard(self, rank: int, ranks: int) -> int:
        """Return how many elements of the parameters lie in one rank's parts of the buckets."""
        held = 0
        for begin, close in self.buckets:
            size = (close - begin) // ranks
            left, right = begin + size * rank, begin + size * (rank + 1)
            first = bisect_right(self.spans, left, key=lambda span: span[2])
            last = bisect_left(self.spans, right, key=lambda span: span[1])
            held += sum(
                min(end, right) - max(start, left) for _, start, end in self.spans[first:last]
            )
        return held


def lay_out(
    parameters: Sequence[Parameter],
    *,
    ranks: int,
    distributed: bool,
    bucket_size: int | None,
    high_bandwidth: bool,
) -> Buffer:
    """Return the buffer of parameters, in the order of Megatron's modules, that share storage and gradient dtype.

    Without the distributed optimizer nothing is padded.
    """
    least = 2**16 if high_bandwidth else 1
    step, multiple = (64, math.lcm(ranks, 128, least)) if distributed else (1, 1)
    spans: list[tuple[Parameter, int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin = 0
    for bucket in _buckets(reversed(parameters), bucket_size, step=step, splits_shared=distributed):
        end = begin
        for parameter in bucket:
            start = padded(end, step)
            end = start + parameter.numel
            spans.append((parameter, start, end))
        buckets.append((begin, padded(end, multiple)))
        begin = buckets[-1][1]
    return Buffer(spans=tuple(spans), buckets=tuple(buckets))


def _buckets(
    parameters: Iterable[Parameter], bucket_size: int | None, *, step: int = 1, splits_shared: bool
) -> Iterator[list[Parameter]]:
    """Yield buckets of at least `bucket_size` elements (None: one bucket); a shared embedding has one of its own.

    Each parameter begins at a multiple of `step` elements.
    """
    bucket: list[Parameter] = []
    size = 0
    for parameter in parameters:
        alone = parameter.shares_embedding and splits_shared
        if alone and bucket:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size = padded(size, step) + parameter.numel
        if alone or (bucket_size and size >= bucket_size):
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def ddp_groups(
    parameters: Sequence[Parameter],
    plan: PrecisionPlan,
    place: Place,
    ddp: Mapping[str, Any],
    data_rank: int,
) -> list[Group]:
    """Return the groups of a model chunk's parameters, given in the order of Megatron's modules, without FSDP."""
    parallel, settings = plan.parallel, plan.settings
    is_cut = ddp["overlap_grad_reduce"] and place.stage == 0 and place.chunk == 0
    bucket_size = (
        int(ddp["bucket_size"] or max(40_000_000, 1_000_000 * parallel.data)) if is_cut else None
    )
    alike = grouped(((one.is_frozen, one.is_expert, one.storage), one) for one in parameters)
    found = []
    for (is_frozen, is_expert, _), group in alike.items():
        if is_frozen:
            held = sum(one.numel for one in group)
            found.append(Group(parameters=tuple(group), whole=held, weights=held))
            continue
        everywhere = parallel.expert_data if is_expert else parallel.data * parallel.context
        ranks = max(1, everywhere // ddp["num_distributed_optimizer_instances"])
        buffer = lay_out(
            group,
            ranks=ranks,
            distributed=settings.distributed,
            bucket_size=bucket_size,
            high_bandwidth=ddp["pad_buckets_for_high_nccl_busbw"],
        )
        own = buffer.shard(data_rank % ranks, ranks) if settings.distributed else buffer.held
        if settings.layer_wise:  # whole parameters, dealt out by size: the shares are nearly even
            own = -(-own // ranks)
        found.append(
            Group(
                parameters=tuple(group),
                whole=buffer.numel,
                weights=_weights(settings, buffer),
                gradients=buffer.numel,
                masters=own,
                states=own,
            )
        )
    return found


def _weights(settings: Settings, buffer: Buffer) -> int:
    """Return the weights' own elements, with the buffer's padding where they lie in one."""
    if not settings.distributed:
        return buffer.held
    if buffer.spans[0][0].is_stored_low and settings.scheme == "mxfp8":
        return buffer.held  # gathered through the gradient buffer, they lie in none of their own
    # Megatron allocates an unused buffer and leaves the weights where they were.
    return buffer.numel + (buffer.held if settings.unused_weight_buffer else 0)


SHARDED = {"no_shard": "", "optim": "O", "optim_grads": "OG", "optim_grads_params": "OGP"}
"""Strategy -> whether optimizer (with the masters), gradients and parameters are sharded."""
GATHERED = ("optim_grads", "optim_grads_params")
"""Strategies under which something is gathered while it is used."""


def fsdp_groups(
    parameters: Sequence[Parameter],
    parallel: Parallel,
    ddp: Mapping[str, Any],
    data_rank: int,
    *,
    has_units: bool,
) -> list[Group]:
    """Return the groups of a model chunk's parameters, given in the order of Megatron's modules.

    `has_units`: a layer is a unit under every strategy that shards (`Settings.has_units`).
    """
    sharded = SHARDED.get(str(ddp["data_parallel_sharding_strategy"]), "OGP")
    instances = ddp["num_distributed_optimizer_instances"] or 1
    is_outer = instances > 1 and ddp["outer_dp_sharding_strategy"] != "no_shard"
    in_units = bool(sharded) if has_units else "P" in sharded
    found = []
    for group in _grouped(
        parameters, in_units, bucket_size=ddp["bucket_size"], splits_shared=bool(sharded)
    ):
        everywhere = (
            parallel.expert_data if group[0].is_expert else parallel.data * parallel.context
        )
        inner = max(1, everywhere // instances)
        outer = everywhere if is_outer else inner
        held = sum(one.numel for one in group)
        whole = share = states = held
        if sharded:
            whole = padded(held, outer * _grid(group))
            share = whole // outer
            states = min(
                max(held - share * (data_rank % outer), 0), share
            )  # the padding is at the end
        trained = 0 if group[0].is_frozen else whole
        found.append(
            Group(
                parameters=tuple(group),
                whole=whole,
                weights=whole // (inner if "P" in sharded else 1),
                gradients=trained // (inner if "G" in sharded else 1),
                masters=share if trained else 0,
                states=states if trained else 0,
                unit=_unit(group[0]) if in_units else None,
            )
        )
    return found


def gathered(groups: Sequence[Group], sizes: Sequence[float]) -> float:
    """Return the bytes of groups that are gathered at a time, given the bytes of each whole group."""
    units = grouped((group.unit, size) for group, size in zip(groups, sizes, strict=True))
    outside = units.pop(None, [])
    unit = max(map(sum, units.values()), default=0.0)
    return unit + max(unit, *outside) if outside else 2 * unit


def _unit(parameter: Parameter) -> str | None:
    if parameter.layer.isdigit() or (
        parameter.layer.startswith("mtp") and parameter.module not in OF_MTP
    ):
        return parameter.layer
    return None


def _grouped(
    parameters: Sequence[Parameter], in_units: bool, *, bucket_size: int | None, splits_shared: bool
) -> Iterator[list[Parameter]]:
    """Yield the groups: by attributes, cut at a shared embedding, and outside of units at the bucket size."""

    def key(one: Parameter) -> tuple[object, bool, bool, str | None]:
        is_expert, unit = one.module.startswith("experts."), _unit(one) if in_units else None
        return one.is_stored_low or one.storage, is_expert, one.is_frozen, unit

    for (_, _, _, unit), group in grouped((key(one), one) for one in parameters).items():
        yield from _buckets(
            group, bucket_size if unit is None else None, splits_shared=splits_shared
        )


def _width(parameter: Parameter) -> int:
    """Return the elements of a row; Megatron's vectors are columns."""
    return parameter.columns if parameter.rows > 1 else 1


def _grid(parameters: Sequence[Parameter]) -> int:
    """Return the multiple at which large parameters of a group begin: its widest row, where the others fit."""
    ordered = sorted(parameters, key=_width, reverse=True)
    grid = _width(ordered[0])
    for one in ordered:
        fits = _width(one) == grid or (grid % _width(one) == 0 and one.numel % grid == 0)
        if not (fits or one.numel < grid):
            grid = math.lcm(grid, _width(one))
    return grid
