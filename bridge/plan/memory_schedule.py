"""Activation memory over a step: the micro-batches that a rank keeps at a time under Megatron's pipeline schedules.

A rank is at its fullest when a forward pass ends, or in the next backward pass, which frees layers from the last one
on and runs those again that are recomputed. `moments` lists these pairs under each schedule: no pipeline, 1F1B,
interleaved 1F1B, and the form that runs both passes at once (`overlap_moe_expert_parallel_comm`). Without
`deallocate_pipeline_outputs` a stage also keeps the outputs that it sent.

`tests/plan/test_memory_in_flight.py` compares the counts and bytes with those of real pipelines on a CPU, and
docs/howto/plan-and-memory.md has the table. The form that runs both passes at once is read in its source: megatron-core
0.16.1 pipeline_parallel/combined_1f1b.py and models/common/model_chunk_schedule_plan.py.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from bridge.model.layout import Place
from bridge.plan.memory_activations import Segment, Workload, segments, stream_bytes
from bridge.plan.precision_plan import PrecisionPlan


class Moment(NamedTuple):
    """A forward pass and the backward pass that follows it, or that runs at the same time."""

    alive: tuple[int, ...]
    """Micro-batches of each model chunk that are kept between the two."""
    forward: int | None
    """Chunk of the forward pass; None at the end of a step, where backward passes follow one another."""
    backward: int
    is_first: bool
    """No backward pass went before."""


def activation_bytes(plan: PrecisionPlan, places: Sequence[Place], workload: Workload) -> int:
    """Return the activations on a rank, given the places of its model chunks, at the fullest moment of a step."""
    if not workload.seq_length:
        return 0
    chunks = [_Chunk(segments(plan, place, workload)) for place in places]
    stage, stages = places[0].stage, plan.parallel.pipeline
    sent = [
        0.0 if place.output or stages == 1 else stream_bytes(plan, workload) for place in places
    ]
    found = moments(
        stage,
        stages,
        len(places),
        workload.group_size,
        workload.micro_batches,
        is_combined=workload.is_combined,
    )
    return round(max(_bytes(moment, chunks, sent, workload) for moment in found))


@lru_cache(maxsize=256)
def moments(
    stage: int,
    stages: int,
    chunks: int,
    group_size: int | None,
    micro_batches: int | None,
    *,
    is_combined: bool,
) -> tuple[Moment, ...]:
    """Return the different moments of a step on a stage, from 0, of so many chunks; the rest is as in `Workload`."""
    group = group_size or stages
    lead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * group
    lead += is_combined
    steady = (
        math.ceil((lead + 1) / (chunks * group)) + 2
    ) * group  # from there on every group is like the one before
    count = steady
    if micro_batches is not None:
        count = micro_batches - max(0, (micro_batches - steady) // group * group)
    return tuple(dict.fromkeys(_moments(lead, chunks, group, count)))


def _moments(lead: int, chunks: int, group: int, micro_batches: int) -> Iterator[Moment]:
    order = [
        chunk
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for _ in range(first, min(first + group, micro_batches))
    ]
    lead = min(lead, len(order) - 1)
    alive = [0] * chunks
    for chunk in order[:lead]:
        alive[chunk] += 1
    for number, chunk in enumerate(order):
        forward = order[lead + number] if lead + number < len(order) else None
        if forward is not None:
            alive[forward] += 1
        backward = chunks - 1 - chunk
        yield Moment(tuple(alive), forward, backward, is_first=number == 0)
        alive[backward] -= 1


class _Chunk:
    def __init__(self, parts: Sequence[Segment]) -> None:
        self.after = list(accumulate((part.kept for part in parts), initial=0.0))
        """Bytes kept once so many of its parts have run."""
        self.kept = self.after[-1]
        filled = zip(self.after[1:], parts, strict=True)
        self.fullest = max((size + part.again for size, part in filled), default=0.0)
        """Bytes at the fullest moment of its backward pass."""


def _bytes(
    moment: Moment, chunks: Sequence[_Chunk], sent: Sequence[float], workload: Workload
) -> float:
    """Return the bytes of a moment, given the bytes of what each chunk sends to the next stage."""
    kept = sum(count * chunk.kept for count, chunk in zip(moment.alive, chunks, strict=True))
    latest = sent[moment.forward] if moment.forward is not None else 0.0
    between = later = latest
    if workload.keeps_outputs:
        later = sum(count * size for count, size in zip(moment.alive, sent, strict=True))
        is_held = len(chunks) == 1 and moment.forward is not None and not moment.is_first
        between = later + (
            latest if is_held else 0.0
        )  # of the last backward pass, until the next forward pass ends
    elif len(chunks) == 1:
        later = (
            0.0  # freed when it is sent; an interleaved stage frees it before its next forward pass
        )
    last = chunks[moment.backward]
    if workload.is_combined and moment.forward is not None:
        others = kept - last.kept - chunks[moment.forward].kept
        return others + _both(chunks[moment.forward].after, last.after) + later
    return max(kept + between, kept - last.kept + last.fullest + later)


def _both(forward: Sequence[float], backward: Sequence[float]) -> float:
    """Return the most that is kept while one chunk runs forward and another one backward, part by part."""
    steps = max(len(forward), len(backward))
    return max(
        forward[min(step + 1, len(forward) - 1)] + backward[max(len(backward) - 1 - step, 0)]
        for step in range(steps)
    )
