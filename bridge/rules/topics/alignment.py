"""Sizes that low-precision GEMMs take: the tokens of a rank, widths after sharding, and GEMMs too small to gain."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from bridge.rules.context import RuleContext
from bridge.rules.rule import error, info, warning
from bridge.rules.violation import Violation, all_of
from bridge.target.fields import whole_number


def tokens(run: RuleContext) -> int | None:
    """Return the tokens of a micro-batch on one rank (M of its GEMMs), or None where that is not known.

    Tokens that do not divide by the ranks are none of an alignment's: that is a fault of its own (PB408).
    """
    seq = run.model.seq_length or run.data.seq_length
    batch = run.train.micro_batch_size
    if not seq or not batch or run.is_emulated:
        return None
    ranks = run.parallel.of_tokens
    return int(seq * batch // ranks) if not seq % ranks else None


GEMMS_OF = {
    "model.ffn_hidden_size": ("linear_fc1", "linear_fc2", "shared_experts.linear_fc1", "shared_experts.linear_fc2"),
    "model.moe_ffn_hidden_size": ("experts.linear_fc1", "experts.linear_fc2"),
    "model.kv_channels": ("linear_qkv", "linear_proj"),
}
"""Width -> the linear layers that have it; any other width is one of all linear layers."""


def _low_modules(run: RuleContext) -> set[str] | None:
    """Return the modules that compute in FP8 or FP4 somewhere under a per-module recipe; None without one."""
    selection = run.selection if run.model.quant_recipe is not None else None
    if selection is None:
        return None
    modules = [*selection.left, *(module for row in selection.rows for module in row.taken)]
    return {module.module for module in modules if module.scheme is not None}


class Width(NamedTuple):
    """A width that GEMMs contract over or produce."""

    path: str
    how: str
    """How it is divided."""
    size: int
    """Size on one rank."""


def widths(run: RuleContext) -> list[Width]:
    """Return the widths that GEMMs contract over or produce.

    A width that does not divide by the ranks is left out: that is a fault of its own (PB408). So is one whose linear
    layers a per-module recipe keeps in the dtype of the run.
    """
    model, heads, tp, etp = run.model, run.model.num_attention_heads, run.parallel.tensor, run.parallel.expert_tensor
    qkv = 0
    if model.hidden_size and heads and not heads % tp and not model.multi_latent_attention and not run.shape.is_hybrid:
        head = model.kv_channels or model.hidden_size // max(1, heads)
        qkv = head * (heads + 2 * (model.num_query_groups or heads))
    sizes = (
        ("model.hidden_size", "", model.hidden_size, "TP", 1),
        ("model.ffn_hidden_size", "", model.ffn_hidden_size, "TP", tp),
        ("model.kv_channels", " x (heads + 2 x groups)", qkv, "TP", tp),
        ("model.moe_ffn_hidden_size", "", model.moe_ffn_hidden_size if run.shape.is_moe else 0, "expert TP", etp),
    )
    low, found = _low_modules(run), []
    for path, how, whole, by, ranks in sizes:
        is_high = low is not None and low.isdisjoint(GEMMS_OF.get(path, low))
        if whole and not whole % ranks and not is_high:
            found.append(Width(path, f"{how} / {by} {ranks}" if ranks > 1 else how, whole // ranks))
    return found


def _alignment(run: RuleContext) -> tuple[int, ...]:
    return (run.row.alignment or ()) if run.row is not None else ()


def _odd_widths(run: RuleContext, multiple: int) -> list[Violation]:
    odd = [one for one in widths(run) if one.size % multiple]
    return [Violation(one.path, how=one.how, size=one.size, multiple=multiple) for one in odd]


def _refused_tokens(run: RuleContext) -> list[Violation]:
    held, alignment = tokens(run), _alignment(run)
    if held is None or not alignment or _low_modules(run) == set():
        return []
    multiple = alignment[0]
    nearest = -(-held // multiple) * multiple
    return [Violation(tokens=held, multiple=multiple, nearest=nearest)] if held % multiple else []


def _odd_blocks(run: RuleContext) -> list[Violation]:
    """Return sizes that are legal for blockwise GEMMs and no multiple of its blocks."""
    found = [one for one in _odd_widths(run, 128) if not one.words["size"] % 16]
    held = tokens(run)
    if held is not None and held % 128 and not held % 16:
        found.append(Violation("train.micro_batch_size", how=" tokens", size=held, multiple=128))
    return found


BLOCK = 128
"""The side of a block of blockwise scaling."""


class Packing(NamedTuple):
    """Padding of the packed batches of Megatron Bridge."""

    path: str
    """The setting that holds the multiple."""
    multiple: int
    """Number of tokens that a sample of a batch is a multiple of."""
    samples: int = 1
    """Samples of a micro-batch that are padded to the same length."""
    fixed: str = ""
    """The setting that pads to a fixed length instead; "" where there is none."""


def _has_packs(specs: Any) -> bool:
    """Return whether releases of Megatron Bridge before 0.6 pack with these specs; a size of -1 packs nothing."""
    size = specs.get("packed_sequence_size", 1) if isinstance(specs, Mapping) else 1
    return specs is not None and (whole_number(size) or 1) > 0


def packing(run: RuleContext) -> Packing | None:
    """Return the padding of a run that packs sequences; None where it packs none, or to a fixed length."""
    data = run.data
    if data.enable_in_batch_packing and not data.defer_in_batch_packing_to_step:
        path = "data.in_batch_packing_pad_to_multiple_of"  # the rows of a micro-batch become one
        return Packing(path, data.in_batch_packing_pad_to_multiple_of or 1)
    options = data.dataset_kwargs if isinstance(data.dataset_kwargs, Mapping) else {}
    is_packed = data.enable_offline_packing or _has_packs(data.packed_sequence_specs)
    multiple = whole_number(options.get("pad_seq_length_to_mult", 16))
    if not is_packed or options.get("pad_to_max_length") or not multiple:
        return None
    path, fixed = "data.dataset_kwargs.pad_seq_length_to_mult", "data.dataset_kwargs.pad_to_max_length"
    return Packing(path, multiple, run.train.micro_batch_size or 1, fixed)


def _odd_packs(run: RuleContext) -> list[Violation]:
    """Return the violation of packed batches whose padding leaves no multiple of an alignment on a rank.

    Blockwise scaling runs ragged blocks, which PB503 is about; a remedy avoids them too.
    """
    packed, alignment = packing(run), _alignment(run)
    if packed is None or packed.multiple < 1 or not alignment:
        return []
    ranks, tokens_of_batch = run.parallel.of_tokens, packed.multiple * packed.samples
    wanted = BLOCK if run.scheme == "blockwise" else alignment[0]
    if not tokens_of_batch % (wanted * ranks):
        return []
    each = wanted * ranks // math.gcd(wanted * ranks, packed.samples)
    setting = ".".join(packed.path.split(".")[:2])
    return [
        Violation(
            setting,
            severity=None if tokens_of_batch % (alignment[0] * ranks) else "warning",
            padded=packed.multiple,
            name=packed.path.rpartition(".")[2],
            by=_ranks_of_tokens(run),
            left=_words_of_share(tokens_of_batch, ranks),
            multiple=wanted,
            needed=f"{packed.path}={math.lcm(packed.multiple, each)}",
            fixed=f"set {packed.fixed}=True" if packed.fixed else "",
        )
    ]


def _ranks_of_tokens(run: RuleContext) -> str:
    """Return the ranks that share the tokens of a batch, in words."""
    parallel, factors = run.parallel, []
    if parallel.sequence_parallel:
        factors.append(f"TP {parallel.tensor} with sequence parallelism")
    if parallel.context > 1:
        factors.append(f"CP {parallel.context}")
    return " x ".join(factors) or "one rank"


def _words_of_share(padded: int, ranks: int) -> str:
    """Return the number that the tokens of a rank are a multiple of; of none, where a rank gets a broken part."""
    return f"a multiple of {padded // ranks} tokens" if not padded % ranks else "no whole number of tokens"


def _projection_width(run: RuleContext) -> list[Violation]:
    """Return the width of a mixer's input projection: Megatron asserts the whole, Transformer Engine a rank's part."""
    mixer = run.shape.state_space or run.shape.delta_net
    if mixer is None or not run.fp8 or run.row is None:
        return []
    is_mamba = run.shape.delta_net is None
    asserted = 32 if run.row.name == "mxfp8" and not is_mamba else 16
    multiple = asserted if run.is_emulated else max(asserted, *_alignment(run))
    width = mixer.projected // (1 if run.is_emulated else run.parallel.tensor)
    field, others = _PROJECTED["mamba" if is_mamba else "delta_net"]
    return [Violation(field, width=width, multiple=multiple, others=others)] if width % multiple else []


_PROJECTED = {
    "mamba": ("model.mamba_num_heads", "mamba_num_heads, mamba_num_groups or mamba_state_dim"),
    "delta_net": ("model.linear_num_value_heads", "the heads of the layer or their widths"),
}
"""Mixer -> the field that decides most of its input projection, and what can be changed."""


def _small(run: RuleContext) -> list[Violation]:
    names = [f"{path.partition('.')[2]}{how} = {size}" for path, how, size in widths(run) if 0 < size <= 1024]
    if not names:
        return []
    smaller = "use a smaller tensor-parallel size" if run.parallel.tensor > 1 else ""
    return [Violation(names=", ".join(names), smaller=smaller)]


RULES = (
    error(
        id="PB501",
        title="tokens of a rank that the GEMMs do not take",
        setting="train.micro_batch_size",
        when=_refused_tokens,
        message="the tokens of a rank (seq_length x micro_batch_size over context and sequence parallel ranks) are "
        "{tokens}, and must be a multiple of {multiple} under {run.scheme}",
        remedies=("pad to {nearest} tokens", "choose another sequence length, micro-batch or layout"),
        source="Transformer Engine 2.20 pytorch/utils.py, common/gemm/cublaslt_gemm.cu; modelscope/ms-swift issue "
        "9722, 2026-07-10",
    ),
    error(
        id="PB502",
        title="width that the GEMMs do not take",
        setting="model.hidden_size",
        when=all_of("not is_emulated", _alignment, find=lambda run: _odd_widths(run, max(_alignment(run)))),
        message="its part on one rank ({size}{how}) must be a multiple of {multiple} under {run.scheme}",
        remedies=("choose a width that is", "change the parallel sizes"),
        source="Transformer Engine 2.20 pytorch/utils.py, pytorch/csrc/quantizer.cpp; NVIDIA/TransformerEngine issue "
        "1422, 2025-01-25",
    ),
    warning(
        id="PB503",
        title="size that is no multiple of a block",
        setting="model.hidden_size",
        when=all_of("scheme is blockwise", "not is_emulated", find=_odd_blocks),
        message="its part on one rank ({size}{how}) is no multiple of 128, the side of a block: ragged blocks run, "
        "gathering quantised tensors does not",
        remedies=("choose a multiple of 128", "use fp8_recipe='tensorwise'"),
        source="Transformer Engine 2.20 tensor/float8_blockwise_tensor.py; ROCm/Megatron-LM issue 130, 2026-05-15",
        evidence="reported",
    ),
    error(
        id="PB505",
        title="input projection of Mamba or a gated delta net that FP8 does not take",
        setting="model.mamba_num_heads",
        when=_projection_width,
        message="the input projection is {width} wide, and must be a multiple of {multiple} under {run.scheme}",
        remedies=("change {others}",),
        source="megatron-core 0.16.1 ssm/mamba_mixer.py:241 and ssm/gated_delta_net.py:131, assertions; Transformer "
        "Engine 2.20 pytorch/csrc/quantizer.cpp: MXFP8, of the part on a rank",
    ),
    info(
        id="PB506",
        title="GEMMs too small to gain",
        setting="model.hidden_size",
        when=all_of("is_low", "not is_emulated", "has_model", find=_small),
        message="FP8 GEMMs this narrow were measured slower than BF16 ones: {names}",
        remedies=("measure both", "{smaller}", "keep FP8 for larger models"),
        source="pytorch/torchtitan issue 1207, 2025-05 (wk and wv, 4096 x 1024, 40 % slower); huggingface/accelerate "
        "issue 1647, 2023-06-27",
        evidence="weak",
    ),
    error(
        id="PB507",
        title="packed batches that the GEMMs do not take",
        setting="data.dataset_kwargs",
        when=all_of("is_low", "not is_emulated", find=_odd_packs),
        message="a packed batch is padded to a multiple of {padded} tokens ({name}), which leaves {left} on a rank "
        "({by}), and {run.scheme} needs multiples of {multiple}",
        remedies=("set {needed}", "{fixed}"),
        source="Megatron Bridge 0.2.0 to 0.6.2 data/packing/gpt_sft.py:198 (before 0.6 data/datasets/sft.py), "
        "data/datasets/gpt_sft.py:95 and data/packing/in_batch.py; Transformer Engine 2.20 pytorch/utils.py "
        "assert_dim_for_fp8_exec, pytorch/csrc/quantizer.cpp; NVIDIA/TransformerEngine issues 2892 and 2911, "
        "2026-04-21",
    ),
)
