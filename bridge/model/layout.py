"""Placement of the layers: parallelism as a model's config values describe it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import Finding, RunConfigError, WrongValueError
from bridge.model.hybrid_pattern import HybridPattern, make_model_fault
from bridge.model.section import Section, find_switched_on, read_section
from bridge.target.versions import Version, is_at_least

RESIDUAL_DTYPE_SINCE = "0.17"
"""First megatron-core whose layers add their output to the residual in the residual's dtype."""

LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
CUSTOM_LAYOUT_FIELD = "pipeline_model_parallel_layout"
MAX_CHUNKS = 4_000
"""Of all stages together; more is a slip of the finger, and would take minutes to be listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChunk:
    """The layers (numbered from 0) of one model chunk of one pipeline stage."""

    stage: int
    chunk: int
    layers: tuple[int, ...]
    embedding: bool = False
    mtp: bool = False
    output: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """A parallel layout, by Megatron's names for its sizes."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Model chunks per pipeline stage."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    """Replicas of the dense parts.

    With context parallelism, gradients are reduced over data x context ranks.
    """
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    embedding_counts: bool = False
    """The embedding takes a layer's place in the split over stages."""
    loss_counts: bool = False
    """So does the output layer."""
    layout: tuple[tuple[str, ...], ...] | None = None
    """A custom split: the content of each chunk, in order of execution."""

    @property
    def replica_size(self) -> int:
        """Ranks that hold the dense parts once."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_replica_size(self) -> int:
        """Ranks that hold the experts once."""
        return self.expert_tensor * self.expert * self.pipeline

    @property
    def world_size(self) -> int:
        """Ranks of the layout."""
        return self.replica_size * self.data

    @property
    def token_ranks(self) -> int:
        """Ranks that share the tokens of a sequence between its GEMMs."""
        return self.context * self.sequence_ranks

    @property
    def sequence_ranks(self) -> int:
        """Tensor-parallel ranks that share tokens between GEMMs, by sequence parallelism."""
        if self.sequence_parallel:
            return self.tensor
        return 1

    def get_tensor_ranks(self, *, is_expert: bool) -> int:
        """Return the tensor-parallel ranks of an expert, or of the dense parts."""
        if is_expert:
            return self.expert_tensor
        return self.tensor

    def get_reduction_ranks(self, *, is_expert: bool) -> int:
        """Return the ranks that reduce the gradients of an expert, or of the dense parts."""
        if is_expert:
            return self.expert_data
        return self.data * self.context

    @property
    def expert_data(self) -> int:
        """Replicas of each expert."""
        return max(1, self.world_size // self.expert_replica_size)

    @classmethod
    def from_model(cls, model: Any) -> ParallelLayout:
        """Return the layout that a model's config describes.

        Raises:
            RunConfigError: There is no such layout.
        """
        parallel, faults = read_parallel_layout(model)
        if faults:
            raise RunConfigError(str(faults[0]))
        return parallel

    def places(self, num_layers: int) -> tuple[ModelChunk, ...]:
        """Return the layers of each chunk of each stage, in order of execution.

        Raises:
            RunConfigError: The layers cannot be split over the stages.
        """
        chunks = self.layout
        if chunks is None:
            chunks = _make_chunk_parts(self._count_chunk_layers(num_layers))
        placed = sum(parts.count("decoder") for parts in chunks)
        if placed != num_layers:
            rule = f"must place all {num_layers} layers"
            raise RunConfigError.of(f"model.{CUSTOM_LAYOUT_FIELD}", rule, placed, "Correct it.")
        places: list[ModelChunk] = []
        first = 0
        for index, parts in enumerate(chunks):
            chunk, stage = divmod(index, self.pipeline)
            end = first + parts.count("decoder")
            place = ModelChunk(
                stage=stage,
                chunk=chunk,
                layers=tuple(range(first, end)),
                embedding="embedding" in parts,
                mtp="mtp" in parts,
                output="loss" in parts,
            )
            places.append(place)
            first = end
        return tuple(places)

    def fit_to_world_size(self, world_size: int | None) -> ParallelLayout:
        """Return the layout on the fewest ranks that hold it a whole number of times.

        There are at least `world_size` ranks.
        """
        step = math.lcm(self.replica_size, self.expert_replica_size)
        steps = max(1, -(-(world_size or 1) // step))
        return replace(self, data=steps * step // self.replica_size)

    def with_even_split(self, num_layers: int) -> ParallelLayout:
        """Return the layout itself where it can split these layers.

        Else return a layout with a split as even as the layers allow. A stated layout, and one with
        more chunks than layers, is returned as it is.
        """
        chunks = self.pipeline * self.virtual
        if self.layout is not None or chunks > num_layers:
            return self
        try:
            self.places(num_layers)
        except RunConfigError:
            each, more = divmod(num_layers, chunks)
            counts = [each + 1] * more + [each] * (chunks - more)
            return replace(self, layout=_make_chunk_parts(counts))
        return self

    def _count_chunk_layers(self, num_layers: int) -> list[int]:
        """Return how many layers each chunk has, in order of execution.

        It is Megatron's get_num_layers_to_build.
        """
        stages, chunks = self.pipeline, self.virtual
        if stages == 1:
            return [num_layers]
        if stages * chunks > MAX_CHUNKS:
            rule = f"stages x chunks of a stage must be at most {MAX_CHUNKS}"
            raise RunConfigError.of(
                "model.pipeline_model_parallel_size", rule, stages * chunks, "Use fewer."
            )
        per_stage = self._count_stage_layers(num_layers)
        if any(count % chunks for count in per_stage):
            rule = (
                f"must give each stage a multiple of its {chunks} model chunks, and gives "
                f"{per_stage}"
            )
            raise _make_split_error(rule, num_layers)
        counts = [count // chunks for count in per_stage] * chunks
        counts[0] -= self.embedding_counts
        counts[-1] -= self.loss_counts
        return counts

    def _count_stage_layers(self, num_layers: int) -> list[int]:
        """Return how many layers each stage has, with embedding and output where they count."""
        stages = self.pipeline
        ends = {0: self.first_stage_layers, stages - 1: self.last_stage_layers}
        stated = {stage: count for stage, count in ends.items() if count is not None}
        if stated:
            left = num_layers - sum(stated.values())
            others = stages - len(stated)
            each = left // max(1, others)
            if left < 0 or each * others != left:
                rule = f"must leave a multiple of the {others} other stages, and leaves {left}"
                raise _make_split_error(rule, num_layers)
            return [stated.get(stage, each) for stage in range(stages)]
        counted = num_layers + self.embedding_counts + self.loss_counts
        if counted % stages:
            rule = f"must be a multiple of the {stages} pipeline stages"
            if counted != num_layers:
                rule = (
                    f"must be, with embedding and output layer {counted}, a multiple of the "
                    f"{stages} pipeline stages"
                )
            raise _make_split_error(rule, num_layers)
        return [counted // stages] * stages


def read_parallel_layout(model: Any) -> tuple[ParallelLayout, tuple[Finding, ...]]:
    """Return the layout that a model's config describes, and reasons why there is no such layout.

    The layout is on as few ranks as it needs. `model` is its section, or a mapping or object that
    is read as one. Values that cannot be read are left out of the layout.
    """
    section = read_section("model", model)
    faults = []
    for finding in section.malformed:
        if finding.path.removeprefix("model.") in LAYOUT_FIELDS:
            faults.append(finding)
    numbers: dict[str, int | None] = {}
    for name in LAYOUT_FIELDS:
        number = section.given(name)
        if number is not None and number < 0:
            faults.append(make_model_fault(name, "must be a whole number", number))
            number = None
        numbers[name] = number
    tensor = numbers["tensor_model_parallel_size"] or 1
    pipeline = numbers["pipeline_model_parallel_size"] or 1
    virtual = 1
    if pipeline > 1:
        virtual = numbers["virtual_pipeline_model_parallel_size"] or 1
    parallel = ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        context=numbers["context_parallel_size"] or 1,
        expert=numbers["expert_model_parallel_size"] or 1,
        expert_tensor=numbers["expert_tensor_parallel_size"] or tensor,
        sequence_parallel=bool(section.given("sequence_parallel")) and tensor > 1,
        first_stage_layers=numbers["num_layers_in_first_pipeline_stage"],
        last_stage_layers=numbers["num_layers_in_last_pipeline_stage"],
        embedding_counts=bool(section.given("account_for_embedding_in_pipeline_split")),
        loss_counts=bool(section.given("account_for_loss_in_pipeline_split")),
    )
    parallel, of_layout = _apply_stated_chunks(parallel.fit_to_world_size(None), section)
    return parallel, (*faults, *of_layout)


def _apply_stated_chunks(
    parallel: ParallelLayout, section: Section
) -> tuple[ParallelLayout, list[Finding]]:
    """Return the layout with the content of each chunk where a field states it.

    The findings are the reasons why a stated content cannot be taken.
    """
    pattern = HybridPattern.from_model(section)
    if pattern is not None and pattern.chunks:
        name = "hybrid_layer_pattern"
        layout = _make_chunk_parts(pattern.chunks)
    elif section.given(CUSTOM_LAYOUT_FIELD):
        name = CUSTOM_LAYOUT_FIELD
        try:
            layout = _parse_layout(section.given(CUSTOM_LAYOUT_FIELD))
        except WrongValueError as error:
            return parallel, [make_model_fault(CUSTOM_LAYOUT_FIELD, error.rule, error.value)]
    else:
        return parallel, []
    if len(layout) % parallel.pipeline:
        rule = f"must have as many chunks for each of the {parallel.pipeline} stages"
        return parallel, [make_model_fault(name, rule, len(layout))]
    return replace(parallel, layout=layout, virtual=len(layout) // parallel.pipeline), []


def _make_split_error(rule: str, num_layers: int) -> RunConfigError:
    remedy = (
        "Change the number of layers or of stages, or say how many the first and the last stage "
        "have."
    )
    return RunConfigError.of("model.num_layers", rule, num_layers, remedy)


def _make_chunk_parts(counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the content of chunks with so many layers.

    The ends of the model are in the first and in the last chunk.
    """
    chunks: list[tuple[str, ...]] = []
    for count in counts:
        chunks.append(("decoder",) * count)
    chunks[0] = ("embedding", *chunks[0])
    chunks[-1] = (*chunks[-1], "mtp", "loss")
    return tuple(chunks)


PART_BY_LETTER = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
MAX_PARTS = 100_000
"""Most parts of a pipeline layout: a slip in a count would fill the memory."""
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|([EtmL|])\*(\d+)")
"""Parts in parentheses, or a letter, with the number of their repetitions."""


def _parse_layout(value: Any) -> tuple[tuple[str, ...], ...]:
    """Return a `pipeline_model_parallel_layout` as Megatron reads it.

    It is lists of names, or text, ``Ett|(tt|)*29,m|L`` for example.
    """
    value = getattr(value, "input_data", value)  # of Megatron's PipelineParallelLayerLayout
    if isinstance(value, str):
        return _parse_layout_text(value)
    if not isinstance(value, list | tuple):
        raise WrongValueError("must be text or a list of lists", value)
    chunks = []
    for item in value:
        parts = item if isinstance(item, list | tuple) else (item,)
        chunks.append(tuple(map(_get_part_name, parts)))
    return tuple(chunks)


def _get_part_name(part: object) -> str:
    """Return the name of a part of the model, which Megatron has as an enum, too."""
    return str(getattr(part, "name", part)).lower()


def _parse_layout_text(value: str) -> tuple[tuple[str, ...], ...]:
    """Return the layout that a text stands for, its repetitions written out."""
    text = value.replace(" ", "").replace(",", "")
    while True:
        match = _REPEATED.search(text)
        if match is None:
            break
        part, times = match[1], match[2]
        if not times:
            part, times = match[3], match[4]
        if len(times.lstrip("0")) > 6 or len(text) + len(part) * int(times) > MAX_PARTS:
            raise WrongValueError(f"must name at most {MAX_PARTS} parts", value)
        text = text[: match.start()] + part * int(times) + text[match.end() :]
    wrong = "".join(sorted(set(text) - set(PART_BY_LETTER) - {"|"}))
    if wrong:
        raise WrongValueError(f"must consist of {', '.join(PART_BY_LETTER)} and |", wrong)
    chunks = []
    for letters in text.split("|"):
        chunks.append(tuple(PART_BY_LETTER[letter] for letter in letters))
    return tuple(chunks)


def get_sent_dtype(
    model: Mapping[str, Any], mcore: Version | None, *, is_local: bool
) -> str | None:
    """Return the dtype of the activations that a pipeline stage sends.

    None where an unknown version decides.

    Megatron receives them in `pipeline_dtype`, whatever was sent. The sum of residual and output
    that ends a layer has the dtype of the output before megatron-core 0.17, and that of the
    residual since: the embedding's.

    Args:
        model: The values of the model's section, in one form.
        mcore: The version that trains.
        is_local: The layers are Megatron's own, which add an FP32 bias to autocast's result.

    Source: fusions/fused_bias_dropout.py of 0.16.1 and 0.17.0,
    pipeline_parallel/p2p_communication.py; Transformer Engine 2.20 pytorch/module/linear.py casts
    the bias.
    """
    weights: str = find_switched_on(model, ("bf16", "fp16")) or model["params_dtype"] or "fp32"
    residual = "fp32" if model["fp32_residual_connection"] else weights
    output = weights
    if model["enable_autocast"]:
        output = model["autocast_dtype"] or weights
    if is_local and output != weights and model["add_bias_linear"]:
        output = "fp32"
    if residual == output:
        return residual
    is_residual_kept = is_at_least(mcore, RESIDUAL_DTYPE_SINCE)
    if is_residual_kept is None:
        return None
    return residual if is_residual_kept else output
