"""Modules of a layer, by Megatron's names, with their full dimensions and their split over TP.

The names are those of Megatron's modules without the parts that never differ (``self_attention.``, ``mlp.``,
``mixer.``); `MTP` layers contain an ordinary layer, whose names are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.plan.shape import ModelShape

__all__ = [
    "EMBEDDING",
    "OUTPUT",
    "Module",
    "embedding_modules",
    "layer_modules",
    "modules_of",
    "mtp_modules",
    "output_modules",
]

EMBEDDING = "embedding"
OUTPUT = "output"


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One module of a layer."""

    name: str
    kind: str
    """linear, router, norm, embedding, head, attention, ssm, gate: decides the precision it runs in."""
    inputs: int = 0
    outputs: int = 0
    split: str = ""
    """column: TP ranks share the outputs; row: the inputs; empty: every rank has all of it."""
    count: int = 1
    """Copies in the layer: one per expert."""
    is_expert: bool = False
    bias: bool = False
    vectors: tuple[tuple[str, int], ...] = ()
    """Further parameters by name and length, split over TP like the outputs where `split` is column."""
    registered: int = 0
    """Place among the layer's modules in Megatron's constructors, which is the order of parameters in its buffers."""

    @property
    def parameters(self) -> int:
        """Parameters of all copies over all ranks."""
        if self.kind == "attention":
            return 0
        matrix = self.inputs * self.outputs if self.kind != "norm" else self.outputs
        return self.count * (matrix + (self.outputs if self.bias else 0)) + sum(length for _, length in self.vectors)

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


def modules_of(shape: ModelShape, label: str, kind: str) -> tuple[Module, ...]:
    """Return the modules of a row of the plan: the embedding, a layer, an MTP layer or the output."""
    if label == EMBEDDING:
        return embedding_modules(shape)
    if label == OUTPUT:
        return output_modules(shape)
    return mtp_modules(shape) if kind == "mtp" else layer_modules(shape, kind)


@lru_cache(maxsize=256)
def layer_modules(shape: ModelShape, kind: str) -> tuple[Module, ...]:
    """Return the modules of a layer of one kind (`ModelShape.kinds`), in the order of the forward pass."""
    if kind == "mamba":
        return _mamba(shape)
    attention = _latent_attention(shape) if shape.latent is not None else _attention(shape)
    if kind == "attention":
        return attention
    before = _norm(shape, "pre_mlp_layernorm", shape.hidden_size, registered=10)
    mlp = (before, *_mlp(shape, shape.ffn_hidden_size))
    experts = (before, *_experts(shape))
    return {
        "mlp": mlp,
        "moe": experts,
        "transformer": (*attention, *mlp),
        "transformer_moe": (*attention, *experts),
    }[kind]


@lru_cache(maxsize=256)
def mtp_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Return the modules of one multi-token-prediction layer; its transformer layer is of the last layer's kind."""
    hidden = shape.hidden_size
    kind = "transformer_moe" if shape.experts is not None else "transformer"
    return (
        _norm(shape, "enorm", hidden, registered=-3),
        _norm(shape, "hnorm", hidden, registered=-2),
        Module(name="eh_proj", kind="linear", inputs=2 * hidden, outputs=hidden, split="column", registered=-1),
        *layer_modules(shape, kind),
        _norm(shape, "final_layernorm", hidden, registered=99),
    )


def embedding_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Return the modules that turn tokens into the first layer's input."""
    word = Module(
        name="word_embeddings",
        kind="embedding",
        inputs=shape.hidden_size,
        outputs=shape.padded_vocab_size(),
        split="column",
    )
    if shape.position_embedding_type != "learned_absolute":
        return (word,)
    position = Module(
        name="position_embeddings",
        kind="embedding",
        inputs=shape.hidden_size,
        outputs=shape.seq_length,
        registered=1,
    )
    return word, position


def output_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Return the modules that turn the last layer's output into logits."""
    head = Module(
        name="output_layer",
        kind="head",
        inputs=shape.hidden_size,
        outputs=shape.padded_vocab_size(),
        split="column",
        registered=1,
    )
    return _norm(shape, "final_layernorm", shape.hidden_size, registered=0), head


def _norm(shape: ModelShape, name: str, width: int, *, registered: int) -> Module:
    return Module(name=name, kind="norm", outputs=width, bias=shape.layer_norm_bias, registered=registered)


def _attention(shape: ModelShape) -> tuple[Module, ...]:
    query = shape.num_attention_heads * shape.kv_channels
    key_value = 2 * shape.num_query_groups * shape.kv_channels
    gate = query if shape.attention_output_gate else 0
    bias = shape.add_bias_linear
    norms: tuple[Module, ...] = ()
    if shape.qk_layernorm:
        norms = (
            _norm(shape, "q_layernorm", shape.kv_channels, registered=3),
            _norm(shape, "k_layernorm", shape.kv_channels, registered=4),
        )
    return (
        _norm(shape, "input_layernorm", shape.hidden_size, registered=0),
        Module(
            name="linear_qkv",
            kind="linear",
            inputs=shape.hidden_size,
            outputs=query + key_value + gate,
            split="column",
            bias=bias or shape.add_qkv_bias,
            registered=2,
        ),
        *norms,
        Module(name="core_attention", kind="attention", inputs=query, outputs=query, split="column"),
        Module(
            name="linear_proj",
            kind="linear",
            inputs=query,
            outputs=shape.hidden_size,
            split="row",
            bias=bias,
            registered=1,
        ),
    )


def _latent_attention(shape: ModelShape) -> tuple[Module, ...]:
    latent = shape.latent
    if latent is None:
        return ()
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    key_value = heads * (latent.qk_head_dim + latent.v_head_dim)
    down = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    queries: tuple[Module, ...]
    if latent.q_lora_rank is None:
        queries = (_linear("linear_q_proj", hidden, query, "column", 2),)
    else:
        queries = (
            _linear("linear_q_down_proj", hidden, latent.q_lora_rank, "", 2),
            *([_norm(shape, "q_layernorm", latent.q_lora_rank, registered=6)] if shape.qk_layernorm else []),
            _linear("linear_q_up_proj", latent.q_lora_rank, query, "column", 3),
        )
    return (
        _norm(shape, "input_layernorm", hidden, registered=0),
        *queries,
        _linear("linear_kv_down_proj", hidden, down, "", 4),
        *([_norm(shape, "kv_layernorm", latent.kv_lora_rank, registered=7)] if shape.qk_layernorm else []),
        _linear("linear_kv_up_proj", latent.kv_lora_rank, key_value, "column", 5),
        Module(
            name="core_attention", kind="attention", inputs=query, outputs=heads * latent.v_head_dim, split="column"
        ),
        Module(
            name="linear_proj",
            kind="linear",
            inputs=heads * latent.v_head_dim,
            outputs=hidden,
            split="row",
            bias=shape.add_bias_linear,
            registered=1,
        ),
    )


def _linear(name: str, inputs: int, outputs: int, split: str, registered: int) -> Module:
    return Module(name=name, kind="linear", inputs=inputs, outputs=outputs, split=split, registered=registered)


def _mlp(
    shape: ModelShape, ffn: int, prefix: str = "", *, experts: int = 0, registered: int = 20
) -> tuple[Module, ...]:
    gated = 2 if shape.gated_linear_unit else 1
    shared = {"count": experts or 1, "is_expert": bool(experts), "bias": shape.add_bias_linear, "kind": "linear"}
    fc1 = Module(
        name=f"{prefix}linear_fc1",
        inputs=shape.hidden_size,
        outputs=gated * ffn,
        split="column",
        registered=registered,
        **shared,  # type: ignore[arg-type]
    )
    fc2 = Module(
        name=f"{prefix}linear_fc2",
        inputs=ffn,
        outputs=shape.hidden_size,
        split="row",
        registered=registered + 1,
        **shared,  # type: ignore[arg-type]
    )
    return fc1, fc2


def _experts(shape: ModelShape) -> tuple[Module, ...]:
    experts = shape.experts
    if experts is None:
        return ()
    router = Module(
        name="router",
        kind="router",
        inputs=shape.hidden_size,
        outputs=experts.num_experts,
        bias=experts.router_bias,
        registered=20,
    )
    routed = _mlp(shape, experts.ffn_hidden_size, "experts.", experts=experts.num_experts, registered=30)
    if not experts.shared_ffn_hidden_size:
        return router, *routed
    shared = _mlp(shape, experts.shared_ffn_hidden_size, "shared_experts.", registered=41)
    gate = Module(name="shared_experts.gate", kind="gate", inputs=shape.hidden_size, outputs=1, registered=40)
    return router, *routed, *([gate] if experts.shared_gate else []), *shared


def _mamba(shape: ModelShape) -> tuple[Module, ...]:
    space = shape.state_space
    if space is None:
        return ()
    conv = space.inner + 2 * space.num_groups * space.state_dim
    heads = space.num_heads
    # dt_bias, A_log and D are parameters of the mixer itself, which come before those of its modules.
    mixer = (("dt_bias", heads), ("A_log", heads), ("D", heads))
    return (
        _norm(shape, "norm", shape.hidden_size, registered=9),
        _linear("in_proj", shape.hidden_size, space.projected, "column", 1),
        Module(
            name="conv1d",
            kind="ssm",
            inputs=space.conv_width,
            outputs=conv,
            split="column",
            bias=True,
            registered=2,
        ),
        Module(name="ssm", kind="ssm", split="column", vectors=mixer, registered=0),
        Module(name="gated_norm", kind="norm", outputs=space.inner, split="column", registered=3),
        _linear("out_proj", space.inner, shape.hidden_size, "row", 4),
    )
