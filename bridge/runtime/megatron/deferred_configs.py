"""Megatron's optimizer and DDP configs, with checks that wait for `finalize`, as in Megatron Bridge.

A script makes these configs before a recipe completes them. In between they may have values that
Megatron refuses.
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


class _DeferredChecks:
    def __post_init__(self) -> None:
        """Check nothing yet."""

    def finalize(self) -> None:
        """Run Megatron's checks and compute its derived values; more calls do no harm."""
        super().__post_init__()  # type: ignore[misc]  # Megatron's class, which comes next


@dataclass
class DistributedDataParallelConfig(_DeferredChecks, MegatronDistributedDataParallelConfig):  # type: ignore[misc]
    """Megatron's `DistributedDataParallelConfig`, checked when it is complete."""


@dataclass
class OptimizerConfig(_DeferredChecks, MegatronOptimizerConfig):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's `OptimizerConfig`, checked when it is complete."""
