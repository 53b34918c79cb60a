"""A run made small enough for a laptop, with its precision, its kinds of layers and its layout left as they are.

    small = shrink(run_values.sections, run_values.precision, gpus=64)
    small.sections["model"]["hidden_size"], small.changes[0].reason, small.rounds[0].processes

Every number is the smallest that Megatron and Transformer Engine treat as they treat the one of the run: sizes keep
their ratio, and the width or the tokens of a rank keep the greatest common divisor with the scaling scheme's multiple.
So a size that the scheme refuses in the run is refused in the rehearsal too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError
from bridge.plan.precision_plan import precision_plan
from bridge.plan.shape import MOE
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES
from bridge.rehearse.layers import kept_layers
from bridge.rehearse.layout import Layout, Round
from bridge.rehearse.split import FIELDS, Split
from bridge.rules.fields import read_field, whole_number
from bridge.rules.hybrid import HybridPattern
from bridge.rules.stages import Parallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.plan.shape import Latent
    from bridge.registry.config import MixedPrecisionConfig

LEAST_ALIGNMENT = 16
"""Multiple of widths where no scheme needs a larger one: tensor cores and Transformer Engine's FP8 GEMMs take it."""
TOKENS = 64
"""Tokens of a sequence on each context-parallel rank, at least."""
HEADS_PER_GROUP = 8
"""The most query heads that share one key and value."""
STEPS = 3
WIDTH = "keeps the ratio to hidden_size and the alignment on a rank"
HEADS = "keeps the queries of a key on a rank"


ON_A_GPU = {
    "tp_comm_overlap": "its user buffers need GPUs",
    "moe_permute_fusion": "its kernels need a GPU",
    "moe_router_fusion": "its kernels need a GPU",
    "use_transformer_engine_op_fuser": "its kernels need a GPU",
}
"""Switch of the model that changes no format, and why it is off in a rehearsal."""


INITIALISERS = ("init_method", "output_layer_init_method", "embedding_init_method")
"""Functions, which Megatron makes of other fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One setting that the rehearsal has another value of."""

    field: str
    """section.field."""
    before: Any
    after: Any
    reason: str
    """Why this value, as a clause."""


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A run made small."""

    sections: Mapping[str, dict[str, Any]]
    """model, optimizer, ddp and train, for one process."""
    precision: dict[str, Any] | None
    """What the precision states; None: the configs' own settings."""
    changes: tuple[Change, ...]
    layers: tuple[str, ...]
    """Labels of the layers of the run that the layers of the rehearsal stand for, in order."""
    layers_of_run: int
    rounds: tuple[Round, ...]
    """The launches that together have every kind of the run's layout."""
    dropped: tuple[str, ...] = ()
    """Choices per module that the layers of the rehearsal cannot show, as sentences."""


def shrink(
    sections: Mapping[str, Any],
    precision: MixedPrecisionConfig | None,
    *,
    gpus: int | None = None,
    processes: int = 4,
    max_layers: int = 8,
) -> SmallRun:
    """Return a run made small.

    Args:
        sections: model, optimizer, ddp and train with Megatron's field names.
        precision: The precision that is written into them.
        gpus: GPUs of the run; None: the least that its parallel sizes need.
        processes: The most processes of one launch.
        max_layers: The most layers, where first and last layers and the pipeline do not need more.

    Raises:
        RunConfigError: No such model can be built, its layers cannot be planned, or some of them do not run on a CPU.
    """
    pattern = HybridPattern.of(sections.get("model") or {})
    if pattern is not None and "mamba" in pattern.kinds:
        rule = "cannot be rehearsed: Mamba layers need the kernels of mamba_ssm, which run on a GPU alone"
        raise RunConfigError.of("model", rule, pattern.layers, "Use `precision-bridge check` for this run.")
    given = {name: dict(sections.get(name) or {}) for name in ("model", "optimizer", "ddp", "train")}
    plan = precision_plan(precision, given["model"], optimizer=given["optimizer"], ddp=given["ddp"])
    parallel = Parallel.of(given["model"], world_size=gpus)
    layout = Layout.of(parallel, is_sharded=plan.settings.distributed)
    shrinker = _Shrinker(given, precision, plan, parallel, layout)
    layers = shrinker.shrink(max_layers)
    split = shrinker.split.fields(len(layers))
    return SmallRun(
        sections=shrinker.sections,
        precision=shrinker.precision,
        changes=tuple(shrinker.changes),
        layers=layers,
        layers_of_run=plan.shape.num_layers,
        rounds=layout.rounds(processes, split),
        dropped=tuple(shrinker.dropped),
    )


@dataclass
class _Shrinker:
    """The sections while they are made small."""

    sections: dict[str, dict[str, Any]]
    stated: MixedPrecisionConfig | None
    plan: PrecisionPlan
    parallel: Parallel
    layout: Layout
    changes: list[Change] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.precision = self.stated.to_dict() if self.stated is not None else None
        self.shape = self.plan.shape
        self.unit = _alignment(self.plan)
        self.split = Split(parallel=self.parallel, num_layers=self.shape.num_layers, virtual=self.layout.virtual)

    def shrink(self, max_layers: int) -> tuple[str, ...]:
        """Make everything small; return the labels of the kept layers."""
        layers = self._layers(max_layers)
        hidden = self._attention()
        self._widths(hidden)
        self._experts(hidden)
        self._tokens()
        self._schedule()
        self._parallelism()
        if self.layout.size("context") > 1 and self.sections["model"].get("cp_comm_type") != "a2a":
            self.set("model.cp_comm_type", "all_gather", "context parallelism by p2p has no CPU version")
        for name, reason in ON_A_GPU.items():
            if read_field(self.sections["model"], name):
                self.set(f"model.{name}", False, reason)
        return layers

    def set(self, path: str, value: Any, reason: str) -> None:
        """Give a setting another value, and note the change where it is one."""
        section, _, name = path.partition(".")
        held = self.precision if section == "mixed_precision" else self.sections[section]
        if held is None:
            return
        before = held.get(name)
        if before == value:
            return
        if value is None:
            held.pop(name, None)
        else:
            held[name] = value
        self.changes.append(Change(field=path, before=before, after=value, reason=reason))

    def _layers(self, limit: int) -> tuple[str, ...]:
        settings, shape = self.plan.settings, self.shape
        kept = kept_layers(
            shape.kinds,
            start=settings.start,
            end=settings.end,
            limit=limit,
            chunks=self.split.chunks if self.layout.size("pipeline") > 1 else 1,
            extra=self.split.extra,
            least=self.split.least if self.layout.size("pipeline") > 1 else 1,
            wanted=self._named_layers(),
        )
        why = "keeps both ends, each kind of layer, and whole stages"
        self.set("model.num_layers", len(kept.layers), why)
        counts = {"num_layers_at_start_in_bf16": kept.start, "num_layers_at_end_in_bf16": kept.end}
        for name, now, count in zip(counts, (settings.start, settings.end), counts.values(), strict=True):
            if now != count:
                owner = "model" if self.precision is None or name not in self.precision else "mixed_precision"
                self.set(f"{owner}.{name}", count, "fewer layers are kept in all")
        self._kinds(kept.layers)
        self._rows(kept.layers)
        if shape.mtp_num_layers > 2:
            self.set("model.mtp_num_layers", 2, "prediction layers are alike")
        split = self.split.fields(len(kept.layers))
        for name in FIELDS:
            if name in self.sections["model"]:
                before = self.sections["model"].pop(name)
                if before not in (None, False, split.get(name)):
                    reason = "the split of the run at two stages"
                    self.changes.append(
                        Change(field=f"model.{name}", before=before, after=split.get(name), reason=reason)
                    )
        recomputed = whole_number(read_field(self.sections["model"], "recompute_num_layers"))
        if recomputed:
            most = len(kept.layers) // (self.layout.size("pipeline") * self.layout.virtual)
            self.set("model.recompute_num_layers", min(recomputed, max(1, most)), "the layers of a stage are fewer")
        return tuple(str(layer + 1) for layer in kept.layers)

    def _kinds(self, layers: tuple[int, ...]) -> None:
        """State the kinds of the kept layers: the pattern of a hybrid model, or which of them have experts."""
        shape, model = self.shape, self.sections["model"]
        pattern = HybridPattern.of(model)
        why = "the kinds of the kept layers"
        if pattern is not None:
            letters = "".join(pattern.layers[layer] for layer in layers)
            name = "hybrid_layer_pattern" if "hybrid_layer_pattern" in model else "hybrid_override_pattern"
            self.set(f"model.{name}", "/".join([letters, *[pattern.mtp] * pattern.depths]), why)
        elif MOE in shape.kinds:
            frequency = [int(shape.kinds[layer] == MOE) for layer in layers]
            if not all(frequency) or read_field(model, "moe_layer_freq", 1) != 1:
                self.set("model.moe_layer_freq", frequency, why)

    def _named_layers(self) -> list[int]:
        """Return the layers that rows of `modules` name: the first that is of its kind and named by the same rows."""
        count = self.shape.num_layers
        rows = [{number % count for number in row.layer_numbers} for row in self.plan.module_rows]
        low = {layer.number - 1 for layer in self.plan.layers if layer.low and layer.number is not None}
        firsts: dict[tuple[str, bool, tuple[bool, ...]], int] = {}
        for layer in sorted(set[int]().union(*rows)):
            firsts.setdefault((self.shape.kinds[layer], layer in low, tuple(layer in row for row in rows)), layer)
        return list(firsts.values())

    def _rows(self, layers: tuple[int, ...]) -> None:
        """Number the layers of the rows of `modules` anew, and drop the rows of which no layer is kept."""
        rows = []
        for plain, row in zip((self.precision or {}).get("modules") or (), self.plan.module_rows, strict=True):
            select = row.renumbered(layers, self.shape.num_layers)
            if select is not None:
                rows.append({**plain, "select": select})
            else:
                self.dropped.append(f"The row {row} of modules: none of its layers is among the kept ones.")
        if rows or self.dropped:
            self.set("mixed_precision.modules", rows or None, "numbers of the kept layers")
        counted = [matcher.pattern for recipe in self.plan.settings.recipes[:1] for matcher in recipe.matchers]
        local = [pattern for pattern in counted if re.search(r"layers\.\W*\d", pattern)]
        if local and not self.plan.module_rows:
            names = ", ".join(local)
            self.dropped.append(f"The layers of {names} in model.quant_recipe: their numbers count within a stage.")

    def _attention(self) -> int:
        """Make heads and channels small; return the hidden size."""
        shape = self.shape
        if not shape.num_attention_heads:
            return self.unit * 2
        heads, groups = self._heads()
        channels = self._channels(heads, groups)
        is_stated = read_field(self.sections["model"], "kv_channels") is not None
        ratio = shape.hidden_size / (shape.num_attention_heads * shape.kv_channels)
        if shape.latent is not None:
            hidden = self._latent(shape.latent, heads, ratio)
        elif is_stated:
            hidden = self.fitted(shape.hidden_size, ratio * heads * channels)
        else:
            hidden = heads * channels
        self.set("model.num_attention_heads", heads, HEADS)
        if groups != heads or read_field(self.sections["model"], "num_query_groups") is not None:
            self.set("model.num_query_groups", groups, HEADS)
        if is_stated and shape.latent is None:
            self.set("model.kv_channels", channels, "keeps the alignment on a rank")
        self.set("model.hidden_size", hidden, "keeps the ratio to the heads and the alignment")
        return hidden

    def _heads(self) -> tuple[int, int]:
        """Return the attention heads and the query groups."""
        heads, groups = self.shape.num_attention_heads, self.shape.num_query_groups
        tp, small = self.parallel.tensor, self.layout.size("tensor")
        if self.shape.latent is not None or heads == groups:
            few = min(4, small * max(1, heads // small)) + (heads % tp != 0)
            return few, few
        few = small if groups % tp == 0 else small + 1 if groups > tp else 1
        each = min(heads // groups, HEADS_PER_GROUP)
        if heads % tp == 0 and few * each % small:
            each += 1
        return few * each, few

    def _channels(self, heads: int, groups: int) -> int:
        """Return the smallest channels of a head that leave the projections of a rank aligned as they are."""
        shape, tp, small = self.shape, self.parallel.tensor, self.layout.size("tensor")
        is_stated = read_field(self.sections["model"], "kv_channels") is not None

        def residues(width: int, queries: int, keys: int, channels: int, ranks: int) -> tuple[int, ...]:
            sizes = (queries * channels, (queries + 2 * keys) * channels)
            return (gcd(width, self.unit), channels % 2, *(gcd(size // ranks, self.unit) for size in sizes))

        wanted = residues(shape.hidden_size, shape.num_attention_heads, shape.num_query_groups, shape.kv_channels, tp)
        for channels in range(LEAST_ALIGNMENT, 4 * self.unit + 1):
            width = shape.hidden_size if is_stated else heads * channels
            if residues(width, heads, groups, channels, small) == wanted:
                return channels
        return self.unit

    def _latent(self, latent: Latent, heads: int, ratio: float) -> int:
        """Make the widths of latent attention small; return the hidden size."""
        dims = {name: getattr(latent, name) for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")}
        scale = 2 * self.unit / min(size for size in dims.values() if size)
        why = "keeps the alignment"
        for name, size in dims.items():
            if size:
                self.set(f"model.{name}", self.fitted(size, size * scale), why)
        value = ratio * self.shape.kv_channels / latent.v_head_dim * heads * latent.v_head_dim * scale
        hidden = self.fitted(self.shape.hidden_size, value)
        for name in ("q_lora_rank", "kv_lora_rank"):
            size = getattr(latent, name)
            if size is not None:
                self.set(f"model.{name}", self.fitted(size, size * hidden / self.shape.hidden_size), WIDTH)
        return hidden

    def _widths(self, hidden: int) -> None:
        shape = self.shape
        tp, small = self.parallel.tensor, self.layout.size("tensor")
        width = self.fitted(shape.ffn_hidden_size, shape.ffn_hidden_size / shape.hidden_size * hidden, tp, small)
        is_stated = read_field(self.sections["model"], "ffn_hidden_size") is not None
        if is_stated or width != 4 * hidden:
            self.set("model.ffn_hidden_size", width, WIDTH)
        self.set("model.vocab_size", None, "the vocabulary of bytes, padded as the run's is")

    def _experts(self, hidden: int) -> None:
        experts = self.shape.experts
        if experts is None:
            return
        own = experts.num_experts // self.parallel.expert
        count = 4 if self.layout.size("expert") == 1 else 2 * min(2, max(1, own))
        if experts.num_experts % self.parallel.expert:
            count += 1
        self.set(
            "model.num_moe_experts", min(count, experts.num_experts), "two experts on each of two ranks, or four on one"
        )
        # Megatron's router takes one expert a token only where it applies its softmax before it chooses
        self.set("model.moe_router_topk", min(experts.topk, max(2, count // 2)), "the experts are fewer")
        model = self.sections["model"]
        if read_field(model, "moe_router_num_groups"):
            self.set("model.moe_router_num_groups", 2, "the experts are fewer")
            self.set("model.moe_router_group_topk", 1, "the groups are fewer")
        if read_field(model, "moe_token_dispatcher_type") == "flex":
            self.set("model.moe_token_dispatcher_type", "alltoall", "the kernels of flex need a GPU")
            model.pop("moe_flex_dispatcher_backend", None)
        ratio = hidden / self.shape.hidden_size
        routed = self.parallel.expert_tensor, self.layout.expert_tensor
        if read_field(model, "moe_ffn_hidden_size") is not None:
            width = self.fitted(experts.ffn_hidden_size, experts.ffn_hidden_size * ratio, *routed)
            self.set("model.moe_ffn_hidden_size", width, WIDTH)
        if experts.shared_ffn_hidden_size:
            shared = experts.shared_ffn_hidden_size
            width = self.fitted(shared, shared * ratio, self.parallel.tensor, self.layout.size("tensor"))
            self.set("model.moe_shared_expert_intermediate_size", width, WIDTH)

    def fitted(self, size: int, wanted: float, ranks: int = 1, small_ranks: int = 1) -> int:
        """Return a width near `wanted` that a rank holds a part of as it does of `size`.

        Args:
            size: The width in the run.
            wanted: The width that keeps the ratio.
            ranks: Ranks of the run that share it.
            small_ranks: Ranks of the rehearsal that do.
        """
        if size % ranks:
            return small_ranks * self.unit + 1
        common = gcd(size // ranks, self.unit)
        whole = max(1, round(wanted / small_ranks / self.unit)) * self.unit
        return small_ranks * (whole + (common if common < self.unit else 0))

    def _tokens(self) -> None:
        model, train = self.sections["model"], self.sections["train"]
        parallel, layout = self.parallel, self.layout
        batch = whole_number(read_field(train, "micro_batch_size")) or 1
        length = self.shape.seq_length or TOKENS
        few = min(batch, 2)
        is_split = parallel.sequence_parallel

        def residues(tokens: int, samples: int, context: int, tensor: int) -> tuple[object, ...]:
            shares = tokens % (2 * context) == 0 if context > 1 else True
            rows = tokens // context
            return shares, not is_split or rows % tensor == 0, gcd(rows * samples, self.unit)

        wanted = residues(length, batch, parallel.context, parallel.tensor)
        start = TOKENS * layout.size("context")
        lengths = (
            tokens
            for tokens in range(start, start + 8 * self.unit * layout.size("context"))
            if residues(tokens, few, layout.size("context"), layout.size("tensor")) == wanted
        )
        why = "keeps the alignment of a rank's tokens"
        self.set("model.seq_length", next(lengths, start), why)
        model.pop("max_position_embeddings", None)
        self.set("train.micro_batch_size", few, "samples of a micro-batch are alike")

    def _schedule(self) -> None:
        """Replace the schedule by one of a few steps; what it was is of no interest to a reader."""
        batch = self.sections["train"]["micro_batch_size"]
        self.sections["train"] = {
            "train_iters": STEPS,
            "micro_batch_size": batch,
            "global_batch_size": batch,
            "lr_decay_iters": STEPS + 1,
            "lr_warmup_iters": 0,
            "eval_iters": 0,
            "eval_interval": 0,
        }
        for name, value in {"lr": 1e-4, "min_lr": 0.0}.items():  # a schedule of Megatron's needs both
            if self.sections["optimizer"].get(name) is None:
                self.sections["optimizer"][name] = value

    def _parallelism(self) -> None:
        """Take the sizes out of the model, each launch has its own, and the functions that a saved run has as text."""
        for name in INITIALISERS:
            self.sections["model"].pop(name, None)
        sizes = {**Round().fields(), "overlap_p2p_comm": None, "batch_p2p_comm": None}
        for name in sizes:
            self.sections["model"].pop(name, None)


def _alignment(plan: PrecisionPlan) -> int:
    """Return the largest multiple that a scheme of the plan needs of a dimension."""
    rows = [{**FP8_SCHEMES, **FP4_SCHEMES}[scheme].alignment or () for scheme in plan.schemes()]
    return max([LEAST_ALIGNMENT, *(multiple for row in rows for multiple in row)])
