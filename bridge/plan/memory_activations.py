"""Activation memory: the tensors that autograd keeps for the backward pass, counted operator by operator.

Each operator keeps what its backward pass reads: a linear its input, an activation its input, a norm its input and
statistics, attention its query, key, value, output and the log of its softmax sums. Under FP8 and FP4 a linear keeps
the quantised input with its scales instead (the column-wise copy, which the weight-gradient GEMM reads). The operators
are those of Transformer Engine and Megatron on a GPU, with the fusions that the model's fields switch on.

`tests/plan/test_memory_kept.py` compares the count with what Transformer Engine's own Python keeps on a CPU, and
docs/howto/plan-and-memory.md has the table. Kernels that need a GPU are read in their sources: the log of the softmax's
sums, Mamba's scan, gated delta net and sparse attention.

Attention without a fused kernel (`transformer_impl=local`, `attention_backend=unfused`, FP32) also keeps its scores.

Memory that lives only inside one operator is not counted. Mixture-of-experts layers assume an even load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bridge.errors import RunConfigError
from bridge.model.layout import Place
from bridge.model.modules import Module
from bridge.model.section import Section, read_section
from bridge.model.shape import Experts, Latent, StateSpace
from bridge.model.variants import DeltaNet
from bridge.plan.memory_parameters import element_bytes, operand_bytes
from bridge.plan.precision_plan import LOW, PlanLayer, PlanModule, PrecisionPlan

Rows = Iterator[tuple[str, float]]
"""(part, bytes) of what a layer keeps; a part that `DROPS` names can be recomputed by itself."""
DROPS = {
    "core_attn": ("core_attn",),
    "layernorm": ("layernorm",),
    "mlp": ("mlp",),
    "moe": ("moe", "moe_act", "shared_experts"),
    "moe_act": ("moe_act",),
    "shared_experts": ("shared_experts",),
    "mla_up_proj": ("up_proj",),
}
"""A name in `recompute_modules` -> the parts that are computed again instead of kept."""
FUSING = (
    "bias_activation_fusion",
    "use_fused_weighted_squared_relu",
    "use_transformer_engine_op_fuser",
)
"""Fields under which the activation function is one kernel."""
FUSED_WITH_NORM = ("linear_qkv", "linear_fc1", "in_proj")
"""Linear layers that Transformer Engine runs in one operator with the norm before them."""
FUSED, LOCAL, UNFUSED = "fused", "local", "unfused"
"""Cores of attention: kernels that keep no scores; Megatron's DotProductAttention; Transformer Engine's
UnfusedDotProductAttention."""
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
    group_size: int | None = None
    """Micro-batches of an interleaved pipeline that pass a chunk before the next one; None: as many as stages."""
    keeps_outputs: bool = True
    """Whether a pipeline stage keeps what it sent (without `deallocate_pipeline_outputs`)."""
    is_combined: bool = False
    """A forward and a backward pass run at the same time (`overlap_moe_expert_parallel_comm`)."""
    recompute: str = "none"
    modules: tuple[str, ...] = ()
    method: str = "uniform"
    """How `full` groups layers: uniform, or block (the first layers of each chunk only)."""
    layers: int = 1
    """Layers per group, or per block."""
    hidden_dropout: bool = False
    fused_activation: bool = False
    """The activation function, with the experts' weights, is one kernel, which keeps its input alone."""
    attention: str = FUSED
    """The core of attention: `FUSED`, or one that keeps its scores, Megatron's `LOCAL` or TE's `UNFUSED`."""
    attention_dropout: bool = False
    softmax_in_fp32: bool = True
    """`LOCAL` computes the softmax in FP32 where its kernel does not run."""
    fused_softmax: bool = True
    """`LOCAL` may run its kernel for scale, mask and softmax."""
    compact_loss: bool = False
    """Transformer Engine's cross-entropy, which keeps the logits in their own dtype and not the softmax in FP32."""

    @classmethod
    def of(cls, model: Any, train: Any = None, *, data_parallel: int = 1) -> Workload:
        """Return the workload of model and training fields, or sections."""
        model, train = read_section("model", model), read_section("train", train)
        batch, whole = (
            _count("train.micro_batch_size", train, 1),
            _count("train.global_batch_size", train, 0, least=0),
        )
        given = model.given("recompute_modules", ("core_attn",))
        granularity = model.given("recompute_granularity")
        loss = model.values["cross_entropy_loss_fusion"], model.values["cross_entropy_fusion_impl"]
        modules = (given,) if isinstance(given, str) else tuple(map(str, given))
        stages = _count("model.pipeline_model_parallel_size", model, 1)
        return cls(
            seq_length=_count("model.seq_length", model, 0, least=0),
            micro_batch_size=batch,
            micro_batches=max(1, whole // (batch * data_parallel)) if whole else None,
            group_size=_count("model.microbatch_group_size_per_vp_stage", model, stages),
            keeps_outputs=not model.values["deallocate_pipeline_outputs"],
            is_combined=bool(model.values["overlap_moe_expert_parallel_comm"]),
            recompute=granularity if granularity in ("selective", "full") else "none",
            modules=modules if granularity == "selective" else (),
            method=model.given("recompute_method", "uniform"),
            layers=_count("model.recompute_num_layers", model, 1),
            hidden_dropout=model.values["hidden_dropout"] > 0,
            fused_activation=any(model.values[name] for name in FUSING),
            attention=_attention_of(model.values),
            attention_dropout=model.values["attention_dropout"] > 0,
            softmax_in_fp32=bool(model.values["attention_softmax_in_fp32"]),
            fused_softmax=bool(model.values["masked_softmax_fusion"]),
            compact_loss=loss == (True, "te"),
        )


def _attention_of(model: Mapping[str, Any]) -> str:
    """Return the core of attention that the fields of a model choose; `auto` is a fused one on a GPU."""
    given = model["attention_backend"]
    backend = str(getattr(given, "name", given)).lower()
    if LOCAL in (model["transformer_impl"], backend):
        return LOCAL
    return UNFUSED if backend == UNFUSED else FUSED


def _count(path: str, section: Section, default: int, *, least: int = 1) -> int:
    """Return a whole number of a section; RunConfigError where it holds something else."""
    number: int = section.given(path.partition(".")[2], default)
    wrong = [one.value for one in section.malformed if one.path == path] or [number] * (
        number < least
    )
    if wrong:
        raise RunConfigError(
            f"{path}: must be a whole number of at least {least}, got {wrong[0]!r}. Correct it."
        )
    return number


class Segment(NamedTuple):
    """A part of a model chunk, in the order of the forward pass."""

    kept: float
    """Bytes that it leaves to its backward pass."""
    again: float = 0.0
    """Further bytes while it is recomputed in the backward pass."""


def attention_core(plan: PrecisionPlan, workload: Workload) -> str:
    """Return the core of attention that runs: Transformer Engine's kernels take 16 bits and fewer."""
    if plan.settings.mode == "fp32" and workload.attention == FUSED:
        return UNFUSED
    return workload.attention


def keeps_scores(plan: PrecisionPlan, workload: Workload) -> bool:
    """Return whether attention keeps its scores for the backward pass, which recomputing the core frees."""
    return attention_core(plan, workload) != FUSED and plan.shape.indexer is None


def uncounted_kernels(plan: PrecisionPlan) -> tuple[str, ...]:
    """Return the parts of layers whose activations are not counted: their kernels run on a GPU alone."""
    found = []
    if plan.shape.compressed is not None:
        found.append(
            "activations of compressors, indexers and cores of DeepSeek-V4's hybrid attention"
        )
    if plan.shape.hyper_connections is not None:
        found.append("activations of hyper-connections beyond their inputs")
    return tuple(found)


def stream_bytes(plan: PrecisionPlan, workload: Workload) -> float:
    """Return the bytes of one micro-batch between two layers."""
    return _Counting(plan, workload).streams


def segments(plan: PrecisionPlan, place: Place, workload: Workload) -> list[Segment]:
    """Return the parts of one model chunk: embedding, layers or the groups that are recomputed, and outputs."""
    count = _Counting(plan, workload)
    own = [plan.by_label[str(index + 1)] for index in place.layers]
    found = [Segment(count.embedding())] if place.embedding else []
    if workload.recompute != "full":
        found += [count.segment(layer) for layer in own]
    elif workload.method == "block":
        found += [count.group([layer]) for layer in own[: workload.layers]]
        found += [count.segment(layer) for layer in own[workload.layers :]]
    else:
        found += [
            count.group(own[at : at + workload.layers])
            for at in range(0, len(own), workload.layers)
        ]
    norm, head = Segment(count.norm()), Segment(count.head())
    found += [norm] if place.output else []
    if place.mtp and plan.shape.mtp_num_layers:
        found += count.prediction([layer for layer in plan.layers if layer.is_mtp])
        found += [head] * plan.shape.mtp_num_layers
    return [*found, head] if place.output else found


class _Counting:
    """Bytes of one micro-batch's tensors on one rank."""

    def __init__(self, plan: PrecisionPlan, workload: Workload) -> None:
        parallel = plan.parallel
        self.plan, self.workload, self.shape = plan, workload, plan.shape
        self.tensor, self.expert_tensor = parallel.tensor, parallel.expert_tensor
        self.element = element_bytes(plan.settings.mode)
        self.keeps_both = plan.settings.scheme == "delayed"
        """A linear whose input is kept by another operator keeps it quantised; other schemes quantise it again."""
        self.tokens = workload.seq_length * workload.micro_batch_size / parallel.context
        self.outside = self.tokens / (parallel.tensor if parallel.sequence_parallel else 1)
        self.is_gathered = self.outside != self.tokens
        self.residual = 4.0 if plan.settings.fp32_residual else self.element
        self.statistics = 8 if plan.shape.layer_norm_bias else 4
        self.width = self.outside * self.shape.hidden_size
        """Elements between two layers."""
        self.stream = self.width * self.residual
        mixing = plan.shape.hyper_connections
        self.streams = self.stream * (mixing.streams if mixing is not None else 1)
        """Bytes between two layers, of all residual streams."""
        self.core = attention_core(plan, workload)
        self.dropped = {part for name in workload.modules for part in DROPS.get(name, ())}
        self.segments: dict[int, Segment] = {}
        """Those of the layers so far, by `PlanLayer.alike`."""

    def segment(self, layer: PlanLayer) -> Segment:
        """Return a layer, of which some parts may be recomputed."""
        if layer.alike not in self.segments:
            rows = list(self._rows({module.name: module for module in layer.modules}))
            again = sum(size for part, size in rows if part in self.dropped)
            self.segments[layer.alike] = Segment(sum(size for _, size in rows) - again, again)
        return self.segments[layer.alike]

    def group(self, layers: Sequence[PlanLayer]) -> Segment:
        """Return layers that are recomputed together, from their input."""
        return Segment(
            self.streams, sum(sum(self.segment(layer)) for layer in layers) - self.streams
        )

    def prediction(self, layers: Sequence[PlanLayer]) -> list[Segment]:
        """Return the layers of multi-token prediction, each with a norm; `block` does not recompute them."""
        depths, own = self.shape.mtp_num_layers, max(1, self.shape.mtp_layers)
        found = [*(self.segment(layer) for layer in layers), *[Segment(self.norm())] * own]
        if self.workload.recompute == "full" and self.workload.method == "uniform":
            inputs, whole = self.stream + self.streams, sum(segment.kept for segment in found) / own
            return [Segment(inputs, whole - inputs)] * depths
        return found * (depths // own)

    def embedding(self) -> float:
        """Return token ids, and the dropout behind the embedding."""
        return self.tokens * 8 + self._dropout()

    def head(self) -> float:
        """Return the output layer's input, and the softmax over the vocabulary, or the logits."""
        inputs = self.width * self.element if self.plan.trains_weights else 0.0
        kept, others = (
            (self.element, 16) if self.workload.compact_loss else (4, 9)
        )  # of a logit, and of a token
        logits = self.shape.padded_vocab_size(self.tensor) // self.tensor
        return inputs + self.tokens * (logits * kept + others)

    def _rows(self, modules: Mapping[str, PlanModule]) -> Rows:
        shape, saved = self.shape, {name: self._operand(module) for name, module in modules.items()}
        mixer = shape.delta_net if "delta_rule" in modules else shape.state_space
        if "linear_proj" in modules:
            yield from self._attention(saved, modules["core_attention"])
        if "in_proj" in modules and mixer is not None:
            yield from self._mixer(saved, mixer)
        if "experts.linear_fc1" in modules and shape.experts is not None:
            yield from self._experts(saved, shape.experts)
        elif "linear_fc1" in modules:
            yield from self._mlp(saved)
        if "eh_proj" in modules:
            yield "base", 2 * self.norm() + 2 * self.width * saved["eh_proj"]
        if (
            "e_proj" in modules and shape.hyper_connections is not None
        ):  # the second norm and projection of each stream
            passes = 1 + shape.hyper_connections.streams
            yield "base", passes * self.norm() + self.width * saved["e_proj"]
            yield "base", shape.hyper_connections.streams * self.width * saved["h_proj"]
        for name in ("self_attention_hyper_connection", "mlp_hyper_connection"):
            if (
                name in modules
            ):  # its input; what it keeps of the streams that it mixes is not counted
                yield "base", self.streams
        yield from self._adapters(modules)

    def _adapters(self, modules: Mapping[str, PlanModule]) -> Rows:
        groups = {"experts.": "moe", "shared_experts.": "shared_experts", "linear_fc": "mlp"}
        bypassed: set[str] = set()
        for module in (one.module for one in modules.values() if one.kind == "adapter"):
            base = module.name.partition(".adapter")[0]
            part = next((part for start, part in groups.items() if base.startswith(start)), "base")
            yield part, self._adapter(module, is_first=base not in bypassed)
            if (
                base in FUSED_WITH_NORM and base not in bypassed
            ):  # it hands the norm's output on, and keeps its own
                quantised = self._quantised(modules[base])
                yield (
                    part,
                    self.outside * module.inputs * (quantised if quantised != self.element else 0),
                )
            bypassed.add(base)

    def _adapter(self, module: Module, *, is_first: bool) -> float:
        """Return what one of the two layers of an adapter keeps: its input, which is gathered over sequences.

        `is_first`: no other adapter of the same linear layer has the same input.
        """
        adapter, experts = self.plan.adapter, self.shape.experts
        tokens, ranks = self.tokens, self.tensor
        if module.is_expert and experts is not None:
            tokens, ranks = self.outside * experts.topk * self.expert_tensor, self.expert_tensor
        if module.name.endswith("linear_out"):
            outputs = (
                module.outputs / ranks if adapter is not None and adapter.kind == "dora" else 0.0
            )
            return (
                tokens * (module.inputs + outputs) * self.element
            )  # DoRA scales the sum, and keeps it
        inputs = module.inputs / (ranks if module.split == "row" else 1)
        if adapter is not None and adapter.has_dropout:
            return tokens * inputs * (self.element + 1)
        kept_anyway = {
            "linear_proj": self.shape.attention_output_gate,
            "shared_experts.linear_fc1": self.is_gathered,
        }
        is_kept = any(
            module.name.startswith(name) and not differs for name, differs in kept_anyway.items()
        )
        return tokens * inputs * self.element if is_first and not is_kept else 0.0

    def _operand(self, module: PlanModule) -> float:
        """Return the bytes per element of a linear's kept input, its scales included; a frozen one keeps none."""
        return 0.0 if module.module.is_frozen else self._quantised(module)

    def _quantised(self, module: PlanModule) -> float:
        kept = (
            module.copies.kept_input
            if module.copies is not None and module.row("input") is not None
            else None
        )
        if kept is None or kept.scheme is None:
            return self.element
        scheme = self.plan.settings.row_of(kept.scheme)
        is_sent = (
            self.is_gathered and module.module.split == "column" and not module.module.is_expert
        )
        copies = (
            2 if is_sent and scheme is not None and scheme.family == "fp4" else 1
        )  # the row-wise one is gathered
        return copies * operand_bytes(kept.format, scheme)

    def norm(self) -> float:
        """Return the bytes that a norm of the residual stream keeps in addition to its output."""
        return self.stream + self.outside * self.statistics

    def _dropout(self) -> float:
        return self.width if self.workload.hidden_dropout else 0.0

    def _attention(self, saved: Mapping[str, float], core: PlanModule) -> Rows:
        shape, heads, proj = (
            self.shape,
            self.shape.num_attention_heads / self.tensor,
            saved["linear_proj"],
        )
        if "linear_o_group_proj" in saved and shape.latent is not None:
            yield from self._compressed(saved, heads, shape.latent)
            return
        row = core.row("qk")
        kept = element_bytes(row.format) if row is not None and row.format in LOW else self.element
        yield "base", self.norm() + self._dropout()
        if "linear_kv_up_proj" in saved and shape.latent is not None:
            out = self.tokens * heads * shape.latent.v_head_dim
            yield from self._latent(saved, heads, kept, shape.latent)
        else:
            out = self.tokens * heads * shape.kv_channels
            yield from self._grouped(saved, heads, kept)
        has_scores = keeps_scores(self.plan, self.workload)
        if has_scores:
            scores = self.tokens * heads * self.workload.seq_length
            yield "core_attn", scores * self._score_bytes(heads)
        else:
            yield "core_attn", self.tokens * heads * 4  # log of the softmax's sums
        projected = (
            self.element if proj and not self.keeps_both else proj
        )  # other schemes keep what the core keeps
        if shape.attention_output_gate:
            yield "base", out * (self.element + 4 + projected)  # both factors, and their product
        else:
            yield "base", out * projected
            # Attention to chosen keys gives its result in the latent width, which `_latent` counts.
            is_kept_by_core = projected != self.element and shape.indexer is None and not has_scores
            yield "core_attn", out * (self.element if is_kept_by_core else 0)

    def _score_bytes(self, heads: float) -> float:
        """Return the bytes that attention without a fused kernel keeps of each score of a query and a key.

        The product with the values keeps the probabilities, and the softmax its result: the same tensor, unless the
        softmax ran in FP32 or dropout lies between them, which keeps a mask as well. The causal mask itself, one for
        all layers, is not counted.

        Source: megatron-core 0.16.1 transformer/dot_product_attention.py and fusions/fused_softmax.py
        is_kernel_available; Transformer Engine 2.20 attention/dot_product_attention/backends.py
        UnfusedDotProductAttention and softmax.py; torch 2.x native_dropout of a GPU, whose mask has a byte.
        """
        load = self.workload
        length, batches = load.seq_length, round(heads * load.micro_batch_size)
        longest, step, is_asked = (
            (4097, 4, load.fused_softmax) if self.core == LOCAL else (16384, 8, True)
        )
        at_once = 8 if length <= 128 else 4  # rows of a block of the kernel
        rows = batches if self.core == LOCAL else length
        is_possible = (
            16 < length < longest
            and length % step == 0
            and batches % 4 == 0
            and rows % at_once == 0
        )
        has_kernel = is_asked and is_possible and self.element == 2
        is_in_fp32 = load.softmax_in_fp32 or self.core == UNFUSED
        softmax = self.element
        if is_in_fp32 and not has_kernel:
            softmax = 4.0
        if load.attention_dropout:
            return softmax + self.element + 1
        return softmax + (self.element if softmax != self.element else 0.0)

    def _grouped(self, saved: Mapping[str, float], heads: float, kept: float) -> Rows:
        shape, query = self.shape, heads * self.shape.kv_channels
        key = max(1.0, shape.num_query_groups / self.tensor) * shape.kv_channels
        yield "base", self.width * saved["linear_qkv"]
        rotated = (
            query + key if shape.position_embedding_type not in ("none", "learned_absolute") else 0
        )
        if self.core != FUSED and key < query and "core_attn" not in self.workload.modules:
            yield (
                "qkv",
                self.tokens * 3 * query * self.element,
            )  # keys and values are repeated for every query
        elif (
            self.core != FUSED or "core_attn" in self.workload.modules
        ):  # the value is a view, which keeps all of the projection's output
            yield "qkv", self.tokens * (rotated + query + 2 * key) * self.element
        else:
            yield "qkv", self.tokens * (query + 2 * key) * kept
        if shape.qk_l2_norm or shape.qk_layernorm:
            yield (
                "base",
                self.tokens * (query + key) * (self.element + self.statistics / shape.kv_channels),
            )

    def _latent(
        self, saved: Mapping[str, float], heads: float, kept: float, latent: Latent
    ) -> Rows:
        first = "linear_q_proj" if latent.q_lora_rank is None else "linear_q_down_proj"
        yield "layernorm", self.width * saved[first]
        if (
            saved["linear_kv_down_proj"] != self.element
        ):  # each quantises the norm's output by itself
            yield "layernorm", self.width * saved["linear_kv_down_proj"]
        compressed = (latent.q_lora_rank or 0) + latent.kv_lora_rank
        if self.shape.qk_layernorm:
            norms = 1 if latent.q_lora_rank is None else 2
            yield "up_proj", self.outside * (compressed * self.element + norms * self.statistics)
        kept_latent = saved["linear_kv_up_proj"]
        if (
            "mla_up_proj" in self.workload.modules
        ):  # which begins with the latents and the key's rotary part
            kept_latent = self.element
            yield "base", self.outside * latent.qk_pos_emb_head_dim * self.element
        yield "base", self.outside * compressed * kept_latent
        wide = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        if self.shape.indexer is None:
            yield "up_proj", self.tokens * heads * (2 * wide + latent.v_head_dim) * kept
            return
        # Sparse attention in its absorbed form: queries and one key of the latent width, and the chosen keys. Read in
        # the operators that Megatron calls; the linear layers around them were measured.
        absorbed = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        yield "up_proj", self.tokens * (heads * (wide + absorbed) + absorbed) * self.element
        chosen = min(self.shape.indexer.topk, self.workload.seq_length) * 4
        yield "core_attn", self.tokens * (heads * latent.kv_lora_rank * self.element + chosen)
        if "indexer.linear_wk" in saved:
            indexer = self.shape.indexer
            chosen_by = indexer.num_heads * (indexer.head_dim + 1) + indexer.head_dim
            yield "core_attn", self.tokens * chosen_by * self.element
            hidden, query = self.shape.hidden_size, latent.q_lora_rank or self.shape.hidden_size
            for name, width in (
                ("linear_wq_b", query),
                ("linear_wk", hidden),
                ("linear_weights_proj", hidden),
            ):
                kept_as = saved[f"indexer.{name}"]
                yield "core_attn", self.tokens * width * (kept_as if kept_as != self.element else 0)

    def _compressed(self, saved: Mapping[str, float], heads: float, latent: Latent) -> Rows:
        """Yield what the linear layers of DeepSeek-V4's hybrid attention keep, and the core's query, key and output.

        Compressors, the indexer and the kernels of the core are not counted (`uncounted_kernels`).
        """
        query, projected = heads * latent.v_head_dim, self.plan.shape.compressed
        rank = latent.q_lora_rank or self.shape.hidden_size
        yield "base", self.norm() + self._dropout()
        yield "layernorm", self.width * (saved["linear_q_down_proj"] + saved["linear_kv_proj"])
        if self.shape.qk_layernorm:
            yield (
                "base",
                self.tokens * ((rank + latent.v_head_dim) * self.element + 2 * self.statistics),
            )
        yield "base", self.tokens * rank * saved["linear_q_up_proj"]
        yield "up_proj", self.tokens * (query + latent.v_head_dim) * self.element
        yield "core_attn", self.tokens * query * self.element
        if projected is not None:
            yield (
                "base",
                self.tokens * (query * self.element + projected.projected * saved["linear_proj"]),
            )

    def _mlp(self, saved: Mapping[str, float]) -> Rows:
        ffn = self.shape.ffn_hidden_size / self.tensor
        yield "base", self.stream + self._dropout()
        yield "mlp", self.outside * self.statistics + self.width * saved["linear_fc1"]
        yield "mlp", self.tokens * (self._activation(ffn) + ffn * saved["linear_fc2"])

    def _activation(self, ffn: float) -> float:
        """Return the bytes per token that the activation function keeps: its input, and each factor of a product."""
        gated = 2 if self.workload.fused_activation else 4
        return (gated if self.shape.gated_linear_unit else 1) * ffn * self.element

    def _experts(self, saved: Mapping[str, float], experts: Experts) -> Rows:
        hidden, latent = self.shape.hidden_size, experts.latent_size
        choice = (
            experts.topk * (8 + 8 + 4 + 4) + experts.num_experts * 5
        )  # indices and weights, and who is chosen
        yield "base", self.norm() + self._dropout()
        yield "layernorm", self.width * self.element
        yield "moe", self.outside * choice
        # An even load: each token goes to top-k experts, and the ranks that share an expert hold all of its tokens.
        copies = self.outside * experts.topk * self.expert_tensor
        ffn = experts.ffn_hidden_size / self.expert_tensor
        weighted = 0.0 if self.workload.fused_activation else ffn * self.element
        yield (
            "moe",
            copies
            * ((latent or hidden) * saved["experts.linear_fc1"] + self._activation(ffn) + weighted),
        )
        yield "moe_act", copies * ffn * saved["experts.linear_fc2"]
        if latent:
            yield (
                "base",
                self.outside
                * (hidden * saved["fc1_latent_proj"] + latent * saved["fc2_latent_proj"]),
            )
        if (
            experts.shared_ffn_hidden_size
        ):  # its input is the router's, and under delayed scaling quantised as well
            ffn = experts.shared_ffn_hidden_size / self.tensor
            if self.keeps_both and saved["shared_experts.linear_fc1"] != self.element:
                yield "shared_experts", self.width * saved["shared_experts.linear_fc1"]
            yield (
                "shared_experts",
                self.tokens * (self._activation(ffn) + ffn * saved["shared_experts.linear_fc2"]),
            )

    def _mixer(self, saved: Mapping[str, float], mixer: StateSpace | DeltaNet) -> Rows:
        """Yield a Mamba block or a gated delta net: the inputs of its projections, and what its kernel keeps.

        mamba_ssm keeps what is scanned and the result before it is gated, and its norm the input and statistics. Gated
        delta net keeps queries and keys of every value head, values, a chunk's triangle per token and head, and the
        decay in FP32 (flash-linear-attention, ops/gated_delta_rule/chunk.py). Read there; what is around was measured.
        """
        if isinstance(mixer, StateSpace):
            width, scanned, statistics = (
                mixer.inner,
                mixer.projected + 2 * mixer.inner,
                4 * mixer.num_groups,
            )
        else:
            width, heads = mixer.value, mixer.num_value_heads
            scanned = (
                mixer.projected
                + mixer.convolved
                + heads * (2 * mixer.key_head_dim + DELTA_CHUNK)
                + 2 * width
            )
            statistics = heads * (4 + 4)
        yield "base", self.norm() + self._dropout() + self.width * saved["in_proj"]
        yield (
            "base",
            self.tokens
            / self.tensor
            * (scanned * self.element + statistics + width * saved["out_proj"]),
        )
