"""The built-in recipes, one file per scaling scheme. The registry finds them by an entry point, like any plugin.

The entry point names this package. So a recipe is registered when its file is imported here. To add a file, import the
names of its recipes below, and list them in `__all__`.
"""

from .blockwise import (
    bf16_with_fp8_subchannel_scaling_mixed,
    fp16_with_fp8_subchannel_scaling_mixed,
    nanov2_bf16_with_fp8_current_scaling_mixed,
    nanov2_bf16_with_fp8_subchannel_scaling_mixed,
)
from .current_scaling import (
    bf16_with_fp8_current_scaling_mixed,
    fp16_with_fp8_current_scaling_mixed,
    nemotron_h_bf16_with_fp8_current_scaling_mixed,
)
from .delayed_scaling import (
    bf16_with_fp8_delayed_scaling_mixed,
    fp16_with_fp8_delayed_scaling_mixed,
)
from .mxfp8 import bf16_with_mxfp8_mixed, fp16_with_mxfp8_mixed
from .nvfp4 import (
    bf16_with_nvfp4_mixed,
    nemotron_3_super_bf16_with_nvfp4_mixed,
    nemotron_3_ultra_bf16_with_nvfp4_mixed,
)
from .unscaled import bf16_autocast_mixed, bf16_mixed, fp16_mixed, fp32

__all__ = [
    "bf16_autocast_mixed",
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
    "fp32",
    "nanov2_bf16_with_fp8_current_scaling_mixed",
    "nanov2_bf16_with_fp8_subchannel_scaling_mixed",
    "nemotron_3_super_bf16_with_nvfp4_mixed",
    "nemotron_3_ultra_bf16_with_nvfp4_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed",
]
