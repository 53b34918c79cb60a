"""Shape of a model, read from config values alone: no torch, no Megatron Core.

    shape = ModelShape.of({"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64})
    shape.kinds          # ('transformer',) * 80

Fields have the names and the defaults of Megatron Core's `TransformerConfig` (0.16.1), of
`GPTConfig` for the further arguments of `GPTModel`, and of `MLATransformerConfig` where
`multi_latent_attention` is on. Values that Megatron derives after construction (`ffn_hidden_size`,
`kv_channels`, ...) are derived here by the same formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import Finding, RunConfigError
from bridge.model.attention_variants import (
    DELTA_NET_VARIANTS,
    SPARSE_VARIANT,
    DeltaNet,
    Indexer,
    find_unplanned_fields,
)
from bridge.model.compressed_attention import (
    COMPRESSED_HYBRID,
    COMPRESSION_RATIOS,
    CompressedAttention,
    HyperConnections,
    get_kind_of_ratio,
)
from bridge.model.hybrid_pattern import HybridPattern, make_model_fault
from bridge.model.list_expression import parse_list_expression
from bridge.model.section import Section, read_section
from bridge.target.fields import parse_integer

TRANSFORMER_KIND = "transformer"
MOE_SUFFIX = "moe"
SHAPE_SWITCHES = (
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_l2_norm",
    "attention_output_gate",
    "share_embeddings_and_output_weights",
)
"""Switches of the model that the shape has by Megatron's names."""
PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
MAX_LAYERS = 10_000
"""The most layers, or experts of a layer. A larger number is taken for a typing error."""
MAX_SIZE = 10**8
"""The largest dimension, vocabulary or sequence. A larger number is taken for a typing error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The mixture of experts of each layer that has one."""

    num_experts: int
    ffn_hidden_size: int
    topk: int
    shared_ffn_hidden_size: int = 0
    """Width of the shared expert, 0 without one."""
    shared_gate: bool = False
    router_bias: bool = False
    latent_size: int | None = None
    """Width that tokens are projected to before they are sent to the experts.

    None: the hidden size.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-latent attention."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpace:
    """The Mamba-2 mixer."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int = 4

    @property
    def inner(self) -> int:
        """Width of the mixer."""
        return self.num_heads * self.head_dim

    @property
    def projected_width(self) -> int:
        """Outputs of the input projection: z, x, B, C and dt."""
        return 2 * self.inner + 2 * self.num_groups * self.state_dim + self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model's dimensions."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    kinds: tuple[str, ...]
    """Kind of each layer.

    It is transformer, delta_net, sparse or sparse_shared (it takes another layer's choice of keys),
    or one of `compressed.RATIOS`, each with _moe where it has experts. In a hybrid it is mamba,
    attention, latent_attention, mlp or moe.
    """
    is_hybrid: bool = False
    """Each layer is one block, of the kind that a letter of the pattern names."""
    vocab_size: int = 0
    """Tokens before padding, 0 where it is unknown."""
    make_vocab_size_divisible_by: int = 128
    seq_length: int = 0
    """Tokens per sample, 0 where it is unknown."""
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    layer_norm_bias: bool = True
    """LayerNorm has a bias, RMSNorm has none."""
    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    """Norms of queries and keys have no weights; they take the place of those of `qk_layernorm`."""
    attention_output_gate: bool = False
    has_softmax_offset: bool = False
    """Each head learns an offset of its softmax (`softmax_type=learnable`)."""
    position_embedding_type: str = "rope"
    share_embeddings_and_output_weights: bool = False
    mtp_num_layers: int = 0
    """Multi-token-prediction depths, each a pass through a prediction layer."""
    mtp_is_repeated: bool = False
    mtp_kind: str = TRANSFORMER_KIND
    """Kind of the layer inside a prediction layer of a model that is no hybrid."""
    mtp_kinds: tuple[str, ...] = ()
    """Kind of each layer inside a prediction layer of a hybrid model."""
    experts: Experts | None = None
    latent: Latent | None = None
    state_space: StateSpace | None = None
    delta_net: DeltaNet | None = None
    indexer: Indexer | None = None
    compressed: CompressedAttention | None = None
    hyper_connections: HyperConnections | None = None

    @property
    def is_moe(self) -> bool:
        """Whether some layers have experts."""
        return self.experts is not None

    @property
    def has_mtp(self) -> bool:
        """Whether it predicts more than the next token."""
        return self.mtp_num_layers > 0

    @property
    def mtp_layers(self) -> int:
        """Prediction layers that the model has."""
        if self.mtp_is_repeated:
            return min(1, self.mtp_num_layers)
        return self.mtp_num_layers

    def padded_vocab_size(self, tensor_parallel: int = 1) -> int:
        """Return the rows of the embedding over all tensor-parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    @classmethod
    def from_model(cls, model: Any) -> ModelShape:
        """Return the shape that a model's config describes.

        Raises:
            RunConfigError: There is no such model; every reason is named.
        """
        shape, faults = read_shape(model)
        if faults:
            raise RunConfigError("\n".join(map(str, faults)))
        return shape


def read_shape(model: Any) -> tuple[ModelShape, tuple[Finding, ...]]:
    """Return the shape that config values describe, and the reasons why it cannot be planned.

    There is no such model, or no plan of it.
    """
    reader = _ShapeReader(read_section("model", model))
    shape = reader.shape()
    return shape, (*reader.faults, *find_unplanned_fields(reader.section))


def find_impossible_sizes(model: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each given number that no model can be built with.

    Values that are no whole numbers are left to the reader of types, and fields that are absent to
    Megatron's defaults.
    """
    reader = _ShapeReader(read_section("model", model))
    reader.shape()
    impossible: list[Finding] = []
    for fault in reader.faults:
        name = fault.path.removeprefix("model.")
        if name not in model or parse_integer(fault.value) is None:
            continue
        if model[name] is None:  # Megatron derives it, and the fault has the derived value
            impossible.append(replace(fault, value=None))
        else:
            impossible.append(fault)
    return impossible


HEAD_SIZES = ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
"""The sizes that decide the heads of attention."""


class _ShapeReader:
    """Reads one model and collects the reasons why it is impossible."""

    def __init__(self, section: Section) -> None:
        self.section = section
        self.pattern = HybridPattern.from_model(section)
        self.variant = self.text("experimental_attention_variant")
        self.faults: list[Finding] = []
        self._malformed = {fault.path.partition(".")[2]: fault for fault in section.malformed}

    def shape(self) -> ModelShape:
        """Return the shape; faults are noted in the order in which the fields are read."""
        layers = self._read_num_layers()
        sizes = self._read_sizes()
        for name in PARALLEL_SIZES:
            self.whole(name)
        if self.pattern is not None:
            self.faults += self.pattern.faults
        delta_net = self._read_delta_net()
        indexer = self._read_indexer()
        depths = self._read_mtp_depths()
        ratio_kinds: tuple[str, ...] = ()
        if self.is_compressed:
            ratio_kinds = self._read_ratio_kinds(layers, depths)
        kinds: tuple[str, ...] = ()
        kinds_of_depth: tuple[str, ...] = ()
        if self.pattern is not None:
            kinds, kinds_of_depth = self.pattern.kinds, self.pattern.mtp_kinds
        if not kinds:
            kinds = self._read_kinds(layers, indexer, ratio_kinds)
        self._check_heads(sizes)
        embedding = "rope" if self.pattern is None else "none"
        norm = "RMSNorm" if self.has_latent else "LayerNorm"
        normalization = self.text("normalization", norm)
        return ModelShape(
            num_layers=layers,
            **sizes,
            kinds=kinds,
            is_hybrid=self.pattern is not None,
            vocab_size=self.whole("vocab_size", least=0),
            make_vocab_size_divisible_by=self.whole("make_vocab_size_divisible_by"),
            seq_length=self.whole("seq_length", least=0),
            layer_norm_bias=normalization == "LayerNorm",
            has_softmax_offset=self.text("softmax_type") == "learnable",
            position_embedding_type=self.text("position_embedding_type", embedding),
            mtp_num_layers=depths,
            mtp_is_repeated=self.flag("mtp_use_repeated_layer"),
            mtp_kind=self._read_mtp_kind(kinds[-1], ratio_kinds[layers:]),
            mtp_kinds=kinds_of_depth,
            experts=self._read_experts(sizes["ffn_hidden_size"]),
            latent=self._read_latent(),
            state_space=self._read_state_space(sizes["hidden_size"]),
            delta_net=delta_net,
            indexer=indexer,
            compressed=self._read_compressed(sizes["num_attention_heads"]),
            hyper_connections=self._read_hyper_connections(),
            **{name: self.flag(name) for name in SHAPE_SWITCHES},
        )

    @property
    def _pattern_kinds(self) -> tuple[str, ...]:
        if self.pattern is None:
            return ()
        return (*self.pattern.kinds, *self.pattern.mtp_kinds)

    @property
    def has_latent(self) -> bool:
        return self.flag("multi_latent_attention") or "latent_attention" in self._pattern_kinds

    @property
    def is_compressed(self) -> bool:
        return self.variant == COMPRESSED_HYBRID and self.pattern is None

    def _read_num_layers(self) -> int:
        if self.pattern is None:
            return self.whole("num_layers", most=MAX_LAYERS)
        return self._require_at_most("num_layers", max(1, len(self.pattern.layers)), MAX_LAYERS)

    def _read_sizes(self) -> dict[str, Any]:
        least_heads = least_ffn = 1
        if self.pattern is not None:
            least_ffn = 0
            kinds = self._pattern_kinds
            if "attention" not in kinds and "latent_attention" not in kinds:
                least_heads = 0
        hidden = self.whole("hidden_size")
        heads = self.whole("num_attention_heads", least=least_heads)
        channels = 0
        if heads:
            channels = hidden // heads
        return {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": self.whole("num_query_groups", heads, least=min(heads, 1)),
            "kv_channels": self.whole("kv_channels", channels),
            "ffn_hidden_size": self.whole("ffn_hidden_size", 4 * hidden, least=least_ffn),
        }

    def _check_heads(self, sizes: Mapping[str, int]) -> None:
        """Note heads that cannot be made of these sizes; heads of some models have other widths."""
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        groups, channels = sizes["num_query_groups"], sizes["kv_channels"]
        faulty = {fault.path.removeprefix("model.") for fault in self.faults}
        if not heads or faulty.intersection(HEAD_SIZES):
            return  # a size that is impossible by itself was replaced
        # Stated: Megatron's default is another.
        is_rotary = self.text("position_embedding_type") == "rope"
        rotates_whole_heads = is_rotary and self.section.values["rotary_percent"] == 1.0
        has_channels = self.section.given("kv_channels") is not None
        has_widths = has_channels or self.has_latent or self.pattern is not None
        if groups and heads % groups:
            rule = f"must divide the {heads} attention heads"
            self._refuse("num_query_groups", rule, groups, "Use a divisor")
        elif hidden % heads and not has_widths:
            rule = (
                f"must be a multiple of the {heads} attention heads while model.kv_channels is not "
                "set"
            )
            remedy = f"Use {_find_nearest_divisor(hidden, heads)} heads, or state model.kv_channels"
            self._refuse("hidden_size", rule, hidden, remedy)
        elif channels % 2 and not self.has_latent and rotates_whole_heads:
            if has_channels:
                rule = "must be even under rotary position embeddings"
                self._refuse("kv_channels", rule, channels, "Use an even number")
            else:
                rule = (
                    "must make heads of an even size under rotary position embeddings, and "
                    f"{heads} make {channels}"
                )
                self._refuse("hidden_size", rule, hidden, f"Use a multiple of {2 * heads}")

    def whole(self, name: str, derived: int = 0, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a size; `derived` where it is None, which Megatron derives."""
        value: int | None = self.section.values[name]
        number = derived if value is None else value
        wrong = self._malformed.get(name)
        if wrong is not None:
            self._refuse(name, wrong.rule, wrong.value, "Correct it")
            return max(number, least)
        if number < least:
            self._refuse(name, f"must be at least {least}", number, f"Use {least} or more")
            return least
        return self._require_at_most(name, number, most)

    def _require_at_most(self, name: str, number: int, most: int) -> int:
        if number <= most:
            return number
        remedy = "Use fewer" if most == MAX_LAYERS else "Use a smaller number"
        self._refuse(name, f"must be at most {most}", number, remedy)
        return 1

    def flag(self, name: str) -> bool:
        return bool(self.section.values[name])

    def text(self, name: str, default: str = "") -> str:
        value = self.section.given(name, default)
        return str(getattr(value, "value", value))

    def _refuse(self, name: str, rule: str, value: object, remedy: str) -> None:
        self.faults.append(make_model_fault(name, rule, value, f"{remedy}."))

    def _read_kinds(
        self, layers: int, indexer: Indexer | None, ratio_kinds: Sequence[str]
    ) -> tuple[str, ...]:
        """Return the kind of each layer: its attention, with _moe where it has experts."""
        kinds = [TRANSFORMER_KIND] * layers
        if ratio_kinds:
            kinds = list(ratio_kinds[:layers])
        elif indexer is not None:
            for layer in range(layers):
                kinds[layer] = "sparse_shared"
                if indexer.chooses_in_layer(layer + 1):
                    kinds[layer] = "sparse"
        elif self.variant in DELTA_NET_VARIANTS:
            flags = self._read_layer_flags("linear_attention_freq", layers, counts_softmax=True)
            for layer, is_linear in enumerate(flags):
                if is_linear:
                    kinds[layer] = "delta_net"
        if self.section.given("num_moe_experts"):
            flags = self._read_layer_flags("moe_layer_freq", layers)
            for layer, is_sparse in enumerate(flags):
                if is_sparse:
                    kinds[layer] += f"_{MOE_SUFFIX}"
        return tuple(kinds)

    def _read_mtp_depths(self) -> int:
        """Return the passes through prediction layers.

        The pattern of a hybrid model has one part for each.
        """
        stated = self.whole("mtp_num_layers", least=0)
        if self.pattern is None or (self.flag("mtp_use_repeated_layer") and stated):
            return stated
        return self.pattern.depths

    def _read_layer_flags(
        self, name: str, layers: int, *, counts_softmax: bool = False
    ) -> tuple[bool, ...]:
        """Return the layers that have a kind of module, as a flag for each layer.

        The field is a number, a list, or a list's expression. A number N takes each Nth layer from
        the first (experts), or all but each Nth layer (`counts_softmax`).
        """
        value = self.section.values[name]
        frequency = value
        if isinstance(value, str) and value.strip().isdecimal():
            frequency = int(value)
        elif isinstance(value, str):
            frequency = parse_list_expression(value)
        if isinstance(frequency, int) and frequency >= 1:
            if counts_softmax:
                return tuple(number % frequency != 0 for number in range(1, layers + 1))
            return tuple(number % frequency == 0 for number in range(layers))
        if isinstance(frequency, list | tuple):
            if len(frequency) == layers:
                return tuple(map(bool, frequency))
            value = len(frequency)
        rule = f"must be a number, or a list with an item for each of the {layers} layers"
        self._refuse(name, rule, value, "Correct it")
        return (True,) * layers

    def _read_experts(self, ffn: int) -> Experts | None:
        if not self.section.given("num_moe_experts"):
            return None
        if self.pattern is not None and "moe" not in self._pattern_kinds:
            return None  # the pattern decides about every layer
        experts = self.whole("num_moe_experts", most=MAX_LAYERS)
        return Experts(
            num_experts=experts,
            ffn_hidden_size=self.whole("moe_ffn_hidden_size", ffn),
            topk=self.whole("moe_router_topk"),
            shared_ffn_hidden_size=self.whole("moe_shared_expert_intermediate_size", least=0),
            shared_gate=self.flag("moe_shared_expert_gate"),
            router_bias=self.flag("add_bias_linear"),
            latent_size=self.whole("moe_latent_size", least=0) or None,
        )

    def _read_latent(self) -> Latent | None:
        if not self.has_latent:
            return None
        if self.flag("qk_l2_norm"):
            rule = "must be off with multi-latent attention, as Megatron asserts"
            self._refuse("qk_l2_norm", rule, True, "Set it to false")
        rank = None
        if self.section.values["q_lora_rank"] is not None:
            rank = self.whole("q_lora_rank")
        return Latent(
            q_lora_rank=rank,
            qk_pos_emb_head_dim=self.whole("qk_pos_emb_head_dim", least=0),
            kv_lora_rank=self.whole("kv_lora_rank"),
            qk_head_dim=self.whole("qk_head_dim"),
            v_head_dim=self.whole("v_head_dim"),
        )

    def _read_state_space(self, hidden: int) -> StateSpace | None:
        if "mamba" not in self._pattern_kinds:
            return None
        head_dim = self.whole("mamba_head_dim")
        return StateSpace(
            num_heads=self.whole("mamba_num_heads", 2 * hidden // head_dim),
            head_dim=head_dim,
            state_dim=self.whole("mamba_state_dim"),
            num_groups=self.whole("mamba_num_groups"),
        )

    def _read_delta_net(self) -> DeltaNet | None:
        if self.variant not in DELTA_NET_VARIANTS or self.pattern is not None:
            return None
        keys = self.whole("linear_num_key_heads")
        values = self.whole("linear_num_value_heads")
        ranks = self.whole("tensor_model_parallel_size")
        if values % keys:
            rule = f"must be a multiple of the {keys} key heads"
            self._refuse("linear_num_value_heads", rule, values, "Use a multiple")
        if keys % ranks:
            rule = f"must be a multiple of the {ranks} tensor-parallel ranks"
            self._refuse("linear_num_key_heads", rule, keys, "Use a multiple")
        return DeltaNet(
            num_key_heads=keys,
            key_head_dim=self.whole("linear_key_head_dim"),
            num_value_heads=values,
            value_head_dim=self.whole("linear_value_head_dim"),
            conv_width=self.whole("linear_conv_kernel_dim"),
        )

    def _read_mtp_kind(self, last: str, ratio_kinds: Sequence[str]) -> str:
        """Return the kind of the layer inside a prediction layer."""
        if not ratio_kinds:
            # Its layers count from 1, which chooses keys.
            return last.replace("sparse_shared", "sparse")
        if len({*ratio_kinds}) > 1:
            rule = "cannot plan: prediction layers of several kinds"
            remedy = "Give all of them the same ratio"
            self._refuse("csa_compress_ratios", rule, list(ratio_kinds), remedy)
        kind = ratio_kinds[0]
        if is_moe_kind(last):
            kind += f"_{MOE_SUFFIX}"
        return kind

    def _read_ratio_kinds(self, layers: int, depths: int) -> tuple[str, ...]:
        """Return the kind of each layer of the hybrid attention.

        Those of prediction layers are behind the others.
        """
        value = self.section.given("csa_compress_ratios")
        ratios = value
        if isinstance(value, str):
            ratios = parse_list_expression(value)
        if not isinstance(ratios, list | tuple):
            ratios = []
        needed = layers + depths
        is_dense = self.flag("csa_dense_mode")
        if len(ratios) < needed or any(
            ratio not in COMPRESSION_RATIOS.values() for ratio in ratios
        ):
            rule = (
                f"must be a list of 0, 4 or 128 for each of the {layers} layers and {depths} "
                "prediction layers"
            )
            self._refuse("csa_compress_ratios", rule, value, "Correct it")
            ratios = [0] * needed
        return tuple(get_kind_of_ratio(ratio, is_dense=is_dense) for ratio in ratios[:needed])

    def _read_compressed(self, heads: int) -> CompressedAttention | None:
        if not self.is_compressed:
            return None
        self._require_latent()
        ranks = self.whole("tensor_model_parallel_size")
        if ranks > 1:
            rule = (
                f"must be 1 with experimental_attention_variant={COMPRESSED_HYBRID}, as Megatron "
                "asserts"
            )
            self._refuse("tensor_model_parallel_size", rule, ranks, "Set it to 1")
        groups = self.whole("o_groups")
        width = heads * self.whole("v_head_dim")
        if width % groups:
            rule = f"must divide the {width} outputs of all heads"
            self._refuse("o_groups", rule, groups, "Use a divisor")
        return CompressedAttention(output_groups=groups, output_rank=self.whole("o_lora_rank"))

    def _read_hyper_connections(self) -> HyperConnections | None:
        """Return the residual streams.

        The development branch and the main branch of Megatron-LM have a field each.
        """
        for name in ("enable_hyper_connections", "enable_mhc_connections"):
            if self.flag(name) and self.pattern is not None:
                remedy = "Override it for a plan without them"
                self._refuse(name, "cannot plan: hyper-connections of a hybrid model", True, remedy)
                return None
        if self.flag("enable_hyper_connections"):
            streams = self.whole("num_residual_streams")
            return HyperConnections(streams=streams, is_fp32=True, is_contraction_learned=True)
        if self.flag("enable_mhc_connections"):
            streams = self.whole("mhc_num_residual_streams")
            return HyperConnections(streams=streams, is_fp32=False, is_contraction_learned=False)
        return None

    def _require_latent(self) -> None:
        if not self.flag("multi_latent_attention"):
            rule = (
                f"must be on with experimental_attention_variant={self.variant}, which Megatron "
                "has for multi-latent attention"
            )
            self._refuse("multi_latent_attention", rule, False, "Set it to true")

    def _read_indexer(self) -> Indexer | None:
        is_sparse = self.variant == SPARSE_VARIANT and self.pattern is None
        if is_sparse:
            self._require_latent()
        elif not self.is_compressed or self.flag("csa_dense_mode"):
            return None
        indexer = Indexer(
            num_heads=self.whole("dsa_indexer_n_heads"),
            head_dim=self.whole("dsa_indexer_head_dim"),
            topk=self.whole("dsa_indexer_topk"),
        )
        if not is_sparse:
            return indexer
        return replace(
            indexer,
            share_every=self.whole("dsa_indexer_topk_freq"),
            share_from=self.whole("dsa_indexer_skip_topk_offset", least=0),
        )


def is_moe_kind(kind: str) -> bool:
    """Return whether layers of a kind (`ModelShape.kinds`) have experts."""
    return kind.endswith(MOE_SUFFIX)


def _find_nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of a number that is nearest to a wanted number, the smaller of two."""
    nearest = 1
    for divisor in range(2, number + 1):
        if number % divisor == 0 and abs(divisor - wanted) < abs(nearest - wanted):
            nearest = divisor
    return nearest
