"""Sizes that low-precision GEMMs take: the tokens of a rank, widths after sharding, and GEMMs too small to gain."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import target_rule


def tokens(s: RuleContext) -> int | None:
    """Return the tokens of a micro-batch on one rank (M of its GEMMs), or None where that is not known.

    Tokens that do not divide by the ranks are none of an alignment's: that is a fault of its own (PB408).
    """
    seq = s.data.seq_length or s.model.seq_length
    batch = s.train.micro_batch_size
    if not seq or not batch or s.data.packing or s.is_emulated:
        return None
    shards = s.cp * (s.tp if s.sp else 1)
    return int(seq * batch // shards) if not seq % shards else None


def widths(s: RuleContext) -> Iterator[tuple[str, str, int]]:
    """Yield (setting, how it is divided, size on one rank) of the widths that GEMMs contract over or produce.

    A width that does not divide by the ranks is left out: that is a fault of its own (PB408).
    """
    model, tp = s.model, s.tp
    if model.hidden_size:
        yield "model.hidden_size", "", model.hidden_size
    if model.ffn_hidden_size and not model.ffn_hidden_size % tp:
        yield "model.ffn_hidden_size", f" / TP {tp}" if tp > 1 else "", model.ffn_hidden_size // tp
    if model.hidden_size and model.num_attention_heads and not model.multi_latent_attention and not s.is_hybrid:
        head = model.kv_channels or model.hidden_size // max(1, model.num_attention_heads)
        groups = model.num_query_groups or model.num_attention_heads
        qkv = head * (model.num_attention_heads + 2 * groups)
        if not model.num_attention_heads % tp and not qkv % tp:
            yield "model.kv_channels", f" x (heads + 2 x groups){f' / TP {tp}' if tp > 1 else ''}", qkv // tp
    if s.is_moe and model.moe_ffn_hidden_size:
        etp = s.etp
        if not model.moe_ffn_hidden_size % etp:
            size = model.moe_ffn_hidden_size // etp
            yield "model.moe_ffn_hidden_size", f" / expert TP {etp}" if etp > 1 else "", size


def _odd_widths(s: RuleContext, multiple: int) -> list[dict[str, Any]]:
    return [
        {"path": path, "how": how, "size": f"{size:g}", "multiple": multiple}
        for path, how, size in widths(s)
        if size % multiple
    ]


def _refused_widths(s: RuleContext) -> list[dict[str, Any]]:
    if s.row is None or s.row.alignment is None or s.is_emulated:
        return []
    return _odd_widths(s, max(s.row.alignment))


def _refused_tokens(s: RuleContext) -> Any:
    held = tokens(s)
    if held is None or s.row is None or s.row.alignment is None:
        return None
    multiple = s.row.alignment[0]
    return bool(held % multiple) and {"tokens": held, "multiple": multiple, "nearest": _next(held, multiple)}


def _odd_blocks(s: RuleContext) -> list[dict[str, Any]]:
    """Return sizes that are legal for blockwise GEMMs and no multiple of its blocks."""
    if s.is_emulated:
        return []
    found = [row for row in _odd_widths(s, 128) if not float(row["size"]) % 16]
    held = tokens(s)
    if held is not None and held % 128 and not held % 16:
        found.append({"path": "train.micro_batch_size", "how": " tokens", "size": held, "multiple": 128})
    return found


def _packing(s: RuleContext) -> Any:
    pad = s.data.pad_multiple
    if not s.data.packing or not pad or s.row is None or s.row.alignment is None or s.is_emulated:
        return None
    sequence = 2 * s.tp * s.cp if s.cp > 1 else s.tp
    slab = s.row.alignment[0] * (s.tp if s.sp else 1) * s.cp
    needed = math.lcm(sequence, slab)
    return bool(pad % needed) and {"needed": needed, "sequence": sequence, "slab": slab}


def _mamba_width(s: RuleContext) -> Any:
    model = s.model
    if not s.is_hybrid or s.is_emulated:
        return None
    inner = model.mamba_num_heads * model.mamba_head_dim if model.mamba_num_heads else 2 * model.hidden_size
    heads = model.mamba_num_heads or inner // max(1, model.mamba_head_dim)
    width = 2 * inner + 2 * model.mamba_num_groups * model.mamba_state_dim + heads
    return bool(width % 16) and {"width": width}


def _small(s: RuleContext) -> Any:
    if s.is_emulated or not s.has_model:
        return None
    names = [f"{path.partition('.')[2]}{how} = {size:g}" for path, how, size in widths(s) if 0 < size <= 1024]
    return bool(names) and {"names": ", ".join(names), "value": s.model.hidden_size}


def _next(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_low = partial(target_rule, gate="is_low")

RULES = (
    _low(
        heading="PB501: tokens of a rank that the GEMMs do not take",
        predicate=_refused_tokens,
        error="train.micro_batch_size: the tokens of a rank (seq_length x micro_batch_size over context and sequence "
        "parallel ranks) are {tokens}, and must be a multiple of {multiple} under {s.scheme}",
        remedies=("pad to {nearest} tokens", "choose another sequence length, micro-batch or layout"),
        verified="Transformer Engine 2.20 pytorch/utils.py, common/gemm/cublaslt_gemm.cu; modelscope/ms-swift issue "
        "9722, 2026-07-10",
    ),
    _low(
        heading="PB502: width that the GEMMs do not take",
        predicate=_refused_widths,
        error="model.hidden_size: its part on one rank ({size}{how}) must be a multiple of {multiple} under {s.scheme}",
        remedies=("choose a width that is", "change the parallel sizes"),
        verified="Transformer Engine 2.20 pytorch/utils.py, pytorch/csrc/quantizer.cpp; NVIDIA/TransformerEngine issue "
        "1422, 2025-01-25",
    ),
    target_rule(
        heading="PB503: size that is no multiple of a block",
        predicate=_odd_blocks,
        warning="model.hidden_size: its part on one rank ({size}{how}) is no multiple of 128, the side of a block: "
        "ragged blocks run, gathering quantised tensors does not",
        remedies=("choose a multiple of 128", "use fp8_recipe='tensorwise'"),
        reported="Transformer Engine 2.20 tensor/float8_blockwise_tensor.py; ROCm/Megatron-LM issue 130, 2026-05-15",
        gate="is_blockwise",
    ),
    _low(
        heading="PB504: padding of packed sequences",
        predicate=_packing,
        warning="data.pad_multiple: must be a multiple of {needed}: {sequence} per sequence for its context and tensor "
        "parallel parts, {slab} per packed slab for {s.scheme}",
        remedies=("pad to {needed}",),
        reported="NVIDIA-NeMo/RL issues 1569 (2025-11-25), 1884 (2026-02-05) and 2182 (2026-03-31)",
    ),
    target_rule(
        heading="PB505: Mamba projection that FP8 does not take",
        predicate=_mamba_width,
        error="model.mamba_num_heads: the input projection is {width} wide, and must be a multiple of 16 under FP8",
        remedies=("change mamba_num_heads, mamba_num_groups or mamba_state_dim",),
        verified="megatron-core 0.16.1 ssm/mamba_mixer.py: an assertion",
        gate="fp8",
    ),
    _low(
        heading="PB506: GEMMs too small to gain",
        predicate=_small,
        info="model.hidden_size: FP8 GEMMs this narrow were measured slower than BF16 ones: {names}",
        remedies=("measure both", "use a smaller tensor-parallel size", "keep FP8 for larger models"),
        weak="pytorch/torchtitan issue 1207, 2025-05 (wk and wv, 4096 x 1024, 40 % slower); huggingface/accelerate "
        "issue 1647, 2023-06-27",
    ),
)
