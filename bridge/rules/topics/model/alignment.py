"""Rules about sizes of low-precision GEMMs: tokens of a rank, sharded widths, and small GEMMs."""

import math
from collections.abc import Iterator

from bridge.rules.facts.gemm_sizes import (
    Width,
    collect_low_precision_modules,
    compute_tokens_per_rank,
    compute_widths_per_rank,
    get_alignment,
)
from bridge.rules.facts.packing import get_packing
from bridge.rules.rule import error, info, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation

BLOCK_SIZE = 128
"""The side of a block of blockwise scaling."""
MAX_SLOW_WIDTH = 1024
"""The widest GEMM that was measured slower in FP8 than in BF16."""
_PROJECTION_FIELDS = {
    "mamba": (
        "model.mamba_num_heads",
        "mamba_num_heads, mamba_num_groups or mamba_state_dim",
    ),
    "delta_net": (
        "model.linear_num_value_heads",
        "the heads of the layer or their widths",
    ),
}
"""Mixer -> the field that decides most of its input projection, and the fields to change."""


def find_unaligned_tokens(context: RunContext) -> Violation | None:
    """Return a violation if a rank's tokens are not a multiple of the scheme's alignment."""
    number, multiples = compute_tokens_per_rank(context), get_alignment(context)
    if number is None or not multiples or collect_low_precision_modules(context) == set():
        return None
    multiple = multiples[0]
    if number % multiple:
        nearest = -(-number // multiple) * multiple
        return Violation(tokens=number, multiple=multiple, nearest=nearest)
    return None


def find_unaligned_widths(context: RunContext) -> Iterator[Violation]:
    """Yield the widths on a rank that are not multiples of the scheme's alignment."""
    if context.is_emulated or not get_alignment(context):
        return
    multiple = max(get_alignment(context))
    for width in compute_widths_per_rank(context):
        if width.size % multiple:
            yield _make_width_violation(width, multiple)


def _make_width_violation(width: Width, multiple: int) -> Violation:
    return Violation(width.path, how=width.formula, size=width.size, multiple=multiple)


def find_ragged_blocks(context: RunContext) -> Iterator[Violation]:
    """Yield the sizes that blockwise GEMMs accept and that leave an incomplete block."""
    if not context.is_blockwise or context.is_emulated:
        return
    for width in compute_widths_per_rank(context):
        if width.size % BLOCK_SIZE and not width.size % 16:
            yield _make_width_violation(width, BLOCK_SIZE)
    number = compute_tokens_per_rank(context)
    if number is not None and number % BLOCK_SIZE and not number % 16:
        yield _make_width_violation(Width("train.micro_batch_size", " tokens", number), BLOCK_SIZE)


def find_unaligned_packing(context: RunContext) -> Violation | None:
    """Return a violation if the padding of packed batches leaves an unaligned size on a rank.

    Blockwise scaling supports incomplete blocks, so the violation is a warning under it. PB503
    reports such blocks. The remedy avoids them.
    """
    if not context.is_low_precision or context.is_emulated:
        return None
    packed, multiples = get_packing(context), get_alignment(context)
    if packed is None or packed.multiple < 1 or not multiples:
        return None
    ranks = context.parallel.token_ranks
    padded = packed.multiple * packed.samples
    wanted = multiples[0]
    if context.is_blockwise:
        wanted = BLOCK_SIZE
    if not padded % (wanted * ranks):
        return None
    severity = None
    if not padded % (multiples[0] * ranks):
        severity = "warning"
    left = "no whole number of tokens"
    if not padded % ranks:
        left = f"a multiple of {padded // ranks} tokens"
    fixed = ""
    if packed.fixed:
        fixed = f"set {packed.fixed}=True"
    of_sample = wanted * ranks // math.gcd(wanted * ranks, packed.samples)
    needed = math.lcm(packed.multiple, of_sample)
    section, setting, *_ = packed.path.split(".")
    return Violation(
        f"{section}.{setting}",
        severity=severity,
        padded=packed.multiple,
        name=packed.path.rpartition(".")[2],
        by=_format_token_ranks(context),
        left=left,
        multiple=wanted,
        needed=f"{packed.path}={needed}",
        fixed=fixed,
    )


def _format_token_ranks(context: RunContext) -> str:
    """Return text with the ranks that share the tokens of a batch."""
    parallel = context.parallel
    factors = []
    if parallel.sequence_parallel:
        factors.append(f"TP {parallel.tensor} with sequence parallelism")
    if parallel.context > 1:
        factors.append(f"CP {parallel.context}")
    return " x ".join(factors) or "one rank"


def find_unaligned_projection(context: RunContext) -> Violation | None:
    """Return a violation if FP8 GEMMs refuse the width of a mixer's input projection.

    Megatron checks the whole width. Transformer Engine checks the width of a rank's part.
    """
    is_mamba = context.shape.delta_net is None
    mixer = context.shape.state_space or context.shape.delta_net
    if mixer is None or not context.is_fp8 or context.scheme_row is None:
        return None
    multiple = 16
    if context.is_mxfp8 and not is_mamba:
        multiple = 32
    width = mixer.projected_width
    if not context.is_emulated:
        multiple = max((multiple, *get_alignment(context)))
        width //= context.parallel.tensor
    field, others = _PROJECTION_FIELDS["delta_net"]
    if is_mamba:
        field, others = _PROJECTION_FIELDS["mamba"]
    if width % multiple:
        return Violation(field, width=width, multiple=multiple, others=others)
    return None


def find_small_gemms(context: RunContext) -> Violation | None:
    """Return a violation if some widths are too small to gain from FP8."""
    if not context.is_low_precision or context.is_emulated or not context.has_model:
        return None
    names = []
    for width in compute_widths_per_rank(context):
        if 0 < width.size <= MAX_SLOW_WIDTH:
            name = width.path.partition(".")[2]
            names.append(f"{name}{width.formula} = {width.size}")
    if not names:
        return None
    smaller = ""
    if context.parallel.tensor > 1:
        smaller = "use a smaller tensor-parallel size"
    return Violation(names=", ".join(names), smaller=smaller)


RULES = (
    error(
        id="PB501",
        title="tokens of a rank that the GEMMs do not take",
        setting="train.micro_batch_size",
        when=find_unaligned_tokens,
        message="the tokens of a rank (seq_length x micro_batch_size over context and sequence "
        "parallel ranks) are {tokens}, and must be a multiple of {multiple} under {run.scheme}",
        remedies=(
            "pad to {nearest} tokens",
            "choose another sequence length, micro-batch or layout",
        ),
        source="Transformer Engine 2.20 pytorch/utils.py, common/gemm/cublaslt_gemm.cu; "
        "modelscope/ms-swift issue 9722, 2026-07-10",
    ),
    error(
        id="PB502",
        title="width that the GEMMs do not take",
        setting="model.hidden_size",
        when=find_unaligned_widths,
        message="its part on one rank ({size}{how}) must be a multiple of "
        "{multiple} under {run.scheme}",
        remedies=("choose a width whose part is", "change the parallel sizes"),
        source="Transformer Engine 2.20 pytorch/utils.py, pytorch/csrc/quantizer.cpp; "
        "NVIDIA/TransformerEngine issue 1422, 2025-01-25",
    ),
    warning(
        id="PB503",
        title="size that is not a multiple of a block",
        setting="model.hidden_size",
        when=find_ragged_blocks,
        message="its part on one rank ({size}{how}) is not a multiple of 128, the side of a block: "
        "ragged blocks run, gathering quantised tensors does not",
        remedies=("choose a multiple of 128", "use fp8_recipe='tensorwise'"),
        source="Transformer Engine 2.20 tensor/float8_blockwise_tensor.py; "
        "ROCm/Megatron-LM issue 130, 2026-05-15",
        evidence="reported",
    ),
    error(
        id="PB505",
        title="input projection of Mamba or a gated delta net that FP8 does not take",
        setting="model.mamba_num_heads",
        when=find_unaligned_projection,
        message="the input projection is {width} wide, and must be a multiple of "
        "{multiple} under {run.scheme}",
        remedies=("change {others}",),
        source="megatron-core 0.16.1 ssm/mamba_mixer.py:241 and ssm/gated_delta_net.py:131, "
        "assertions; Transformer Engine 2.20 pytorch/csrc/quantizer.cpp: "
        "MXFP8, of the part on a rank",
    ),
    info(
        id="PB506",
        title="GEMMs too small to gain",
        setting="model.hidden_size",
        when=find_small_gemms,
        message="FP8 GEMMs this narrow were measured slower than BF16 ones: {names}",
        remedies=("measure both", "{smaller}", "keep FP8 for larger models"),
        source="pytorch/torchtitan issue 1207, 2025-05 (wk and wv, 4096 x 1024, 40 % slower); "
        "huggingface/accelerate issue 1647, 2023-06-27",
        evidence="weak",
    ),
    error(
        id="PB507",
        title="packed batches that the GEMMs do not take",
        setting="data.dataset_kwargs",
        when=find_unaligned_packing,
        message="a packed batch is padded to a multiple of {padded} tokens ({name}), which leaves "
        "{left} on a rank ({by}), and {run.scheme} needs multiples of {multiple}",
        remedies=("set {needed}", "{fixed}"),
        source="Megatron Bridge 0.2.0 to 0.6.2 data/packing/gpt_sft.py:198 (before 0.6 "
        "data/datasets/sft.py), data/datasets/gpt_sft.py:95 and data/packing/in_batch.py; "
        "Transformer Engine 2.20 pytorch/utils.py assert_dim_for_fp8_exec, "
        "pytorch/csrc/quantizer.cpp; NVIDIA/TransformerEngine issues 2892 and 2911, 2026-04-21",
    ),
)
