"""`ParallelLayout`: the parallel sizes of a run, and the layers of each model chunk."""

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
"""The first megatron-core whose layers keep the dtype of the residual when they add to it."""

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
"""The largest number of chunks of all stages. A larger number is taken for a typing error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChunk:
    """One model chunk of one pipeline stage, with the numbers of its layers from 0."""

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
    """Whether the embedding counts as a layer in the split over stages."""
    loss_counts: bool = False
    """Whether the output layer counts as a layer in the split over stages."""
    layout: tuple[tuple[str, ...], ...] | None = None
    """A custom split: the parts of each chunk, in order of execution. None: an even split."""

    @property
    def replica_size(self) -> int:
        """The number of ranks of one replica of the dense parts."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_replica_size(self) -> int:
        """The number of ranks of one replica of the experts."""
        return self.expert_tensor * self.expert * self.pipeline

    @property
    def world_size(self) -> int:
        """The number of ranks of the layout."""
        return self.replica_size * self.data

    @property
    def token_ranks(self) -> int:
        """The number of ranks over which the tokens of a sequence are split between GEMMs."""
        return self.context * self.sequence_ranks

    @property
    def sequence_ranks(self) -> int:
        """The number of tensor-parallel ranks over which sequence parallelism splits tokens."""
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
        """The number of replicas of each expert."""
        return max(1, self.world_size // self.expert_replica_size)

    @classmethod
    def from_model(cls, model: Any) -> ParallelLayout:
        """Return the layout that a model's config describes.

        Raises:
            RunConfigError: The config describes no possible layout.
        """
        parallel, faults = read_parallel_layout(model)
        if faults:
            raise RunConfigError(str(faults[0]))
        return parallel

    def split_layers(self, num_layers: int) -> tuple[ModelChunk, ...]:
        """Return the layers of each chunk of each stage, in order of execution.

        Raises:
            RunConfigError: The layers cannot be split over the stages.
        """
        chunks = self.layout
        if chunks is None:
            chunks = _make_chunk_parts(self._count_chunk_layers(num_layers))
        layer_count = sum(parts.count("decoder") for parts in chunks)
        if layer_count != num_layers:
            rule = f"must place all {num_layers} layers"
            raise RunConfigError.of(
                f"model.{CUSTOM_LAYOUT_FIELD}", rule, layer_count, "Correct it."
            )
        model_chunks: list[ModelChunk] = []
        first = 0
        for index, parts in enumerate(chunks):
            chunk, stage = divmod(index, self.pipeline)
            end = first + parts.count("decoder")
            model_chunk = ModelChunk(
                stage=stage,
                chunk=chunk,
                layers=tuple(range(first, end)),
                embedding="embedding" in parts,
                mtp="mtp" in parts,
                output="loss" in parts,
            )
            model_chunks.append(model_chunk)
            first = end
        return tuple(model_chunks)

    def fit_to_world_size(self, world_size: int | None) -> ParallelLayout:
        """Return the layout on the smallest possible number of ranks from `world_size` on.

        This number must be a multiple of the ranks of a replica of the dense parts, and of the
        ranks of a replica of the experts.
        """
        step = math.lcm(self.replica_size, self.expert_replica_size)
        steps = max(1, -(-(world_size or 1) // step))
        return replace(self, data=steps * step // self.replica_size)

    def with_even_split(self, num_layers: int) -> ParallelLayout:
        """Return this layout if it can split these layers, else a layout with the most even split.

        A layout with a custom split, or with more chunks than layers, is returned as it is.
        """
        chunks = self.pipeline * self.virtual
        if self.layout is not None or chunks > num_layers:
            return self
        try:
            self.split_layers(num_layers)
        except RunConfigError:
            layers_per_chunk, more = divmod(num_layers, chunks)
            counts = [layers_per_chunk + 1] * more + [layers_per_chunk] * (chunks - more)
            return replace(self, layout=_make_chunk_parts(counts))
        return self

    def _count_chunk_layers(self, num_layers: int) -> list[int]:
        """Return the number of layers of each chunk, in order of execution.

        It corresponds to Megatron's get_num_layers_to_build.
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
        """Return the number of layers of each stage, with embedding and output if they count."""
        stages = self.pipeline
        ends = {0: self.first_stage_layers, stages - 1: self.last_stage_layers}
        stated = {stage: count for stage, count in ends.items() if count is not None}
        if stated:
            left = num_layers - sum(stated.values())
            num_others = stages - len(stated)
            layers_per_stage = left // max(1, num_others)
            if left < 0 or layers_per_stage * num_others != left:
                rule = f"must leave a multiple of the {num_others} other stages, and leaves {left}"
                raise _make_split_error(rule, num_layers)
            return [stated.get(stage, layers_per_stage) for stage in range(stages)]
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
    """Return the layout that a model config describes, and the faults of that layout.

    The layout has the smallest number of ranks. Faulty values are left out of it.

    Args:
        model: The section of the model, or a mapping or object that is read as one.
    """
    section = read_section("model", model)
    faults = []
    for finding in section.malformed:
        if finding.path.removeprefix("model.") in LAYOUT_FIELDS:
            faults.append(finding)
    numbers: dict[str, int | None] = {}
    for name in LAYOUT_FIELDS:
        number = section.get_stated(name)
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
        sequence_parallel=bool(section.get_stated("sequence_parallel")) and tensor > 1,
        first_stage_layers=numbers["num_layers_in_first_pipeline_stage"],
        last_stage_layers=numbers["num_layers_in_last_pipeline_stage"],
        embedding_counts=bool(section.get_stated("account_for_embedding_in_pipeline_split")),
        loss_counts=bool(section.get_stated("account_for_loss_in_pipeline_split")),
    )
    parallel, split_faults = _apply_stated_chunks(parallel.fit_to_world_size(None), section)
    return parallel, (*faults, *split_faults)


def _apply_stated_chunks(
    parallel: ParallelLayout, section: Section
) -> tuple[ParallelLayout, list[Finding]]:
    """Return the layout with the parts of each chunk if a field states them, and the faults.

    A faulty statement is left out of the layout.
    """
    pattern = HybridPattern.from_model(section)
    if pattern is not None and pattern.chunks:
        name = "hybrid_layer_pattern"
        layout = _make_chunk_parts(pattern.chunks)
    elif section.get_stated(CUSTOM_LAYOUT_FIELD):
        name = CUSTOM_LAYOUT_FIELD
        try:
            layout = _parse_layout(section.get_stated(CUSTOM_LAYOUT_FIELD))
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
        "Change the number of layers or of stages, or state how many layers the first and the last "
        "stage have."
    )
    return RunConfigError.of("model.num_layers", rule, num_layers, remedy)


def _make_chunk_parts(counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the parts of each chunk, for the numbers of layers of the chunks.

    The first chunk has the embedding. The last chunk has multi-token prediction and the loss.
    """
    chunks: list[tuple[str, ...]] = []
    for count in counts:
        chunks.append(("decoder",) * count)
    chunks[0] = ("embedding", *chunks[0])
    chunks[-1] = (*chunks[-1], "mtp", "loss")
    return tuple(chunks)


PART_BY_LETTER = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
MAX_PARTS = 100_000
"""The largest number of parts of a layout. A typing error in a count could fill the memory."""
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|([EtmL|])\*(\d+)")
"""Parts in parentheses, or a letter, with the number of their repetitions."""


def _parse_layout(value: Any) -> tuple[tuple[str, ...], ...]:
    """Return the parts of each chunk in a value of `pipeline_model_parallel_layout`.

    Args:
        value: Lists of names; text such as ``Ett|(tt|)*29,m|L``; or an object of Megatron's
            PipelineParallelLayerLayout, whose `input_data` is such a list or text.
    """
    value = getattr(value, "input_data", value)
    if isinstance(value, str):
        return _parse_layout_text(value)
    if not isinstance(value, list | tuple):
        raise WrongValueError("must be text or a list of lists", value)
    chunks = []
    for item in value:
        parts = item
        if not isinstance(item, list | tuple):
            parts = (item,)
        chunks.append(tuple(map(_get_part_name, parts)))
    return tuple(chunks)


def _get_part_name(part: object) -> str:
    """Return the name of a part of the model, from text or from Megatron's enum."""
    return str(getattr(part, "name", part)).lower()


def _parse_layout_text(value: str) -> tuple[tuple[str, ...], ...]:
    """Return the parts of each chunk in a text, with its repetitions expanded."""
    expanded = value.replace(" ", "").replace(",", "")
    while True:
        match = _REPEATED.search(expanded)
        if match is None:
            break
        part, times = match[1], match[2]
        if not times:
            part, times = match[3], match[4]
        if len(times.lstrip("0")) > 6 or len(expanded) + len(part) * int(times) > MAX_PARTS:
            raise WrongValueError(f"must name at most {MAX_PARTS} parts", value)
        expanded = expanded[: match.start()] + part * int(times) + expanded[match.end() :]
    wrong = "".join(sorted(set(expanded) - set(PART_BY_LETTER) - {"|"}))
    if wrong:
        raise WrongValueError(f"must consist of {', '.join(PART_BY_LETTER)} and |", wrong)
    chunks = []
    for letters in expanded.split("|"):
        chunks.append(tuple(PART_BY_LETTER[letter] for letter in letters))
    return tuple(chunks)


def get_sent_dtype(
    model: Mapping[str, Any], mcore: Version | None, *, is_local: bool
) -> str | None:
    """Return the dtype of the activations that a pipeline stage sends.

    The next stage receives them in `pipeline_dtype`, whatever the sent dtype is. A layer ends with
    the sum of residual and output. Before megatron-core 0.17, the sum has the dtype of the output.
    Since then, it has the dtype of the residual, which comes from the embedding.

    Args:
        model: The normalised values of the model section.
        mcore: The version of megatron-core.
        is_local: Whether the layers are Megatron's local layers. They add an FP32 bias to the
            result of autocast.

    Returns:
        The token of the dtype. None if it depends on a version that is not known.

    Source: fusions/fused_bias_dropout.py of 0.16.1 and 0.17.0,
    pipeline_parallel/p2p_communication.py; Transformer Engine 2.20 pytorch/module/linear.py casts
    the bias.
    """
    weights: str = find_switched_on(model, ("bf16", "fp16")) or model["params_dtype"] or "fp32"
    residual = weights
    if model["fp32_residual_connection"]:
        residual = "fp32"
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
    if is_residual_kept:
        return residual
    return output
