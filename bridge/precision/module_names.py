"""Names that Megatron Core gives to its linear layers, in models of every kind, for rows that a sync cannot place.

A sync knows the fields of a config and no plan of the model. A row that takes no name of any Megatron model is an
error of spelling there too.

Source: `named_modules()` of GPTModel and MambaModel, megatron-core 0.16.1 and 0.19.2.
"""

import re
from fnmatch import fnmatchcase

from bridge.precision.modules import ModuleRow

OF_A_LAYER = {
    "self_attention": (
        *("linear_qkv", "linear_proj", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
        *("linear_qkv_down_proj", "linear_kv_down_proj", "linear_kv_up_proj", "in_proj", "out_proj"),
    ),
    "self_attention.core_attention.indexer": ("linear_wq_b", "linear_wk", "linear_weights_proj"),
    "cross_attention": ("linear_q", "linear_kv", "linear_proj"),
    "mlp": ("linear_fc1", "linear_fc2", "fc1_latent_proj", "fc2_latent_proj"),
    "mlp.experts": ("linear_fc1", "linear_fc2"),
    "mlp.experts.local_experts.0": ("linear_fc1", "linear_fc2"),
    "mlp.shared_experts": ("linear_fc1", "linear_fc2"),
    "mixer": ("in_proj", "out_proj"),
}
"""Module of a layer -> its linear layers."""
PARENTS = (
    "decoder.layers.0",
    "mtp.layers.0.mtp_model_layer",
    "mtp.layers.0.transformer_layer",
    "mtp.layers.0.mtp_model_layer.layers.0",
    "mtp.layers.0.transformer_layer.layers.0",
)
"""Layers, the first of each kind."""
LINEAR_NAMES = (
    "mtp.layers.0.eh_proj",
    *(f"{parent}.{inner}.{name}" for parent in PARENTS for inner, names in OF_A_LAYER.items() for name in names),
)
"""Every name, with 0 for the number of a layer and of an expert."""

_NUMBER = re.compile(r"\b(layers|local_experts)\.\d+")


def takes_a_linear_layer(row: ModuleRow) -> bool:
    """Return whether a row takes a linear layer of some Megatron model; True for names in another tree of modules.

    Numbers of layers do not count.
    """
    pattern = _NUMBER.sub(r"\1.0", row.select) if row.select else f"*.{row.module}"
    root = re.split(r"[.*?\[]", pattern, maxsplit=1)[0]
    if root and not any(tree.startswith(root) for tree in ("decoder", "mtp")):
        return True
    return any(fnmatchcase(name, pattern) for name in LINEAR_NAMES)
