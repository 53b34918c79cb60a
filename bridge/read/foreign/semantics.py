"""`SEMANTICS`: the computations that a mode can mean in different systems.

`get_semantics` names the computation of a config.
"""

from collections.abc import Mapping

from bridge.precision.mode import get_mode
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

SEMANTICS: Mapping[str, str] = {
    "megatron_o2": "half-precision weights everywhere, FP32 master weights in the optimizer",
    "amp_o1": "FP32 weights, each operator cast by autocast",
    "fsdp_policy": "FP32 shards, cast to half precision when they are gathered",
    "true": "half-precision weights and optimizer state, nothing in FP32",
    "fp32": "no half precision anywhere",
    "unstated": "the file does not state the mode, and does not show the whole run either",
}
"""Computation -> its description. Some system calls each of the first four "bf16 mixed"."""


def get_semantics(config: MixedPrecisionConfig) -> str:
    """Return the computation of a config in Megatron Core, a key of `SEMANTICS`.

    FP32 weights under autocast are O1. In FP16 the mode is then `fp16` with `params_dtype="fp32"`,
    which keeps the loss scale. In BF16 it is `fp32`, as in the recipe `bf16_autocast_mixed`.
    """
    mode = get_mode(config)
    weights_dtype = config.to_dict().get("params_dtype") or mode
    if config.autocast_enabled and weights_dtype == "fp32":
        return "amp_o1"
    if mode == "fp32":
        return "fp32"
    return "megatron_o2"
