"""Megatron's optimizer and DDP configs whose checks wait for `finalize`, as in the classes of Megatron Bridge.

A script states these configs before a recipe completes them, so that what Megatron refuses may be true only in between.
"""

from dataclasses import dataclass

from megatron.core.distributed import (
    DistributedDataParallelConfig as MegatronDistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

__all__ = [
    "DistributedDataParallelConfig",
    "MegatronDistributedDataParallelConfig",
    "MegatronOptimizerConfig",
    "OptimizerConfig",
]


class _Deferred:
    def __post_init__(self) -> None:
        """Check nothing yet."""

    def finalize(self) -> None:
        """Run Megatron's own checks and compute what it derives; as often as wanted."""
        super().__post_init__()  # type: ignore[misc]  # Megatron's class, which comes next


@dataclass
class DistributedDataParallelConfig(_Deferred, MegatronDistributedDataParallelConfig):  # type: ignore[misc]
    """Megatron's `DistributedDataParallelConfig`, checked when it is complete."""


@dataclass
class OptimizerConfig(_Deferred, MegatronOptimizerConfig):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's `OptimizerConfig`, checked when it is complete."""
