"""The layout of a run at size 2: its kinds of parallelism, the launches, and two stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.model.layout import CUSTOM_LAYOUT_FIELD, ParallelLayout

PARALLELISM_KINDS = ("tensor", "pipeline", "data", "expert", "context")
"""Kinds of parallelism, by the names of the fields of `Parallel`."""
RANKS_PER_KIND = 2
"""Ranks of each kind of parallelism in a rehearsal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLayout:
    """One launch, or a whole run: the kinds of parallelism that it has, each at size 2."""

    kinds: tuple[str, ...] = ()
    """Some of `KINDS`."""
    sequence_parallel: bool = False
    virtual: int = 1
    """Model chunks of a pipeline stage."""
    expert_tensor: int = 1
    split: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model that split the layers over the stages otherwise than evenly."""

    @classmethod
    def from_parallel(cls, parallel: ParallelLayout, *, is_sharded: bool) -> LaunchLayout:
        """Return all kinds of a run's layout."""
        kinds = []
        for kind in PARALLELISM_KINDS:
            if getattr(parallel, kind) > 1 or (kind == "data" and is_sharded):
                kinds.append(kind)
        return cls(
            kinds=tuple(kinds),
            sequence_parallel=parallel.sequence_parallel,
            virtual=min(parallel.virtual, RANKS_PER_KIND),
            expert_tensor=min(parallel.expert_tensor, RANKS_PER_KIND),
        )

    def size(self, kind: str) -> int:
        """Return the ranks of a kind."""
        if kind in self.kinds:
            return RANKS_PER_KIND
        return 1

    @property
    def processes(self) -> int:
        """Processes of the launch; experts are spread over ranks that are there already."""
        return (
            self.size("tensor") * self.size("pipeline") * self.size("context") * self.size("data")
        )

    def fields(self) -> dict[str, Any]:
        """Return the model fields of the layout."""
        fields: dict[str, Any] = {
            "tensor_model_parallel_size": self.size("tensor"),
            "sequence_parallel": self.sequence_parallel and "tensor" in self.kinds,
            "pipeline_model_parallel_size": self.size("pipeline"),
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": self.size("context"),
            "expert_model_parallel_size": self.size("expert"),
            "expert_tensor_parallel_size": 1,
        }
        if "tensor" in self.kinds:
            fields["expert_tensor_parallel_size"] = self.expert_tensor
        if "pipeline" not in self.kinds:
            return fields
        if self.virtual > 1:
            fields["virtual_pipeline_model_parallel_size"] = self.virtual
            # Without it Megatron's two interleaved stages take messages of both directions for
            # each other.
            fields["overlap_p2p_comm"] = True
            fields["batch_p2p_comm"] = False
        return {**fields, **self.split}

    def __str__(self) -> str:
        names = {"tensor": "TP 2", "pipeline": "PP 2"}
        if self.sequence_parallel:
            names["tensor"] = "TP 2 with SP"
        if self.virtual > 1:
            names["pipeline"] = f"PP 2 x VPP {self.virtual}"
        names |= {"context": "CP 2", "data": "DP 2", "expert": "EP 2"}
        return " x ".join(names[kind] for kind in names if kind in self.kinds) or "one process"

    def without(self, kind: str) -> LaunchLayout:
        """Return the launch without a kind; experts need another kind's ranks to be spread over."""
        left = list(self.kinds)
        if kind in left:
            left.remove(kind)
        if "expert" in left and not {"tensor", "data", "context"} & {*left}:
            left.remove("expert")
        return replace(self, kinds=tuple(left))

    def rounds(self, processes: int, split: Mapping[str, Any]) -> tuple[LaunchLayout, ...]:
        """Return launches of at most so many processes that together have every kind.

        There is one where the run has no kind. Experts are spread over the data-parallel ranks, or
        else over those of a kind that the run has; and over tensor-parallel ranks that do not split
        an expert, since Megatron does not reduce the gradients of experts that are all on each of
        them. `split` is that of the launches.
        """
        at_once = max(0, processes.bit_length() - 1)
        if not at_once:
            return (self._part((), split),)
        parts: list[list[str]] = []
        for kind in self.kinds:
            if kind == "expert":
                continue
            if not parts or len(parts[-1]) == at_once:
                parts.append([])
            parts[-1].append(kind)
        if not parts:
            parts.append([])
        if "expert" in self.kinds:
            self._spread_experts(parts)
        return tuple(self._part(tuple(part), split) for part in parts)

    def _spread_experts(self, parts: list[list[str]]) -> None:
        """Add the experts to the launches whose ranks they are spread over."""
        hosts = []
        for kind in ("data", "tensor", "context"):
            for part in parts:
                if kind in part:
                    hosts.append(part)
        if not hosts:
            parts.append(["data", "expert"])
        for part in hosts:
            is_host = part is hosts[0] or ("tensor" in part and self.expert_tensor == 1)
            if is_host and "expert" not in part:
                part.append("expert")

    def _part(self, kinds: tuple[str, ...], split: Mapping[str, Any]) -> LaunchLayout:
        expert_tensor = 1
        if "expert" not in kinds or "data" in kinds:
            expert_tensor = self.expert_tensor
        return replace(self, kinds=kinds, split=split, expert_tensor=expert_tensor)


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
SPLIT_FIELDS = (FIRST, LAST, CUSTOM_LAYOUT_FIELD, EMBEDDING, LOSS)
"""Fields of the model that say how the layers are split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSplit:
    """How a run splits its layers."""

    parallel: ParallelLayout
    num_layers: int
    """Layers of the run."""
    virtual: int
    """Model chunks of each of the two stages."""

    def can_share(self, size: int) -> bool:
        """Return whether the chunks can share so many layers.

        A layout of the run's own gives each chunk any number.
        """
        if self.parallel.pipeline == 1 or self.parallel.layout is not None:
            return True
        places = size + self.parallel.embedding_counts + self.parallel.loss_counts
        chunks = 2 * self.virtual
        if self._list_stage_layers:
            chunks = self.virtual
        return places % chunks == 0

    @property
    def least(self) -> int:
        """The fewest layers that show the split."""
        if self.parallel.pipeline == 1:
            return 1
        if self.parallel.layout is not None:
            return 2 * self.virtual
        before, after = self._list_stage_layers or (1, 1)
        if before == after:
            return 2 * self.virtual
        return 3 * self.virtual

    @property
    def _list_stage_layers(self) -> tuple[int, int] | None:
        """Return the layers of two stages of the run, where one has a number of its own.

        Else None.
        """
        first, last = self.parallel.first_stage_layers, self.parallel.last_stage_layers
        if self.parallel.pipeline == 1 or (first is None and last is None):
            return None
        counts = [0] * self.parallel.pipeline
        for place in self.parallel.places(self.num_layers):
            counts[place.stage] += len(place.layers)
        if first is None:
            return counts[-2], counts[-1]
        if last is None:
            return counts[0], counts[1]
        return counts[0], counts[-1]

    def fields(self, size: int) -> dict[str, Any]:
        """Return the model fields that split so many layers over two stages.

        None for equal stages.
        """
        parallel = self.parallel
        if parallel.pipeline == 1:
            return {}
        if parallel.layout is not None:
            return {CUSTOM_LAYOUT_FIELD: self._layout(size)}
        if self._list_stage_layers is None:
            counted = {}
            if parallel.embedding_counts:
                counted[EMBEDDING] = True
            if parallel.loss_counts:
                counted[LOSS] = True
            return counted
        before, after = self._list_stage_layers
        few = self.virtual
        first = size - few
        if before == after:
            first = size // few // 2 * few
        elif before < after:
            first = few
        fields = {}
        if parallel.first_stage_layers is not None:
            fields[FIRST] = first
        if parallel.last_stage_layers is not None:
            fields[LAST] = size - first
        return fields

    def _layout(self, size: int) -> list[list[str]]:
        """Return the content of each chunk.

        First and last have one layer where the run's have some.
        """
        layout = self.parallel.layout or ()
        counts = [0] * (2 * self.virtual)
        counts[0] = min(1, layout[0].count("decoder"))
        counts[-1] = min(1, layout[-1].count("decoder"))
        between = list(range(1, len(counts) - 1))
        if not between and counts[0]:
            between = [0]
        elif not between:
            between = [1]
        for number in range(size - counts[0] - counts[-1]):
            counts[between[number % len(between)]] += 1
        chunks = [["decoder"] * count for count in counts]
        chunks[0].insert(0, "embedding")
        of_prediction = chunks[-1]
        if "mtp" not in layout[-1] and self.virtual > 1:
            of_prediction = chunks[-2]
        predictions = sum(chunk.count("mtp") for chunk in layout)
        of_prediction += ["mtp"] * min(2, predictions)
        chunks[-1].append("loss")
        return chunks
