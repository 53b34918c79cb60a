"""The kinds of parallelism of a run at size 2, and the launches of a few processes that they are dealt out to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.rules.shape.parallel import Parallel

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
            kinds=tuple(kind for kind in KINDS if getattr(parallel, kind) > 1 or (kind == "data" and is_sharded)),
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
        return self.size("tensor") * self.size("pipeline") * self.size("context") * self.size("data")

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
        parts = [free[start : start + at_once] for start in range(0, len(free), at_once or 1)] or [[]]
        if "expert" in self.kinds and at_once:
            hosts = [part for kind in ("data", "tensor", "context") for part in parts if kind in part]
            if not hosts:
                parts.append(["data", "expert"])
            for part in hosts:
                is_host = part is hosts[0] or ("tensor" in part and self.expert_tensor == 1)
                if is_host and "expert" not in part:
                    part.append("expert")
        return tuple(self._part(tuple(part), split) for part in parts)

    def _part(self, kinds: tuple[str, ...], split: Mapping[str, Any]) -> Round:
        is_whole = "expert" not in kinds or "data" in kinds
        return replace(self, kinds=kinds, split=split, expert_tensor=self.expert_tensor if is_whole else 1)
