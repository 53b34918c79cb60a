"""`read_shape`: the shape of a model from its config values, with the faults of these values.

    model = {"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
    require_shape(model).kinds          # ('transformer',) * 80

Fields have the names and the defaults of Megatron Core's `TransformerConfig` (0.16.1), of
`GPTConfig` for the further arguments of `GPTModel`, and of `MLATransformerConfig` if
`multi_latent_attention` is on. Values that Megatron derives after construction (`ffn_hidden_size`,
`kv_channels`, ...) are derived by the same formulas. Neither torch nor Megatron Core is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from bridge.model.shape import (
    TRANSFORMER_KIND,
    Experts,
    Latent,
    ModelShape,
    StateSpace,
    is_moe_kind,
    make_moe_kind,
)
from bridge.target.fields import parse_integer

SHAPE_SWITCHES = (
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_l2_norm",
    "attention_output_gate",
    "share_embeddings_and_output_weights",
)
"""Switches that are copied into the shape under Megatron's names."""
PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
MAX_LAYERS = 10_000
"""The largest number of layers, or of experts in a layer. More is taken for a typing error."""
MAX_SIZE = 10**8
"""The largest dimension, vocabulary or sequence. A larger number is taken for a typing error."""


def require_shape(model: object) -> ModelShape:
    """Return the shape that a model config describes.

    Args:
        model: The section of the model, a mapping, or an object with Megatron's attributes.

    Raises:
        RunConfigError: The config describes no possible model. The error has every reason.
    """
    shape, faults = read_shape(model)
    if faults:
        raise RunConfigError("\n".join(map(str, faults)))
    return shape


def read_shape(model: object) -> tuple[ModelShape, tuple[Finding, ...]]:
    """Return the shape that a model config describes, and the reasons why it cannot be planned.

    A reason is a value that no model can have, or a module that the plan does not know.
    """
    reader = _ShapeReader(read_section("model", model))
    shape = reader.read()
    return shape, (*reader.faults, *find_unplanned_fields(reader.section))


def find_impossible_sizes(model: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each stated whole number with which no model can be built.

    Values of wrong types are not checked here. Missing fields have Megatron's defaults.
    """
    reader = _ShapeReader(read_section("model", model))
    reader.read()
    impossible: list[Finding] = []
    for fault in reader.faults:
        name = fault.path.removeprefix("model.")
        if name not in model or parse_integer(fault.value) is None:
            continue
        if model[name] is None:  # the fault is about a value that Megatron derives
            impossible.append(replace(fault, value=None))
        else:
            impossible.append(fault)
    return impossible


HEAD_SIZES = ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
"""The fields that decide the heads of attention."""


class _ShapeReader:
    """Reads the shape of a model, and collects the faults of its values."""

    def __init__(self, section: Section) -> None:
        self.section = section
        self.pattern = HybridPattern.from_model(section)
        self.variant = self.read_text("experimental_attention_variant")
        self.faults: list[Finding] = []
        self._sizes: dict[str, int] = {}
        """Field -> the size that was read. A field that is read again adds no second fault."""
        self._malformed = {fault.path.partition(".")[2]: fault for fault in section.malformed}

    def read(self) -> ModelShape:
        """Return the shape. Faults are collected in the order in which the fields are read."""
        layers = self._read_num_layers()
        sizes = self._read_sizes()
        for name in PARALLEL_SIZES:
            self.read_size(name)
        if self.pattern is not None:
            self.faults += self.pattern.faults
        delta_net = self._read_delta_net()
        indexer = self._read_indexer()
        depths = self._read_mtp_depths()
        ratio_kinds: tuple[str, ...] = ()
        if self.is_compressed:
            ratio_kinds = self._read_ratio_kinds(layers, depths)
        kinds = self._read_kinds(layers, indexer, ratio_kinds)
        self._check_heads(sizes)
        return ModelShape(
            num_layers=layers,
            **sizes,
            kinds=kinds,
            is_hybrid=self.pattern is not None,
            layer_norm_bias=self._read_normalization() == "LayerNorm",
            vocab_size=self.read_size("vocab_size", minimum=0),
            make_vocab_size_divisible_by=self.read_size("make_vocab_size_divisible_by"),
            seq_length=self.read_size("seq_length", minimum=0),
            has_softmax_offset=self.read_text("softmax_type") == "learnable",
            position_embedding_type=self._read_position_embedding(),
            mtp_num_layers=depths,
            mtp_is_repeated=self.read_flag("mtp_use_repeated_layer"),
            mtp_kind=self._read_mtp_kind(kinds[-1], ratio_kinds[layers:]),
            mtp_kinds=self._get_mtp_kinds(),
            experts=self._read_experts(sizes["ffn_hidden_size"]),
            latent=self._read_latent(),
            state_space=self._read_state_space(sizes["hidden_size"]),
            delta_net=delta_net,
            indexer=indexer,
            compressed=self._read_compressed(sizes["num_attention_heads"]),
            hyper_connections=self._read_hyper_connections(),
            **{name: self.read_flag(name) for name in SHAPE_SWITCHES},
        )

    @property
    def _pattern_kinds(self) -> tuple[str, ...]:
        if self.pattern is None:
            return ()
        return (*self.pattern.kinds, *self.pattern.mtp_kinds)

    @property
    def has_latent(self) -> bool:
        return self.read_flag("multi_latent_attention") or "latent_attention" in self._pattern_kinds

    @property
    def is_compressed(self) -> bool:
        return self.variant == COMPRESSED_HYBRID and self.pattern is None

    def _read_num_layers(self) -> int:
        if self.pattern is None:
            return self.read_size("num_layers", maximum=MAX_LAYERS)
        return self._limit_size("num_layers", max(1, len(self.pattern.layers)), MAX_LAYERS)

    def _read_sizes(self) -> dict[str, Any]:
        min_heads = min_ffn = 1
        if self.pattern is not None:
            min_ffn = 0
            kinds = self._pattern_kinds
            if "attention" not in kinds and "latent_attention" not in kinds:
                min_heads = 0
        hidden = self.read_size("hidden_size")
        heads = self.read_size("num_attention_heads", minimum=min_heads)
        channels = 0
        if heads:
            channels = hidden // heads
        return {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": self.read_size("num_query_groups", heads, minimum=min(heads, 1)),
            "kv_channels": self.read_size("kv_channels", channels),
            "ffn_hidden_size": self.read_size("ffn_hidden_size", 4 * hidden, minimum=min_ffn),
        }

    def _check_heads(self, sizes: Mapping[str, int]) -> None:
        """Add faults for sizes that do not divide into heads."""
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        groups, channels = sizes["num_query_groups"], sizes["kv_channels"]
        faulty = {fault.path.removeprefix("model.") for fault in self.faults}
        if not heads or faulty.intersection(HEAD_SIZES):
            return  # an impossible size was replaced, so the sizes do not fit together
        # The position embedding counts only if it is stated as rope: Megatron has another default.
        is_rotary = self.read_text("position_embedding_type") == "rope"
        rotates_whole_heads = is_rotary and self.section.values["rotary_percent"] == 1.0
        has_channels = self.section.get_stated("kv_channels") is not None
        has_widths = has_channels or self.has_latent or self.pattern is not None
        if groups and heads % groups:
            rule = f"must divide the {heads} attention heads"
            self._add_fault("num_query_groups", rule, groups, "Use a divisor")
        elif hidden % heads and not has_widths:
            rule = (
                f"must be a multiple of the {heads} attention heads while model.kv_channels is not "
                "set"
            )
            remedy = f"Use {_find_nearest_divisor(hidden, heads)} heads, or state model.kv_channels"
            self._add_fault("hidden_size", rule, hidden, remedy)
        elif channels % 2 and not self.has_latent and rotates_whole_heads:
            if has_channels:
                rule = "must be even under rotary position embeddings"
                self._add_fault("kv_channels", rule, channels, "Use an even number")
            else:
                rule = (
                    "must make heads of an even size under rotary position embeddings, and "
                    f"{heads} make {channels}"
                )
                self._add_fault("hidden_size", rule, hidden, f"Use a multiple of {2 * heads}")

    def read_size(
        self, name: str, derived: int = 0, *, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """Return a size. An impossible size adds a fault, and a possible size is returned.

        Args:
            name: The field.
            derived: The value that Megatron derives if the field is None.
            minimum: The smallest possible value.
            maximum: The largest possible value.
        """
        if name not in self._sizes:
            self._sizes[name] = self._read_new_size(name, derived, minimum, maximum)
        return self._sizes[name]

    def _read_new_size(self, name: str, derived: int, minimum: int, maximum: int) -> int:
        """Return a size that was not read before."""
        value: int | None = self.section.values[name]
        number = derived
        if value is not None:
            number = value
        wrong = self._malformed.get(name)
        if wrong is not None:
            self._add_fault(name, wrong.rule, wrong.value, "Correct it")
            return max(number, minimum)
        if number < minimum:
            self._add_fault(name, f"must be at least {minimum}", number, f"Use {minimum} or more")
            return minimum
        return self._limit_size(name, number, maximum)

    def _limit_size(self, name: str, number: int, maximum: int) -> int:
        """Return a number, or 1 and add a fault if the number is too large."""
        if number <= maximum:
            return number
        remedy = "Use a smaller number"
        if maximum == MAX_LAYERS:
            remedy = "Use fewer"
        self._add_fault(name, f"must be at most {maximum}", number, remedy)
        return 1

    def read_flag(self, name: str) -> bool:
        return bool(self.section.values[name])

    def read_text(self, name: str, default: str = "") -> str:
        value = self.section.get_stated(name, default)
        return str(getattr(value, "value", value))

    def _add_fault(self, name: str, rule: str, value: object, remedy: str) -> None:
        """Add a fault. Reading goes on, so that every fault is found."""
        self.faults.append(make_model_fault(name, rule, value, f"{remedy}."))

    def _read_kinds(
        self, layers: int, indexer: Indexer | None, ratio_kinds: Sequence[str]
    ) -> tuple[str, ...]:
        """Return the kind of each layer: its attention, with the suffix _moe if it has experts.

        The pattern of a hybrid model states the kinds.
        """
        if self.pattern is not None and self.pattern.kinds:
            return self.pattern.kinds
        kinds = [TRANSFORMER_KIND] * layers
        if ratio_kinds:
            kinds = list(ratio_kinds[:layers])
        elif indexer is not None:
            for layer in range(layers):
                kinds[layer] = "sparse_shared"
                if indexer.chooses_in_layer(layer + 1):
                    kinds[layer] = "sparse"
        elif self.variant in DELTA_NET_VARIANTS:
            flags = self._read_layer_flags(
                "linear_attention_freq", layers, is_linear_attention=True
            )
            for layer, is_linear in enumerate(flags):
                if is_linear:
                    kinds[layer] = "delta_net"
        if self.section.get_stated("num_moe_experts"):
            flags = self._read_layer_flags("moe_layer_freq", layers)
            for layer, is_sparse in enumerate(flags):
                if is_sparse:
                    kinds[layer] = make_moe_kind(kinds[layer])
        return tuple(kinds)

    def _get_mtp_kinds(self) -> tuple[str, ...]:
        """Return the kinds of the layers inside a prediction layer, which only a pattern states."""
        if self.pattern is None:
            return ()
        return self.pattern.mtp_kinds

    def _read_normalization(self) -> str:
        """Return Megatron's name of the norm. Latent attention has another default."""
        default = "RMSNorm" if self.has_latent else "LayerNorm"
        return self.read_text("normalization", default)

    def _read_position_embedding(self) -> str:
        """Return Megatron's name of the position embedding. A hybrid model has another default."""
        default = "rope" if self.pattern is None else "none"
        return self.read_text("position_embedding_type", default)

    def _read_mtp_depths(self) -> int:
        """Return the number of passes through prediction layers.

        The pattern of a hybrid model has one part for each pass.
        """
        stated = self.read_size("mtp_num_layers", minimum=0)
        if self.pattern is None or (self.read_flag("mtp_use_repeated_layer") and stated):
            return stated
        return self.pattern.depths

    def _read_layer_flags(
        self, name: str, layers: int, *, is_linear_attention: bool = False
    ) -> tuple[bool, ...]:
        """Return for each layer whether it has a kind of module.

        The field is a number N, a list, or the expression of a list. For experts, N means every Nth
        layer, beginning with the first. For linear attention, N means all layers except every Nth
        layer. Megatron divides by N, so that -N means the same as N.

        Args:
            name: The field.
            layers: The number of layers.
            is_linear_attention: Whether the flags are about linear attention, and not experts.
        """
        value = self.section.values[name]
        frequency = value
        if isinstance(value, str) and value.strip().isdecimal():
            frequency = int(value)
        elif isinstance(value, str):
            frequency = parse_list_expression(value)
        if isinstance(frequency, int) and frequency != 0:
            if is_linear_attention:
                return tuple(number % frequency != 0 for number in range(1, layers + 1))
            return tuple(number % frequency == 0 for number in range(layers))
        if isinstance(frequency, list | tuple):
            if len(frequency) == layers:
                return tuple(map(bool, frequency))
            value = len(frequency)
        rule = f"must be a number, or a list with an item for each of the {layers} layers"
        self._add_fault(name, rule, value, "Correct it")
        return (True,) * layers

    def _read_experts(self, ffn: int) -> Experts | None:
        if not self.section.get_stated("num_moe_experts"):
            return None
        if self.pattern is not None and "moe" not in self._pattern_kinds:
            return None  # the pattern decides about every layer
        experts = self.read_size("num_moe_experts", maximum=MAX_LAYERS)
        return Experts(
            num_experts=experts,
            ffn_hidden_size=self.read_size("moe_ffn_hidden_size", ffn),
            topk=self.read_size("moe_router_topk"),
            shared_ffn_hidden_size=self.read_size("moe_shared_expert_intermediate_size", minimum=0),
            shared_gate=self.read_flag("moe_shared_expert_gate"),
            router_bias=self.read_flag("add_bias_linear"),
            latent_size=self.read_size("moe_latent_size", minimum=0) or None,
        )

    def _read_latent(self) -> Latent | None:
        if not self.has_latent:
            return None
        if self.read_flag("qk_l2_norm"):
            rule = "must be off with multi-latent attention, as Megatron asserts"
            self._add_fault("qk_l2_norm", rule, True, "Set it to false")
        rank = None
        if self.section.values["q_lora_rank"] is not None:
            rank = self.read_size("q_lora_rank")
        return Latent(
            q_lora_rank=rank,
            qk_pos_emb_head_dim=self.read_size("qk_pos_emb_head_dim", minimum=0),
            kv_lora_rank=self.read_size("kv_lora_rank"),
            qk_head_dim=self.read_size("qk_head_dim"),
            v_head_dim=self.read_size("v_head_dim"),
        )

    def _read_state_space(self, hidden: int) -> StateSpace | None:
        if "mamba" not in self._pattern_kinds:
            return None
        head_dim = self.read_size("mamba_head_dim")
        return StateSpace(
            num_heads=self.read_size("mamba_num_heads", 2 * hidden // head_dim),
            head_dim=head_dim,
            state_dim=self.read_size("mamba_state_dim"),
            num_groups=self.read_size("mamba_num_groups"),
        )

    def _read_delta_net(self) -> DeltaNet | None:
        if self.variant not in DELTA_NET_VARIANTS or self.pattern is not None:
            return None
        keys = self.read_size("linear_num_key_heads")
        values = self.read_size("linear_num_value_heads")
        ranks = self.read_size("tensor_model_parallel_size")
        if values % keys:
            rule = f"must be a multiple of the {keys} key heads"
            self._add_fault("linear_num_value_heads", rule, values, "Use a multiple")
        if keys % ranks:
            rule = f"must be a multiple of the {ranks} tensor-parallel ranks"
            self._add_fault("linear_num_key_heads", rule, keys, "Use a multiple")
        return DeltaNet(
            num_key_heads=keys,
            key_head_dim=self.read_size("linear_key_head_dim"),
            num_value_heads=values,
            value_head_dim=self.read_size("linear_value_head_dim"),
            conv_width=self.read_size("linear_conv_kernel_dim"),
        )

    def _read_mtp_kind(self, last: str, ratio_kinds: Sequence[str]) -> str:
        """Return the kind of the layer inside a prediction layer."""
        if not ratio_kinds:
            # Inside a prediction layer, the layer has the number 1. So it chooses keys itself.
            return last.replace("sparse_shared", "sparse")
        if len({*ratio_kinds}) > 1:
            rule = "cannot plan: prediction layers of several kinds"
            remedy = "Give all of them the same ratio"
            self._add_fault("csa_compress_ratios", rule, list(ratio_kinds), remedy)
        kind = ratio_kinds[0]
        if is_moe_kind(last):
            kind = make_moe_kind(kind)
        return kind

    def _read_ratio_kinds(self, layers: int, depths: int) -> tuple[str, ...]:
        """Return the kind of each layer of the hybrid attention, then of each prediction layer."""
        value = self.section.get_stated("csa_compress_ratios")
        ratios = value
        if isinstance(value, str):
            ratios = parse_list_expression(value)
        if not isinstance(ratios, list | tuple):
            ratios = []
        needed = layers + depths
        is_dense = self.read_flag("csa_dense_mode")
        if len(ratios) < needed or any(
            ratio not in COMPRESSION_RATIOS.values() for ratio in ratios
        ):
            rule = (
                f"must be a list of 0, 4 or 128 for each of the {layers} layers and {depths} "
                "prediction layers"
            )
            self._add_fault("csa_compress_ratios", rule, value, "Correct it")
            ratios = [0] * needed
        return tuple(get_kind_of_ratio(ratio, is_dense=is_dense) for ratio in ratios[:needed])

    def _read_compressed(self, heads: int) -> CompressedAttention | None:
        if not self.is_compressed:
            return None
        self._check_latent()
        ranks = self.read_size("tensor_model_parallel_size")
        if ranks > 1:
            rule = (
                f"must be 1 with experimental_attention_variant={COMPRESSED_HYBRID}, as Megatron "
                "asserts"
            )
            self._add_fault("tensor_model_parallel_size", rule, ranks, "Set it to 1")
        groups = self.read_size("o_groups")
        width = heads * self.read_size("v_head_dim")
        if width % groups:
            rule = f"must divide the {width} outputs of all heads"
            self._add_fault("o_groups", rule, groups, "Use a divisor")
        return CompressedAttention(output_groups=groups, output_rank=self.read_size("o_lora_rank"))

    def _read_hyper_connections(self) -> HyperConnections | None:
        """Return the residual streams, or None if the model has one stream.

        The development branch and the main branch of Megatron-LM have different fields for them.
        """
        for name in ("enable_hyper_connections", "enable_mhc_connections"):
            if self.read_flag(name) and self.pattern is not None:
                remedy = "Override it for a plan without them"
                self._add_fault(
                    name, "cannot plan: hyper-connections of a hybrid model", True, remedy
                )
                return None
        if self.read_flag("enable_hyper_connections"):
            streams = self.read_size("num_residual_streams")
            return HyperConnections(streams=streams, is_fp32=True, is_contraction_learned=True)
        if self.read_flag("enable_mhc_connections"):
            streams = self.read_size("mhc_num_residual_streams")
            return HyperConnections(streams=streams, is_fp32=False, is_contraction_learned=False)
        return None

    def _check_latent(self) -> None:
        """Add a fault if the model has no multi-latent attention, which its variant needs."""
        if not self.read_flag("multi_latent_attention"):
            rule = (
                f"must be on with experimental_attention_variant={self.variant}, which Megatron "
                "has for multi-latent attention"
            )
            self._add_fault("multi_latent_attention", rule, False, "Set it to true")

    def _read_indexer(self) -> Indexer | None:
        is_sparse = self.variant == SPARSE_VARIANT and self.pattern is None
        if is_sparse:
            self._check_latent()
        elif not self.is_compressed or self.read_flag("csa_dense_mode"):
            return None
        indexer = Indexer(
            num_heads=self.read_size("dsa_indexer_n_heads"),
            head_dim=self.read_size("dsa_indexer_head_dim"),
            topk=self.read_size("dsa_indexer_topk"),
        )
        if not is_sparse:
            return indexer
        return replace(
            indexer,
            share_every=self.read_size("dsa_indexer_topk_freq"),
            share_from=self.read_size("dsa_indexer_skip_topk_offset", minimum=0),
        )


def _find_nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of a number nearest to `wanted`, the smaller of two equally near ones."""
    nearest = 1
    for divisor in range(2, number + 1):
        if number % divisor == 0 and abs(divisor - wanted) < abs(nearest - wanted):
            nearest = divisor
    return nearest
