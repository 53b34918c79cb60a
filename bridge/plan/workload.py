"""`Workload`: the tokens that a rank works on at a time, and the parts that it recomputes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.section import Section, read_section

FUSED_ACTIVATION_FIELDS = (
    "bias_activation_fusion",
    "use_fused_weighted_squared_relu",
    "use_transformer_engine_op_fuser",
)
"""Fields under which the activation function is one kernel."""
FUSED, LOCAL, UNFUSED = "fused", "local", "unfused"
"""Cores of attention.

`FUSED`: kernels that keep no scores. `LOCAL`: Megatron's DotProductAttention. `UNFUSED`:
Transformer Engine's UnfusedDotProductAttention.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The tokens that a rank works on at a time, and the parts that it recomputes."""

    seq_length: int = 0
    """Tokens of a sample before context parallelism. 0: activations are not counted."""
    micro_batch_size: int = 1
    micro_batches: int | None = None
    """Micro-batches of a step on a rank. None: as many as fill the pipeline."""
    group_size: int | None = None
    """Micro-batches that pass a chunk of an interleaved pipeline before the next chunk begins.

    None: the number of stages.
    """
    keeps_outputs: bool = True
    """Whether a stage keeps the outputs that it sent (`deallocate_pipeline_outputs` is off)."""
    is_combined: bool = False
    """Whether a forward and a backward pass run together (`overlap_moe_expert_parallel_comm`)."""
    recompute: str = "none"
    """`recompute_granularity`: none, selective or full."""
    modules: tuple[str, ...] = ()
    """The modules that selective recomputation runs again."""
    method: str = "uniform"
    """`recompute_method`: full recomputation of all layers (uniform) or of first layers (block)."""
    layers: int = 1
    """Layers per recomputed group (uniform), or recomputed layers per chunk (block)."""
    hidden_dropout: bool = False
    fused_activation: bool = False
    """Whether one kernel computes the activation function and the experts' weights.

    Such a kernel keeps only its input.
    """
    attention: str = FUSED
    """The core of attention: `FUSED`, `LOCAL` or `UNFUSED`. Only the last two keep scores."""
    attention_dropout: bool = False
    softmax_in_fp32: bool = True
    """Whether `LOCAL` computes the softmax in FP32 if its kernel does not run."""
    fused_softmax: bool = True
    """Whether `LOCAL` may run its kernel for scale, mask and softmax."""
    loss: str = "unfused"
    """The cross-entropy: unfused, native or te.

    Megatron's losses (`unfused`, and `native` of `cross_entropy_fusion_impl`) keep the softmax in
    FP32. Transformer Engine's loss (`te`) keeps the logits in the dtype that they have.
    """

    @classmethod
    def from_sections(cls, model: Any, train: Any = None, *, data_parallel: int = 1) -> Workload:
        """Return the workload of model and training fields, or sections."""
        model = read_section("model", model)
        train = read_section("train", train)
        micro_batch_size = _read_count("train.micro_batch_size", train, 1)
        samples = _read_count("train.global_batch_size", train, 0, least=0)
        micro_batches = None
        if samples:
            micro_batches = max(1, samples // (micro_batch_size * data_parallel))
        recompute = model.get_stated("recompute_granularity")
        if recompute not in ("selective", "full"):
            recompute = "none"
        method = model.get_stated("recompute_method", "uniform")
        least_layers = 1
        if method == "block" or recompute != "full":
            least_layers = 0
        layers = _read_count("model.recompute_num_layers", model, 1, least=least_layers)
        if layers == 0:  # Megatron recomputes none of the layers of a stage, or reads no number
            method, layers = "uniform", 1
            if recompute == "full":
                recompute = "none"
        loss = "unfused"
        if model.values["cross_entropy_loss_fusion"]:
            loss = str(model.values["cross_entropy_fusion_impl"])
        stages = _read_count("model.pipeline_model_parallel_size", model, 1)
        return cls(
            seq_length=_read_count("model.seq_length", model, 0, least=0),
            micro_batch_size=micro_batch_size,
            micro_batches=micro_batches,
            group_size=_read_count("model.microbatch_group_size_per_vp_stage", model, stages),
            keeps_outputs=not model.values["deallocate_pipeline_outputs"],
            is_combined=bool(model.values["overlap_moe_expert_parallel_comm"]),
            recompute=recompute,
            modules=_get_recomputed_modules(model),
            method=method,
            layers=layers,
            hidden_dropout=model.values["hidden_dropout"] > 0,
            fused_activation=any(model.values[name] for name in FUSED_ACTIVATION_FIELDS),
            attention=_get_attention_core(model.values),
            attention_dropout=model.values["attention_dropout"] > 0,
            softmax_in_fp32=bool(model.values["attention_softmax_in_fp32"]),
            fused_softmax=bool(model.values["masked_softmax_fusion"]),
            loss=loss,
        )


def _get_recomputed_modules(model: Section) -> tuple[str, ...]:
    """Return the modules that selective recomputation runs again. Empty: it is off."""
    names = model.get_stated("recompute_modules", ("core_attn",))
    if model.get_stated("recompute_granularity") != "selective":
        return ()
    if isinstance(names, str):
        names = (names,)
    return tuple(map(str, names))


def _get_attention_core(model: Mapping[str, Any]) -> str:
    """Return the core of attention that a model's fields choose. On a GPU, `auto` means fused."""
    value = model["attention_backend"]
    backend = str(getattr(value, "name", value)).lower()
    if LOCAL in (model["transformer_impl"], backend):
        return LOCAL
    if backend == UNFUSED:
        return UNFUSED
    return FUSED


def _read_count(path: str, section: Section, default: int, *, least: int = 1) -> int:
    """Return a whole number of a section.

    Raises:
        RunConfigError: The value is not a whole number, or is too small.
    """
    number: int = section.get_stated(path.partition(".")[2], default)
    rule = f"must be a whole number of at least {least}"
    for finding in section.malformed:
        if finding.path == path:
            raise RunConfigError(f"{path}: {rule}, got {finding.value!r}. Correct it.")
    if number < least:
        raise RunConfigError(f"{path}: {rule}, got {number!r}. Correct it.")
    return number
