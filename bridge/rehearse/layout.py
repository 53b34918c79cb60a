"""The parallel layout of a rehearsal, in which every kind of parallelism has the size 2.

`LaunchLayout` is the layout of the whole run or of one launch. A machine has fewer processes than
the whole layout needs, so `split_into_launches` spreads its kinds over several launches.
`LayerSplit` describes how the two pipeline stages of a launch share the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bridge.model.layout import CUSTOM_LAYOUT_FIELD, ParallelLayout

PARALLELISM_KINDS = ("tensor", "pipeline", "data", "expert", "context")
"""Kinds of parallelism, by the names of the fields of `ParallelLayout`."""
RANKS_PER_KIND = 2
"""Ranks of each kind of parallelism in a rehearsal."""

FIRST_STAGE_FIELD = "num_layers_in_first_pipeline_stage"
LAST_STAGE_FIELD = "num_layers_in_last_pipeline_stage"
EMBEDDING_FIELD = "account_for_embedding_in_pipeline_split"
LOSS_FIELD = "account_for_loss_in_pipeline_split"
SPLIT_FIELDS = (
    FIRST_STAGE_FIELD,
    LAST_STAGE_FIELD,
    CUSTOM_LAYOUT_FIELD,
    EMBEDDING_FIELD,
    LOSS_FIELD,
)
"""Fields of the model that state how the layers are split over the stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLayout:
    """The layout of one launch, or of a whole run: its kinds of parallelism, each at size 2."""

    kinds: tuple[str, ...] = ()
    """Some of `PARALLELISM_KINDS`."""
    sequence_parallel: bool = False
    virtual: int = 1
    """Model chunks of a pipeline stage."""
    expert_tensor: int = 1
    """Tensor-parallel ranks that share an expert."""
    split: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model that split the layers unevenly over the stages."""

    @classmethod
    def from_parallel(cls, parallel: ParallelLayout, *, is_sharded: bool) -> LaunchLayout:
        """Return the layout of a whole run at size 2.

        Args:
            parallel: The parallel layout of the run.
            is_sharded: Whether the optimizer state is sharded. Then the rehearsal has data
                parallelism even if the run has a single replica.
        """
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

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LaunchLayout:
        """Return the layout of fields that `to_dict` returned, which may have been through JSON."""
        return cls(**{**fields, "kinds": tuple(fields["kinds"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the layout as plain data."""
        return asdict(self)

    def size(self, kind: str) -> int:
        """Return the number of ranks of a kind of parallelism."""
        if kind in self.kinds:
            return RANKS_PER_KIND
        return 1

    @property
    def processes(self) -> int:
        """Number of processes. Experts are spread over ranks of other kinds, and need no more."""
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
            # Without these two, each of Megatron's two interleaved stages confuses the messages
            # of both directions.
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
        """Return the layout without a kind of parallelism.

        Expert parallelism is removed too if no other kind is left whose ranks can have the experts.
        """
        kinds = list(self.kinds)
        if kind in kinds:
            kinds.remove(kind)
        if "expert" in kinds and not {"tensor", "data", "context"} & {*kinds}:
            kinds.remove("expert")
        return replace(self, kinds=tuple(kinds))

    def split_into_launches(
        self, processes: int, split: Mapping[str, Any]
    ) -> tuple[LaunchLayout, ...]:
        """Return launches that together have every kind of this layout.

        A layout without any kind has one launch, of one process.

        Args:
            processes: The most processes of a launch.
            split: The fields of `LaunchLayout.split`, for all launches.
        """
        # Each kind doubles the processes.
        kinds_per_launch = max(0, processes.bit_length() - 1)
        if not kinds_per_launch:
            return (self._make_launch((), split),)
        groups: list[list[str]] = []
        for kind in self.kinds:
            if kind == "expert":
                continue
            if not groups or len(groups[-1]) == kinds_per_launch:
                groups.append([])
            groups[-1].append(kind)
        if not groups:
            groups.append([])
        if "expert" in self.kinds:
            self._add_experts(groups)
        return tuple(self._make_launch(tuple(kinds), split) for kinds in groups)

    def _add_experts(self, groups: list[list[str]]) -> None:
        """Add expert parallelism to the launches whose ranks the experts are spread over.

        This is the launch with data parallelism, or else with tensor or context parallelism. Each
        launch with tensor parallelism gets it too if tensor-parallel ranks do not share an expert.
        Megatron would not reduce the gradients of experts that are complete on each of these ranks.

        Args:
            groups: The kinds of each launch. They are changed.
        """
        hosts = []
        for kind in ("data", "tensor", "context"):
            for kinds in groups:
                if kind in kinds:
                    hosts.append(kinds)
        if not hosts:
            groups.append(["data", "expert"])
        for kinds in hosts:
            is_host = kinds is hosts[0] or ("tensor" in kinds and self.expert_tensor == 1)
            if is_host and "expert" not in kinds:
                kinds.append("expert")

    def _make_launch(self, kinds: tuple[str, ...], split: Mapping[str, Any]) -> LaunchLayout:
        """Return the layout of a launch with some of the kinds."""
        # Experts that are spread over tensor-parallel ranks cannot be shared by these ranks too.
        expert_tensor = 1
        if "expert" not in kinds or "data" in kinds:
            expert_tensor = self.expert_tensor
        return replace(self, kinds=kinds, split=split, expert_tensor=expert_tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSplit:
    """How a run splits its layers, and how two stages split fewer layers in the same way."""

    parallel: ParallelLayout
    """The parallel layout of the full run."""
    num_layers: int
    """Layers of the full run."""
    virtual: int
    """Model chunks of each of the two stages."""

    def can_share(self, size: int) -> bool:
        """Return whether the chunks of the two stages can share `size` layers.

        With a custom layout (`pipeline_model_parallel_layout`), a chunk has any number of layers.
        """
        if self.parallel.pipeline == 1 or self.parallel.layout is not None:
            return True
        # Megatron counts the embedding and the loss as layers if the run states this.
        counted = size + self.parallel.embedding_counts + self.parallel.loss_counts
        chunks = 2 * self.virtual
        if self._uneven_stages:
            # The stages differ in size. Only the chunks of one stage share its layers evenly.
            chunks = self.virtual
        return counted % chunks == 0

    @property
    def least(self) -> int:
        """The least number of layers that shows the split."""
        if self.parallel.pipeline == 1:
            return 1
        if self.parallel.layout is not None:
            return 2 * self.virtual
        first, second = self._uneven_stages or (1, 1)
        if first == second:
            return 2 * self.virtual
        return 3 * self.virtual

    @property
    def _uneven_stages(self) -> tuple[int, int] | None:
        """The numbers of layers of two different stages of the run. None: an even split.

        A run can state the layers of its first and its last stage. If it states only one of them,
        the other number belongs to a stage in the middle.
        """
        first, last = self.parallel.first_stage_layers, self.parallel.last_stage_layers
        if self.parallel.pipeline == 1 or (first is None and last is None):
            return None
        counts = [0] * self.parallel.pipeline
        for chunk in self.parallel.split_layers(self.num_layers):
            counts[chunk.stage] += len(chunk.layers)
        if first is None:
            return counts[-2], counts[-1]
        if last is None:
            return counts[0], counts[1]
        return counts[0], counts[-1]

    def fields(self, size: int) -> dict[str, Any]:
        """Return the model fields that split `size` layers over two stages.

        Empty for an even split, except for fields that count the embedding or the loss as layers.
        """
        parallel = self.parallel
        if parallel.pipeline == 1:
            return {}
        if parallel.layout is not None:
            return {CUSTOM_LAYOUT_FIELD: self._make_custom_layout(size)}
        if self._uneven_stages is None:
            counted = {}
            if parallel.embedding_counts:
                counted[EMBEDDING_FIELD] = True
            if parallel.loss_counts:
                counted[LOSS_FIELD] = True
            return counted
        first_stage = self._count_first_stage_layers(size, *self._uneven_stages)
        fields = {}
        if parallel.first_stage_layers is not None:
            fields[FIRST_STAGE_FIELD] = first_stage
        if parallel.last_stage_layers is not None:
            fields[LAST_STAGE_FIELD] = size - first_stage
        return fields

    def _count_first_stage_layers(self, size: int, first: int, second: int) -> int:
        """Return how many of `size` layers the first of two stages has.

        The smaller stage has the fewest layers that its chunks can share, one per chunk.

        Args:
            size: Layers of both stages.
            first: Layers of the first stage in the full run.
            second: Layers of the other stage in the full run.
        """
        fewest = self.virtual
        if first == second:
            return size // fewest // 2 * fewest
        if first < second:
            return fewest
        return size - fewest

    def _make_custom_layout(self, size: int) -> list[list[str]]:
        """Return the content of each chunk, as `pipeline_model_parallel_layout` lists it.

        The first and the last chunk have one layer if they have any in the full run. The chunks
        between them share the other layers.
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
        prediction_chunk = chunks[-1]
        if "mtp" not in layout[-1] and self.virtual > 1:
            prediction_chunk = chunks[-2]
        num_predictions = sum(chunk.count("mtp") for chunk in layout)
        prediction_chunk += ["mtp"] * min(2, num_predictions)
        chunks[-1].append("loss")
        return chunks
