"""The layout of a run at size 2: its kinds of parallelism, the launches of them, and its layers over two stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.model.layout import LAYOUT, Parallel

KINDS = ("tensor", "pipeline", "data", "expert", "context")
"""As `Parallel` has them."""
TWO = 2
"""Ranks of each kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
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
    def of(cls, parallel: Parallel, *, is_sharded: bool) -> Round:
        """Return all kinds of a run's layout."""
        return cls(
            kinds=tuple(
                kind
                for kind in KINDS
                if getattr(parallel, kind) > 1 or (kind == "data" and is_sharded)
            ),
            sequence_parallel=parallel.sequence_parallel,
            virtual=min(parallel.virtual, TWO),
            expert_tensor=min(parallel.expert_tensor, TWO),
        )

    def size(self, kind: str) -> int:
        """Return the ranks of a kind."""
        return TWO if kind in self.kinds else 1

    @property
    def processes(self) -> int:
        """Processes of the launch; experts are spread over ranks that are there already."""
        return (
            self.size("tensor") * self.size("pipeline") * self.size("context") * self.size("data")
        )

    def fields(self) -> dict[str, Any]:
        """Return the model fields of the layout."""
        interleaved = self.virtual > 1 and "pipeline" in self.kinds
        return {
            "tensor_model_parallel_size": self.size("tensor"),
            "sequence_parallel": self.sequence_parallel and "tensor" in self.kinds,
            "pipeline_model_parallel_size": self.size("pipeline"),
            "virtual_pipeline_model_parallel_size": self.virtual if interleaved else None,
            "context_parallel_size": self.size("context"),
            "expert_model_parallel_size": self.size("expert"),
            "expert_tensor_parallel_size": self.expert_tensor if "tensor" in self.kinds else 1,
            # Megatron's two interleaved stages take messages of both directions for each other without it.
            **({"overlap_p2p_comm": True, "batch_p2p_comm": False} if interleaved else {}),
            **(self.split if "pipeline" in self.kinds else {}),
        }

    def __str__(self) -> str:
        names = {
            "tensor": "TP 2 with SP" if self.sequence_parallel else "TP 2",
            "pipeline": f"PP 2 x VPP {self.virtual}" if self.virtual > 1 else "PP 2",
            "context": "CP 2",
            "data": "DP 2",
            "expert": "EP 2",
        }
        return " x ".join(names[kind] for kind in names if kind in self.kinds) or "one process"

    def without(self, kind: str) -> Round:
        """Return the launch without a kind; experts need another kind's ranks to be spread over."""
        left = tuple(known for known in self.kinds if known != kind)
        if not {"tensor", "data", "context"} & {*left}:
            left = tuple(known for known in left if known != "expert")
        return replace(self, kinds=left)

    def rounds(self, processes: int, split: Mapping[str, Any]) -> tuple[Round, ...]:
        """Return launches of at most so many processes that together have every kind: one where there is none.

        Experts are spread over the data-parallel ranks, or else over those of a kind that the run has; and over
        tensor-parallel ranks that do not split an expert, since Megatron does not reduce the gradients of experts that
        are all on each of them. `split` is that of the launches.
        """
        at_once = max(0, processes.bit_length() - 1)
        free = [kind for kind in self.kinds if kind != "expert"] if at_once else []
        parts = [free[start : start + at_once] for start in range(0, len(free), at_once or 1)] or [
            []
        ]
        if "expert" in self.kinds and at_once:
            hosts = [
                part for kind in ("data", "tensor", "context") for part in parts if kind in part
            ]
            if not hosts:
                parts.append(["data", "expert"])
            for part in hosts:
                is_host = part is hosts[0] or ("tensor" in part and self.expert_tensor == 1)
                if is_host and "expert" not in part:
                    part.append("expert")
        return tuple(self._part(tuple(part), split) for part in parts)

    def _part(self, kinds: tuple[str, ...], split: Mapping[str, Any]) -> Round:
        is_whole = "expert" not in kinds or "data" in kinds
        return replace(
            self, kinds=kinds, split=split, expert_tensor=self.expert_tensor if is_whole else 1
        )


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
SPLIT = (FIRST, LAST, LAYOUT, EMBEDDING, LOSS)
"""Fields of the model that say how the layers are split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How a run splits its layers."""

    parallel: Parallel
    num_layers: int
    """Layers of the run."""
    virtual: int
    """Model chunks of each of the two stages."""

    def shares(self, size: int) -> bool:
        """Return whether the chunks can share so many layers; a layout of the run's own gives each what it likes."""
        if self.parallel.pipeline == 1 or self.parallel.layout is not None:
            return True
        places = size + self.parallel.embedding_counts + self.parallel.loss_counts
        return places % (self.virtual * (1 if self._ends else 2)) == 0

    @property
    def least(self) -> int:
        """The fewest layers that show the split."""
        if self.parallel.pipeline == 1:
            return 1
        if self.parallel.layout is not None:
            return 2 * self.virtual
        before, after = self._ends or (1, 1)
        return self.virtual * (2 if before == after else 3)

    @property
    def _ends(self) -> tuple[int, int] | None:
        """Return the layers of two stages of the run of which one has a number of its own; None where none has."""
        first, last = self.parallel.first_stage_layers, self.parallel.last_stage_layers
        if self.parallel.pipeline == 1 or (first is None and last is None):
            return None
        held = [0] * self.parallel.pipeline
        for place in self.parallel.places(self.num_layers):
            held[place.stage] += len(place.layers)
        if first is None:
            return held[-2], held[-1]
        return held[0], held[-1] if last is not None else held[1]

    def fields(self, size: int) -> dict[str, Any]:
        """Return the model fields that split so many layers over two stages; none for equal stages."""
        parallel = self.parallel
        if parallel.pipeline == 1:
            return {}
        if parallel.layout is not None:
            return {LAYOUT: self._layout(size)}
        if self._ends is None:
            counted = {EMBEDDING: parallel.embedding_counts, LOSS: parallel.loss_counts}
            return {name: True for name, is_on in counted.items() if is_on}
        before, after = self._ends
        few = self.virtual
        first = few if before < after else size - few
        if before == after:
            first = size // few // 2 * few
        stated = {
            FIRST: (parallel.first_stage_layers, first),
            LAST: (parallel.last_stage_layers, size - first),
        }
        return {name: here for name, (there, here) in stated.items() if there is not None}

    def _layout(self, size: int) -> list[list[str]]:
        """Return the content of each chunk: first and last as in the run, with one layer where they have some."""
        given = self.parallel.layout or ()
        counts = [0] * (2 * self.virtual)
        counts[0], counts[-1] = (
            min(1, given[0].count("decoder")),
            min(1, given[-1].count("decoder")),
        )
        between = list(range(1, len(counts) - 1)) or [0 if counts[0] else 1]
        for number in range(size - counts[0] - counts[-1]):
            counts[between[number % len(between)]] += 1
        chunks = [["decoder"] * count for count in counts]
        chunks[0].insert(0, "embedding")
        stands_alone = "mtp" not in given[-1] and self.virtual > 1
        chunks[-2 if stands_alone else -1] += [
            part for chunk in given for part in chunk if part == "mtp"
        ][:2]
        chunks[-1].append("loss")
        return chunks
