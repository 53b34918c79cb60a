"""Precision Bridge: a named recipe is the single source of truth for the precision of a Megatron Core training run.

from bridge import get_mixed_precision_config, synchronize

report = synchronize("bf16_mixed", model=model_config, optimizer=optimizer_config, ddp=ddp_config)

A name is imported when it is first asked for: `import bridge` alone imports none of the rooms.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.errors import BridgeError, BridgeWarning
    from bridge.registry.composed import to_config
    from bridge.registry.config import MixedPrecisionConfig
    from bridge.registry.registry import MIXED_PRECISION_RECIPES, get_mixed_precision_config, register
    from bridge.sync.report import SyncReport
    from bridge.sync.schedule import PrecisionSchedule
    from bridge.sync.synchroniser import synchronize
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

_PLACES = {
    "errors": ("BridgeError", "BridgeWarning"),
    "registry.composed": ("to_config",),
    "registry.config": ("MixedPrecisionConfig",),
    "registry.registry": ("MIXED_PRECISION_RECIPES", "get_mixed_precision_config", "register"),
    "sync.schedule": ("PrecisionSchedule",),
    "sync.report": ("SyncReport",),
    "sync.synchroniser": ("synchronize",),
    "training.config": ("ConfigContainer", "runtime_config_update"),
}
"""Module of this package -> the public names that it defines."""


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it."""
    for place, names in _PLACES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{place}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the module's names with those that are not imported yet."""
    return sorted({*globals(), *__all__})
