"""`Module`: a module of a layer with its full sizes and its split over tensor-parallel ranks.

A module has Megatron's name without ``self_attention.``, ``mlp.`` or ``mixer.``. A multi-token-
prediction layer contains an ordinary layer, whose modules have the same names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from bridge.model.attention_variants import DeltaNet, Indexer
from bridge.model.compressed_attention import (
    COMPRESSED,
    COMPRESSION_RATIOS,
    CompressedAttention,
    HyperConnections,
)
from bridge.model.shape import (
    TRANSFORMER_KIND,
    Experts,
    Latent,
    ModelShape,
    StateSpace,
    get_attention_kind,
    is_moe_kind,
)

REGISTRATION_ORDER = (
    "hc_head",
    "enorm",
    "hnorm",
    "eh_proj",
    "e_proj",
    "h_proj",
    "word_embeddings",
    "position_embeddings",
    "input_layernorm",
    "linear_o_group_proj",
    "core_attention",
    "compressor",
    "compressor.linear_wkv",
    "compressor.linear_wgate",
    "compressor.norm",
    "indexer.linear_wq_b",
    "indexer.linear_wk",
    "indexer.k_norm",
    "indexer.linear_weights_proj",
    "indexer.compressor",
    "indexer.compressor.linear_wkv",
    "indexer.compressor.linear_wgate",
    "indexer.compressor.norm",
    "delta_rule",
    "ssm",
    "in_proj",
    "conv1d",
    "gated_norm",
    "out_norm",
    "out_proj",
    "linear_proj",
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_kv_proj",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
    "pre_mlp_layernorm",
    "linear_fc1",
    "linear_fc2",
    "router",
    "fc1_latent_proj",
    "fc2_latent_proj",
    "experts.linear_fc1",
    "experts.linear_fc2",
    "shared_experts.gate",
    "shared_experts.linear_fc1",
    "shared_experts.linear_fc2",
    "self_attention_hyper_connection",
    "mlp_hyper_connection",
    "norm",
    "final_layernorm",
    "final_norm",
    "output_layer",
)
"""Modules in the order in which Megatron's constructors make them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One module of a layer."""

    name: str
    kind: str
    """The kind of the module, which decides the precision that it runs in.

    The kinds are linear, router, norm, embedding, head, attention, ssm, gate, mixing and adapter.
    A module of the kind mixing mixes residual streams, tokens or groups of heads, and is not a
    linear layer.
    """
    inputs: int = 0
    outputs: int = 0
    split: str = ""
    """column: TP ranks split the outputs. row: TP ranks split the inputs. Empty: no split."""
    count: int = 1
    is_expert: bool = False
    is_high_precision: bool = False
    """Whether it stays in high precision under each scheme: Transformer Engine does not run it."""
    is_absorbed: bool = False
    """Like `is_high_precision`, but only from megatron-core 0.17 on (`PlanSettings.absorbs`)."""
    is_fp32: bool = False
    """Whether Megatron keeps its parameters in FP32, and it computes in FP32.

    An attention core has only its parameters in FP32.
    """
    is_detached: bool = False
    """Whether its input needs no gradient, so that no dgrad runs."""
    is_frozen: bool = False
    """Whether its weights are not trained: the run trains an adapter or freezes the model."""
    bias: bool = False
    vectors: tuple[tuple[str, int], ...] = ()
    """Further parameters by name and length. If `split` is column, they are split like outputs."""

    @property
    def registration_index(self) -> int:
        """Place in `REGISTRATION_ORDER`, which is the order of parameters in Megatron's buffers."""
        return REGISTRATION_ORDER.index(self.name.partition(".adapter")[0])

    @property
    def parameters(self) -> int:
        """Parameters of all copies over all ranks."""
        if self.kind == "attention":
            count = 0
        elif self.kind == "norm":
            count = self.outputs
        else:
            count = self.inputs * self.outputs
        if self.bias:
            count += self.outputs
        return self.count * count + sum(length for _, length in self.vectors)

    def get_rank_shape(self, shape: ModelShape, ranks: int) -> tuple[int, int]:
        """Return the numbers of outputs and inputs on one of `ranks` tensor-parallel ranks."""
        outputs, inputs = self.outputs, self.inputs
        if self.kind in ("embedding", "head") and self.split == "column":
            outputs = shape.padded_vocab_size(ranks)
        if self.split == "column":
            outputs //= ranks
        elif self.split == "row":
            inputs //= ranks
        return outputs, inputs


def list_modules(shape: ModelShape, kind: str) -> tuple[Module, ...]:
    """Return the modules of a layer of the plan. The embedding and the output are layers too."""
    if kind == "embedding":
        return list_embedding_modules(shape)
    if kind == "output":
        return list_output_modules(shape)
    if kind == "mtp":
        return list_mtp_modules(shape)
    return list_layer_modules(shape, kind)


@lru_cache(maxsize=256)
def list_layer_modules(shape: ModelShape, kind: str) -> tuple[Module, ...]:
    """Return the modules of a layer of one kind, in the order of the forward pass.

    `ModelShape.kinds` lists the kinds.
    """
    if kind == "mamba":
        if shape.state_space is None:
            return ()
        return _make_mamba(shape, shape.state_space)
    mixing = shape.hyper_connections
    modules: list[Module] = []
    if mixing is not None:
        modules.append(_make_hyper_connection(shape, "self_attention_hyper_connection", mixing))
    modules += _make_attention_of_kind(shape, kind)
    if kind in ("attention", "latent_attention"):
        return tuple(modules)
    if mixing is not None:
        modules.append(_make_hyper_connection(shape, "mlp_hyper_connection", mixing))
    modules.append(_make_norm(shape, "pre_mlp_layernorm", shape.hidden_size))
    if not is_moe_kind(kind):
        modules += _make_mlp(shape, shape.ffn_hidden_size)
    elif shape.experts is not None:
        modules += _make_experts(shape, shape.experts)
    return tuple(modules)


def _make_attention_of_kind(shape: ModelShape, kind: str) -> tuple[Module, ...]:
    """Return the modules of a layer's attention, or of the delta net that replaces it."""
    if kind.startswith("delta_net") and shape.delta_net is not None:
        return _make_delta_net(shape, shape.delta_net)
    attention = get_attention_kind(kind)
    if (
        attention in COMPRESSION_RATIOS
        and shape.compressed is not None
        and shape.latent is not None
    ):
        return _make_compressed_attention(shape, shape.latent, shape.compressed, attention)
    if kind in ("mlp", "moe"):
        return ()
    if shape.latent is not None and kind != "attention":
        return _make_latent_attention(shape, shape.latent, kind)
    return _make_attention(shape)


@lru_cache(maxsize=256)
def list_mtp_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Return the modules of one multi-token-prediction layer.

    Its transformer layer is of the kind `mtp_kind`. The layers inside a prediction layer of a
    hybrid model are separate rows of the plan ("mtp 1.1").
    """
    hidden = shape.hidden_size
    modules = [_make_norm(shape, "enorm", hidden), _make_norm(shape, "hnorm", hidden)]
    if shape.hyper_connections is None:
        modules.append(_make_linear("eh_proj", 2 * hidden, hidden, "column"))
    else:  # each stream is projected separately
        modules.append(_make_linear("e_proj", hidden, hidden, "column"))
        modules.append(_make_linear("h_proj", hidden, hidden, "column"))
    if not shape.is_hybrid:
        modules += list_layer_modules(shape, shape.mtp_kind)
    modules += _make_contraction(shape)
    modules.append(_make_norm(shape, "final_layernorm", hidden))
    return tuple(modules)


def list_embedding_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Return the modules that turn tokens into the first layer's input."""
    hidden = shape.hidden_size
    word = _make_linear(
        "word_embeddings", hidden, shape.padded_vocab_size(), "column", kind="embedding"
    )
    if shape.position_embedding_type != "learned_absolute":
        return (word,)
    return word, _make_linear("position_embeddings", hidden, shape.seq_length, "", kind="embedding")


def list_output_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Return the modules that turn the last layer's output into logits."""
    hidden = shape.hidden_size
    head = _make_linear("output_layer", hidden, shape.padded_vocab_size(), "column", kind="head")
    name = "final_norm" if shape.is_hybrid else "final_layernorm"
    norm = _make_norm(shape, name, hidden)
    return (*_make_contraction(shape), norm, head)


def _make_contraction(shape: ModelShape) -> tuple[Module, ...]:
    """Return the module that contracts the residual streams, if it has weights."""
    mixing = shape.hyper_connections
    if mixing is None or not mixing.is_contraction_learned:
        return ()
    head = Module(
        name="hc_head",
        kind="mixing",
        inputs=mixing.streams * shape.hidden_size,
        outputs=mixing.streams,
        is_fp32=mixing.is_fp32,
        vectors=(("hc_head_base", mixing.streams), ("hc_head_scale", 1)),
    )
    return (head,)


def _make_hyper_connection(shape: ModelShape, name: str, mixing: HyperConnections) -> Module:
    """Return the module that mixes the residual streams in front of an attention or an MLP."""
    return Module(
        name=name,
        kind="mixing",
        inputs=mixing.streams * shape.hidden_size,
        outputs=mixing.mapped,
        is_fp32=mixing.is_fp32,
        vectors=(("alpha_pre", 1), ("alpha_post", 1), ("alpha_res", 1), ("bias", mixing.mapped)),
    )


def _make_norm(shape: ModelShape, name: str, width: int) -> Module:
    return Module(name=name, kind="norm", outputs=width, bias=shape.layer_norm_bias)


def _make_linear(
    name: str, inputs: int, outputs: int, split: str, *, kind: str = "linear", **more: Any
) -> Module:
    return Module(name=name, kind=kind, inputs=inputs, outputs=outputs, split=split, **more)


def _make_core_attention(
    shape: ModelShape, inputs: int, outputs: int, *, is_high: bool = False
) -> Module:
    offsets: tuple[tuple[str, int], ...] = ()
    if shape.has_softmax_offset:
        offsets = (("softmax_offset", shape.num_attention_heads),)
    return Module(
        name="core_attention",
        kind="attention",
        inputs=inputs,
        outputs=outputs,
        split="column",
        vectors=offsets,
        is_high_precision=is_high,
    )


def _make_attention(shape: ModelShape) -> tuple[Module, ...]:
    hidden, channels, bias = shape.hidden_size, shape.kv_channels, shape.add_bias_linear
    query = shape.num_attention_heads * channels
    projected = query + 2 * shape.num_query_groups * channels
    if shape.attention_output_gate:
        projected += query
    norms: list[Module] = []
    for name in ("q_layernorm", "k_layernorm"):
        if shape.qk_l2_norm:
            norms.append(Module(name=name, kind="norm"))
        elif shape.qk_layernorm:
            norms.append(_make_norm(shape, name, channels))
    return (
        _make_norm(shape, "input_layernorm", hidden),
        _make_linear("linear_qkv", hidden, projected, "column", bias=bias or shape.add_qkv_bias),
        *norms,
        _make_core_attention(shape, query, query),
        _make_linear("linear_proj", query, hidden, "row", bias=bias),
    )


def _make_latent_attention(
    shape: ModelShape, latent: Latent, kind: str = TRANSFORMER_KIND
) -> tuple[Module, ...]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    rank, kv_rank = latent.q_lora_rank, latent.kv_lora_rank
    query = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    key_value = heads * (latent.qk_head_dim + latent.v_head_dim)
    value = heads * latent.v_head_dim
    # From 0.17 on, sparse attention multiplies by the weight of the key-value up projection itself.
    # No linear layer runs these products.
    is_sparse = shape.indexer is not None
    modules = [_make_norm(shape, "input_layernorm", hidden)]
    if rank is None:
        modules.append(_make_linear("linear_q_proj", hidden, query, "column"))
    else:
        modules.append(_make_linear("linear_q_down_proj", hidden, rank, ""))
        modules += _make_query_key_norm(shape, "q_layernorm", rank)
        modules.append(_make_linear("linear_q_up_proj", rank, query, "column"))
    down = kv_rank + latent.qk_pos_emb_head_dim
    modules.append(_make_linear("linear_kv_down_proj", hidden, down, ""))
    modules += _make_query_key_norm(shape, "kv_layernorm", kv_rank)
    modules.append(
        _make_linear("linear_kv_up_proj", kv_rank, key_value, "column", is_absorbed=is_sparse)
    )
    if shape.indexer is not None and get_attention_kind(kind) == "sparse":
        modules += _make_indexer(shape, latent, shape.indexer)
    modules.append(_make_core_attention(shape, query, value, is_high=is_sparse))
    modules.append(_make_linear("linear_proj", value, hidden, "row", bias=shape.add_bias_linear))
    return tuple(modules)


def _make_query_key_norm(shape: ModelShape, name: str, width: int) -> tuple[Module, ...]:
    """Return the norm of the latent of queries or of keys, if the model has such norms."""
    if not shape.qk_layernorm:
        return ()
    return (_make_norm(shape, name, width),)


def _make_compressed_attention(
    shape: ModelShape, latent: Latent, attention: CompressedAttention, kind: str
) -> tuple[Module, ...]:
    """Return the modules of DeepSeek-V4's hybrid attention.

    A single key serves as the value too, and outputs are projected in groups. The projections of
    the queries, of the key and of the indexer run in FP8. The compressors, the indexer's weights
    and the first output projection do not. This projection is a parameter outside linear layers.
    """
    hidden, heads, width = shape.hidden_size, shape.num_attention_heads, latent.v_head_dim
    rank = latent.q_lora_rank or hidden
    query = heads * width
    ratio = COMPRESSION_RATIOS[kind]
    projected = attention.projected_width
    modules = [
        _make_norm(shape, "input_layernorm", hidden),
        _make_linear("linear_q_down_proj", hidden, rank, ""),
        *_make_query_key_norm(shape, "q_layernorm", rank),
        _make_linear("linear_q_up_proj", rank, query, "column"),
        _make_linear("linear_kv_proj", hidden, width, "column"),
        *_make_query_key_norm(shape, "kv_layernorm", width),
    ]
    if ratio:
        modules += _make_compressor("compressor", hidden, width, ratio)
    if kind == COMPRESSED and shape.indexer is not None:
        modules += _make_compressed_indexer(shape, rank, shape.indexer, ratio)
    core = Module(
        name="core_attention",
        kind="attention",
        vectors=(("attn_sink", heads),),
        is_high_precision=True,
        is_fp32=True,
    )
    inputs_of_group = query // attention.output_groups
    groups = _make_linear("linear_o_group_proj", inputs_of_group, projected, "", kind="mixing")
    proj = _make_linear("linear_proj", projected, hidden, "row", bias=shape.add_bias_linear)
    return (*modules, core, groups, proj)


def _make_compressor(
    name: str, hidden: int, width: int, ratio: int, *, is_detached: bool = False
) -> tuple[Module, ...]:
    """Return the modules that make one key of several tokens.

    Groups of four tokens overlap, which doubles the width.
    """
    projected = width
    if ratio == COMPRESSION_RATIOS[COMPRESSED]:
        projected *= 2
    keys = _make_linear(
        f"{name}.linear_wkv", hidden, projected, "", is_high_precision=True, is_detached=is_detached
    )
    positions = (("ape", ratio * projected),)
    return (
        keys,
        replace(keys, name=f"{name}.linear_wgate"),
        Module(name=name, kind="mixing", vectors=positions, is_fp32=True),
        Module(name=f"{name}.norm", kind="norm", outputs=width),
    )


def _make_compressed_indexer(
    shape: ModelShape, rank: int, indexer: Indexer, ratio: int
) -> tuple[Module, ...]:
    """Return the modules that choose compressed keys.

    Their inputs need no gradient, and they have a separate loss.
    """
    hidden, width, heads = shape.hidden_size, indexer.head_dim, indexer.num_heads
    weights = _make_linear(
        "indexer.linear_weights_proj", hidden, heads, "", is_high_precision=True, is_detached=True
    )
    return (
        _make_linear("indexer.linear_wq_b", rank, heads * width, "", is_detached=True),
        weights,
        *_make_compressor("indexer.compressor", hidden, width, ratio, is_detached=True),
    )


def _make_indexer(shape: ModelShape, latent: Latent, indexer: Indexer) -> tuple[Module, ...]:
    """Return the modules that choose keys.

    Every tensor-parallel rank has all of these modules. They have a separate loss.
    """
    hidden, width, heads = shape.hidden_size, indexer.head_dim, indexer.num_heads
    rank = latent.q_lora_rank or hidden
    return (
        _make_linear("indexer.linear_wq_b", rank, heads * width, "", is_detached=True),
        _make_linear("indexer.linear_wk", hidden, width, "", is_detached=True),
        Module(name="indexer.k_norm", kind="norm", outputs=width, bias=True),
        _make_linear("indexer.linear_weights_proj", hidden, heads, "", is_detached=True),
    )


def _make_mlp(
    shape: ModelShape, ffn: int, prefix: str = "", width: int | None = None
) -> tuple[Module, Module]:
    hidden = width or shape.hidden_size
    bias = shape.add_bias_linear
    outputs = 2 * ffn if shape.gated_linear_unit else ffn
    return (
        _make_linear(f"{prefix}linear_fc1", hidden, outputs, "column", bias=bias),
        _make_linear(f"{prefix}linear_fc2", ffn, hidden, "row", bias=bias),
    )


def _make_experts(shape: ModelShape, experts: Experts) -> tuple[Module, ...]:
    """Return the router, the experts, projections around a latent width, and the shared expert."""
    hidden, latent, bias = shape.hidden_size, experts.latent_size, shape.add_bias_linear
    count = experts.num_experts
    modules = [_make_linear("router", hidden, count, "", kind="router", bias=experts.router_bias)]
    if latent:
        modules.append(_make_linear("fc1_latent_proj", hidden, latent, "", bias=bias))
    for module in _make_mlp(shape, experts.ffn_hidden_size, "experts.", width=latent):
        modules.append(replace(module, count=count, is_expert=True))
    if latent:
        modules.append(_make_linear("fc2_latent_proj", latent, hidden, "", bias=bias))
    if experts.shared_ffn_hidden_size:
        if experts.shared_gate:
            modules.append(_make_linear("shared_experts.gate", hidden, 1, "", kind="gate"))
        modules += _make_mlp(shape, experts.shared_ffn_hidden_size, "shared_experts.")
    return tuple(modules)


def _make_mamba(shape: ModelShape, space: StateSpace) -> tuple[Module, ...]:
    conv = space.inner + 2 * space.num_groups * space.state_dim
    heads = space.num_heads
    # The parameters of the mixer itself come before the parameters of its modules.
    mixer = (("dt_bias", heads), ("A_log", heads), ("D", heads))
    return (
        _make_norm(shape, "norm", shape.hidden_size),
        _make_linear("in_proj", shape.hidden_size, space.projected_width, "column"),
        _make_linear("conv1d", space.conv_width, conv, "column", kind="ssm", bias=True),
        Module(name="ssm", kind="ssm", split="column", vectors=mixer),
        Module(name="gated_norm", kind="norm", outputs=space.inner, split="column"),
        _make_linear("out_proj", space.inner, shape.hidden_size, "row"),
    )


def _make_delta_net(shape: ModelShape, net: DeltaNet) -> tuple[Module, ...]:
    rule = (("dt_bias", net.num_value_heads), ("A_log", net.num_value_heads))
    return (
        _make_norm(shape, "input_layernorm", shape.hidden_size),
        _make_linear("in_proj", shape.hidden_size, net.projected_width, "column"),
        _make_linear("conv1d", net.conv_width, net.conv_channels, "column", kind="ssm"),
        Module(name="delta_rule", kind="ssm", split="column", vectors=rule),
        _make_norm(shape, "out_norm", net.value_head_dim),
        _make_linear("out_proj", net.value_width, shape.hidden_size, "row"),
    )
