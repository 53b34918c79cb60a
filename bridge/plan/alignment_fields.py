"""Config fields behind a GEMM's dimensions, and how many times the field a dimension is."""

from operator import attrgetter
from typing import NamedTuple

from bridge.rules.shape.model import ModelShape

_OF_SHAPE = {
    "moe_ffn_hidden_size": "experts.ffn_hidden_size",
    "moe_latent_size": "experts.latent_size",
    "moe_shared_expert_intermediate_size": "experts.shared_ffn_hidden_size",
    "q_lora_rank": "latent.q_lora_rank",
    "kv_lora_rank": "latent.kv_lora_rank",
    "mamba_num_heads": "state_space.num_heads",
    "linear_num_value_heads": "delta_net.num_value_heads",
    "dsa_indexer_n_heads": "indexer.num_heads",
    "dsa_indexer_head_dim": "indexer.head_dim",
}
"""Field -> its attribute of the shape, where that has another name."""


class Field(NamedTuple):
    """The field behind a dimension."""

    name: str
    value: int
    factor: int = 1
    """How many times the value the dimension is."""


def _fields(shape: ModelShape) -> dict[str, tuple[str, str]]:
    """Return module -> the fields that its N and its K come from."""
    hidden, heads, shared = "hidden_size", "num_attention_heads", "moe_shared_expert_intermediate_size"
    expert, latent = "moe_ffn_hidden_size", "moe_latent_size"
    token = latent if shape.experts is not None and shape.experts.latent_size else hidden
    mixer = "mamba_num_heads" if shape.delta_net is None else "linear_num_value_heads"
    return {
        "linear_qkv": ("kv_channels", hidden),
        "linear_proj": (hidden, "kv_channels" if shape.latent is None else heads),
        "linear_fc1": ("ffn_hidden_size", hidden),
        "linear_fc2": (hidden, "ffn_hidden_size"),
        "experts.linear_fc1": (expert, token),
        "experts.linear_fc2": (token, expert),
        "fc1_latent_proj": (latent, hidden),
        "fc2_latent_proj": (hidden, latent),
        "shared_experts.linear_fc1": (shared, hidden),
        "shared_experts.linear_fc2": (hidden, shared),
        "linear_q_proj": (heads, hidden),
        "linear_q_down_proj": ("q_lora_rank", hidden),
        "linear_q_up_proj": (heads, "q_lora_rank"),
        "linear_kv_down_proj": ("kv_lora_rank", hidden),
        "linear_kv_up_proj": (heads, "kv_lora_rank"),
        "indexer.linear_wq_b": ("dsa_indexer_n_heads", "q_lora_rank"),
        "indexer.linear_wk": ("dsa_indexer_head_dim", hidden),
        "indexer.linear_weights_proj": ("dsa_indexer_n_heads", hidden),
        "in_proj": (mixer, hidden),
        "out_proj": (hidden, mixer),
        "eh_proj": (hidden, hidden),
    }


def field_of(shape: ModelShape, module: str, dimension: str, whole: int) -> Field:
    """Return the field behind a dimension of a module, N or K, that is `whole` over all ranks."""
    names = _fields(shape).get(module)
    if names is None:
        return Field("the model's dimensions", whole)
    name = names["NK".index(dimension)]
    own = attrgetter(_OF_SHAPE.get(name, name))(shape) or 0
    is_multiple = own > 0 and whole % own == 0
    return Field(f"model.{name}", own, whole // own) if is_multiple else Field(f"model.{name} and others", whole)
