"""Activation memory over a step: the micro-batches that a rank keeps at a time under each schedule.

A rank is at its fullest when a forward pass ends, or in the next backward pass, which frees layers
from the last layer on and runs recomputed layers again. `list_moments` lists these pairs under each
pipeline schedule of Megatron: no pipeline, 1F1B, interleaved 1F1B, and the form that runs both
passes at once (`overlap_moe_expert_parallel_comm`). Without `deallocate_pipeline_outputs` a stage
also keeps the outputs that it sent.

`tests/plan/test_memory_in_flight.py` compares the counts and bytes with those of real pipelines on
a CPU, and docs/howto/plan-and-memory.md has the table. The form that runs both passes at once is
read in its source: megatron-core 0.16.1 pipeline_parallel/combined_1f1b.py and
models/common/model_chunk_schedule_plan.py.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from bridge.model.layout import ModelChunk
from bridge.plan.memory_activations import Segment, build_segments, count_stream_bytes
from bridge.plan.precision_plan import PrecisionPlan
from bridge.plan.workload import Workload


class Moment(NamedTuple):
    """A forward pass and the backward pass that follows it, or that runs at the same time."""

    alive: tuple[int, ...]
    """Micro-batches of each model chunk that are kept between the two."""
    forward: int | None
    """Chunk of the forward pass; None at the end of a step, in which backward passes alone run."""
    backward: int
    is_first: bool
    """No backward pass went before."""


def count_activation_bytes(
    plan: PrecisionPlan, places: Sequence[ModelChunk], workload: Workload
) -> int:
    """Return the activations on a rank at the fullest moment of a step.

    `places` are those of its model chunks.
    """
    if not workload.seq_length:
        return 0
    stage, stages = places[0].stage, plan.parallel.pipeline
    chunks: list[_Chunk] = []
    for place in places:
        sent = 0.0
        if stages > 1 and not place.output:
            sent = count_stream_bytes(plan, workload)
        chunks.append(_Chunk(build_segments(plan, place, workload), sent))
    of_step = list_moments(
        stage,
        stages,
        len(places),
        workload.group_size,
        workload.micro_batches,
        is_combined=workload.is_combined,
    )
    return round(max(_count_bytes(moment, chunks, workload) for moment in of_step))


@lru_cache(maxsize=256)
def list_moments(
    stage: int,
    stages: int,
    chunks: int,
    group_size: int | None,
    micro_batches: int | None,
    *,
    is_combined: bool,
) -> tuple[Moment, ...]:
    """Return the different moments of a step on a stage.

    Args:
        stage: Number of the stage, from 0.
        stages: Stages of the pipeline.
        chunks: Model chunks of each stage.
        group_size: As in `Workload`.
        micro_batches: As in `Workload`.
        is_combined: As in `Workload`.
    """
    group = group_size or stages
    lead = stages - stage - 1
    if chunks > 1:
        lead = 2 * lead + (chunks - 1) * group
    if is_combined:
        lead += 1
    # From there on every group is like the group before.
    steady = (math.ceil((lead + 1) / (chunks * group)) + 2) * group
    count = steady
    if micro_batches is not None:
        count = micro_batches - max(0, (micro_batches - steady) // group * group)
    order = _list_forward_chunks(chunks, group, count)
    # Where both passes run at once, the last forward pass has no backward pass beside it when all
    # of them have to go first.
    most = len(order) if is_combined else len(order) - 1
    return tuple(dict.fromkeys(_generate_moments(order, min(lead, most), chunks)))


def _list_forward_chunks(chunks: int, group: int, micro_batches: int) -> list[int]:
    """Return the chunk of each forward pass of a step."""
    order: list[int] = []
    for first in range(0, micro_batches, group):
        size = min(group, micro_batches - first)
        for chunk in range(chunks):
            order += [chunk] * size
    return order


def _generate_moments(order: Sequence[int], lead: int, chunks: int) -> Iterator[Moment]:
    """Yield the moments of a step; `lead` forward passes go before the first backward pass."""
    alive = [0] * chunks
    for chunk in order[:lead]:
        alive[chunk] += 1
    for number, chunk in enumerate(order):
        forward = None
        if lead + number < len(order):
            forward = order[lead + number]
            alive[forward] += 1
        backward = chunks - 1 - chunk
        yield Moment(tuple(alive), forward, backward, is_first=number == 0)
        alive[backward] -= 1


class _Chunk:
    """The bytes of a model chunk: of its parts, and of the output that it sends."""

    def __init__(self, parts: Sequence[Segment], sent: float) -> None:
        self.sent = sent
        self.after = [0.0]
        """Bytes kept once so many of its parts have run."""
        self.fullest = 0.0
        """Bytes at the fullest moment of its backward pass."""
        for part in parts:
            size = self.after[-1] + part.kept
            self.after.append(size)
            self.fullest = max(self.fullest, size + part.again)
        self.kept = self.after[-1]


def _count_bytes(moment: Moment, chunks: Sequence[_Chunk], workload: Workload) -> float:
    """Return the bytes of a moment."""
    kept = outputs = 0.0
    for count, chunk in zip(moment.alive, chunks, strict=True):
        kept += count * chunk.kept
        outputs += count * chunk.sent
    forward = None
    latest = 0.0
    if moment.forward is not None:
        forward = chunks[moment.forward]
        latest = forward.sent
    if workload.keeps_outputs:
        between = later = outputs
        if len(chunks) == 1 and not moment.is_first:
            # The output of the last backward pass is kept until the next forward pass ends.
            between += latest
    else:
        between = later = latest
        if len(chunks) == 1:
            # Freed when it is sent; an interleaved stage frees it before its next forward pass.
            later = 0.0
    backward = chunks[moment.backward]
    if workload.is_combined and forward is not None:
        others = kept - backward.kept - forward.kept
        return others + _count_overlap(forward.after, backward.after) + later
    return max(kept + between, kept - backward.kept + backward.fullest + later)


def _count_overlap(forward: Sequence[float], backward: Sequence[float]) -> float:
    """Return the most that is kept while one chunk runs forward and another backward, by parts."""
    most = 0.0
    last_forward, last_backward = len(forward) - 1, len(backward) - 1
    for step in range(max(len(forward), len(backward))):
        size = forward[min(step + 1, last_forward)] + backward[max(last_backward - step, 0)]
        most = max(most, size)
    return most
