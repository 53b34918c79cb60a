"""The attention variants of `experimental_attention_variant`, and fields that have no plan.

A field of `UNPLANNED_FIELDS` is refused if its value is not Megatron's default. Otherwise the plan
would describe another model. A test lists every other field of each known release: the plan reads
it, or it changes no module.

Source: megatron-core 0.16.1 and Megatron-LM main of 2026-08-22, ssm/gated_delta_net and
transformer/experimental_attention_variant/dsa.py.
"""

from dataclasses import dataclass
from typing import Any

from bridge.errors import Finding
from bridge.model.compressed_attention import COMPRESSED_HYBRID
from bridge.model.hybrid_pattern import HybridPattern, make_model_fault
from bridge.model.section import Section
from bridge.target.fields import OWNER_FIELDS

DELTA_NET_VARIANTS = ("gated_delta_net", "gdn")
"""Values of the field for gated delta net."""
SPARSE_VARIANT = "dsa"
"""Value of the field for DeepSeek sparse attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """Gated delta net, the linear attention of a layer."""

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_width: int = 4

    @property
    def value_width(self) -> int:
        """Width of the values, and of the output gate."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_width

    @property
    def projected_width(self) -> int:
        """Outputs of the input projection: queries, keys, values, the gate, beta and alpha."""
        return self.conv_channels + self.value_width + 2 * self.num_value_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """The part of DeepSeek sparse attention that chooses the keys of each query."""

    num_heads: int
    head_dim: int
    topk: int
    share_every: int = 1
    """Every Nth layer chooses keys, and the layers after it use its choice."""
    share_from: int = 0
    """Number of the first layers that each choose keys themselves."""

    def chooses_in_layer(self, number: int) -> bool:
        """Return whether a layer chooses keys itself.

        Args:
            number: The number of the layer, from 1.
        """
        return max(number - max(self.share_from, 1), 0) % self.share_every == 0


UNPLANNED_FIELDS = {
    "heterogeneous_block_specs": "each layer has modules of its own",
    "experimental_attention_variant": "layers of {kind}",
    "mla_down_proj_fusion": "one projection takes the place of two",
    "use_kitchen": "linear layers come from another library",
    "moe_use_legacy_grouped_gemm": "experts are one module without linear layers",
    "moe_extended_tp": "experts are split in another way",
    "gtp_weight_remat_size": "weights are sharded once more",
    "expert_gtp_weight_remat_size": "weights of experts are sharded once more",
    "tensor_parallel_num_weight_shards": "weights are sharded once more",
    "expert_tensor_parallel_num_weight_shards": "weights of experts are sharded once more",
}
"""Field -> a clause about the modules that the plan does not know."""


UNPLANNED_VARIANTS = {"gdn2": "the second gated delta net"}
"""Attention variant that the plan does not know -> the name of its layers."""


RANKS_BY_SHARD_COUNT = {
    "tensor_parallel_num_weight_shards": ("tensor_model_parallel_size",),
    "expert_tensor_parallel_num_weight_shards": (
        "expert_tensor_parallel_size",
        "tensor_model_parallel_size",
    ),
}
"""Field with a number of weight shards -> the fields with the number of ranks.

Without further sharding, the number of shards equals the first stated field of these.
"""


def _is_planned_value(model: Section, name: str) -> bool:
    """Return whether the plan supports a value other than the default.

    It supports the planned variants, and numbers of shards without further sharding.
    """
    if name == "experimental_attention_variant":
        return model.get_stated(name) in (
            None,
            *DELTA_NET_VARIANTS,
            SPARSE_VARIANT,
            COMPRESSED_HYBRID,
        )
    if name not in RANKS_BY_SHARD_COUNT:
        return False
    ranks = 1
    for size in reversed(RANKS_BY_SHARD_COUNT[name]):
        ranks = model.get_stated(size, ranks)
    return bool(model.get_stated(name) == ranks)


UNPLANNED_REMEDY = (
    "Override it for a plan of the other layers, or ask `precision-bridge check`, which judges the "
    "rest of the run."
)


def find_unplanned_fields(model: Section) -> list[Finding]:
    """Return a finding for each field that adds modules that the plan does not know.

    A field that only a newer, unknown release of Megatron Core has is reported too, if its value
    is not the default.
    """
    faults: list[Finding] = []

    def add_fault(name: str, reason: str, value: object) -> None:
        faults.append(make_model_fault(name, f"cannot plan: {reason}", value, UNPLANNED_REMEDY))

    for name, reason in UNPLANNED_FIELDS.items():
        value = model.get_stated(name)
        if _differs(value, OWNER_FIELDS["model"][name].default) and not _is_planned_value(
            model, name
        ):
            kind = UNPLANNED_VARIANTS.get(str(value), "an unknown kind")
            add_fault(name, reason.format(kind=kind), value)
    for name, value in model.newer_fields.items():
        add_fault(name, "the field is newer than the releases that the plan knows", value)
    pattern = HybridPattern.from_model(model)
    if pattern is not None and pattern.unplanned_letters:
        kinds = " and ".join(pattern.unplanned_letters.values())
        add_fault(pattern.field, f"layers of {kinds}", "".join(pattern.unplanned_letters))
    return faults


def _differs(value: Any, default: Any) -> bool:
    value = getattr(value, "name", value)
    if default is None and value in (1, "1"):
        return False  # in a field with a size, None means 1
    return value not in (None, default)
