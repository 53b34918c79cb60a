"""Activation memory: the tensors that autograd keeps for the backward pass, counted operator by operator.

Each operator keeps what its backward pass reads: a linear its input, an activation its input, a norm its input and
statistics, attention its query, key, value, output and the log of its softmax sums. Under FP8 and FP4 a linear keeps
the quantised input instead (the column-wise copy, which the weight-gradient GEMM reads). Two sets of operators are
known:

- `te`: fused kernels of Transformer Engine and Megatron on a GPU. Read in Transformer Engine 2.20 and megatron-core
  0.16.1; the totals follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, with flash attention.
- `local`: Megatron's local layers over plain torch, as they run on a CPU here; measured.

Memory that lives only inside one operator is not counted. Mixture-of-experts layers assume an even load.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import RunConfigError
from bridge.plan.memory_copies import element_bytes
from bridge.plan.precision_plan import LOW, PlanLayer, PrecisionPlan
from bridge.rules.section import Section, read_section
from bridge.rules.shape.model import Experts, Latent, StateSpace
from bridge.rules.shape.parallel import Place
from bridge.rules.shape.variants import DeltaNet, Indexer

Parts = defaultdict[str, float]
"""Bytes of a layer by the part of it that can be recomputed."""
DROPS = {
    "core_attn": ("core_attn",),
    "layernorm": ("layernorm",),
    "mlp": ("mlp", "mlp_act"),
    "moe": ("router", "experts", "experts_act", "shared_experts"),
    "moe_act": ("experts_act",),
    "shared_experts": ("shared_experts",),
    "mla_up_proj": ("up_proj",),
}
"""A name in `recompute_modules` -> the parts that are computed again instead of kept."""
DELTA_CHUNK = 64
"""Tokens of a chunk in the kernel of gated delta net."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Tokens that a rank works on at a time, and the parts that it recomputes instead of keeping them."""

    seq_length: int = 0
    """Tokens per sample before context parallelism; 0: activations are not counted."""
    micro_batch_size: int = 1
    micro_batches: int | None = None
    """Micro-batches per step and rank; None: enough to fill the pipeline."""
    recompute: str = "none"
    modules: tuple[str, ...] = ()
    method: str = "uniform"
    """How `full` groups layers: uniform, or block (the first layers of each chunk only)."""
    layers: int = 1
    """Layers per group, or per block."""
    hidden_dropout: bool = False
    activation: str = "gelu"
    operators: str = "te"
    widened_attention: bool = False
    """local: the attention of 16-bit models runs in FP32, on CPUs without 16-bit GEMMs."""

    @classmethod
    def of(cls, model: Any, train: Any = None, *, data_parallel: int = 1, **changes: Any) -> Workload:
        """Return the workload of model and training fields, or sections; `changes` are fields of this class."""
        model, train = read_section("model", model), read_section("train", train)
        batch, whole = _count("train.micro_batch_size", train, 1), _count("train.global_batch_size", train, 0, least=0)
        given = model.given("recompute_modules", ("core_attn",))
        granularity = model.given("recompute_granularity")
        modules = (given,) if isinstance(given, str) else tuple(map(str, given))
        activation = model.given("activation_func", "gelu")
        return replace(
            cls(
                seq_length=_count("model.seq_length", model, 0, least=0),
                micro_batch_size=batch,
                micro_batches=max(1, whole // (batch * data_parallel)) if whole else None,
                recompute=granularity if granularity in ("selective", "full") else "none",
                modules=modules if granularity == "selective" else (),
                method=model.given("recompute_method", "uniform"),
                layers=_count("model.recompute_num_layers", model, 1),
                hidden_dropout=model.values["hidden_dropout"] > 0,
                activation=str(getattr(activation, "__name__", activation)),
            ),
            **changes,
        )


def _count(path: str, section: Section, default: int, *, least: int = 1) -> int:
    """Return a whole number of a section; RunConfigError where it holds something else."""
    number: int = section.given(path.partition(".")[2], default)
    wrong = [one.value for one in section.malformed if one.path == path] or [number] * (number < least)
    if wrong:
        raise RunConfigError(f"{path}: must be a whole number of at least {least}, got {wrong[0]!r}. Correct it.")
    return number


def activation_bytes(plan: PrecisionPlan, places: Sequence[Place], workload: Workload) -> int:
    """Return the activations on a rank at its fullest: micro-batches in flight, and one group that is recomputed."""
    if not workload.seq_length:
        return 0
    kept = [kept_bytes(plan, place, workload) for place in places]
    in_flight = _in_flight(plan, places[0].stage, workload)
    total = sum(count * size for count, size in zip(in_flight, kept, strict=True))
    return round(total + max(_working_set(plan, place, workload) for place in places))


def kept_bytes(plan: PrecisionPlan, place: Place, workload: Workload) -> int:
    """Return the bytes that one micro-batch keeps in one model chunk."""
    count = _Counting(plan, workload)
    layers = {layer.label: layer for layer in plan.layers}
    recomputed = _recomputed(place, workload)
    total = count.embedding() if place.embedding else 0.0
    for position, index in enumerate(place.layers):
        layer = layers[str(index + 1)]
        if position in recomputed:
            total += recomputed[position] * count.stream
        else:
            parts = count.layer(layer)
            drop = [part for name in workload.modules for part in DROPS.get(name, ())]
            total += sum(size for part, size in parts.items() if part not in drop)
    if place.mtp:
        passes = plan.shape.mtp_num_layers // max(1, plan.shape.mtp_layers)  # of each prediction layer
        total += passes * sum(sum(count.layer(layer).values()) for layer in plan.layers if layer.is_mtp)
    return round(total + (count.output() if place.output else 0.0))


def _recomputed(place: Place, workload: Workload) -> dict[int, int]:
    """Return the layers of a chunk that are recomputed, and whether each is the first of its group (1) or not (0)."""
    if workload.recompute != "full":
        return {}
    count = len(place.layers)
    if workload.method == "block":
        return dict.fromkeys(range(min(workload.layers, count)), 1)
    return {position: int(position % workload.layers == 0) for position in range(count)}


def _working_set(plan: PrecisionPlan, place: Place, workload: Workload) -> float:
    """Return the activations of one group of layers while it is recomputed."""
    if not _recomputed(place, workload):
        return 0.0
    size = 1 if workload.method == "block" else workload.layers
    layers = {layer.label: layer for layer in plan.layers}
    count = _Counting(plan, workload)
    each = [sum(count.layer(layers[str(index + 1)]).values()) for index in place.layers]
    return max(sum(each[start : start + size]) for start in range(0, len(each), size))


def _in_flight(plan: PrecisionPlan, stage: int, workload: Workload) -> list[int]:
    """Return how many micro-batches each chunk of a stage keeps at most, under 1F1B or its interleaved form."""
    stages, chunks = plan.parallel.pipeline, plan.parallel.virtual
    available = workload.micro_batches or stages * chunks
    if chunks == 1:
        return [min(available, stages - stage)]
    passes = min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, available * chunks)
    rounds = Counter(order // stages % chunks for order in range(passes))  # `stages` micro-batches a chunk at a time
    return [rounds[chunk] for chunk in range(chunks)]


class _Counting:
    """Bytes of one micro-batch's tensors on one rank."""

    def __init__(self, plan: PrecisionPlan, workload: Workload) -> None:
        parallel = plan.parallel
        self.plan, self.workload, self.shape = plan, workload, plan.shape
        self.tensor, self.expert_tensor = parallel.tensor, parallel.expert_tensor
        self.local = workload.operators == "local"
        self.element = element_bytes(plan.settings.mode)
        self.tokens = workload.seq_length * workload.micro_batch_size / parallel.context
        self.outside = self.tokens / (parallel.tensor if parallel.sequence_parallel else 1)
        self.residual = 4.0 if plan.settings.fp32_residual else self.element
        self.stream = self.outside * self.shape.hidden_size * self.residual

    def layer(self, layer: PlanLayer) -> Mapping[str, float]:
        """Return a layer's parts."""
        names = {module.name: module for module in layer.modules}
        parts: Parts = defaultdict(float)
        saved = {name: self._operand(names, name) for name in names}
        if "linear_proj" in names:
            self._attention(parts, saved)
        if "delta_rule" in names and self.shape.delta_net is not None:
            self._delta_net(parts, saved, self.shape.delta_net)
        elif "in_proj" in names and self.shape.state_space is not None:
            self._mamba(parts, saved, self.shape.state_space)
        if "experts.linear_fc1" in names and self.shape.experts is not None:
            self._experts(parts, saved, self.shape.experts)
        elif "linear_fc1" in names:
            self._mlp(parts, saved)
        if "eh_proj" in names:
            parts["base"] += 2 * self._norm() + self.outside * 2 * self.shape.hidden_size * saved["eh_proj"]
            parts["base"] += self.output()
        return parts

    def embedding(self) -> float:
        """Return token ids, and the dropout behind the embedding."""
        return self.tokens * 8 + self._dropout()

    def output(self) -> float:
        """Return the last norm, the output layer's input, and the softmax over the vocabulary in FP32."""
        head = self.outside * self.shape.hidden_size * self.element
        softmax = self.tokens * (self.shape.padded_vocab_size(self.tensor) // self.tensor * 4 + 9)
        return self._norm() + head + softmax

    def _operand(self, names: Mapping[str, Any], name: str) -> float:
        """Return the bytes per element of a linear's kept input."""
        row = names[name].row("input")
        return element_bytes(row.format) if row is not None and row.format in LOW and not self.local else self.element

    def _norm(self, width: int | None = None, tokens: float | None = None) -> float:
        """Return the bytes that a norm keeps in addition to its output."""
        width = width or self.shape.hidden_size
        tokens = self.outside if tokens is None else tokens
        if self.shape.layer_norm_bias:
            return tokens * (width * self.residual + (2 * self.element if self.local else 8))
        if self.local:  # torch's RMSNorm: the input in FP32 and the normalised input
            return tokens * (2 * 4 * width + 4)
        return tokens * (width * self.residual + 4)

    def _dropout(self) -> float:
        per_value = self.element if self.local else 1
        return self.outside * self.shape.hidden_size * per_value if self.workload.hidden_dropout else 0.0

    def _attention(self, parts: Parts, saved: Mapping[str, float]) -> None:
        shape, tokens = self.shape, self.tokens
        heads = shape.num_attention_heads / self.tensor
        parts["base"] += self._norm() + self._dropout()
        if "linear_kv_up_proj" in saved and shape.latent is not None:
            out = self._latent(parts, saved, heads, shape.latent)
        else:
            out = self._grouped(parts, saved, heads)
        parts["core_attn"] += tokens * heads * 4  # log of the softmax's sums
        parts["base"] += tokens * out * saved["linear_proj"]
        is_own = saved["linear_proj"] != self.element or (self.local and self.workload.widened_attention)
        if is_own and not (self.local and self.element == 4):
            parts["core_attn"] += tokens * out * (4 if self.local else self.element)

    def _grouped(self, parts: Parts, saved: Mapping[str, float], heads: float) -> float:
        shape, tokens = self.shape, self.tokens
        query = heads * shape.kv_channels
        key = max(1.0, shape.num_query_groups / self.tensor) * shape.kv_channels
        parts["layernorm"] += self.outside * shape.hidden_size * saved["linear_qkv"]
        rotated = query + key if shape.position_embedding_type not in ("none", "learned_absolute") else 0
        widened = self.local and self.workload.widened_attention and self.element < 4
        if widened and "core_attn" not in self.workload.modules:
            parts["core_attn"] += tokens * (query + 2 * key) * 4
        else:  # the value is a view, which keeps all of the projection's output
            parts["qkv"] += tokens * (rotated + query + 2 * key) * self.element
        if self.local and rotated:
            parts["base"] += 4 * self.workload.seq_length * shape.kv_channels * self.element
        if shape.qk_l2_norm:  # it has no weight, and keeps its input: in FP32 where torch computes it
            parts["base"] += tokens * (query + key) * (4 if self.local else self.element)
        elif shape.qk_layernorm:
            parts["base"] += self._norm(round(query), tokens) + self._norm(round(key), tokens)
        return query

    def _latent(self, parts: Parts, saved: Mapping[str, float], heads: float, latent: Latent) -> float:
        shape, tokens = self.shape, self.tokens
        first = "linear_q_proj" if latent.q_lora_rank is None else "linear_q_down_proj"
        parts["layernorm"] += self.outside * shape.hidden_size * saved[first]
        compressed = (latent.q_lora_rank or 0) + latent.kv_lora_rank
        if shape.qk_layernorm:
            parts["base"] += self._norm(compressed, self.outside)
        parts["base"] += self.outside * compressed * saved["linear_kv_up_proj"]
        wide = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        if shape.indexer is not None:
            return self._sparse(parts, saved, heads, latent, shape.indexer)
        parts["up_proj"] += tokens * heads * (2 * wide + latent.v_head_dim) * self.element
        return heads * latent.v_head_dim

    def _sparse(
        self, parts: Parts, saved: Mapping[str, float], heads: float, latent: Latent, indexer: Indexer
    ) -> float:
        """Count sparse attention in its absorbed form: queries and one key of the latent width, and the chosen keys.

        Estimated from the operators that Megatron calls, not measured.
        """
        absorbed = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        wide = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        parts["up_proj"] += self.tokens * (heads * (wide + absorbed) + absorbed) * self.element
        chosen = min(indexer.topk, self.workload.seq_length) * 4
        parts["core_attn"] += self.tokens * (heads * latent.kv_lora_rank * self.element + chosen)
        if "indexer.linear_wk" in saved:
            chosen_by = indexer.num_heads * (indexer.head_dim + 1) + indexer.head_dim
            parts["core_attn"] += self.tokens * chosen_by * self.element
        return heads * latent.v_head_dim

    def _mlp(self, parts: Parts, saved: Mapping[str, float]) -> None:
        parts["base"] += self._norm() + self._dropout()
        parts["layernorm"] += self.outside * self.shape.hidden_size * saved["linear_fc1"]
        hidden, out = self._hidden(self.shape.ffn_hidden_size / self.tensor, saved["linear_fc2"])
        parts["mlp"] += self.tokens * hidden
        parts["mlp_act"] += self.tokens * out

    def _hidden(self, ffn: float, operand: float) -> tuple[float, float]:
        """Return bytes per token of the activation's kept input, and of the second linear's."""
        if self.local and self.shape.gated_linear_unit:  # halves are copied, and each factor of the product is kept
            return 4 * ffn * self.element, ffn * self.element
        if self.local and self.workload.activation == "relu":  # keeps its result, which is the next linear's input
            return 0.0, ffn * self.element
        return (2 if self.shape.gated_linear_unit else 1) * ffn * self.element, ffn * operand

    def _experts(self, parts: Parts, saved: Mapping[str, float], experts: Experts) -> None:
        hidden, latent = self.shape.hidden_size, experts.latent_size
        parts["base"] += self._norm() + self._dropout()
        router = element_bytes(self.plan.settings.router or self.plan.settings.mode)
        parts["router"] += self.outside * (hidden * max(router, self.element) + experts.num_experts * 8)
        # An even load: each token goes to top-k experts, and the ranks that share an expert hold all of its tokens.
        copies = self.outside * experts.topk * self.expert_tensor
        wide, out = self._hidden(experts.ffn_hidden_size / self.expert_tensor, saved["experts.linear_fc2"])
        parts["experts"] += copies * ((latent or hidden) * saved["experts.linear_fc1"] + wide)
        if latent:
            parts["base"] += self.outside * (hidden * saved["fc1_latent_proj"] + latent * saved["fc2_latent_proj"])
        parts["experts_act"] += copies * out
        if experts.shared_ffn_hidden_size:
            wide, out = self._hidden(experts.shared_ffn_hidden_size / self.tensor, saved["shared_experts.linear_fc2"])
            parts["shared_experts"] += self.tokens * (wide + out)
            parts["shared_experts"] += self.outside * hidden * saved["shared_experts.linear_fc1"]

    def _mamba(self, parts: Parts, saved: Mapping[str, float], space: StateSpace) -> None:
        parts["base"] += self._norm() + self._dropout()
        parts["layernorm"] += self.outside * self.shape.hidden_size * saved["in_proj"]
        scan = (space.projected + space.inner) / self.tensor * self.element
        parts["scan"] += self.tokens * (scan + space.inner / self.tensor * saved["out_proj"] + 4)

    def _delta_net(self, parts: Parts, saved: Mapping[str, float], net: DeltaNet) -> None:
        """Count gated delta net: the projection, the convolution's input, and what the chunked kernel keeps.

        The kernel keeps queries and keys of every value head, values, a chunk's triangle per token and head, and the
        decay in FP32 (flash-linear-attention, ops/gated_delta_rule/chunk.py). Estimated, not measured.
        """
        parts["base"] += self._norm() + self._dropout()
        parts["layernorm"] += self.outside * self.shape.hidden_size * saved["in_proj"]
        heads = net.num_value_heads
        kernel = heads * (2 * net.key_head_dim + DELTA_CHUNK) + net.value
        kept = (net.projected + net.convolved + kernel + net.value) * self.element + heads * (4 + 4)
        parts["scan"] += self.tokens / self.tensor * (kept + net.value * saved["out_proj"])
