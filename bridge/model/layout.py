"""Placement of the layers: tensor, expert, context and pipeline parallelism, read from a model's config values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import Finding, RunConfigError, WrongValueError
from bridge.model.hybrid import HybridPattern, model_fault
from bridge.model.section import Section, read_section
from bridge.target.versions import Version, at_least

RESIDUAL_IS_KEPT = "0.17"
"""First megatron-core whose layers add their output to the residual in the residual's dtype."""

SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *(
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "virtual_pipeline_model_parallel_size",
    ),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
)
LAYOUT = "pipeline_model_parallel_layout"
MOST_CHUNKS = 4_000
"""Of all stages together; more is a slip of the finger, and would take minutes to be listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The layers (numbered from 0) of one model chunk of one pipeline stage."""

    stage: int
    chunk: int
    layers: tuple[int, ...]
    embedding: bool = False
    mtp: bool = False
    output: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """A parallel layout, by Megatron's names for its sizes."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Model chunks per pipeline stage."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    """Replicas of the dense parts; with context parallelism, gradients are reduced over data x context ranks."""
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
    def replica(self) -> int:
        """Ranks that hold the dense parts once."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_replica(self) -> int:
        """Ranks that hold the experts once."""
        return self.expert_tensor * self.expert * self.pipeline

    @property
    def world_size(self) -> int:
        """Ranks of the layout."""
        return self.replica * self.data

    @property
    def of_tokens(self) -> int:
        """Ranks that share the tokens of a sequence between its GEMMs."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    @property
    def expert_data(self) -> int:
        """Replicas of each expert."""
        return max(1, self.world_size // self.expert_replica)

    @classmethod
    def of(cls, model: Any) -> Parallel:
        """Return the layout that a model's config describes; RunConfigError where there is no such layout."""
        parallel, faults = read_parallel(model)
        if faults:
            raise RunConfigError(str(faults[0]))
        return parallel

    def places(self, num_layers: int) -> tuple[Place, ...]:
        """Return the layers of each chunk of each stage, in order of execution; RunConfigError without such a split."""
        chunks = self.layout if self.layout is not None else _content(self._counts(num_layers))
        placed = sum(parts.count("decoder") for parts in chunks)
        if placed != num_layers:
            raise RunConfigError.of(
                f"model.{LAYOUT}", f"must place all {num_layers} layers", placed, "Correct it."
            )
        places: list[Place] = []
        first = 0
        for index, parts in enumerate(chunks):
            chunk, stage = divmod(index, self.pipeline)
            layers = tuple(range(first, first + parts.count("decoder")))
            has = {
                "embedding": "embedding" in parts,
                "mtp": "mtp" in parts,
                "output": "loss" in parts,
            }
            places.append(Place(stage=stage, chunk=chunk, layers=layers, **has))
            first += len(layers)
        return tuple(places)

    def on_enough(self, world_size: int | None) -> Parallel:
        """Return the layout on the fewest ranks, from `world_size` on, that hold it a whole number of times."""
        step = math.lcm(self.replica, self.expert_replica)
        return replace(self, data=max(1, -(-(world_size or 1) // step)) * step // self.replica)

    def split_for(self, num_layers: int) -> Parallel:
        """Return the layout itself where it can split these layers, else one with a split as even as they allow.

        A stated layout, and one with more chunks than layers, is returned as it is.
        """
        chunks = self.pipeline * self.virtual
        if self.layout is not None or chunks > num_layers:
            return self
        try:
            self.places(num_layers)
        except RunConfigError:
            each, more = divmod(num_layers, chunks)
            return replace(
                self, layout=_content([each + (index < more) for index in range(chunks)])
            )
        return self

    def _counts(self, num_layers: int) -> list[int]:
        """Return how many layers each chunk has, in order of execution (Megatron's get_num_layers_to_build)."""
        stages, chunks = self.pipeline, self.virtual
        if stages == 1:
            return [num_layers]
        if stages * chunks > MOST_CHUNKS:
            rule = f"stages x chunks of a stage must be at most {MOST_CHUNKS}"
            raise RunConfigError.of(
                "model.pipeline_model_parallel_size", rule, stages * chunks, "Use fewer."
            )
        ends = {0: self.first_stage_layers, stages - 1: self.last_stage_layers}
        uneven = {stage: count for stage, count in ends.items() if count is not None}
        if uneven:
            left, middle = num_layers - sum(uneven.values()), stages - len(uneven)
            each = left // middle if middle else 0
            if left < 0 or each * middle != left:
                rule = f"must leave a multiple of the {middle} other stages, and leaves {left}"
                raise _unsplittable(rule, num_layers)
            per_stage = [uneven.get(stage, each) for stage in range(stages)]
        else:
            counted = num_layers + self.embedding_counts + self.loss_counts
            if counted % stages:
                places = (
                    f", with embedding and output layer {counted}," if counted != num_layers else ""
                )
                raise _unsplittable(
                    f"must be{places} a multiple of the {stages} pipeline stages", num_layers
                )
            per_stage = [counted // stages] * stages
        if any(count % chunks for count in per_stage):
            rule = f"must give each stage a multiple of its {chunks} model chunks, and gives {per_stage}"
            raise _unsplittable(rule, num_layers)
        counts = [count // chunks for _ in range(chunks) for count in per_stage]
        counts[0] -= self.embedding_counts
        counts[-1] -= self.loss_counts
        return counts


def read_parallel(model: Any) -> tuple[Parallel, tuple[Finding, ...]]:
    """Return the layout that a model's config describes, on as few ranks as it needs, and why there is no such layout.

    `model` is its section, or a mapping or object that is read as one. What cannot be read is left out of the layout.
    """
    section = read_section("model", model)
    faults = [one for one in section.malformed if one.path.removeprefix("model.") in SIZES]
    numbers: dict[str, int | None] = {name: section.given(name) for name in SIZES}
    for name, number in numbers.items():
        if number is not None and number < 0:
            faults.append(model_fault(name, "must be a whole number", number))
            numbers[name] = None
    tensor, pipeline, context, expert, expert_tensor, virtual, first, last = numbers.values()
    tensor, pipeline = tensor or 1, pipeline or 1
    parallel = Parallel(
        tensor=tensor,
        pipeline=pipeline,
        virtual=(virtual or 1) if pipeline > 1 else 1,
        context=context or 1,
        expert=expert or 1,
        expert_tensor=expert_tensor or tensor,
        sequence_parallel=bool(section.given("sequence_parallel")) and tensor > 1,
        first_stage_layers=first,
        last_stage_layers=last,
        embedding_counts=bool(section.given("account_for_embedding_in_pipeline_split")),
        loss_counts=bool(section.given("account_for_loss_in_pipeline_split")),
    )
    parallel, of_layout = _laid_out(parallel.on_enough(None), section)
    return parallel, (*faults, *of_layout)


def _laid_out(parallel: Parallel, section: Section) -> tuple[Parallel, list[Finding]]:
    """Return the layout with the content of each chunk where a field states it, and the reason why it has none."""
    pattern, name = HybridPattern.of(section), LAYOUT
    if pattern is not None and pattern.chunks:
        name, layout = "hybrid_layer_pattern", _content(pattern.chunks)
    elif section.given(LAYOUT):
        try:
            layout = _layout(section.given(LAYOUT))
        except WrongValueError as error:
            return parallel, [model_fault(LAYOUT, error.rule, error.value)]
    else:
        return parallel, []
    if len(layout) % parallel.pipeline:
        rule = f"must have as many chunks for each of the {parallel.pipeline} stages"
        return parallel, [model_fault(name, rule, len(layout))]
    return replace(parallel, layout=layout, virtual=len(layout) // parallel.pipeline), []


def _unsplittable(rule: str, num_layers: int) -> RunConfigError:
    remedy = "Change the number of layers or of stages, or say how many the first and the last stage have."
    return RunConfigError.of("model.num_layers", rule, num_layers, remedy)


def _content(counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the content of chunks with so many layers: the ends of the model are in the first and in the last."""
    chunks: list[tuple[str, ...]] = [("decoder",) * count for count in counts]
    chunks[0] = ("embedding", *chunks[0])
    chunks[-1] = (*chunks[-1], "mtp", "loss")
    return tuple(chunks)


LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
LONGEST = 100_000
"""Most parts of a pipeline layout: a slip in a count would fill the memory."""


def _layout(given: Any) -> tuple[tuple[str, ...], ...]:
    """Return a `pipeline_model_parallel_layout` as Megatron reads it: lists of names, or ``Ett|(tt|)*29,m|L``."""
    given = getattr(given, "input_data", given)  # of Megatron's PipelineParallelLayerLayout
    if not isinstance(given, str | list | tuple):
        raise WrongValueError("must be text or a list of lists", given)
    if not isinstance(given, str):
        chunks = (chunk if isinstance(chunk, list | tuple) else (chunk,) for chunk in given)
        return tuple(
            tuple(str(getattr(part, "name", part)).lower() for part in chunk) for chunk in chunks
        )
    text = given.replace(" ", "").replace(",", "")
    while True:
        match = re.search(r"\(([^()]*)\)\*(\d+)|([EtmL|])\*(\d+)", text)
        if match is None:
            break
        part, times = (match[1], match[2]) if match[2] else (match[3], match[4])
        if len(times.lstrip("0")) > 6 or len(text) + len(part) * int(times) > LONGEST:
            raise WrongValueError(f"must name at most {LONGEST} parts", given)
        text = text[: match.start()] + part * int(times) + text[match.end() :]
    wrong = "".join(sorted(set(text) - set(LETTERS) - {"|"}))
    if wrong:
        raise WrongValueError(f"must consist of {', '.join(LETTERS)} and |", wrong)
    return tuple(tuple(LETTERS[letter] for letter in chunk) for chunk in text.split("|"))


def sent_between_stages(
    model: Mapping[str, Any], mcore: Version | None, *, is_local: bool
) -> str | None:
    """Return the dtype of the activations that a pipeline stage sends; None where an unknown version decides.

    Megatron receives them in `pipeline_dtype`, whatever was sent. The sum of residual and output that ends a layer has
    the dtype of the output before megatron-core 0.17, and that of the residual since: the embedding's.

    Args:
        model: The values of the model's section, in one form.
        mcore: The version that trains.
        is_local: The layers are Megatron's own, which add an FP32 bias to autocast's result.

    Source: fusions/fused_bias_dropout.py of 0.16.1 and 0.17.0, pipeline_parallel/p2p_communication.py; Transformer
    Engine 2.20 pytorch/module/linear.py casts the bias.
    """
    mode = [name for name in ("bf16", "fp16") if model[name]]
    weights: str = mode[0] if mode else model["params_dtype"] or "fp32"
    residual = "fp32" if model["fp32_residual_connection"] else weights
    output = (model["autocast_dtype"] or weights) if model["enable_autocast"] else weights
    if is_local and output != weights and model["add_bias_linear"]:
        output = "fp32"
    if residual == output:
        return residual
    is_kept = at_least(mcore, RESIDUAL_IS_KEPT)
    if is_kept is None:
        return None
    return residual if is_kept else output
