"""Names that models of other systems give to the linear layers that rows of `modules` select.

    # {"model.layers.3.mlp.down_proj": (3, "mlp.linear_fc2")}
    megatron_names(["model.layers.3.mlp.down_proj", "lm_head"])

Source: `named_modules()` of the models of transformers 5.23.0, torchtitan 0.2.2 and 0.3.0, and of
`TransformerLayer` of Transformer Engine 2.20.
"""

import re
from collections.abc import Iterable

DENSE_LAYERS = QKV, PROJ, FC1, FC2 = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Megatron's names of the linear layers of a dense layer."""
SHARED_EXPERT_LAYERS = SHARED_FC1, SHARED_FC2 = (
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)
_LATENT_NAMES = {
    "self_attention.linear_q_down_proj": ("wq_a", "q_a_proj"),
    "self_attention.linear_q_up_proj": ("wq_b", "q_b_proj"),
    "self_attention.linear_kv_down_proj": ("wkv_a", "kv_a_proj_with_mqa"),
    "self_attention.linear_kv_up_proj": ("wkv_b", "kv_b_proj"),
}
"""Megatron's name -> torchtitan's and transformers'."""
Q_PROJ = "self_attention.linear_q_proj"
LATENT_LAYERS = (*_LATENT_NAMES, Q_PROJ)
"""Megatron's names of the linear layers of multi-head latent attention."""
DEEPSEEK_NAMES = {name: (f"self_attn.{theirs}",) for name, (_, theirs) in _LATENT_NAMES.items()}
"""Megatron's name within a layer -> the names in the latent attention of transformers."""

LLAMA_NAMES = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    PROJ: ("self_attn.o_proj",),
    FC1: ("mlp.gate_proj", "mlp.up_proj"),
    FC2: ("mlp.down_proj",),
}
"""Megatron's name within a layer -> the names in the dense models of transformers.

The models are Llama, Mistral, Qwen and Gemma.
"""
TORCHTITAN_NAMES = {
    QKV: ("attention.wq", "attention.wk", "attention.wv"),
    PROJ: ("attention.wo",),
    FC1: ("feed_forward.w1", "feed_forward.w3"),
    FC2: ("feed_forward.w2",),
    **{name: (f"attention.{theirs}",) for name, (theirs, _) in _LATENT_NAMES.items()},
    SHARED_FC1: ("moe.shared_experts.w1", "moe.shared_experts.w3"),
    SHARED_FC2: ("moe.shared_experts.w2",),
}
_OTHER_NAMES = {
    **DEEPSEEK_NAMES,
    SHARED_FC1: (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ),
    SHARED_FC2: ("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"),
    QKV: (
        "query_key_value",
        "qkv_proj",
        "attn.c_attn",
        "layernorm_linear_qkv",
        "wqkv",
        "qkv_linear.wq",
        "wkv",
    ),
    PROJ: (
        "self_attn.out_proj",
        "self_attn.dense",
        "attention.dense",
        "self_attention.dense",
        "attn.c_proj",
        "proj",
    ),
    FC1: ("mlp.gate_up_proj", "dense_h_to_4h", "fc1", "c_fc"),
    FC2: ("dense_4h_to_h", "fc2", "mlp.c_proj"),
}
"""Names in DeepSeek, Phi, GPT-NeoX, Falcon, Bloom, OPT, GPT-BigCode, Starcoder and TE's layers."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")


def _build_name_table() -> dict[str, str]:
    """Return Megatron's name of each known name, Megatron's names included."""
    names = {name: name for name in (*DENSE_LAYERS, *LATENT_LAYERS, *SHARED_EXPERT_LAYERS)}
    for table in (LLAMA_NAMES, TORCHTITAN_NAMES, _OTHER_NAMES):
        for name, foreign_names in table.items():
            names.update(dict.fromkeys(foreign_names, name))
    return names


_MEGATRON_NAMES = _build_name_table()


def map_to_megatron_names(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return the layer number and Megatron's name of each linear layer, by its full foreign name.

    A name without a counterpart among Megatron's linear layers is left out. If the names contain
    latent attention, queries have a separate module.
    """
    places = {}
    for name in names:
        place = _parse_name(name)
        if place is not None:
            places[name] = place
    if any(inner in LATENT_LAYERS for _, inner in places.values()):
        for name, (layer, inner) in places.items():
            if inner == QKV:
                places[name] = (layer, Q_PROJ)
    return places


def _parse_name(name: str) -> tuple[int, str] | None:
    match = _LAYER.search(name)
    if match is None:
        return None
    parts = name[match.end() :].split(".")
    for start in range(len(parts)):
        inner = _MEGATRON_NAMES.get(".".join(parts[start:]))
        if inner is not None:
            return int(match[1]), inner
    return None
