"""Drop-in replacement for `megatron.bridge.training.mixed_precision`: only the import line changes.

    from bridge.training.mixed_precision import MixedPrecisionConfig, get_mixed_precision_config
    from bridge.training.mixed_precision import register

The built-in recipes can be imported by name, as from Megatron Bridge's module. There are two
differences: a config remembers which fields were stated, and each overridden value is reported.
"""

import logging
from typing import TypeVar

from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.peer import PeerConfig
from bridge.registry.registry import (
    MIXED_PRECISION_RECIPES,
    REGISTRY,
    get_mixed_precision_config,
    register,
)
from bridge.registry.source_location import RecipeFunction

__all__ = [
    "MIXED_PRECISION_RECIPES",
    "MixedPrecisionConfig",
    "bf16_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_nvfp4_mixed",
    "fp16_mixed",
    "fp16_with_fp8_current_scaling_mixed",
    "fp16_with_fp8_delayed_scaling_mixed",
    "fp16_with_fp8_subchannel_scaling_mixed",
    "fp16_with_mxfp8_mixed",
    "get_mixed_precision_config",
    "nanov2_bf16_with_fp8_current_scaling_mixed",
    "nemotron_3_super_bf16_with_nvfp4_mixed",
    "nemotron_3_ultra_bf16_with_nvfp4_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "register",
    "update_config_with_precision_overrides",
]

# Megatron Bridge's recipes. `__getattr__` finds them in the registry; these lines declare them for
# type checkers and `import *`.
bf16_mixed: RecipeFunction
bf16_with_fp8_current_scaling_mixed: RecipeFunction
bf16_with_fp8_delayed_scaling_mixed: RecipeFunction
bf16_with_fp8_subchannel_scaling_mixed: RecipeFunction
bf16_with_mxfp8_mixed: RecipeFunction
bf16_with_nvfp4_mixed: RecipeFunction
fp16_mixed: RecipeFunction
fp16_with_fp8_current_scaling_mixed: RecipeFunction
fp16_with_fp8_delayed_scaling_mixed: RecipeFunction
fp16_with_fp8_subchannel_scaling_mixed: RecipeFunction
fp16_with_mxfp8_mixed: RecipeFunction
nanov2_bf16_with_fp8_current_scaling_mixed: RecipeFunction
nemotron_3_super_bf16_with_nvfp4_mixed: RecipeFunction
nemotron_3_ultra_bf16_with_nvfp4_mixed: RecipeFunction
nemotron_h_bf16_with_fp8_current_scaling_mixed: RecipeFunction

log = logging.getLogger(__name__)

T = TypeVar("T")


def update_config_with_precision_overrides(
    mixed_precision_config: MixedPrecisionConfig | PeerConfig, config: T
) -> T:
    """Write the precision into a config object and return that object.

    Args:
        mixed_precision_config: The precision, of our class or of Megatron Bridge's class.
        config: A model, optimizer or DDP config of Megatron, or any object with attributes of the
            same names.

    Returns:
        The same object. A warning is logged for each value that was overridden or kept, and for
        each finding. An object without any field of a precision is not changed, as in Megatron
        Bridge.

    Raises:
        PrecisionConfigError: The precision is wrong for any run.
        PrecisionTypeError: `config` is not a config object.
        SyncCheckError: The result would not pass Megatron's validation. The object is not changed.
    """
    # Imported here, so that an import of this module loads no sync.
    from bridge.sync.owner import NON_CONFIG_TYPES, Owner, get_owner_name, has_precision_field
    from bridge.sync.synchroniser import write_precision

    precision = get_mixed_precision_config(mixed_precision_config)
    precision.finalize()
    owner_name = get_owner_name(config)
    is_config = not isinstance(config, NON_CONFIG_TYPES)
    if is_config and not has_precision_field(Owner(owner_name, config)):
        log.warning("%s has no field of a precision; it is left as it is", type(config).__name__)
        return config
    report = write_precision(precision, {owner_name: config})
    report.log_warnings(log)
    return config


def __getattr__(name: str) -> RecipeFunction:
    """Return the function of a registered recipe, as Megatron Bridge's module has it.

    Raises:
        AttributeError: No recipe has this name.
    """
    if not name.startswith("_") and name in REGISTRY:
        return MIXED_PRECISION_RECIPES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the module and of the registered recipes."""
    return sorted({*globals(), *REGISTRY.names()})
