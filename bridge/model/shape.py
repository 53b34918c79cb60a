"""Shape of a model, read from config values alone: no torch, no Megatron Core.

    shape = ModelShape.of({"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_query_groups": 8})
    shape.kinds          # ('transformer',) * 80

Fields have the names and the defaults of Megatron Core's `TransformerConfig` (0.16.1), of `GPTConfig` for the
further arguments of `GPTModel`, and of `MLATransformerConfig` where `multi_latent_attention` is on. Values that
Megatron derives after construction (`ffn_hidden_size`, `kv_channels`, ...) are derived here by the same formulas.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import Finding, RunConfigError
from bridge.model.compressed import (
    COMPRESSED_HYBRID,
    RATIOS,
    CompressedAttention,
    HyperConnections,
    kind_of_ratio,
)
from bridge.model.hybrid import HybridPattern, model_fault
from bridge.model.section import Section, read_section
from bridge.model.variants import DELTA_NET, SPARSE, DeltaNet, Indexer, unplanned
from bridge.target.fields import whole_number

DENSE = "transformer"
MOE = "moe"
SWITCHES = (
    *(
        "gated_linear_unit",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "qk_l2_norm",
        "attention_output_gate",
    ),
    "share_embeddings_and_output_weights",
)
"""Switches of the model that the shape has by Megatron's names."""
PARALLEL_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size"),
)
MOST = 10_000
"""Layers, or experts of a layer: more is a slip of the finger, and would take minutes to be listed."""
MOST_SIZE = 10**8
"""Of any other size, for the same reason: no model has a dimension, a vocabulary or a sequence near it."""


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
    """Width that tokens are projected to before they are sent to the experts; None: the hidden size."""


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
    def projected(self) -> int:
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
    """Kind of each layer: transformer, delta_net, sparse or sparse_shared (it takes another layer's choice of keys),
    or one of `compressed.RATIOS`, each with _moe where it has experts; in a hybrid mamba, attention, latent_attention,
    mlp or moe."""
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
    mtp_kind: str = DENSE
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
        return min(1, self.mtp_num_layers) if self.mtp_is_repeated else self.mtp_num_layers

    def padded_vocab_size(self, tensor_parallel: int = 1) -> int:
        """Return the rows of the embedding over all tensor-parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        """Return the shape that a model's config describes; RunConfigError with every reason why there is none."""
        shape, faults = read_shape(model)
        if faults:
            raise RunConfigError("\n".join(map(str, faults)))
        return shape


def read_shape(model: Any) -> tuple[ModelShape, tuple[Finding, ...]]:
    """Return the shape that config values describe, and every reason why there is no such model, or no plan of it."""
    reader = _Reader(read_section("model", model))
    shape = reader.shape()
    return shape, (*reader.faults, *unplanned(reader.section))


def impossible_sizes(model: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each given number that no model can be built with.

    Values that are no whole numbers are left to the reader of types, and fields that are absent to Megatron's defaults.
    """
    reader = _Reader(read_section("model", model))
    reader.shape()
    named = [(fault, fault.path.removeprefix("model.")) for fault in reader.faults]
    return [
        replace(fault, value=model[name]) if model[name] is None else fault
        for fault, name in named
        if name in model and whole_number(fault.value) is not None
    ]


OF_HEADS = ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
"""Sizes that attention's heads are made of."""


class _Reader:
    """Reads one model and collects the reasons why it is impossible."""

    def __init__(self, section: Section) -> None:
        self.section = section
        self.pattern = HybridPattern.of(section)
        self.variant = self.text("experimental_attention_variant")
        self.faults: list[Finding] = []
        self._malformed = {one.path.partition(".")[2]: one for one in section.malformed}

    def shape(self) -> ModelShape:
        layers = self._layers()
        sizes = self._sizes()
        for name in PARALLEL_SIZES:
            self.whole(name)
        self.faults += self.pattern.faults if self.pattern is not None else ()
        delta_net, indexer = self._delta_net(), self._indexer()
        depths = self._depths()
        ratio_kinds = self._ratio_kinds(layers, depths) if self.is_compressed else ()
        kinds = (self.pattern.kinds if self.pattern is not None else ()) or self._kinds(
            layers, indexer, ratio_kinds
        )
        self._check_heads(sizes)
        embedding = "rope" if self.pattern is None else "none"
        normalization = self.text("normalization", "RMSNorm" if self.has_latent else "LayerNorm")
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
            mtp_kind=self._mtp_kind(kinds[-1], ratio_kinds[layers:]),
            mtp_kinds=self.pattern.mtp_kinds if self.pattern is not None else (),
            experts=self._experts(sizes["ffn_hidden_size"]),
            latent=self._latent() if self.has_latent else None,
            state_space=self._state_space(sizes["hidden_size"])
            if "mamba" in self._kinds_of_pattern
            else None,
            delta_net=delta_net,
            indexer=indexer,
            compressed=self._compressed(sizes["num_attention_heads"])
            if self.is_compressed
            else None,
            hyper_connections=self._hyper_connections(),
            **{name: self.flag(name) for name in SWITCHES},
        )

    @property
    def _kinds_of_pattern(self) -> tuple[str, ...]:
        return (*self.pattern.kinds, *self.pattern.mtp_kinds) if self.pattern is not None else ()

    @property
    def has_latent(self) -> bool:
        return self.flag("multi_latent_attention") or "latent_attention" in self._kinds_of_pattern

    @property
    def is_compressed(self) -> bool:
        return self.variant == COMPRESSED_HYBRID and self.pattern is None

    def _layers(self) -> int:
        if self.pattern is None:
            return self.whole("num_layers", most=MOST)
        return self._at_most("num_layers", max(1, len(self.pattern.layers)), MOST)

    def _sizes(self) -> dict[str, Any]:
        is_hybrid = self.pattern is not None
        attends = not is_hybrid or {"attention", "latent_attention"} & {*self._kinds_of_pattern}
        hidden, heads = (
            self.whole("hidden_size"),
            self.whole("num_attention_heads", least=1 if attends else 0),
        )
        return {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": self.whole("num_query_groups", heads, least=min(heads, 1)),
            "kv_channels": self.whole("kv_channels", hidden // heads if heads else 0),
            "ffn_hidden_size": self.whole(
                "ffn_hidden_size", 4 * hidden, least=0 if is_hybrid else 1
            ),
        }

    def _check_heads(self, sizes: Mapping[str, int]) -> None:
        """Note heads that cannot be made of these sizes; those of some models have widths of their own."""
        hidden, heads, groups, channels = (sizes[name] for name in OF_HEADS)
        if not heads or {f"model.{name}" for name in OF_HEADS} & {
            fault.path for fault in self.faults
        }:
            return  # a size that is impossible by itself was replaced
        is_rotary = (
            self.text("position_embedding_type") == "rope"
        )  # stated: Megatron's default is another
        rotates_whole_heads = is_rotary and self.section.values["rotary_percent"] == 1.0
        has_channels = self.section.given("kv_channels") is not None
        has_widths = has_channels or self.has_latent or self.pattern is not None
        if groups and heads % groups:
            self._refuse(
                "num_query_groups",
                f"must divide the {heads} attention heads",
                groups,
                "Use a divisor",
            )
        elif hidden % heads and not has_widths:
            near = min(
                range(1, hidden + 1), key=lambda count: (hidden % count != 0, abs(count - heads))
            )
            rule = f"must be a multiple of the {heads} attention heads while model.kv_channels is not set"
            self._refuse(
                "hidden_size", rule, hidden, f"Use {near} heads, or state model.kv_channels"
            )
        elif channels % 2 and not self.has_latent and rotates_whole_heads:
            rule = "must be even under rotary position embeddings"
            if has_channels:
                self._refuse("kv_channels", rule, channels, "Use an even number")
            else:
                rule = f"must make heads of an even size under rotary position embeddings, and {heads} make {channels}"
                self._refuse("hidden_size", rule, hidden, f"Use a multiple of {2 * heads}")

    def whole(self, name: str, derived: int = 0, *, least: int = 1, most: int = MOST_SIZE) -> int:
        """Return a size; `derived` where it is None, which Megatron derives."""
        held: int | None = self.section.values[name]
        number = derived if held is None else held
        wrong = self._malformed.get(name)
        if wrong is not None:
            self._refuse(name, wrong.rule, wrong.value, "Correct it")
            return max(number, least)
        if number < least:
            self._refuse(name, f"must be at least {least}", number, f"Use {least} or more")
            return least
        return self._at_most(name, number, most)

    def _at_most(self, name: str, number: int, most: int) -> int:
        if number <= most:
            return number
        self._refuse(
            name,
            f"must be at most {most}",
            number,
            "Use fewer" if most == MOST else "Use a smaller number",
        )
        return 1

    def flag(self, name: str) -> bool:
        return bool(self.section.values[name])

    def text(self, name: str, default: str = "") -> str:
        value = self.section.given(name, default)
        return str(getattr(value, "value", value))

    def _refuse(self, name: str, rule: str, value: object, remedy: str) -> None:
        self.faults.append(model_fault(name, rule, value, f"{remedy}."))

    def _kinds(
        self, layers: int, indexer: Indexer | None, ratio_kinds: Sequence[str]
    ) -> tuple[str, ...]:
        """Return the kind of each layer: its attention, with _moe where it has experts."""
        attention = [DENSE] * layers
        if ratio_kinds:
            attention = list(ratio_kinds[:layers])
        elif indexer is not None:
            chooses = (indexer.is_in_layer(number) for number in range(1, layers + 1))
            attention = ["sparse" if is_chooser else "sparse_shared" for is_chooser in chooses]
        elif self.variant in DELTA_NET:
            is_linear = self._layer_flags("linear_attention_freq", layers, counts_softmax=True)
            attention = ["delta_net" if linear else DENSE for linear in is_linear]
        if not self.section.given("num_moe_experts"):
            return tuple(attention)
        expert = self._layer_flags("moe_layer_freq", layers)
        return tuple(
            f"{kind}_{MOE}" if has else kind for kind, has in zip(attention, expert, strict=True)
        )

    def _depths(self) -> int:
        """Return the passes through prediction layers; the pattern of a hybrid model has one part for each."""
        stated = self.whole("mtp_num_layers", least=0)
        if self.pattern is None or (self.flag("mtp_use_repeated_layer") and stated):
            return stated
        return self.pattern.depths

    def _layer_flags(
        self, name: str, layers: int, *, counts_softmax: bool = False
    ) -> tuple[bool, ...]:
        """Return which layers have a kind of module: the field is a number, a list, or a list's expression.

        A number N takes each Nth layer from the first (experts), or all but each Nth layer (`counts_softmax`).
        """
        given = self.section.values[name]
        frequency = _list_of(given) if isinstance(given, str) else given
        if isinstance(frequency, int) and frequency >= 1:
            if counts_softmax:
                return tuple(number % frequency != 0 for number in range(1, layers + 1))
            return tuple(number % frequency == 0 for number in range(layers))
        if isinstance(frequency, list | tuple) and len(frequency) == layers:
            return tuple(bool(flag) for flag in frequency)
        rule = f"must be a number, or a list with an item for each of the {layers} layers"
        self._refuse(
            name,
            rule,
            len(frequency) if isinstance(frequency, list | tuple) else given,
            "Correct it",
        )
        return (True,) * layers

    def _experts(self, ffn: int) -> Experts | None:
        if not self.section.given("num_moe_experts"):
            return None
        if self.pattern is not None and "moe" not in self._kinds_of_pattern:
            return None  # the pattern decides about every layer
        experts = self.whole("num_moe_experts", most=MOST)
        return Experts(
            num_experts=experts,
            ffn_hidden_size=self.whole("moe_ffn_hidden_size", ffn),
            topk=self.whole("moe_router_topk"),
            shared_ffn_hidden_size=self.whole("moe_shared_expert_intermediate_size", least=0),
            shared_gate=self.flag("moe_shared_expert_gate"),
            router_bias=self.flag("add_bias_linear"),
            latent_size=self.whole("moe_latent_size", least=0) or None,
        )

    def _latent(self) -> Latent:
        if self.flag("qk_l2_norm"):
            rule = "must be off with multi-latent attention, as Megatron asserts"
            self._refuse("qk_l2_norm", rule, True, "Set it to false")
        has_rank = self.section.values["q_lora_rank"] is not None
        return Latent(
            q_lora_rank=self.whole("q_lora_rank") if has_rank else None,
            qk_pos_emb_head_dim=self.whole("qk_pos_emb_head_dim", least=0),
            **{name: self.whole(name) for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim")},
        )

    def _state_space(self, hidden: int) -> StateSpace:
        head_dim = self.whole("mamba_head_dim")
        return StateSpace(
            num_heads=self.whole("mamba_num_heads", 2 * hidden // head_dim),
            head_dim=head_dim,
            state_dim=self.whole("mamba_state_dim"),
            num_groups=self.whole("mamba_num_groups"),
        )

    def _delta_net(self) -> DeltaNet | None:
        if self.variant not in DELTA_NET or self.pattern is not None:
            return None
        keys, values = self.whole("linear_num_key_heads"), self.whole("linear_num_value_heads")
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

    def _mtp_kind(self, last: str, ratio_kinds: Sequence[str]) -> str:
        """Return the kind of the layer inside a prediction layer."""
        if not ratio_kinds:
            return last.replace(
                "sparse_shared", "sparse"
            )  # its layers count from 1, which chooses keys
        if len({*ratio_kinds}) > 1:
            rule = "cannot plan: prediction layers of several kinds"
            self._refuse(
                "csa_compress_ratios", rule, list(ratio_kinds), "Give all of them the same ratio"
            )
        return f"{ratio_kinds[0]}_{MOE}" if last.endswith(MOE) else ratio_kinds[0]

    def _ratio_kinds(self, layers: int, depths: int) -> tuple[str, ...]:
        """Return the kind of each layer of the hybrid attention, those of prediction layers behind the others."""
        given = self.section.given("csa_compress_ratios")
        ratios = _list_of(given) if isinstance(given, str) else given
        needed, is_dense = layers + depths, self.flag("csa_dense_mode")
        listed = ratios if isinstance(ratios, list | tuple) else []
        if len(listed) < needed or any(ratio not in RATIOS.values() for ratio in listed):
            rule = f"must be a list of 0, 4 or 128 for each of the {layers} layers and {depths} prediction layers"
            self._refuse("csa_compress_ratios", rule, given, "Correct it")
            listed = [0] * needed
        return tuple(kind_of_ratio(ratio, is_dense=is_dense) for ratio in listed[:needed])

    def _compressed(self, heads: int) -> CompressedAttention:
        self._require_latent()
        if self.whole("tensor_model_parallel_size") > 1:
            ranks = self.whole("tensor_model_parallel_size")
            rule = f"must be 1 with experimental_attention_variant={COMPRESSED_HYBRID}, as Megatron asserts"
            self._refuse("tensor_model_parallel_size", rule, ranks, "Set it to 1")
        groups, width = self.whole("o_groups"), heads * self.whole("v_head_dim")
        if width % groups:
            rule = f"must divide the {width} outputs of all heads"
            self._refuse("o_groups", rule, groups, "Use a divisor")
        return CompressedAttention(output_groups=groups, output_rank=self.whole("o_lora_rank"))

    def _hyper_connections(self) -> HyperConnections | None:
        """Return the residual streams, by the field of the development branch or that of the main branch."""
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
            rule = f"must be on with experimental_attention_variant={self.variant}, which Megatron has for multi-latent"
            self._refuse("multi_latent_attention", f"{rule} attention", False, "Set it to true")

    def _indexer(self) -> Indexer | None:
        has_indexer = self.is_compressed and not self.flag("csa_dense_mode")
        if has_indexer:
            return Indexer(
                num_heads=self.whole("dsa_indexer_n_heads"),
                head_dim=self.whole("dsa_indexer_head_dim"),
                topk=self.whole("dsa_indexer_topk"),
            )
        if self.variant != SPARSE or self.pattern is not None:
            return None
        self._require_latent()
        return Indexer(
            num_heads=self.whole("dsa_indexer_n_heads"),
            head_dim=self.whole("dsa_indexer_head_dim"),
            topk=self.whole("dsa_indexer_topk"),
            share_every=self.whole("dsa_indexer_topk_freq"),
            share_from=self.whole("dsa_indexer_skip_topk_offset", least=0),
        )


def has_experts(kind: str) -> bool:
    """Return whether layers of a kind (`ModelShape.kinds`) have experts."""
    return kind.endswith(MOE)


def _list_of(expression: str) -> Any:
    """Return the list that ``([0]*3+[1]*58)`` stands for, evaluating nothing else; None for another expression."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = value(node.left), value(node.right)
            small = all(part < 100_000 for part in (left, right) if isinstance(part, int))
            if (
                isinstance(node.op, ast.Mult)
                and small
                and isinstance(left, list) != isinstance(right, list)
            ):
                return left * right
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
        raise ValueError(expression)

    with suppress(ValueError, SyntaxError, TypeError):
        return value(ast.parse(expression, mode="eval").body)
    return None
