"""Activation memory: counts the tensors that autograd keeps for the backward pass, by operator.

Each operator keeps the tensors that its backward pass reads:

- a linear layer keeps its input, and so does an activation function;
- a norm keeps its input and its statistics;
- attention keeps its query, key, value, output and the log of its softmax sums.

Under FP8 and FP4, a linear layer keeps its quantised input with the scales instead. This is the
column-wise copy, which the weight-gradient GEMM reads. The operators of Transformer Engine and
Megatron on a GPU are counted, with the fusions that fields of the model switch on.

`tests/plan/test_memory_kept.py` compares the count with the tensors that Transformer Engine's
Python code keeps on a CPU, and docs/howto/plan-and-memory.md has the table. The tensors of some
kernels are known only from their source code, because the kernels need a GPU: the log of the
softmax sums, Mamba's scan, gated delta net and sparse attention.

Attention without a fused kernel (`transformer_impl=local`, `attention_backend=unfused`, FP32) also
keeps its scores.

Memory that exists only while an operator runs is not counted. The loss is the exception, because
its tensors are as large as the vocabulary. For mixture-of-experts layers, an even load is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bridge.model.attention_variants import DeltaNet, Indexer
from bridge.model.layout import ModelChunk
from bridge.model.modules import Module
from bridge.model.shape import Experts, Latent, StateSpace
from bridge.plan.memory_parameters import FP32_BYTES, count_operand_bytes, get_element_bytes
from bridge.plan.plan_layers import LOW_FORMATS, PlanLayer, PlanModule
from bridge.plan.precision_plan import PrecisionPlan
from bridge.plan.workload import FUSED, LOCAL, UNFUSED, Workload

Rows = Iterator[tuple[str, float]]
"""(part, bytes) of the tensors that a layer keeps. `RECOMPUTED_PARTS` can be recomputed."""
RECOMPUTED_PARTS = {
    "core_attn": ("core_attn",),
    "layernorm": ("layernorm",),
    "mlp": ("mlp",),
    "moe": ("moe", "moe_act", "shared_experts"),
    "moe_act": ("moe_act",),
    "shared_experts": ("shared_experts",),
    "mla_up_proj": ("up_proj",),
}
"""A name in `recompute_modules` -> the parts that are computed again instead of kept."""
FUSED_WITH_NORM = ("linear_qkv", "linear_fc1", "in_proj")
"""Linear layers that Transformer Engine fuses with the norm before them into a single operator."""
DELTA_CHUNK = 64
"""Tokens of a chunk in the kernel of gated delta net."""


class Segment(NamedTuple):
    """A part of a model chunk, in the order of the forward pass."""

    kept: float
    """Bytes that the part keeps for its backward pass."""
    again: float = 0.0
    """Further bytes in its backward pass: recomputed tensors, and the gradient of the logits."""


def get_attention_core(plan: PrecisionPlan, workload: Workload) -> str:
    """Return the core of attention that runs. Fused kernels do not support FP32."""
    if plan.settings.mode == "fp32" and workload.attention == FUSED:
        return UNFUSED
    return workload.attention


def keeps_scores(plan: PrecisionPlan, workload: Workload) -> bool:
    """Return whether attention keeps its scores. Recomputing the core frees them."""
    return get_attention_core(plan, workload) != FUSED and plan.shape.indexer is None


def list_uncounted_kernels(plan: PrecisionPlan) -> tuple[str, ...]:
    """Return the parts of layers whose activations are not counted.

    Their kernels run only on a GPU.
    """
    parts = []
    if plan.shape.compressed is not None:
        parts.append(
            "activations of compressors, indexers and cores of DeepSeek-V4's hybrid attention"
        )
    if plan.shape.hyper_connections is not None:
        parts.append("activations of hyper-connections beyond their inputs")
    return tuple(parts)


def count_stream_bytes(plan: PrecisionPlan, workload: Workload) -> float:
    """Return the bytes of one micro-batch between two layers."""
    return _ActivationCounter(plan, workload).streams


def build_segments(plan: PrecisionPlan, place: ModelChunk, workload: Workload) -> list[Segment]:
    """Return the parts of one model chunk: embedding, layers or recomputed groups, and outputs."""
    count = _ActivationCounter(plan, workload)
    layers = [plan.by_label[str(index + 1)] for index in place.layers]
    parts: list[Segment] = []
    if place.embedding:
        parts.append(Segment(count.embedding()))
    if workload.recompute != "full":
        parts += map(count.segment, layers)
    elif workload.method == "block":
        for layer in layers[: workload.layers]:
            parts.append(count.group([layer]))
        parts += map(count.segment, layers[workload.layers :])
    else:
        for start in range(0, len(layers), workload.layers):
            parts.append(count.group(layers[start : start + workload.layers]))
    head = count.head()
    if place.output:
        parts.append(Segment(count.norm()))
    if place.mtp and plan.shape.mtp_num_layers:
        predicting = [layer for layer in plan.layers if layer.is_mtp]
        parts += count.prediction(predicting)
        parts += [head] * plan.shape.mtp_num_layers
    if place.output:
        parts.append(head)
    return parts


class _ActivationCounter:
    """Counts the bytes of the tensors of a micro-batch on a rank."""

    def __init__(self, plan: PrecisionPlan, workload: Workload) -> None:
        parallel = plan.parallel
        self.plan, self.workload, self.shape = plan, workload, plan.shape
        self.tensor, self.expert_tensor = parallel.tensor, parallel.expert_tensor
        self.element = get_element_bytes(plan.settings.mode)
        self.keeps_both = plan.settings.scheme == "delayed"
        """Whether a linear layer keeps its quantised input, although another operator keeps it.

        Under other schemes the input is quantised again in the backward pass.
        """
        self.tokens = workload.seq_length * workload.micro_batch_size / parallel.context
        self.outside = self.tokens / parallel.sequence_ranks
        self.is_gathered = self.outside != self.tokens
        self.residual = 4.0 if plan.settings.fp32_residual else self.element
        self.statistics = 8 if plan.shape.layer_norm_bias else 4
        self.width = self.outside * self.shape.hidden_size
        """Elements between two layers."""
        self.stream = self.width * self.residual
        self.streams = self.stream
        """Bytes between two layers, of all residual streams."""
        if plan.shape.hyper_connections is not None:
            self.streams *= plan.shape.hyper_connections.streams
        self.core = get_attention_core(plan, workload)
        self.dropped: set[str] = set()
        for name in workload.modules:
            self.dropped.update(RECOMPUTED_PARTS.get(name, ()))
        self.segments: dict[int, Segment] = {}
        """The parts of the layers so far, by `PlanLayer.alike`."""

    def segment(self, layer: PlanLayer) -> Segment:
        """Return a layer, of which some parts may be recomputed."""
        if layer.alike not in self.segments:
            modules = {module.name: module for module in layer.modules}
            rows = list(self._rows(modules))
            again = sum(size for part, size in rows if part in self.dropped)
            whole = sum(size for _, size in rows)
            self.segments[layer.alike] = Segment(whole - again, again)
        return self.segments[layer.alike]

    def group(self, layers: Sequence[PlanLayer]) -> Segment:
        """Return layers that are recomputed together, from their input."""
        whole = sum(sum(self.segment(layer)) for layer in layers)
        return Segment(self.streams, whole - self.streams)

    def prediction(self, layers: Sequence[PlanLayer]) -> list[Segment]:
        """Return the layers of multi-token prediction, each with a norm.

        The method `block` does not recompute them.
        """
        depths = self.shape.mtp_num_layers
        stored = max(1, self.shape.mtp_layers)
        parts = list(map(self.segment, layers))
        parts += [Segment(self.norm())] * stored
        if self.workload.recompute == "full" and self.workload.method == "uniform":
            inputs = self.stream + self.streams
            whole = sum(part.kept for part in parts) / stored
            return [Segment(inputs, whole - inputs)] * depths
        return parts * (depths // stored)

    def embedding(self) -> float:
        """Return the bytes of the token ids, and of the dropout after the embedding."""
        return self.tokens * 8 + self._dropout()

    def head(self) -> Segment:
        """Return the output layer with the loss.

        It keeps its input, and the softmax over the vocabulary. With Transformer Engine's loss it
        keeps the logits instead of the softmax. During the backward pass, the gradient of the
        logits is in memory too: Megatron computes it in the tensor of the softmax, in FP32, and
        casts it.

        Source: Megatron-LM of 2026-08-22, megatron/core/tensor_parallel/cross_entropy.py and
        fusions/fused_cross_entropy.py, whose compiled functions keep a second tensor in FP32.
        docs/explain/memory-measured.md has measurements on GPUs.
        """
        inputs = 0.0
        if self.plan.trains_weights:
            inputs = self.width * self.element
        logits = self.tokens * (self.shape.padded_vocab_size(self.tensor) // self.tensor)
        if self.workload.loss == "te":
            # The gradient replaces the logits.
            return Segment(inputs + logits * self.element + self.tokens * 16)
        gradient = 0.0
        if self.element < FP32_BYTES:
            gradient = logits * self.element
        if self.workload.loss == "native":
            gradient += logits * FP32_BYTES
        return Segment(inputs + logits * FP32_BYTES + self.tokens * 9, gradient)

    def _rows(self, modules: Mapping[str, PlanModule]) -> Rows:
        shape = self.shape
        saved = {name: self._operand(module) for name, module in modules.items()}
        mixer: StateSpace | DeltaNet | None = shape.state_space
        if "delta_rule" in modules:
            mixer = shape.delta_net
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
        if "e_proj" in modules and shape.hyper_connections is not None:
            # Each stream has a pass through the second norm and the second projection.
            passes = 1 + shape.hyper_connections.streams
            yield "base", passes * self.norm() + self.width * saved["e_proj"]
            yield "base", shape.hyper_connections.streams * self.width * saved["h_proj"]
        for name in ("self_attention_hyper_connection", "mlp_hyper_connection"):
            # Its input. Further tensors of the mixed streams are not counted.
            if name in modules:
                yield "base", self.streams
        yield from self._adapters(modules)

    def _adapters(self, modules: Mapping[str, PlanModule]) -> Rows:
        bypassed: set[str] = set()
        for planned in modules.values():
            if planned.kind != "adapter":
                continue
            module = planned.module
            base = module.name.partition(".adapter")[0]
            part = _get_adapter_part(base)
            is_first = base not in bypassed
            yield part, self._adapter(module, is_first=is_first)
            if base in FUSED_WITH_NORM and is_first:
                # The fused operator passes the norm's output on, and keeps its input.
                quantised = self._quantised(modules[base])
                if quantised != self.element:
                    yield part, self.outside * module.inputs * quantised
            bypassed.add(base)

    def _adapter(self, module: Module, *, is_first: bool) -> float:
        """Return the bytes that one of the two layers of an adapter keeps.

        It keeps its input. A layer that is whole on each tensor-parallel rank has the tokens of
        that rank; the input of any other is gathered over sequences.

        Args:
            module: The layer of the adapter.
            is_first: Whether no adapter before it, at the same linear layer, has the same input.
        """
        adapter, experts = self.plan.adapter, self.shape.experts
        tokens, ranks = self.tokens, self.tensor
        if module.is_expert and experts is not None:
            tokens, ranks = self.outside * experts.topk * self.expert_tensor, self.expert_tensor
        elif not module.split:
            tokens = self.outside
        if module.name.endswith("linear_out"):
            kept_outputs = 0.0
            if adapter is not None and adapter.kind == "dora":
                kept_outputs = module.outputs / ranks  # DoRA scales the sum, and keeps it
            return tokens * (module.inputs + kept_outputs) * self.element
        inputs = float(module.inputs)
        if module.split == "row":
            inputs /= ranks
        if adapter is not None and adapter.has_dropout:
            return tokens * inputs * (self.element + 1)
        if not is_first or self._is_kept_by_another(module):
            return 0.0
        return tokens * inputs * self.element

    def _is_kept_by_another(self, module: Module) -> bool:
        """Return whether another operator keeps the input of an adapter's first layer."""
        if module.name.startswith("linear_proj"):
            return not self.shape.attention_output_gate
        if module.name.startswith("shared_experts.linear_fc1"):
            return not self.is_gathered
        return False

    def _operand(self, module: PlanModule) -> float:
        """Return the bytes per element of the input that a linear layer keeps, with its scales.

        A frozen linear layer keeps no input.
        """
        if module.module.is_frozen:
            return 0.0
        return self._quantised(module)

    def _quantised(self, module: PlanModule) -> float:
        if module.copies is None or module.row("input") is None:
            return self.element
        kept = module.copies.saved_input
        if kept.scheme is None:
            return self.element
        scheme = self.plan.settings.find_scheme_row(kept.scheme)
        is_dense_column = module.module.split == "column" and not module.module.is_expert
        copies = 1
        if self.is_gathered and is_dense_column and scheme is not None and scheme.family == "fp4":
            copies = 2  # the row-wise one is gathered
        return copies * count_operand_bytes(kept.format, scheme)

    def norm(self) -> float:
        """Return the bytes that a norm of the residual stream keeps in addition to its output."""
        return self.stream + self.outside * self.statistics

    def _dropout(self) -> float:
        return self.width * self.workload.hidden_dropout

    def _attention(self, saved: Mapping[str, float], core: PlanModule) -> Rows:
        shape = self.shape
        heads = shape.num_attention_heads / self.tensor
        if "linear_o_group_proj" in saved and shape.latent is not None:
            yield from self._compressed(saved, heads, shape.latent)
            return
        row = core.row("qk")
        kept = self.element
        if row is not None and row.format in LOW_FORMATS:
            kept = get_element_bytes(row.format)
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
            yield "core_attn", self.tokens * heads * 4  # log of the softmax sums
        projected = saved["linear_proj"]
        if projected and not self.keeps_both:
            projected = self.element  # the projection keeps the tensor that the core keeps
        if shape.attention_output_gate:
            yield "base", out * (self.element + 4 + projected)  # both factors, and their product
            return
        yield "base", out * projected
        # Attention to chosen keys has outputs of the latent width, which `_latent` counts.
        if projected != self.element and shape.indexer is None and not has_scores:
            yield "core_attn", out * self.element

    def _score_bytes(self, heads: float) -> float:
        """Return the bytes that attention without a fused kernel keeps of each score.

        A score belongs to a query and a key. The product with the values keeps the probabilities,
        and the softmax keeps its result. Both are the same tensor, unless the softmax ran in FP32
        or dropout runs between them. Dropout keeps a mask too. The causal mask is not counted,
        since all layers share it.

        Source: torch 2.x native_dropout of a GPU, whose mask has a byte; for the kernels see
        `_has_softmax_kernel`.
        """
        workload = self.workload
        is_in_fp32 = workload.softmax_in_fp32 or self.core == UNFUSED
        softmax = self.element
        if is_in_fp32 and not self._has_softmax_kernel(heads):
            softmax = 4.0
        if workload.attention_dropout:
            return softmax + self.element + 1
        if softmax != self.element:
            return softmax + self.element
        return softmax

    def _has_softmax_kernel(self, heads: float) -> bool:
        """Return whether a fused kernel for scale, mask and softmax runs.

        Source: megatron-core 0.16.1 transformer/dot_product_attention.py and
        fusions/fused_softmax.py is_kernel_available; Transformer Engine 2.20
        attention/dot_product_attention/backends.py UnfusedDotProductAttention and softmax.py.
        """
        length = self.workload.seq_length
        batches = round(heads * self.workload.micro_batch_size)
        if self.core == LOCAL:
            longest, step, rows = 4097, 4, batches
            is_asked = self.workload.fused_softmax
        else:
            longest, step, rows = 16384, 8, length
            is_asked = True
        if not is_asked or self.element != 2:
            return False
        rows_of_block = 8 if length <= 128 else 4
        is_in_range = 16 < length < longest
        return is_in_range and length % step == 0 and batches % 4 == 0 and rows % rows_of_block == 0

    def _grouped(self, saved: Mapping[str, float], heads: float, kept: float) -> Rows:
        shape = self.shape
        query = heads * shape.kv_channels
        key = max(1.0, shape.num_query_groups / self.tensor) * shape.kv_channels
        yield "base", self.width * saved["linear_qkv"]
        rotated = 0.0
        if shape.position_embedding_type not in ("none", "learned_absolute"):
            rotated = query + key
        is_fused = self.core == FUSED
        recomputes_core = "core_attn" in self.workload.modules
        if not is_fused and key < query and not recomputes_core:
            # Keys and values are repeated for every query.
            yield "qkv", self.tokens * 3 * query * self.element
        elif not is_fused or recomputes_core:
            # The value is a view, which keeps the whole output of the projection in memory.
            yield "qkv", self.tokens * (rotated + query + 2 * key) * self.element
        else:
            yield "qkv", self.tokens * (query + 2 * key) * kept
        if shape.qk_l2_norm or shape.qk_layernorm:
            normed = self.element + self.statistics / shape.kv_channels
            yield "base", self.tokens * (query + key) * normed

    def _latent(
        self, saved: Mapping[str, float], heads: float, kept: float, latent: Latent
    ) -> Rows:
        first, norms = "linear_q_down_proj", 2
        if latent.q_lora_rank is None:
            first, norms = "linear_q_proj", 1
        yield "layernorm", self.width * saved[first]
        if saved["linear_kv_down_proj"] != self.element:
            # Each of the two projections quantises the output of the norm separately.
            yield "layernorm", self.width * saved["linear_kv_down_proj"]
        compressed = (latent.q_lora_rank or 0) + latent.kv_lora_rank
        if self.shape.qk_layernorm:
            yield "up_proj", self.outside * (compressed * self.element + norms * self.statistics)
        kept_latent = saved["linear_kv_up_proj"]
        if "mla_up_proj" in self.workload.modules:
            # Recomputation begins with the latents and the key's rotary part.
            kept_latent = self.element
            yield "base", self.outside * latent.qk_pos_emb_head_dim * self.element
        yield "base", self.outside * compressed * kept_latent
        wide = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        if self.shape.indexer is None:
            yield "up_proj", self.tokens * heads * (2 * wide + latent.v_head_dim) * kept
            return
        # Sparse attention in its absorbed form: queries and one key of the latent width, and the
        # chosen keys. These numbers are from the code of the operators that Megatron calls. The
        # linear layers around them were measured.
        absorbed = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        yield "up_proj", self.tokens * (heads * (wide + absorbed) + absorbed) * self.element
        chosen = min(self.shape.indexer.topk, self.workload.seq_length) * 4
        yield "core_attn", self.tokens * (heads * latent.kv_lora_rank * self.element + chosen)
        if "indexer.linear_wk" in saved:
            yield from self._indexer(saved, self.shape.indexer, latent)

    def _indexer(self, saved: Mapping[str, float], indexer: Indexer, latent: Latent) -> Rows:
        chosen_by = indexer.num_heads * (indexer.head_dim + 1) + indexer.head_dim
        yield "core_attn", self.tokens * chosen_by * self.element
        hidden = self.shape.hidden_size
        inputs = {
            "indexer.linear_wq_b": latent.q_lora_rank or hidden,
            "indexer.linear_wk": hidden,
            "indexer.linear_weights_proj": hidden,
        }
        for name, width in inputs.items():
            if saved[name] != self.element:
                yield "core_attn", self.tokens * width * saved[name]

    def _compressed(self, saved: Mapping[str, float], heads: float, latent: Latent) -> Rows:
        """Yield the tensors of DeepSeek-V4's hybrid attention.

        They are the inputs of the linear layers, and the query, key and output of the core.
        Compressors, the indexer and the kernels of the core are not counted: see
        `list_uncounted_kernels`.
        """
        query = heads * latent.v_head_dim
        rank = latent.q_lora_rank or self.shape.hidden_size
        yield "base", self.norm() + self._dropout()
        yield "layernorm", self.width * (saved["linear_q_down_proj"] + saved["linear_kv_proj"])
        if self.shape.qk_layernorm:
            normed = (rank + latent.v_head_dim) * self.element + 2 * self.statistics
            yield "base", self.tokens * normed
        yield "base", self.tokens * rank * saved["linear_q_up_proj"]
        yield "up_proj", self.tokens * (query + latent.v_head_dim) * self.element
        yield "core_attn", self.tokens * query * self.element
        attention = self.shape.compressed
        if attention is not None:
            projections = query * self.element + attention.projected_width * saved["linear_proj"]
            yield "base", self.tokens * projections

    def _mlp(self, saved: Mapping[str, float]) -> Rows:
        ffn = self.shape.ffn_hidden_size / self.tensor
        yield "base", self.stream + self._dropout()
        yield "mlp", self.outside * self.statistics + self.width * saved["linear_fc1"]
        yield "mlp", self.tokens * (self._activation(ffn) + ffn * saved["linear_fc2"])

    def _activation(self, ffn: float) -> float:
        """Return the bytes per token that the activation function keeps.

        It keeps its input, and each factor of a product.
        """
        tensors = 4
        if not self.shape.gated_linear_unit:
            tensors = 1
        elif self.workload.fused_activation:
            tensors = 2
        return tensors * ffn * self.element

    def _experts(self, saved: Mapping[str, float], experts: Experts) -> Rows:
        hidden, latent = self.shape.hidden_size, experts.latent_size
        # Indices and weights of the chosen experts, and a flag of each expert.
        choice = experts.topk * (8 + 8 + 4 + 4) + experts.num_experts * 5
        yield "base", self.norm() + self._dropout()
        yield "layernorm", self.width * self.element
        yield "moe", self.outside * choice
        # An even load is assumed: each token goes to top-k experts. The ranks that share an expert
        # keep all of its tokens.
        copies = self.outside * experts.topk * self.expert_tensor
        ffn = experts.ffn_hidden_size / self.expert_tensor
        weighted = 0.0
        if not self.workload.fused_activation:
            weighted = ffn * self.element
        inputs = (latent or hidden) * saved["experts.linear_fc1"]
        yield "moe", copies * (inputs + self._activation(ffn) + weighted)
        yield "moe_act", copies * ffn * saved["experts.linear_fc2"]
        if latent:
            projections = hidden * saved["fc1_latent_proj"] + latent * saved["fc2_latent_proj"]
            yield "base", self.outside * projections
        if experts.shared_ffn_hidden_size:
            yield from self._shared_expert(saved, experts.shared_ffn_hidden_size / self.tensor)

    def _shared_expert(self, saved: Mapping[str, float], ffn: float) -> Rows:
        """Yield the tensors of a shared expert, which has the same input as the router.

        Under delayed scaling it also keeps this input quantised.
        """
        if self.keeps_both and saved["shared_experts.linear_fc1"] != self.element:
            yield "shared_experts", self.width * saved["shared_experts.linear_fc1"]
        hidden = self._activation(ffn) + ffn * saved["shared_experts.linear_fc2"]
        yield "shared_experts", self.tokens * hidden

    def _mixer(self, saved: Mapping[str, float], mixer: StateSpace | DeltaNet) -> Rows:
        """Yield the tensors of a Mamba block or a gated delta net.

        They are the inputs of its projections, and the tensors that its kernel keeps.

        mamba_ssm keeps the scanned tensors and the result before the gate. Its norm keeps the input
        and statistics. Gated delta net keeps queries and keys of every value head, values, a
        triangle of a chunk per token and head, and the decay in FP32.

        Source: flash-linear-attention, ops/gated_delta_rule/chunk.py, for the kernel. The operators
        around it were measured.
        """
        if isinstance(mixer, StateSpace):
            width = mixer.inner
            scanned = mixer.projected_width + 2 * width
            statistics = 4 * mixer.num_groups
        else:
            width = mixer.value_width
            heads = mixer.num_value_heads
            of_heads = heads * (2 * mixer.key_head_dim + DELTA_CHUNK)
            scanned = mixer.projected_width + mixer.conv_channels + of_heads + 2 * width
            statistics = heads * (4 + 4)
        yield "base", self.norm() + self._dropout() + self.width * saved["in_proj"]
        kept = scanned * self.element + statistics + width * saved["out_proj"]
        yield "base", self.tokens / self.tensor * kept


def _get_adapter_part(base: str) -> str:
    """Return the part of a layer in which the adapter of a linear layer is recomputed."""
    if base.startswith("experts."):
        return "moe"
    if base.startswith("shared_experts."):
        return "shared_experts"
    if base.startswith("linear_fc"):
        return "mlp"
    return "base"
