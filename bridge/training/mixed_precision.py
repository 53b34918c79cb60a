"""Drop-in for `megatron.bridge.training.mixed_precision`: change the import line, keep the code.

    from bridge.training.mixed_precision import MixedPrecisionConfig, get_mixed_precision_config
    from bridge.training.mixed_precision import register

Beyond the peer: what was stated is remembered, nothing is overridden without a report, and the
built-in recipes can be imported from here by name, as there.
"""

import logging
from typing import Any, TypeVar

from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.definition import RecipeFunction
from bridge.registry.peer import PeerConfig
from bridge.registry.registry import (
    MIXED_PRECISION_RECIPES,
    REGISTRY,
    get_mixed_precision_config,
    register,
)

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

# The peer's recipes, which `__getattr__` finds in the registry: declared for type checkers and
# `import *`.
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
        mixed_precision_config: The precision, of our class or of Megatron Bridge's.
        config: A model, optimizer or DDP config of Megatron's, or any object with same-named
            attributes.

    Returns:
        The same object, with a warning for each value that was overridden or kept, and for each
        finding. An object without any field of a precision is left alone, as at the peer.

    Raises:
        PrecisionConfigError: The precision can never be right.
        PrecisionTypeError: `config` is no config object.
        SyncCheckError: The result would not pass Megatron's validation; the object is as it was.
    """
    # An import of this module does without the sync.
    from bridge.sync.owner import NON_CONFIG_TYPES, Owner, get_owner_name, has_precision_field
    from bridge.sync.synchroniser import write_precision

    precision = get_mixed_precision_config(mixed_precision_config)
    precision.finalize()
    role = get_owner_name(config)
    if not isinstance(config, NON_CONFIG_TYPES) and not has_precision_field(Owner(role, config)):
        log.warning("%s has no field of a precision; it is left as it is", type(config).__name__)
        return config
    write_precision(precision, {role: config}).log_all(log)
    return config


def __getattr__(name: str) -> Any:
    """Return a built-in recipe function by name, as the peer's module has them."""
    if not name.startswith("_") and name in REGISTRY:
        return MIXED_PRECISION_RECIPES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the module's names with those of the registered recipes, as the peer's has them."""
    return sorted({*globals(), *REGISTRY.names()})
