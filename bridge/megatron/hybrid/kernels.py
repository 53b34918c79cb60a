"""Compiled packages that layers of Megatron import, and torch code that takes their places where they are missing.

`import_layers` imports those layers. A module that is not installed is in place while they are imported and gone
afterwards, so that no other code takes it for the package.
"""

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from bridge.megatron.hybrid.state_space import GatedRMSNorm, chunk_scan, convolved_scan

LAYERS = ("megatron.core.ssm.mamba_mixer",)
"""Modules of Megatron that import one of the packages."""
_TENSOR_OPS = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
KERNELS: Mapping[str, tuple[str, Mapping[str, Callable[..., Any] | None]]] = {
    "mamba_ssm.ops.triton.layernorm_gated": ("mamba_ssm", {"RMSNorm": GatedRMSNorm}),
    "mamba_ssm.ops.triton.ssd_combined": (
        "mamba_ssm",
        {"mamba_chunk_scan_combined": chunk_scan, "mamba_split_conv1d_scan_combined": convolved_scan},
    ),
    _TENSOR_OPS: ("triton", dict.fromkeys(("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"))),
}
"""Module -> the package without which it cannot be imported, and its names; None: only inference calls it."""


def import_layers() -> None:
    """Import the layers of this Megatron Core that need the packages."""
    missing = {name for name, (package, _) in KERNELS.items() if find_spec(package) is None} - sys.modules.keys()
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(KERNELS[name][1])
    try:
        for layer in LAYERS:
            with suppress(ModuleNotFoundError):  # a release that has no such layer
                importlib.import_module(layer)
    finally:
        for name in missing:
            del sys.modules[name]
