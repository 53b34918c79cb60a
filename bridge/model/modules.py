"""Modules of a layer, by Megatron's names, with their full dimensions and their split over TP.

The names are those of Megatron's modules without the parts that never differ (``self_attention.``, ``mlp.``,
``mixer.``); `MTP` layers contain an ordinary layer, whose names are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from bridge.model.compressed import COMPRESSED, RATIOS, CompressedAttention, HyperConnections
from bridge.model.shape import DENSE, MOE, Experts, Latent, ModelShape, StateSpace, has_experts
from bridge.model.variants import DeltaNet, Indexer
from bridge.precision.modules import OF_A_LAYER
from bridge.target.fields import read_field
from bridge.target.versions import at_least, installed

REGISTERED = (
    *(
        "hc_head",
        "enorm",
        "hnorm",
        "eh_proj",
        "e_proj",
        "h_proj",
        "word_embeddings",
        "position_embeddings",
    ),
    *("input_layernorm", "linear_o_group_proj", "core_attention"),
    *("compressor", "compressor.linear_wkv", "compressor.linear_wgate", "compressor.norm"),
    *("indexer.linear_wq_b", "indexer.linear_wk", "indexer.k_norm", "indexer.linear_weights_proj"),
    *("indexer.compressor", "indexer.compressor.linear_wkv", "indexer.compressor.linear_wgate"),
    *("indexer.compressor.norm",),
    *("delta_rule", "ssm", "in_proj", "conv1d", "gated_norm", "out_norm", "out_proj"),
    *(
        "linear_proj",
        "linear_qkv",
        "linear_q_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
    ),
    *("linear_kv_up_proj", "linear_kv_proj", "q_layernorm", "k_layernorm", "kv_layernorm"),
    *(
        "pre_mlp_layernorm",
        "linear_fc1",
        "linear_fc2",
        "router",
        "fc1_latent_proj",
        "fc2_latent_proj",
    ),
    *("experts.linear_fc1", "experts.linear_fc2"),
    *("shared_experts.gate", "shared_experts.linear_fc1", "shared_experts.linear_fc2"),
    *("self_attention_hyper_connection", "mlp_hyper_connection"),
    *("norm", "final_layernorm", "final_norm", "output_layer"),
)
"""Modules in the order in which Megatron's constructors make them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One module of a layer."""

    name: str
    kind: str
    """linear, router, norm, embedding, head, attention, ssm, gate, mixing, adapter: decides the precision it runs in.

    mixing: of residual streams, of tokens or of groups of heads, outside of any linear layer.
    """
    inputs: int = 0
    outputs: int = 0
    split: str = ""
    """column: TP ranks share the outputs; row: the inputs; empty: every rank has all of it."""
    count: int = 1
    is_expert: bool = False
    is_high: bool = False
    """Transformer Engine does not run it, so it stays in high precision under each scheme."""
    is_absorbed: bool = False
    """The same from megatron-core 0.17 on (`Settings.absorbs`)."""
    is_fp32: bool = False
    """Megatron keeps its parameters in FP32, and it computes in FP32; of a core of attention the parameters alone."""
    is_detached: bool = False
    """Its input takes no gradient, so that it runs no dgrad."""
    is_frozen: bool = False
    """Its weights are not trained: there is an adapter, or the language model is frozen."""
    bias: bool = False
    vectors: tuple[tuple[str, int], ...] = ()
    """Further parameters by name and length, split over TP like the outputs where `split` is column."""

    @property
    def registered(self) -> int:
        """Place in `REGISTERED`, which is the order of parameters in Megatron's buffers."""
        return REGISTERED.index(self.name.partition(".adapter")[0])

    @property
    def parameters(self) -> int:
        """Parameters of all copies over all ranks."""
        matrix = {"attention": 0, "norm": self.outputs}.get(self.kind, self.inputs * self.outputs)
        return self.count * (matrix + (self.outputs if self.bias else 0)) + sum(
            length for _, length in self.vectors
        )

    def on_rank(self, shape: ModelShape, ranks: int) -> tuple[int, int]:
        """Return the outputs and inputs that one of `ranks` tensor-parallel ranks holds."""
        outputs, inputs = self.outputs, self.inputs
        if self.kind in ("embedding", "head") and self.split == "column":
            outputs = shape.padded_vocab_size(ranks)
        if self.split == "column":
            outputs //= ranks
        elif self.split == "row":
            inputs //= ranks
        return outputs, inputs


def modules_of(shape: ModelShape, kind: str) -> tuple[Module, ...]:
    """Return the modules of a row of the plan: the embedding, a layer, an MTP layer or the output."""
    if kind == "embedding":
        return embedding_modules(shape)
    if kind == "output":
        return output_modules(shape)
    return mtp_modules(shape) if kind == "mtp" else layer_modules(shape, kind)


@lru_cache(maxsize=256)
def layer_modules(shape: ModelShape, kind: str) -> tuple[Module, ...]:
    """Return the modules of a layer of one kind (`ModelShape.kinds`), in the order of the forward pass."""
    if kind == "mamba":
        return _mamba(shape, shape.state_space) if shape.state_space is not None else ()
    modules: tuple[Module, ...] = ()
    attention, mixing = kind.removesuffix(f"_{MOE}"), shape.hyper_connections
    if mixing is not None:
        modules = (_hyper_connection(shape, "self_attention_hyper_connection", mixing),)
    if kind.startswith("delta_net") and shape.delta_net is not None:
        modules += _delta_net(shape, shape.delta_net)
    elif attention in RATIOS and shape.compressed is not None and shape.latent is not None:
        modules += _compressed_attention(shape, shape.latent, shape.compressed, attention)
    elif kind not in ("mlp", "moe"):
        is_latent = shape.latent is not None and kind != "attention"
        modules += (
            _latent_attention(shape, shape.latent, kind)
            if is_latent and shape.latent
            else _attention(shape)
        )
    if kind in ("attention", "latent_attention"):
        return modules
    if mixing is not None:
        modules += (_hyper_connection(shape, "mlp_hyper_connection", mixing),)
    modules += (_norm(shape, "pre_mlp_layernorm", shape.hidden_size),)
    if not has_experts(kind):
        return modules + _mlp(shape, shape.ffn_hidden_size)
    return modules + (_experts(shape, shape.experts) if shape.experts is not None else ())


@lru_cache(maxsize=256)
def mtp_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Return the modules of one multi-token-prediction layer; its transformer layer is of the kind `mtp_kind`.

    The layers inside a prediction layer of a hybrid model are rows of the plan by themselves ("mtp 1.1").
    """
    hidden = shape.hidden_size
    projections = [_matrix("eh_proj", 2 * hidden, hidden, "column")]
    if shape.hyper_connections is not None:  # each stream is projected by itself
        projections = [
            _matrix("e_proj", hidden, hidden, "column"),
            _matrix("h_proj", hidden, hidden, "column"),
        ]
    return (
        _norm(shape, "enorm", hidden),
        _norm(shape, "hnorm", hidden),
        *projections,
        *(() if shape.is_hybrid else layer_modules(shape, shape.mtp_kind)),
        *_contraction(shape),
        _norm(shape, "final_layernorm", hidden),
    )


def embedding_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Return the modules that turn tokens into the first layer's input."""
    hidden = shape.hidden_size
    word = _matrix("word_embeddings", hidden, shape.padded_vocab_size(), "column", kind="embedding")
    if shape.position_embedding_type != "learned_absolute":
        return (word,)
    return word, _matrix("position_embeddings", hidden, shape.seq_length, "", kind="embedding")


def output_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Return the modules that turn the last layer's output into logits."""
    hidden = shape.hidden_size
    head = _matrix("output_layer", hidden, shape.padded_vocab_size(), "column", kind="head")
    norm = _norm(shape, "final_norm" if shape.is_hybrid else "final_layernorm", hidden)
    return (*_contraction(shape), norm, head)


def _contraction(shape: ModelShape) -> tuple[Module, ...]:
    """Return the module that makes one stream of several, where it has weights."""
    mixing = shape.hyper_connections
    if mixing is None or not mixing.is_contraction_learned:
        return ()
    vectors = (("hc_head_base", mixing.streams), ("hc_head_scale", 1))
    inputs = mixing.streams * shape.hidden_size
    more: dict[str, Any] = {"kind": "mixing", "is_fp32": mixing.is_fp32, "vectors": vectors}
    return (_matrix("hc_head", inputs, mixing.streams, "", **more),)


def _hyper_connection(shape: ModelShape, name: str, mixing: HyperConnections) -> Module:
    """Return the module that mixes the residual streams in front of an attention or an MLP."""
    factors = tuple((factor, 1) for factor in ("alpha_pre", "alpha_post", "alpha_res"))
    more: dict[str, Any] = {
        "kind": "mixing",
        "is_fp32": mixing.is_fp32,
        "vectors": (*factors, ("bias", mixing.mapped)),
    }
    return _matrix(name, mixing.streams * shape.hidden_size, mixing.mapped, "", **more)


def _norm(shape: ModelShape, name: str, width: int) -> Module:
    return Module(name=name, kind="norm", outputs=width, bias=shape.layer_norm_bias)


def _matrix(
    name: str, inputs: int, outputs: int, split: str, *, kind: str = "linear", **more: Any
) -> Module:
    return Module(name=name, kind=kind, inputs=inputs, outputs=outputs, split=split, **more)


def _core(shape: ModelShape, inputs: int, outputs: int, **more: Any) -> Module:
    offsets = (("softmax_offset", shape.num_attention_heads),) if shape.has_softmax_offset else ()
    return _matrix(
        "core_attention", inputs, outputs, "column", kind="attention", vectors=offsets, **more
    )


def _attention(shape: ModelShape) -> tuple[Module, ...]:
    hidden, channels, bias = shape.hidden_size, shape.kv_channels, shape.add_bias_linear
    query = shape.num_attention_heads * channels
    projected = (
        2 if shape.attention_output_gate else 1
    ) * query + 2 * shape.num_query_groups * channels
    names = ("q_layernorm", "k_layernorm")
    norms = [
        Module(name=name, kind="norm") if shape.qk_l2_norm else _norm(shape, name, channels)
        for name in names
    ]
    return (
        _norm(shape, "input_layernorm", hidden),
        _matrix("linear_qkv", hidden, projected, "column", bias=bias or shape.add_qkv_bias),
        *(norms if shape.qk_layernorm or shape.qk_l2_norm else ()),
        _core(shape, query, query),
        _matrix("linear_proj", query, hidden, "row", bias=bias),
    )


def _latent_attention(shape: ModelShape, latent: Latent, kind: str = DENSE) -> tuple[Module, ...]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    key_value = heads * (latent.qk_head_dim + latent.v_head_dim)
    down = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    # From 0.17 on sparse attention takes the weight of the key-value up projection into products outside of any linear.
    is_sparse, chooses = shape.indexer is not None, kind.removesuffix("_moe") == "sparse"
    if latent.q_lora_rank is None:
        queries = [_matrix("linear_q_proj", hidden, query, "column")]
    else:
        queries = [
            _matrix("linear_q_down_proj", hidden, latent.q_lora_rank, ""),
            *([_norm(shape, "q_layernorm", latent.q_lora_rank)] if shape.qk_layernorm else []),
            _matrix("linear_q_up_proj", latent.q_lora_rank, query, "column"),
        ]
    return (
        _norm(shape, "input_layernorm", hidden),
        *queries,
        _matrix("linear_kv_down_proj", hidden, down, ""),
        *([_norm(shape, "kv_layernorm", latent.kv_lora_rank)] if shape.qk_layernorm else []),
        _matrix(
            "linear_kv_up_proj", latent.kv_lora_rank, key_value, "column", is_absorbed=is_sparse
        ),
        *(_indexer(shape, latent, shape.indexer) if chooses and shape.indexer is not None else ()),
        _core(shape, query, heads * latent.v_head_dim, is_high=is_sparse),
        _matrix(
            "linear_proj", heads * latent.v_head_dim, hidden, "row", bias=shape.add_bias_linear
        ),
    )


def _compressed_attention(
    shape: ModelShape, latent: Latent, attention: CompressedAttention, kind: str
) -> tuple[Module, ...]:
    """Return the modules of DeepSeek-V4's hybrid attention: one key that is its own value, and grouped outputs.

    The projections of queries and of the key run in FP8, and so does the indexer's; the compressors, the indexer's
    weights and the first output projection, a parameter that no linear layer has, do not.
    """
    hidden, heads, width = shape.hidden_size, shape.num_attention_heads, latent.v_head_dim
    rank = latent.q_lora_rank or hidden
    query, ratio = heads * width, RATIOS[kind]
    sinks = (("attn_sink", heads),)
    return (
        _norm(shape, "input_layernorm", hidden),
        _matrix("linear_q_down_proj", hidden, rank, ""),
        *([_norm(shape, "q_layernorm", rank)] if shape.qk_layernorm else []),
        _matrix("linear_q_up_proj", rank, query, "column"),
        _matrix("linear_kv_proj", hidden, width, "column"),
        *([_norm(shape, "kv_layernorm", width)] if shape.qk_layernorm else []),
        *(_compressor("compressor", hidden, width, ratio) if ratio else ()),
        *(
            _compressed_indexer(shape, rank, shape.indexer, ratio)
            if kind == COMPRESSED and shape.indexer
            else ()
        ),
        Module(name="core_attention", kind="attention", vectors=sinks, is_high=True, is_fp32=True),
        _matrix(
            "linear_o_group_proj",
            query // attention.output_groups,
            attention.projected,
            "",
            kind="mixing",
        ),
        _matrix("linear_proj", attention.projected, hidden, "row", bias=shape.add_bias_linear),
    )


def _compressor(
    name: str, hidden: int, width: int, ratio: int, *, is_detached: bool = False
) -> tuple[Module, ...]:
    """Return the modules that make one key of several tokens; those of four tokens overlap, which doubles them."""
    projected = 2 * width if ratio == RATIOS[COMPRESSED] else width
    positions = (("ape", ratio * projected),)
    return (
        _matrix(f"{name}.linear_wkv", hidden, projected, "", is_high=True, is_detached=is_detached),
        _matrix(
            f"{name}.linear_wgate", hidden, projected, "", is_high=True, is_detached=is_detached
        ),
        Module(name=name, kind="mixing", vectors=positions, is_fp32=True),
        Module(name=f"{name}.norm", kind="norm", outputs=width),
    )


def _compressed_indexer(
    shape: ModelShape, rank: int, indexer: Indexer, ratio: int
) -> tuple[Module, ...]:
    """Return the modules that choose compressed keys; their inputs take no gradient, and they have their own loss."""
    hidden, width = shape.hidden_size, indexer.head_dim
    return (
        _matrix("indexer.linear_wq_b", rank, indexer.num_heads * width, "", is_detached=True),
        _matrix(
            "indexer.linear_weights_proj",
            hidden,
            indexer.num_heads,
            "",
            is_high=True,
            is_detached=True,
        ),
        *_compressor("indexer.compressor", hidden, width, ratio, is_detached=True),
    )


def _indexer(shape: ModelShape, latent: Latent, indexer: Indexer) -> tuple[Module, ...]:
    """Return the modules that choose keys; every tensor-parallel rank has all of them, and a loss of their own."""
    hidden, width = shape.hidden_size, indexer.head_dim
    return (
        _matrix(
            "indexer.linear_wq_b",
            latent.q_lora_rank or hidden,
            indexer.num_heads * width,
            "",
            is_detached=True,
        ),
        _matrix("indexer.linear_wk", hidden, width, "", is_detached=True),
        Module(name="indexer.k_norm", kind="norm", outputs=width, bias=True),
        _matrix("indexer.linear_weights_proj", hidden, indexer.num_heads, "", is_detached=True),
    )


def _mlp(
    shape: ModelShape, ffn: int, prefix: str = "", width: int | None = None
) -> tuple[Module, Module]:
    hidden, bias = width or shape.hidden_size, shape.add_bias_linear
    return (
        _matrix(
            f"{prefix}linear_fc1",
            hidden,
            (2 if shape.gated_linear_unit else 1) * ffn,
            "column",
            bias=bias,
        ),
        _matrix(f"{prefix}linear_fc2", ffn, hidden, "row", bias=bias),
    )


def _experts(shape: ModelShape, experts: Experts) -> tuple[Module, ...]:
    """Return the router, the experts, the projections around them where they work at a latent width, and the rest."""
    hidden, latent, bias = shape.hidden_size, experts.latent_size, shape.add_bias_linear
    router = _matrix(
        "router", hidden, experts.num_experts, "", kind="router", bias=experts.router_bias
    )
    before = [_matrix("fc1_latent_proj", hidden, latent, "", bias=bias)] if latent else []
    after = [_matrix("fc2_latent_proj", latent, hidden, "", bias=bias)] if latent else []
    routed = [
        replace(module, count=experts.num_experts, is_expert=True)
        for module in _mlp(shape, experts.ffn_hidden_size, "experts.", width=latent)
    ]
    if not experts.shared_ffn_hidden_size:
        return router, *before, *routed, *after
    gate = _matrix("shared_experts.gate", hidden, 1, "", kind="gate")
    shared = _mlp(shape, experts.shared_ffn_hidden_size, "shared_experts.")
    return router, *before, *routed, *after, *([gate] if experts.shared_gate else []), *shared


def _mamba(shape: ModelShape, space: StateSpace) -> tuple[Module, ...]:
    conv = space.inner + 2 * space.num_groups * space.state_dim
    # dt_bias, A_log and D are parameters of the mixer itself, which come before those of its modules.
    mixer = tuple((name, space.num_heads) for name in ("dt_bias", "A_log", "D"))
    return (
        _norm(shape, "norm", shape.hidden_size),
        _matrix("in_proj", shape.hidden_size, space.projected, "column"),
        _matrix("conv1d", space.conv_width, conv, "column", kind="ssm", bias=True),
        Module(name="ssm", kind="ssm", split="column", vectors=mixer),
        Module(name="gated_norm", kind="norm", outputs=space.inner, split="column"),
        _matrix("out_proj", space.inner, shape.hidden_size, "row"),
    )


def _delta_net(shape: ModelShape, net: DeltaNet) -> tuple[Module, ...]:
    rule = tuple((name, net.num_value_heads) for name in ("dt_bias", "A_log"))
    return (
        _norm(shape, "input_layernorm", shape.hidden_size),
        _matrix("in_proj", shape.hidden_size, net.projected, "column"),
        _matrix("conv1d", net.conv_width, net.convolved, "column", kind="ssm"),
        Module(name="delta_rule", kind="ssm", split="column", vectors=rule),
        _norm(shape, "out_norm", net.value_head_dim),
        _matrix("out_proj", net.value, shape.hidden_size, "row"),
    )


OTHER_PARTS = {
    "self_attention": (
        *("core_attention", "q_layernorm", "k_layernorm", "kv_layernorm", "delta_rule", "out_norm"),
        *("linear_kv_proj", "linear_o_group_proj"),
    ),
    "mlp": ("router",),
    "mixer": ("conv1d", "ssm", "gated_norm"),
}
"""Module of a layer -> its own modules next to the linear layers."""
_PARENT_OF = {
    name: f"{parent}."
    for parent, names in OTHER_PARTS.items()
    for name in (*OF_A_LAYER[parent], *names)
}
OF_MTP = ("enorm", "hnorm", "eh_proj", "e_proj", "h_proj", "hc_head", "final_layernorm")
"""Modules of a multi-token-prediction layer around its transformer layer."""
RENAMED = {"gated_norm": "norm"}
"""Name in the plan -> name in Megatron, where a layer has two modules of the same name."""


@dataclass(frozen=True, kw_only=True)
class ModulePaths:
    """How a model names its modules within a chunk: `named_modules()` of GPTModel and MambaModel, 0.16.1 and 0.19.2."""

    are_experts_grouped: bool = False
    """The experts of a layer are one module (`moe_grouped_gemm`)."""
    inside_mtp: str = "mtp_model_layer"
    """Name of the transformer layer inside a multi-token-prediction layer."""
    mixer: str = "mixer"
    """Name of the module that mixes tokens without a softmax: that of a Mamba layer, or of a gated delta net."""

    @classmethod
    def of(cls, model: Any) -> ModulePaths:
        """Return the names of a model's config values, in the installed megatron-core or else the newest."""
        version = installed("mcore")
        is_old = version is not None and not at_least(version, "0.17")
        return cls(
            are_experts_grouped=bool(read_field(model, "moe_grouped_gemm", default=False)),
            inside_mtp="transformer_layer" if is_old else "mtp_model_layer",
            mixer="mixer"
            if read_field(model, "experimental_attention_variant") is None
            else "self_attention",
        )

    def path(self, label: str, index: int, module: str) -> str:
        """Return the name of a module by the label of its row in the plan and its layer's number within the chunk."""
        if label == "embedding":
            return f"embedding.{module}"
        if label == "output":
            return module if module == "output_layer" else f"decoder.{module}"
        if label.startswith("mtp"):
            depth, _, inner = label.partition(" ")[2].partition(".")
            outer = f"mtp.layers.{int(depth) - 1}"
            if inner:
                return f"{outer}.{self.inside_mtp}.layers.{int(inner) - 1}.{self._inner(module)}"
            return (
                f"{outer}.{module}"
                if module in OF_MTP
                else f"{outer}.{self.inside_mtp}.{self._inner(module)}"
            )
        return f"decoder.layers.{index}.{self._inner(module)}"

    def _inner(self, module: str) -> str:
        expert = module.removeprefix("experts.")
        if expert != module:
            return (
                f"mlp.experts.{expert}"
                if self.are_experts_grouped
                else f"mlp.experts.local_experts.0.{expert}"
            )
        if module.startswith("shared_experts."):
            return f"mlp.{module}"
        if module.startswith(("indexer.", "compressor")):
            return f"self_attention.core_attention.{module}"
        parent = _PARENT_OF.get(module, "")
        return f"{f'{self.mixer}.' if parent == 'mixer.' else parent}{RENAMED.get(module, module)}"
