"""The buffers that Megatron allocates for parameters and gradients: padding, buckets, shards.

Without Megatron-FSDP, a buffer has all parameters of the same storage dtype, in reverse order.
Under the distributed optimizer:

- each parameter begins at a multiple of 64 elements;
- each bucket ends at a multiple of lcm(ranks, 128), and of 2^16 with
  `pad_buckets_for_high_nccl_busbw`;
- rank r has the r-th part of every bucket.

Source: megatron-core 0.16.1 distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py.

Under Megatron-FSDP, a group has parameters of the same dtype and the same unit. Parameters of
experts and other parameters are in different groups. Under `optim_grads_params` each layer is a
unit. From 0.20 on, each layer is a unit under every strategy that shards
(distributed/fsdp/mcore_fsdp_adapter.py). The widest row of a group decides its grid. The group ends
at a multiple of the grid times the ranks. Gaps of less than a row between parameters are not
counted, since small parameters fill them.

With several optimizer instances (HSDP), weights and gradients are sharded inside an instance. With
`outer_dp_sharding_strategy`, masters and optimizer state are sharded over all instances. Sharded
groups are gathered while they are used: two units at a time, or a unit and the largest other group.

Source: megatron-core 0.16.1 distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py. There, a
Mamba layer is not a unit. Here it is a unit, as in Megatron-LM's development branch. The difference
affects only the padding.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.model.layout import ModelChunk, ParallelLayout
from bridge.model.module_paths import MTP_MODULES, is_mtp_label
from bridge.plan.memory_parameters import Parameter, pad_to_multiple
from bridge.plan.plan_settings import PlanSettings
from bridge.plan.precision_plan import PrecisionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """The parameters of a buffer, or frozen parameters of the same storage dtype.

    All sizes are elements on this rank.
    """

    parameters: tuple[Parameter, ...]
    whole: int
    """All elements of the group, before sharding, padding included."""
    weights: int
    gradients: int = 0
    masters: int = 0
    states: int = 0
    """Elements with optimizer state. Padding has no optimizer state."""
    unit: str | None = None
    """The unit of Megatron-FSDP that the group belongs to. None: the group is in no unit."""

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
        if not self.buckets:
            return 0
        return self.buckets[-1][1]

    @property
    def parameter_numel(self) -> int:
        """Elements of its parameters, without padding."""
        return sum(parameter.numel for parameter, _, _ in self.spans)

    def shard(self, rank: int, ranks: int) -> int:
        """Return how many elements of the parameters are in the parts of the buckets of a rank."""
        elements = 0
        for bucket_start, bucket_end in self.buckets:
            size = (bucket_end - bucket_start) // ranks
            left = bucket_start + size * rank
            right = left + size
            first = bisect_right(self.spans, left, key=lambda span: span[2])
            last = bisect_left(self.spans, right, key=lambda span: span[1])
            for _, start, end in self.spans[first:last]:
                elements += min(end, right) - max(start, left)
        return elements


def lay_out(
    parameters: Sequence[Parameter],
    *,
    ranks: int,
    distributed: bool,
    bucket_size: int | None,
    high_bandwidth: bool,
) -> Buffer:
    """Return the buffer of parameters that share storage and gradient dtype.

    `parameters` are in the order of Megatron's modules. Without the distributed optimizer nothing
    is padded.
    """
    step = multiple = 1
    if distributed:
        step = 64
        multiple = math.lcm(ranks, 128)
        if high_bandwidth:
            multiple = math.lcm(multiple, 2**16)
    spans: list[tuple[Parameter, int, int]] = []
    buckets: list[tuple[int, int]] = []
    bucket_start = 0
    for bucket in _split_into_buckets(
        reversed(parameters), bucket_size, step=step, splits_shared=distributed
    ):
        end = bucket_start
        for parameter in bucket:
            start = pad_to_multiple(end, step)
            end = start + parameter.numel
            spans.append((parameter, start, end))
        bucket_end = pad_to_multiple(end, multiple)
        buckets.append((bucket_start, bucket_end))
        bucket_start = bucket_end
    return Buffer(spans=tuple(spans), buckets=tuple(buckets))


def _split_into_buckets(
    parameters: Iterable[Parameter], bucket_size: int | None, *, step: int = 1, splits_shared: bool
) -> Iterator[list[Parameter]]:
    """Yield buckets of at least `bucket_size` elements (None: a single bucket).

    A shared embedding has a separate bucket. Each parameter begins at a multiple of `step`.
    """
    bucket: list[Parameter] = []
    size = 0
    for parameter in parameters:
        is_alone = parameter.shares_embedding and splits_shared
        if is_alone and bucket:
            yield bucket
            bucket = []
            size = 0
        bucket.append(parameter)
        size = pad_to_multiple(size, step) + parameter.numel
        if is_alone or (bucket_size and size >= bucket_size):
            yield bucket
            bucket = []
            size = 0
    if bucket:
        yield bucket


def build_ddp_groups(
    parameters: Sequence[Parameter],
    plan: PrecisionPlan,
    place: ModelChunk,
    ddp: Mapping[str, Any],
    data_rank: int,
) -> list[ParameterGroup]:
    """Return the groups of a model chunk's parameters without FSDP.

    `parameters` are in the order of Megatron's modules.
    """
    parallel, settings = plan.parallel, plan.settings
    bucket_size = None
    if ddp["overlap_grad_reduce"] and place.stage == 0 and place.chunk == 0:
        bucket_size = int(ddp["bucket_size"] or max(40_000_000, 1_000_000 * parallel.data))
    alike: dict[tuple[bool, bool, str], list[Parameter]] = {}
    for parameter in parameters:
        key = (parameter.is_frozen, parameter.is_expert, parameter.storage)
        alike.setdefault(key, []).append(parameter)
    groups: list[ParameterGroup] = []
    for (is_frozen, is_expert, _), members in alike.items():
        if is_frozen:
            elements = _count_elements(members)
            groups.append(
                ParameterGroup(parameters=tuple(members), whole=elements, weights=elements)
            )
            continue
        replicas = parallel.get_reduction_ranks(is_expert=is_expert)
        ranks = max(1, replicas // ddp["num_distributed_optimizer_instances"])
        buffer = lay_out(
            members,
            ranks=ranks,
            distributed=settings.distributed,
            bucket_size=bucket_size,
            high_bandwidth=ddp["pad_buckets_for_high_nccl_busbw"],
        )
        groups.append(
            _build_trained_group(buffer, members, settings, rank=data_rank % ranks, ranks=ranks)
        )
    return groups


def _build_trained_group(
    buffer: Buffer, members: Sequence[Parameter], settings: PlanSettings, *, rank: int, ranks: int
) -> ParameterGroup:
    """Return the group of a buffer's parameters. A rank updates only its share of them."""
    share = buffer.parameter_numel
    if settings.distributed:
        share = buffer.shard(rank, ranks)
    if settings.layer_wise:  # ranks get whole parameters, by size, so shares are nearly even
        share = -(-share // ranks)
    return ParameterGroup(
        parameters=tuple(members),
        whole=buffer.numel,
        weights=_count_weights(settings, buffer),
        gradients=buffer.numel,
        masters=share,
        states=share,
    )


def _count_elements(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.numel for parameter in parameters)


def _count_weights(settings: PlanSettings, buffer: Buffer) -> int:
    """Return the elements of the weights, with padding if the weights are in a buffer."""
    if not settings.distributed:
        return buffer.parameter_numel
    if buffer.spans[0][0].is_stored_low and settings.scheme == "mxfp8":
        # These weights are gathered through the gradient buffer, and have no separate buffer.
        return buffer.parameter_numel
    if settings.unused_weight_buffer:
        # Megatron allocates an unused buffer and leaves the weights where they were.
        return buffer.numel + buffer.parameter_numel
    return buffer.numel


SHARDED_TENSORS = {"no_shard": "", "optim": "O", "optim_grads": "OG", "optim_grads_params": "OGP"}
"""Strategy -> the kinds of tensors that are sharded.

O: optimizer state and masters. G: gradients. P: parameters.
"""
GATHERING_STRATEGIES = ("optim_grads", "optim_grads_params")
"""Strategies under which weights or gradients are gathered while they are used."""


def build_fsdp_groups(
    parameters: Sequence[Parameter],
    parallel: ParallelLayout,
    ddp: Mapping[str, Any],
    data_rank: int,
    *,
    has_units: bool,
) -> list[ParameterGroup]:
    """Return the groups of a model chunk's parameters under Megatron-FSDP.

    `parameters` are in the order of Megatron's modules. With `has_units` a layer is a unit under
    every strategy that shards (`PlanSettings.has_units`).
    """
    sharded = SHARDED_TENSORS.get(str(ddp["data_parallel_sharding_strategy"]), "OGP")
    instances = ddp["num_distributed_optimizer_instances"] or 1
    is_outer = instances > 1 and ddp["outer_dp_sharding_strategy"] != "no_shard"
    in_units = "P" in sharded
    if has_units:
        in_units = bool(sharded)
    groups: list[ParameterGroup] = []
    for members in _group_parameters(
        parameters, in_units, bucket_size=ddp["bucket_size"], splits_shared=bool(sharded)
    ):
        replicas = parallel.get_reduction_ranks(is_expert=members[0].is_expert)
        inner = max(1, replicas // instances)
        outer = inner
        if is_outer:
            outer = replicas
        group = _build_fsdp_group(members, sharded, inner=inner, outer=outer, data_rank=data_rank)
        if in_units:
            group = replace(group, unit=_get_unit(members[0]))
        groups.append(group)
    return groups


def _build_fsdp_group(
    members: Sequence[Parameter], sharded: str, *, inner: int, outer: int, data_rank: int
) -> ParameterGroup:
    """Return a group of Megatron-FSDP.

    Args:
        sharded: The kinds of tensors that are sharded, as in `SHARDED_TENSORS`.
        inner: Ranks that share weights and gradients.
        outer: Ranks that share masters and optimizer state.
        data_rank: The data-parallel rank.
    """
    elements = _count_elements(members)
    whole = share = states = elements
    if sharded:
        whole = pad_to_multiple(elements, outer * _compute_grid(members))
        share = whole // outer
        # The padding is at the end.
        states = min(max(elements - share * (data_rank % outer), 0), share)
    weights = gradients = whole
    if "P" in sharded:
        weights = whole // inner
    if "G" in sharded:
        gradients = whole // inner
    if members[0].is_frozen:
        gradients = share = states = 0
    return ParameterGroup(
        parameters=tuple(members),
        whole=whole,
        weights=weights,
        gradients=gradients,
        masters=share,
        states=states,
    )


def count_gathered_bytes(groups: Sequence[ParameterGroup], sizes: Sequence[float]) -> float:
    """Return the bytes of groups that are gathered at a time.

    `sizes` are the sizes of whole groups.
    """
    outside: list[float] = []
    units: dict[str, float] = {}
    for group, size in zip(groups, sizes, strict=True):
        if group.unit is None:
            outside.append(size)
        else:
            units[group.unit] = units.get(group.unit, 0.0) + size
    largest_unit = max(units.values(), default=0.0)
    if not outside:
        return 2 * largest_unit
    return largest_unit + max(largest_unit, *outside)


def _get_unit(parameter: Parameter) -> str | None:
    """Return the label of the layer that is the unit of a parameter. None: it is in no layer."""
    layer = parameter.layer
    is_inside_mtp = is_mtp_label(layer) and parameter.module not in MTP_MODULES
    if layer.isdigit() or is_inside_mtp:
        return layer
    return None


def _group_parameters(
    parameters: Sequence[Parameter], in_units: bool, *, bucket_size: int | None, splits_shared: bool
) -> Iterator[list[Parameter]]:
    """Yield groups of parameters with equal attributes, split at a shared embedding.

    Outside of units, groups are also split at the bucket size.
    """
    alike: dict[tuple[str, bool, bool, str | None], list[Parameter]] = {}
    for parameter in parameters:
        storage = parameter.storage
        if parameter.is_stored_low:
            storage = "low"
        is_expert = parameter.module.startswith("experts.")
        unit = None
        if in_units:
            unit = _get_unit(parameter)
        key = (storage, is_expert, parameter.is_frozen, unit)
        alike.setdefault(key, []).append(parameter)
    for (_, _, _, unit), members in alike.items():
        if unit is None:
            yield from _split_into_buckets(members, bucket_size, splits_shared=splits_shared)
        else:
            yield from _split_into_buckets(members, None, splits_shared=splits_shared)


def _get_row_width(parameter: Parameter) -> int:
    """Return the elements of a row. Megatron's vectors are columns."""
    if parameter.rows > 1:
        return parameter.columns
    return 1


def _compute_grid(parameters: Sequence[Parameter]) -> int:
    """Return the multiple at which large parameters of a group begin.

    It is the widest row of the group, if the other rows fit into it.
    """
    ordered = sorted(parameters, key=_get_row_width, reverse=True)
    grid = _get_row_width(ordered[0])
    for parameter in ordered:
        width = _get_row_width(parameter)
        fits = width == grid or (grid % width == 0 and parameter.numel % grid == 0)
        if not fits and parameter.numel >= grid:
            grid = math.lcm(grid, width)
    return grid
