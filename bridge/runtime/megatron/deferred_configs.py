"""Megatron's optimizer and DDP configs, with checks that wait for `finalize`, as in Megatron Bridge.

A script makes these configs before the sync writes a recipe into them. Until then they may have
values that Megatron refuses.
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
    """A mix-in before a config class of Megatron, whose checks then run in `finalize`."""

    def __post_init__(self) -> None:
        """Check nothing yet."""

    def finalize(self) -> None:
        """Run Megatron's checks and compute its derived values. Several calls are allowed."""
        super().__post_init__()  # type: ignore[misc]  # that of Megatron's class, the next base


@dataclass
class DistributedDataParallelConfig(_DeferredChecks, MegatronDistributedDataParallelConfig):  # type: ignore[misc]
    """Megatron's `DistributedDataParallelConfig`, checked when it is complete."""


@dataclass
class OptimizerConfig(_DeferredChecks, MegatronOptimizerConfig):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's `OptimizerConfig`, checked when it is complete."""
