"""`build_alignment_report`: the dimensions of a rank's GEMMs that a scaling scheme refuses.

A linear layer with M tokens, N outputs and K inputs on a rank runs three GEMMs: fprop contracts
over K, dgrad over N, wgrad over M. So all three numbers must fit the scheme (`Scheme.alignment`),
and the number of tokens is padded.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.model.modules import Module
from bridge.model.shape import ModelShape
from bridge.plan.precision_plan import PrecisionPlan, format_ranges
from bridge.plan.workload import Workload
from bridge.precision.schemes import SCHEMES, Scheme, find_scheme

EXPERT_TOKENS = {"mxfp8": 32, "nvfp4": 128, "custom": 128}
"""Scheme -> the multiple to which the tokens of an expert are padded. Other schemes need 16.

Source: Transformer Engine 2.20 pytorch/quantization.py.
"""
PER_TENSOR_SCHEMES = ("tensorwise", "delayed")
SMALL_GEMM_RULES = {
    "tensor": "at most 1024 inputs and 4096 outputs",
    "block": "at most 2048 inputs, at most 1024 outputs, or at most 4096 inputs and 2048 outputs",
}
SMALL_GEMM_SOURCE = (
    "torchao float8_linear_utils.py, automatic filters for tensorwise and rowwise scaling, "
    "measured on H100"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PadMultiple:
    """Multiples that numbers of tokens are padded to."""

    scheme: str | None
    per_sequence: int
    """The multiple for each sequence of a packed sample, and for the sample itself."""
    per_slab: int
    """The multiple for all tokens of a micro-batch together."""
    per_expert: int
    derivation: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmShape:
    """The dimensions of a linear layer on a rank."""

    layers: str
    module: str
    tokens: float
    """M, the number of tokens. 0: not known."""
    outputs: int
    inputs: int
    low: bool
    scheme: str | None = None
    """The scaling scheme in which it computes. None: it computes in high precision.

    It is the scheme of the run, or of a row of `modules`.
    """
    small: bool = False
    """Whether, by a rule of thumb, the GEMM is too small to gain from the scheme."""
    expert: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """A dimension that the scheme refuses."""

    layers: str
    module: str
    dimension: str
    """M (tokens), N (outputs) or K (inputs)."""
    size: float
    multiple: int
    field: str
    """The config field that decides the dimension, or its factors."""
    value: int
    below: int | None
    """The nearest smaller legal value. None: no smaller value is legal."""
    above: int

    def __str__(self) -> str:
        nearest = str(self.above)
        if self.below:
            nearest = f"{self.below} or {self.above}"
        if self.dimension == "M":
            return (
                f"{self.field}: a micro-batch must be a multiple of {self.multiple} tokens "
                f"and is {self.module}, got {self.value!r}. Use {nearest}, or pad."
            )
        size = round(self.size, 2)
        if self.size == int(self.size):
            size = int(self.size)
        return (
            f"{self.field}: {self.module} (layers {self.layers}) takes {self.dimension} in "
            f"multiples of {self.multiple} on each rank, {size} is none, got {self.value!r}. "
            f"Use {nearest}."
        )


class DimensionField(NamedTuple):
    """The field that decides a dimension."""

    name: str
    value: int
    factor: int = 1
    """The dimension, divided by the value of the field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentReport:
    """The GEMMs of a model, with the dimensions that its scheme refuses."""

    label: str
    scheme: str | None
    """The scheme that the padding follows.

    It is the scheme of the run, or the scheme of single modules that needs the largest multiple.
    """
    pad: PadMultiple
    gemms: tuple[GemmShape, ...]
    misfits: tuple[Misfit, ...]

    @property
    def small_rules(self) -> tuple[str, ...]:
        """The rules of thumb by which GEMMs are small, a rule for each kind of scaling."""
        rules: list[str] = []
        for gemm in self.small:
            kind = "tensor" if gemm.scheme in PER_TENSOR_SCHEMES else "block"
            if SMALL_GEMM_RULES[kind] not in rules:
                rules.append(SMALL_GEMM_RULES[kind])
        return tuple(rules)

    @property
    def small(self) -> tuple[GemmShape, ...]:
        """The GEMMs that probably gain nothing from their scheme."""
        return tuple(gemm for gemm in self.gemms if gemm.small)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        misfits = []
        for misfit in self.misfits:
            misfits.append({**asdict(misfit), "message": str(misfit)})
        return {
            "precision": self.label,
            "scheme": self.scheme,
            "pad": asdict(self.pad),
            "gemms": [asdict(gemm) for gemm in self.gemms],
            "misfits": misfits,
            "small": {"rule": SMALL_GEMM_RULES, "source": SMALL_GEMM_SOURCE},
        }


def pad_multiple(
    scheme: str | None, tp: int = 1, sp: bool = False, cp: int = 1, *, family: str | None = None
) -> PadMultiple:
    """Return the multiples that sequences and the tokens of a micro-batch have to be padded to.

    Args:
        scheme: A value of `fp8_recipe` or `fp4_recipe`. None: neither FP8 nor FP4.
        tp: Tensor-parallel ranks.
        sp: Whether sequence parallelism splits the tokens over these ranks between the GEMMs.
        cp: Context-parallel ranks. Each rank has two chunks of every sequence, so that the work of
            causal attention is even.
        family: fp8 or fp4, for a name of a scheme that both families have (custom).

    Raises:
        RunConfigError: No scheme has this name.
    """
    row = _get_scheme(scheme, family)
    steps = []
    per_sequence = 1
    if cp > 1:
        per_sequence = 2 * cp
        steps.append(f"Context parallelism cuts each sequence into 2 x {cp} chunks.")
    over_ranks = 1
    if sp and tp > 1:
        over_ranks = tp
        per_sequence *= tp
        steps.append(f"Sequence parallelism shares tokens over {tp} ranks.")
    steps.append(f"Each sequence: {per_sequence}.")
    if row is None:
        per_slab = math.lcm(per_sequence, cp * over_ranks)
        per_expert = 1
        steps.append(f"A slab: {per_slab}; no FP8 or FP4 asks for more.")
    else:
        tokens = _get_token_multiple(row) or EXPERT_TOKENS["custom"]
        per_slab = math.lcm(per_sequence, tokens * cp * over_ranks)
        per_expert = EXPERT_TOKENS.get(row.name, 16)
        steps.append(
            f"The weight gradient contracts over tokens: {row.name} takes {tokens} at a time "
            "on each rank."
        )
        steps.append(
            f"A slab: the least common multiple of {per_sequence} and {tokens} x "
            f"{cp * over_ranks} ranks = {per_slab}."
        )
    return PadMultiple(
        scheme=scheme,
        per_sequence=per_sequence,
        per_slab=per_slab,
        per_expert=per_expert,
        derivation=tuple(steps),
    )


def build_alignment_report(
    plan: PrecisionPlan, workload: Workload | None = None
) -> AlignmentReport:
    """Return M, N and K of every linear layer on a rank, and the dimensions that are refused.

    Without a workload only the model's dimensions are checked.
    """
    parallel = plan.parallel
    scheme, family = _find_strictest_scheme(plan)
    pad = pad_multiple(
        scheme, parallel.tensor, parallel.sequence_parallel, parallel.context, family=family
    )
    tokens = 0
    if workload is not None:
        tokens = workload.seq_length * workload.micro_batch_size
    labels: dict[tuple[Module, str | None], list[str]] = {}
    for layer in plan.layers:
        for planned in layer.modules:
            if planned.kind in ("linear", "head"):
                labels.setdefault((planned.module, planned.scheme), []).append(layer.label)
    gemms: list[GemmShape] = []
    misfits: list[Misfit] = []
    for (module, module_scheme), layers in labels.items():
        gemm = _make_gemm_shape(plan, module, format_ranges(layers), tokens, scheme=module_scheme)
        gemms.append(gemm)
        if module_scheme is not None:
            misfits += _find_misfits(plan, module, gemm.layers, module_scheme)
    if workload is not None and tokens % pad.per_slab and scheme is not None:
        misfits.append(_make_slab_misfit(workload, pad))
    return AlignmentReport(
        label=plan.label,
        scheme=scheme,
        pad=pad,
        gemms=tuple(gemms),
        misfits=tuple(dict.fromkeys(misfits)),
    )


def _find_strictest_scheme(plan: PrecisionPlan) -> tuple[str | None, str | None]:
    """Return the scheme that needs the largest multiple of tokens, and its family.

    It is the scheme of the run, unless single modules have other schemes.
    """
    settings = plan.settings
    planned = plan.schemes()
    module_schemes = []
    for row in SCHEMES:
        if row.name in planned and row.name not in (settings.scheme, "custom"):
            module_schemes.append(row)
    if not module_schemes:
        return settings.scheme, settings.family
    rows = module_schemes
    if settings.scheme_row is not None:
        rows = [settings.scheme_row, *module_schemes]
    strictest = max(rows, key=_get_token_multiple)
    return strictest.name, strictest.family


def _get_token_multiple(row: Scheme) -> int:
    if not row.alignment:
        return 0
    return row.alignment[0]


def _get_scheme(name: str | None, family: str | None) -> Scheme | None:
    row = find_scheme(name, family)
    if row is None and name is not None:
        known = sorted({row.name for row in SCHEMES})
        matches = close_matches(name, known)
        hint = did_you_mean(matches) or f"There are {', '.join(known)}."
        raise RunConfigError(f"scheme: no such scaling scheme, got {name!r}. {hint}", matches)
    return row


def _make_gemm_shape(
    plan: PrecisionPlan, module: Module, layers: str, tokens: int, *, scheme: str | None
) -> GemmShape:
    parallel = plan.parallel
    ranks = parallel.get_tensor_ranks(is_expert=module.is_expert)
    outputs, inputs = module.get_rank_shape(plan.shape, ranks)
    gemm_tokens = tokens / parallel.context
    experts = plan.shape.experts
    if module.is_expert and experts is not None:
        routed_tokens = gemm_tokens / parallel.sequence_ranks * experts.topk * ranks
        gemm_tokens = routed_tokens / (module.count / parallel.expert)
    elif not module.split:
        gemm_tokens /= parallel.sequence_ranks
    return GemmShape(
        layers=layers,
        module=module.name,
        tokens=gemm_tokens,
        outputs=outputs,
        inputs=inputs,
        low=scheme is not None,
        scheme=scheme,
        small=scheme is not None and _is_small(scheme, outputs, inputs),
        expert=module.is_expert,
    )


def _is_small(scheme: str, outputs: int, inputs: int) -> bool:
    if scheme in PER_TENSOR_SCHEMES:
        return inputs <= 1024 and outputs <= 4096
    return inputs <= 2048 or outputs <= 1024 or (inputs <= 4096 and outputs <= 2048)


def _find_misfits(
    plan: PrecisionPlan, module: Module, layers: str, scheme: str
) -> Iterator[Misfit]:
    """Yield the dimensions of the model that do not fit. Tokens are checked once for all layers."""
    row = plan.settings.find_scheme_row(scheme)
    if row is None or not row.alignment:
        return
    ranks = plan.parallel.get_tensor_ranks(is_expert=module.is_expert)
    dimensions = (
        ("N", module.outputs, row.alignment[1], "column"),
        ("K", module.inputs, row.alignment[2], "row"),
    )
    for dimension, whole, multiple, split in dimensions:
        parts = 1
        if module.split == split:
            parts = ranks
        need = multiple * parts
        if whole % need == 0:
            continue
        field = find_dimension_field(plan.shape, module.name, dimension, whole)
        place = {"layers": layers, "module": module.name, "dimension": dimension}
        yield _make_misfit(field, need, **place, size=whole / parts, multiple=multiple)


def _make_misfit(field: DimensionField, need: int, **columns: Any) -> Misfit:
    """Return a dimension that is not a multiple of `need`, with the nearest legal values."""
    step = need // math.gcd(need, field.factor)
    below = field.value // step * step
    return Misfit(
        **columns, field=field.name, value=field.value, below=below or None, above=below + step
    )


def _make_slab_misfit(workload: Workload, pad: PadMultiple) -> Misfit:
    seq, batch = workload.seq_length, workload.micro_batch_size
    place = {"layers": "all", "module": f"{batch} x {seq} tokens", "dimension": "M"}
    field = DimensionField("model.seq_length", seq, batch)
    return _make_misfit(field, pad.per_slab, **place, size=seq * batch, multiple=pad.per_slab)


_SHAPE_FIELDS = {
    "moe_ffn_hidden_size": "experts.ffn_hidden_size",
    "moe_latent_size": "experts.latent_size",
    "moe_shared_expert_intermediate_size": "experts.shared_ffn_hidden_size",
    "q_lora_rank": "latent.q_lora_rank",
    "kv_lora_rank": "latent.kv_lora_rank",
    "mamba_num_heads": "state_space.num_heads",
    "linear_num_value_heads": "delta_net.num_value_heads",
    "dsa_indexer_n_heads": "indexer.num_heads",
    "dsa_indexer_head_dim": "indexer.head_dim",
}
"""Field -> its attribute in the shape, if the attribute has another name."""


def _map_dimension_fields(shape: ModelShape) -> dict[str, tuple[str, str]]:
    """Return module -> the fields that decide its N and its K."""
    hidden = "hidden_size"
    heads = "num_attention_heads"
    shared = "moe_shared_expert_intermediate_size"
    expert = "moe_ffn_hidden_size"
    latent = "moe_latent_size"
    token = hidden
    if shape.experts is not None and shape.experts.latent_size:
        token = latent
    mixer = "mamba_num_heads"
    if shape.delta_net is not None:
        mixer = "linear_num_value_heads"
    attended = "kv_channels"
    if shape.latent is not None:
        attended = heads
    return {
        "linear_qkv": ("kv_channels", hidden),
        "linear_proj": (hidden, attended),
        "linear_fc1": ("ffn_hidden_size", hidden),
        "linear_fc2": (hidden, "ffn_hidden_size"),
        "experts.linear_fc1": (expert, token),
        "experts.linear_fc2": (token, expert),
        "fc1_latent_proj": (latent, hidden),
        "fc2_latent_proj": (hidden, latent),
        "shared_experts.linear_fc1": (shared, hidden),
        "shared_experts.linear_fc2": (hidden, shared),
        "linear_q_proj": (heads, hidden),
        "linear_q_down_proj": ("q_lora_rank", hidden),
        "linear_q_up_proj": (heads, "q_lora_rank"),
        "linear_kv_down_proj": ("kv_lora_rank", hidden),
        "linear_kv_up_proj": (heads, "kv_lora_rank"),
        "indexer.linear_wq_b": ("dsa_indexer_n_heads", "q_lora_rank"),
        "indexer.linear_wk": ("dsa_indexer_head_dim", hidden),
        "indexer.linear_weights_proj": ("dsa_indexer_n_heads", hidden),
        "in_proj": (mixer, hidden),
        "out_proj": (hidden, mixer),
        "eh_proj": (hidden, hidden),
    }


def find_dimension_field(
    shape: ModelShape, module: str, dimension: str, total: int
) -> DimensionField:
    """Return the field that decides a dimension (N or K) of a module.

    The dimension is `total` over all ranks.
    """
    names = _map_dimension_fields(shape).get(module)
    if names is None:
        return DimensionField("the model's dimensions", total)
    name = names["NK".index(dimension)]
    value = attrgetter(_SHAPE_FIELDS.get(name, name))(shape) or 0
    if value > 0 and total % value == 0:
        return DimensionField(f"model.{name}", value, total // value)
    return DimensionField(f"model.{name} and others", total)
