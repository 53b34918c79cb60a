"""Precision Bridge: named recipes as the single source of truth of a Megatron Core run.

The places for additions (`docs/explain/architecture.md` has the whole table):

    a built-in recipe           recipes/, next to this package: a function with `@register`; a new
                                file is imported in recipes/__init__.py
    a recipe of a team          any module that the entry-point group `bridge.recipes` names
    a field of the precision    precision/precision_config.py, and a route in sync/field_routes.py
    a scheme or a format        precision/schemes.py, precision/formats.py
    a rule                      rules/topics/, the file of its topic; a new file: rules/rulebook.py
    a framework's file          read/framework/tables/NAME.yaml; another system's file: convert/
    a log of another trainer    read/logs/, a module, and its call in read/logs/files.py
    a command                   cli/, a module, and its row in cli/commands.py
    a GPU                       target/gpus.py
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.errors import BridgeError, BridgeWarning
    from bridge.front.loader import load_run
    from bridge.front.python_check import check
    from bridge.plan.precision_plan import PrecisionPlan as Plan
    from bridge.registry.composed import to_config
    from bridge.registry.mixed_precision_config import MixedPrecisionConfig
    from bridge.registry.registry import (
        MIXED_PRECISION_RECIPES,
        get_mixed_precision_config,
        register,
    )
    from bridge.registry.schedule import PrecisionSchedule
    from bridge.registry.synchronize import synchronize
    from bridge.sync.report import SyncReport
    from bridge.training.config import ConfigContainer, runtime_config_update

__all__ = [
    "MIXED_PRECISION_RECIPES",
    "BridgeError",
    "BridgeWarning",
    "ConfigContainer",
    "MixedPrecisionConfig",
    "Plan",
    "PrecisionSchedule",
    "SyncReport",
    "check",
    "get_mixed_precision_config",
    "load_run",
    "register",
    "runtime_config_update",
    "synchronize",
    "to_config",
]

_MODULE_BY_NAME = {
    "MIXED_PRECISION_RECIPES": "registry.registry",
    "BridgeError": "errors",
    "BridgeWarning": "errors",
    "ConfigContainer": "training.config",
    "MixedPrecisionConfig": "registry.mixed_precision_config",
    "Plan": "plan.precision_plan",
    "PrecisionSchedule": "registry.schedule",
    "SyncReport": "sync.report",
    "check": "front.python_check",
    "get_mixed_precision_config": "registry.registry",
    "load_run": "front.loader",
    "register": "registry.registry",
    "runtime_config_update": "training.config",
    "synchronize": "registry.synchronize",
    "to_config": "registry.composed",
}
"""Public name -> the module of this package that defines it."""

_NAME_IN_MODULE = {"Plan": "PrecisionPlan"}
"""Public name -> its name in that module, if the names differ."""


def __getattr__(name: str) -> Any:
    """Return a public name, and import the module that defines it.

    So `import bridge` stays fast.
    """
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_BY_NAME[name]}")
    value = globals()[name] = getattr(module, _NAME_IN_MODULE.get(name, name))
    return value


def __dir__() -> list[str]:
    """Return the module's names with those that are not imported yet."""
    return sorted({*globals(), *__all__})
