"""Activation memory over a step: the micro-batches that a rank keeps at a time under each schedule.

A rank keeps the most activations when a forward pass ends, or in the next backward pass. A backward
pass frees layers from the last layer on and runs recomputed layers again. `list_schedule_steps`
lists these pairs of passes under each pipeline schedule of Megatron: no pipeline, 1F1B, interleaved
1F1B, and the form that runs both passes at once (`overlap_moe_expert_parallel_comm`). Without
`deallocate_pipeline_outputs` a stage also keeps the outputs that it sent.

`tests/plan/test_memory_in_flight.py` compares the counts and bytes with real pipelines on a CPU.
docs/howto/plan-and-memory.md has the table. The form that runs both passes at once is known only
from its source code.

Source: megatron-core 0.16.1 pipeline_parallel/combined_1f1b.py and
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


class ScheduleStep(NamedTuple):
    """A forward pass and the backward pass that follows it, or that runs at the same time."""

    in_flight: tuple[int, ...]
    """Micro-batches of each model chunk whose activations are kept between the two passes."""
    forward: int | None
    """The chunk of the forward pass. None: only backward passes are left at the end of a step."""
    backward: int
    is_first: bool
    """Whether no backward pass has run before this forward pass."""


def count_activation_bytes(
    plan: PrecisionPlan, places: Sequence[ModelChunk], workload: Workload
) -> int:
    """Return the largest number of bytes of activations that a rank keeps in a training step.

    Args:
        plan: The plan of the run.
        places: The model chunks of the rank.
        workload: The micro-batches and the schedule.
    """
    if not workload.seq_length:
        return 0
    stage, stages = places[0].stage, plan.parallel.pipeline
    chunks: list[_ChunkBytes] = []
    for place in places:
        sent = 0.0
        if stages > 1 and not place.output:
            sent = count_stream_bytes(plan, workload)
        chunks.append(_ChunkBytes(build_segments(plan, place, workload), sent))
    steps = list_schedule_steps(
        stage,
        stages,
        len(places),
        workload.group_size,
        workload.micro_batches,
        is_combined=workload.is_combined,
    )
    return round(max(_count_bytes(step, chunks, workload) for step in steps))


@lru_cache(maxsize=256)
def list_schedule_steps(
    stage: int,
    stages: int,
    chunks: int,
    group_size: int | None,
    micro_batches: int | None,
    *,
    is_combined: bool,
) -> tuple[ScheduleStep, ...]:
    """Return the different pairs of passes in a training step on a stage.

    Args:
        stage: Number of the stage, from 0.
        stages: Stages of the pipeline.
        chunks: Model chunks of each stage.
        group_size: Micro-batches that a chunk runs before the next chunk. None: as many as stages.
        micro_batches: Micro-batches of a step on a rank. None: as many as fill the pipeline.
        is_combined: Whether the forward of a micro-batch runs beside the backward of another.
    """
    group = group_size or stages
    num_warmup = stages - stage - 1
    if chunks > 1:
        num_warmup = 2 * num_warmup + (chunks - 1) * group
    if is_combined:
        num_warmup += 1
    # After so many micro-batches every group has the same steps as the group before it.
    num_different = (math.ceil((num_warmup + 1) / (chunks * group)) + 2) * group
    count = num_different
    if micro_batches is not None:
        count = micro_batches - max(0, (micro_batches - num_different) // group * group)
    order = _list_forward_chunks(chunks, group, count)
    # The last forward pass runs before a backward pass, or at the same time. If both run at once
    # and all forward passes are warm-up passes, no forward pass runs with a backward pass.
    max_warmup = len(order) - 1
    if is_combined:
        max_warmup = len(order)
    steps = _generate_schedule_steps(order, min(num_warmup, max_warmup), chunks)
    return tuple(dict.fromkeys(steps))


def _list_forward_chunks(chunks: int, group: int, micro_batches: int) -> list[int]:
    """Return the chunk of each forward pass of a step."""
    order: list[int] = []
    for first in range(0, micro_batches, group):
        size = min(group, micro_batches - first)
        for chunk in range(chunks):
            order += [chunk] * size
    return order


def _generate_schedule_steps(
    order: Sequence[int], num_warmup: int, chunks: int
) -> Iterator[ScheduleStep]:
    """Yield the pairs of passes in a training step.

    Args:
        order: The chunk of each forward pass.
        num_warmup: Forward passes before the first backward pass.
        chunks: Model chunks of the stage.
    """
    in_flight = [0] * chunks
    for chunk in order[:num_warmup]:
        in_flight[chunk] += 1
    for number, chunk in enumerate(order):
        forward = None
        if num_warmup + number < len(order):
            forward = order[num_warmup + number]
            in_flight[forward] += 1
        backward = chunks - 1 - chunk
        yield ScheduleStep(tuple(in_flight), forward, backward, is_first=number == 0)
        in_flight[backward] -= 1


class _ChunkBytes:
    """The bytes that a model chunk keeps for one micro-batch."""

    def __init__(self, parts: Sequence[Segment], sent: float) -> None:
        self.sent = sent
        self.kept_after = [0.0]
        """Number of parts that have run forward -> bytes that are kept then."""
        self.peak_backward = 0.0
        """The most bytes that are kept at a time in its backward pass."""
        for part in parts:
            size = self.kept_after[-1] + part.kept
            self.kept_after.append(size)
            self.peak_backward = max(self.peak_backward, size + part.again)
        self.kept = self.kept_after[-1]


def _count_bytes(step: ScheduleStep, chunks: Sequence[_ChunkBytes], workload: Workload) -> float:
    """Return the bytes of a step."""
    kept = outputs = 0.0
    for count, chunk in zip(step.in_flight, chunks, strict=True):
        kept += count * chunk.kept
        outputs += count * chunk.sent
    forward = None
    latest = 0.0
    if step.forward is not None:
        forward = chunks[step.forward]
        latest = forward.sent
    # Bytes of the outputs for the next stage: after the forward pass, and in the backward pass.
    if workload.keeps_outputs:
        outputs_between = outputs_in_backward = outputs
        if len(chunks) == 1 and not step.is_first:
            # The output of the last backward pass is kept until the next forward pass ends.
            outputs_between += latest
    else:
        outputs_between = outputs_in_backward = latest
        if len(chunks) == 1:
            # The output is freed when it is sent. An interleaved stage frees it before its next
            # forward pass.
            outputs_in_backward = 0.0
    backward = chunks[step.backward]
    if workload.is_combined and forward is not None:
        kept_by_others = kept - backward.kept - forward.kept
        return (
            kept_by_others
            + _count_overlap(forward.kept_after, backward.kept_after)
            + outputs_in_backward
        )
    return max(
        kept + outputs_between,
        kept - backward.kept + backward.peak_backward + outputs_in_backward,
    )


def _count_overlap(forward: Sequence[float], backward: Sequence[float]) -> float:
    """Return the most bytes that are kept while a chunk runs forward and another runs backward."""
    most = 0.0
    last_forward, last_backward = len(forward) - 1, len(backward) - 1
    for step in range(max(len(forward), len(backward))):
        size = forward[min(step + 1, last_forward)] + backward[max(last_backward - step, 0)]
        most = max(most, size)
    return most
