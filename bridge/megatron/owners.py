"""Megatron's own config classes that a run is described with, under the names Megatron Bridge re-exports them by."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

__all__ = ["DistributedDataParallelConfig", "OptimizerConfig"]
