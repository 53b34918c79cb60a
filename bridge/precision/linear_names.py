"""Names of the linear layers of Megatron's models, which a row of `modules` can select."""

import re
from fnmatch import fnmatchcase

from bridge.precision.module_row import ModuleRow

LINEAR_LAYERS = {
    "self_attention": (
        "linear_qkv",
        "linear_proj",
        "linear_q_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_qkv_down_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "in_proj",
        "out_proj",
    ),
    "self_attention.core_attention.indexer": ("linear_wq_b", "linear_wk", "linear_weights_proj"),
    "cross_attention": ("linear_q", "linear_kv", "linear_proj"),
    "mlp": ("linear_fc1", "linear_fc2", "fc1_latent_proj", "fc2_latent_proj"),
    "mlp.experts": ("linear_fc1", "linear_fc2"),
    "mlp.experts.local_experts.0": ("linear_fc1", "linear_fc2"),
    "mlp.shared_experts": ("linear_fc1", "linear_fc2"),
    "mixer": ("in_proj", "out_proj"),
}
"""Module of a layer -> its linear layers.

By `named_modules()` of GPTModel and MambaModel, 0.16.1 and 0.19.2.
"""
LAYER_PATHS = (
    "decoder.layers.0",
    "mtp.layers.0.mtp_model_layer",
    "mtp.layers.0.transformer_layer",
    "mtp.layers.0.mtp_model_layer.layers.0",
    "mtp.layers.0.transformer_layer.layers.0",
)
"""The path of the first layer of each kind."""


def _list_linear_names() -> tuple[str, ...]:
    """Return the names of the linear layers of each layer in `LAYER_PATHS`."""
    names = ["mtp.layers.0.eh_proj"]
    for parent in LAYER_PATHS:
        for inner, linear_layers in LINEAR_LAYERS.items():
            for name in linear_layers:
                names.append(f"{parent}.{inner}.{name}")
    return tuple(names)


LINEAR_NAMES = _list_linear_names()
"""Every name, with 0 for the number of a layer and of an expert."""

_NUMBER = re.compile(r"\b(layers|local_experts)\.\d+")


def selects_linear_layer(row: ModuleRow) -> bool:
    """Return whether a row selects a linear layer of some Megatron model.

    Numbers of layers do not count. The answer is True for names in another tree of modules.
    """
    pattern = f"*.{row.module}"
    if row.select:
        pattern = _NUMBER.sub(r"\1.0", row.select)
    root = re.split(r"[.*?\[]", pattern, maxsplit=1)[0]
    if root and not "decoder".startswith(root) and not "mtp".startswith(root):
        return True
    return any(fnmatchcase(name, pattern) for name in LINEAR_NAMES)
