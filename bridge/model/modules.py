"""Modules of a layer, by Megatron's names, with their full dimensions and their split over TP.

The names are those of Megatron's modules without the parts that never differ (``self_attention.``,
``mlp.``, ``mixer.``); `MTP` layers contain an ordinary layer, whose names are kept.
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
    MOE_SUFFIX,
    TRANSFORMER_KIND,
    Experts,
    Latent,
    ModelShape,
    StateSpace,
    is_moe_kind,
)
from bridge.precision.linear_names import LINEAR_LAYERS
from bridge.target.fields import read_field
from bridge.target.versions import get_installed_version, is_at_least

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
    """It decides the precision that the module runs in.

    The kinds are linear, router, norm, embedding, head, attention, ssm, gate, mixing and adapter.
    mixing: of residual streams, of tokens or of groups of heads, outside of any linear layer.
    """
    inputs: int = 0
    outputs: int = 0
    split: str = ""
    """column: TP ranks share the outputs; row: the inputs; empty: every rank has all of it."""
    count: int = 1
    is_expert: bool = False
    is_high_precision: bool = False
    """Transformer Engine does not run it, so it stays in high precision under each scheme."""
    is_absorbed: bool = False
    """The same from megatron-core 0.17 on (`Settings.absorbs`)."""
    is_fp32: bool = False
    """Megatron keeps its parameters in FP32, and it computes in FP32.

    Of a core of attention only the parameters are in FP32.
    """
    is_detached: bool = False
    """Its input takes no gradient, so that it runs no dgrad."""
    is_frozen: bool = False
    """Its weights are not trained: there is an adapter, or the language model is frozen."""
    bias: bool = False
    vectors: tuple[tuple[str, int], ...] = ()
    """Further parameters by name and length, split like the outputs where `split` is column."""

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
        """Return the outputs and inputs that one of `ranks` tensor-parallel ranks holds."""
        outputs, inputs = self.outputs, self.inputs
        if self.kind in ("embedding", "head") and self.split == "column":
            outputs = shape.padded_vocab_size(ranks)
        if self.split == "column":
            outputs //= ranks
        elif self.split == "row":
            inputs //= ranks
        return outputs, inputs


def list_modules(shape: ModelShape, kind: str) -> tuple[Module, ...]:
    """Return the modules of a layer of the plan: embedding and output are layers, too."""
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

    The kinds are those of `ModelShape.kinds`.
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
    """Return the attention of a layer of one kind, or the delta net in its place."""
    if kind.startswith("delta_net") and shape.delta_net is not None:
        return _make_delta_net(shape, shape.delta_net)
    attention = kind.removesuffix(f"_{MOE_SUFFIX}")
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
    else:  # each stream is projected by itself
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
    """Return the module that makes one stream of several, where it has weights."""
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
    # From 0.17 on sparse attention takes the weight of the key-value up projection into products
    # outside of any linear.
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
    if shape.indexer is not None and kind.removesuffix("_moe") == "sparse":
        modules += _make_indexer(shape, latent, shape.indexer)
    modules.append(_make_core_attention(shape, query, value, is_high=is_sparse))
    modules.append(_make_linear("linear_proj", value, hidden, "row", bias=shape.add_bias_linear))
    return tuple(modules)


def _make_query_key_norm(shape: ModelShape, name: str, width: int) -> tuple[Module, ...]:
    """Return the norm of a latent of queries or of keys, where the model has such norms."""
    if not shape.qk_layernorm:
        return ()
    return (_make_norm(shape, name, width),)


def _make_compressed_attention(
    shape: ModelShape, latent: Latent, attention: CompressedAttention, kind: str
) -> tuple[Module, ...]:
    """Return the modules of DeepSeek-V4's hybrid attention.

    One key is its own value, and outputs are projected in groups. The projections of queries and of
    the key run in FP8, and so does the indexer's. The compressors, the indexer's weights and the
    first output projection, a parameter that no linear layer has, do not.
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
        f"{name}.linear_wkv", hidden, projected, "", is_high=True, is_detached=is_detached
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

    Their inputs take no gradient, and they have a separate loss.
    """
    hidden, width, heads = shape.hidden_size, indexer.head_dim, indexer.num_heads
    weights = _make_linear(
        "indexer.linear_weights_proj", hidden, heads, "", is_high=True, is_detached=True
    )
    return (
        _make_linear("indexer.linear_wq_b", rank, heads * width, "", is_detached=True),
        weights,
        *_make_compressor("indexer.compressor", hidden, width, ratio, is_detached=True),
    )


def _make_indexer(shape: ModelShape, latent: Latent, indexer: Indexer) -> tuple[Module, ...]:
    """Return the modules that choose keys.

    Every tensor-parallel rank has all of them, and they have a separate loss.
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
    # These are parameters of the mixer itself, which come before those of its modules.
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
        _make_linear("out_proj", net.value, shape.hidden_size, "row"),
    )


FURTHER_MODULES = {
    "self_attention": (
        "core_attention",
        "q_layernorm",
        "k_layernorm",
        "kv_layernorm",
        "delta_rule",
        "out_norm",
        "linear_kv_proj",
        "linear_o_group_proj",
    ),
    "mlp": ("router",),
    "mixer": ("conv1d", "ssm", "gated_norm"),
}
"""Module of a layer -> the modules inside it that `LINEAR_LAYERS` does not have."""


def _build_parent_table() -> dict[str, str]:
    """Return each module -> the module of a layer that it is inside of."""
    parents: dict[str, str] = {}
    for parent, names in FURTHER_MODULES.items():
        for name in (*LINEAR_LAYERS[parent], *names):
            parents[name] = parent
    return parents


_PARENT_OF = _build_parent_table()
"""Module -> the module of a layer that it is inside of."""
MTP_MODULES = ("enorm", "hnorm", "eh_proj", "e_proj", "h_proj", "hc_head", "final_layernorm")
"""Modules of a multi-token-prediction layer around its transformer layer."""
MEGATRON_NAMES = {"gated_norm": "norm"}
"""Name in the plan -> name in Megatron, where a layer has two modules of the same name."""


@dataclass(frozen=True, kw_only=True)
class ModulePaths:
    """The names of a model's modules within a chunk.

    They are those of `named_modules()` of GPTModel and MambaModel, 0.16.1 and 0.19.2.
    """

    are_experts_grouped: bool = False
    """The experts of a layer are one module (`moe_grouped_gemm`)."""
    inside_mtp: str = "mtp_model_layer"
    """Name of the transformer layer inside a multi-token-prediction layer."""
    mixer: str = "mixer"
    """Name of the module that mixes tokens without a softmax.

    It is that of a Mamba layer, or of a gated delta net.
    """

    @classmethod
    def from_model(cls, model: Any) -> ModulePaths:
        """Return the names of a model's config values.

        They are those of the installed megatron-core, or else of the newest.
        """
        version = get_installed_version("mcore")
        is_old = version is not None and not is_at_least(version, "0.17")
        are_grouped = bool(read_field(model, "moe_grouped_gemm", default=False))
        variant = read_field(model, "experimental_attention_variant")
        return cls(
            are_experts_grouped=are_grouped,
            inside_mtp="transformer_layer" if is_old else "mtp_model_layer",
            mixer="mixer" if variant is None else "self_attention",
        )

    def path(self, label: str, index: int, module: str) -> str:
        """Return the name of a module.

        Args:
            label: Label of its layer in the plan.
            index: Number of its layer within the chunk.
            module: Its name in the plan.
        """
        if label == "embedding":
            return f"embedding.{module}"
        if label == "output":
            if module == "output_layer":
                return module
            return f"decoder.{module}"
        if not label.startswith("mtp"):
            return f"decoder.layers.{index}.{self._get_inner_name(module)}"
        depth, _, inner = label.partition(" ")[2].partition(".")
        outer = f"mtp.layers.{int(depth) - 1}"
        if inner:
            return (
                f"{outer}.{self.inside_mtp}.layers.{int(inner) - 1}.{self._get_inner_name(module)}"
            )
        if module in MTP_MODULES:
            return f"{outer}.{module}"
        return f"{outer}.{self.inside_mtp}.{self._get_inner_name(module)}"

    def get_debug_name(self, label: str, module: str) -> str:
        """Return the name that Transformer Engine's debugger has for a linear layer.

        It begins with the wrappers of a chunk, Megatron's DDP and Float16Module, and counts layers
        over the whole model from 1 on. Each expert of a grouped layer has a name; this is that of
        the first. Source: nvdlfw-inspect 0.2.2 api.py, infer_and_assign_layer_names; Megatron
        Bridge 0.6.2 training/tensor_inspect.py; Transformer Engine 2.20.2
        pytorch/module/grouped_linear.py, _get_debug_quantizers.

        Args:
            label: Label of the layer in the plan.
            module: Name of the linear layer in the plan.
        """
        index = 0
        if label.isdecimal():
            index = int(label)
        name = self.path(label, index, module)
        if module.startswith("experts.") and self.are_experts_grouped:
            name += ".gemm_0"
        if label.startswith("mtp"):
            depth = int(label.partition(" ")[2].partition(".")[0])
            name = name.replace(f"mtp.layers.{depth - 1}.", f"mtp.layers.{depth}.", 1)
        return f"model.module.module.{name}"

    def _get_inner_name(self, module: str) -> str:
        """Return the name of a module within its layer."""
        expert = module.removeprefix("experts.")
        if expert != module:
            if self.are_experts_grouped:
                return f"mlp.experts.{expert}"
            return f"mlp.experts.local_experts.0.{expert}"
        if module.startswith("shared_experts."):
            return f"mlp.{module}"
        if module.startswith(("indexer.", "compressor")):
            return f"self_attention.core_attention.{module}"
        name = MEGATRON_NAMES.get(module, module)
        parent = _PARENT_OF.get(module)
        if parent is None:
            return name
        if parent == "mixer":
            parent = self.mixer
        return f"{parent}.{name}"
