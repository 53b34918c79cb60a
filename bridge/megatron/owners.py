"""The classes of Megatron Core that a run's configuration is made of, for the rooms that must not import Megatron."""

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from bridge.megatron.gpt import ACTIVATIONS, GPTConfig

__all__ = ["FUNCTIONS", "OWNERS", "DistributedDataParallelConfig", "GPTConfig", "OptimizerConfig"]

OWNERS = {"model": GPTConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
"""Section of the run's configuration -> class."""

FUNCTIONS = {"activation_func": ACTIVATIONS}
"""Field that holds a function -> the functions that a configuration can name."""
