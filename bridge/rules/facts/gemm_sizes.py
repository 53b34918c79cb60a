"""Sizes of the GEMMs on one rank: the tokens of a micro-batch, and the widths after sharding."""

from collections.abc import Iterator
from typing import NamedTuple

from bridge.rules.run_context import RunContext

LINEAR_LAYERS_BY_WIDTH = {
    "model.ffn_hidden_size": (
        "linear_fc1",
        "linear_fc2",
        "shared_experts.linear_fc1",
        "shared_experts.linear_fc2",
    ),
    "model.moe_ffn_hidden_size": ("experts.linear_fc1", "experts.linear_fc2"),
    "model.kv_channels": ("linear_qkv", "linear_proj"),
}
"""Width -> the linear layers that have it. All linear layers have any other width."""


def compute_tokens_per_rank(context: RunContext) -> int | None:
    """Return the tokens of a micro-batch on a rank (M of its GEMMs), or None if they are not known.

    The result is also None if the tokens do not divide by the ranks. PB408 reports that.
    """
    length = context.model.seq_length or context.data.seq_length
    batch = context.train.micro_batch_size
    if not length or not batch or context.is_emulated:
        return None
    ranks = context.parallel.token_ranks
    if length % ranks:
        return None
    return length * batch // ranks


def get_alignment(context: RunContext) -> tuple[int, ...]:
    """Return the multiples of tokens and of widths that the scheme's GEMMs need."""
    if context.scheme_row is None:
        return ()
    return context.scheme_row.alignment or ()


def collect_low_precision_modules(context: RunContext) -> set[str] | None:
    """Return the modules in FP8 or FP4 under a per-module recipe, or None without such a recipe."""
    if context.model.quant_recipe is None or context.selection is None:
        return None
    modules = [*context.selection.unselected]
    for row in context.selection.rows:
        modules += row.taken
    return {module.module for module in modules if module.scheme is not None}


class Width(NamedTuple):
    """A width of an operand or of a result of GEMMs."""

    path: str
    formula: str
    """The calculation of the size, as text."""
    size: int
    """Size on one rank."""


class _FullWidth(NamedTuple):
    """A width before it is divided over ranks."""

    path: str
    formula: str
    size: int | None
    ranks: str
    """The name of the ranks, as text."""
    parts: int
    """Number of the ranks."""


def compute_widths_per_rank(context: RunContext) -> Iterator[Width]:
    """Yield the widths of the operands and results of GEMMs.

    A width that does not divide by the ranks is left out, and PB408 reports it. A width is also
    left out if a per-module recipe keeps all of its linear layers in the dtype of the run.
    """
    low = collect_low_precision_modules(context)
    for width in _list_full_widths(context):
        if not width.size or width.size % width.parts:
            continue
        if low is not None and low.isdisjoint(LINEAR_LAYERS_BY_WIDTH.get(width.path, low)):
            continue
        formula = width.formula
        if width.parts > 1:
            formula += f" / {width.ranks} {width.parts}"
        yield Width(width.path, formula, width.size // width.parts)


def _list_full_widths(context: RunContext) -> Iterator[_FullWidth]:
    model, heads = context.model, context.model.num_attention_heads
    tensor, expert_tensor = context.parallel.tensor, context.parallel.expert_tensor
    qkv = _compute_qkv_width(context, heads)
    yield _FullWidth("model.hidden_size", "", model.hidden_size, "TP", 1)
    yield _FullWidth("model.ffn_hidden_size", "", model.ffn_hidden_size, "TP", tensor)
    yield _FullWidth("model.kv_channels", " x (heads + 2 x groups)", qkv, "TP", tensor)
    if context.shape.is_moe:
        width = model.moe_ffn_hidden_size
        yield _FullWidth("model.moe_ffn_hidden_size", "", width, "expert TP", expert_tensor)


def _compute_qkv_width(context: RunContext, heads: int) -> int:
    """Return the width of the projection to queries, keys and values, or 0 without such a layer."""
    model = context.model
    if not model.hidden_size or not heads or heads % context.parallel.tensor:
        return 0
    if model.multi_latent_attention or context.shape.is_hybrid:
        return 0
    head = model.kv_channels or model.hidden_size // max(1, heads)
    return head * (heads + 2 * (model.num_query_groups or heads))
