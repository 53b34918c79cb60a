"""Precision Bridge: a named recipe is the single source of truth for the precision of a Megatron Core training run.

from bridge import get_mixed_precision_config, synchronize

report = synchronize("bf16_mixed", model=model_config, optimizer=optimizer_config, ddp=ddp_config)
"""

from bridge.errors import BridgeError, BridgeWarning
from bridge.registry.composed import to_config
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import MIXED_PRECISION_RECIPES, get_mixed_precision_config, register, synchronize
from bridge.registry.schedule import PrecisionSchedule
from bridge.sync import SyncReport
from bridge.training.config import ConfigContainer, runtime_config_update

__all__ = [
    "MIXED_PRECISION_RECIPES",
    "BridgeError",
    "BridgeWarning",
    "ConfigContainer",
    "MixedPrecisionConfig",
    "PrecisionSchedule",
    "SyncReport",
    "get_mixed_precision_config",
    "register",
    "runtime_config_update",
    "synchronize",
    "to_config",
]
