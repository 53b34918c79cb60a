"""Megatron's contiguous buffers of parameters and gradients: their padding, their buckets, and each rank's shard.

Parameters are laid out in reverse order. Under the distributed optimizer each begins at a multiple of 64 elements, each
bucket ends at a multiple of lcm(ranks, 128) (and 2^16 with `pad_buckets_for_high_nccl_busbw`), and rank r owns the r-th
part of every bucket. Source: megatron-core 0.16.1 distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.plan.memory_parameters import Parameter


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
            held += sum(min(end, right) - max(start, left) for _, start, end in self.spans[first:last])
        return held


def lay_out(
    parameters: Sequence[Parameter],
    *,
    ranks: int,
    distributed: bool,
    bucket_size: int | None = None,
    high_bandwidth: bool = False,
) -> Buffer:
    """Return the buffer of parameters, in the order of Megatron's modules, that share storage and gradient dtype.

    Without the distributed optimizer nothing is padded. A bucket is closed after `bucket_size` elements; None: one
    bucket.
    """
    divisor = math.lcm(ranks, 128, 2**16 if high_bandwidth else 1)
    spans: list[tuple[Parameter, int, int]] = []
    buckets: list[tuple[int, int]] = []
    cursor = begin = end = 0
    is_open = False

    def close() -> int:
        nonlocal begin, is_open
        padded = -(-end // divisor) * divisor if distributed else end
        buckets.append((begin, padded))
        begin, is_open = padded, False
        return padded

    for parameter in reversed(parameters):
        cursor = -(-cursor // 64) * 64 if distributed else cursor
        alone = distributed and parameter.shares_embedding
        if alone and is_open:
            end = cursor  # Megatron ends the bucket at the padded start of the parameter that leaves it
            cursor = close()
        end = cursor + parameter.numel
        spans.append((parameter, cursor, end))
        is_open = True
        cursor = close() if alone or (bucket_size is not None and end - begin >= bucket_size) else end
    if is_open:
        close()
    return Buffer(spans=tuple(spans), buckets=tuple(buckets))
