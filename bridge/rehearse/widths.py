"""`shrink_widths`: makes the widths of a model small: heads, channels, hidden size, experts.

A small width keeps two properties of the width in the full run. The first is its ratio to the
hidden size. The second is its alignment: the greatest common divisor of a rank's part and the
multiple that the scaling scheme needs. Several widths of attention, of Mamba and of a gated delta
net depend on the same heads and channels. So heads and channels are found by search: a
`_measure_..._alignment` function measures the full run and then growing sizes. The first sizes with
the same alignment are taken.
"""

from dataclasses import replace
from math import gcd

from bridge.model.attention_variants import DeltaNet, Indexer
from bridge.model.shape import Experts, Latent, StateSpace
from bridge.rehearse.small_run import MIN_ALIGNMENT, SmallRun
from bridge.target.fields import read_field

MAX_HEADS_PER_GROUP = 8
"""The most query heads that share one key and value."""
DELTA_CHANNELS = 8
"""Channels of a head of a gated delta net."""
INDEXER_TOPK = 16
"""The most keys that a query of sparse attention selects."""

WIDTH_REASON = "keeps the ratio to hidden_size and the alignment on a rank"
HEADS_REASON = "keeps the queries of a key on a rank"


def shrink_widths(small_run: SmallRun) -> None:
    """Make every width small."""
    hidden = _shrink_attention(small_run)
    if small_run.shape.state_space is not None:
        _shrink_state_space(small_run, small_run.shape.state_space)
    if small_run.shape.delta_net is not None:
        _shrink_delta_net(small_run, small_run.shape.delta_net)
    if small_run.shape.indexer is not None:
        _shrink_indexer(small_run, small_run.shape.indexer)
    _shrink_feed_forward(small_run, hidden)
    if small_run.shape.experts is not None:
        _shrink_experts(small_run, small_run.shape.experts, hidden)


def _shrink_attention(small_run: SmallRun) -> int:
    """Make the heads, their channels and the hidden size small, and return the hidden size."""
    shape = small_run.shape
    if not shape.num_attention_heads:
        # The model has no attention. So nothing else decides its hidden size.
        return small_run.alignment * 2
    heads, groups = _choose_heads(small_run)
    ratio = shape.hidden_size / (shape.num_attention_heads * shape.kv_channels)
    stated_channels = None
    if shape.latent is not None:
        hidden = _shrink_latent(small_run, shape.latent, heads, ratio)
    elif read_field(small_run.model, "kv_channels") is None:
        hidden = heads * _find_channels(small_run, heads, groups, is_stated=False)
    else:
        stated_channels = _find_channels(small_run, heads, groups, is_stated=True)
        hidden = small_run.fit_width(shape.hidden_size, ratio * heads * stated_channels)
    small_run.set("model.num_attention_heads", heads, HEADS_REASON)
    if groups != heads or read_field(small_run.model, "num_query_groups") is not None:
        small_run.set("model.num_query_groups", groups, HEADS_REASON)
    if stated_channels is not None:
        small_run.set("model.kv_channels", stated_channels, "keeps the alignment on a rank")
    small_run.set("model.hidden_size", hidden, "keeps the ratio to the heads and the alignment")
    return hidden


def _choose_heads(small_run: SmallRun) -> tuple[int, int]:
    """Return small numbers of query heads and of query groups.

    If the tensor-parallel ranks of the full run do not divide a number, the ranks of the rehearsal
    do not divide the small number. So Megatron's checks of these numbers have the same result.
    """
    heads, groups = small_run.shape.num_attention_heads, small_run.shape.num_query_groups
    ranks, small_ranks = small_run.parallel.tensor, small_run.tensor_ranks
    if small_run.shape.latent is not None or heads == groups:
        small_heads = min(4, small_ranks * max(1, heads // small_ranks))
        if heads % ranks:
            small_heads += 1  # not divisible
        return small_heads, small_heads
    if groups % ranks == 0:
        small_groups = small_ranks
    elif groups > ranks:
        small_groups = small_ranks + 1  # not divisible
    else:
        small_groups = 1  # fewer than the ranks
    per_group = min(heads // groups, MAX_HEADS_PER_GROUP)
    if heads % ranks == 0 and small_groups * per_group % small_ranks:
        per_group += 1  # divisible
    return small_groups * per_group, small_groups


def _find_channels(small_run: SmallRun, heads: int, groups: int, *, is_stated: bool) -> int:
    """Return the least number of channels of a head that keeps the alignment of the projections.

    Args:
        heads: Query heads of the rehearsal.
        groups: Query groups of the rehearsal.
        is_stated: Whether the run states the channels. Then the hidden size is independent of them.
    """
    shape = small_run.shape
    wanted = _measure_attention_alignment(
        small_run.alignment,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        groups=shape.num_query_groups,
        channels=shape.kv_channels,
        ranks=small_run.parallel.tensor,
    )
    for channels in range(MIN_ALIGNMENT, 4 * small_run.alignment + 1):
        hidden = heads * channels
        if is_stated:
            hidden = shape.hidden_size
        alignment = _measure_attention_alignment(
            small_run.alignment,
            hidden=hidden,
            heads=heads,
            groups=groups,
            channels=channels,
            ranks=small_run.tensor_ranks,
        )
        if alignment == wanted:
            return channels
    return small_run.alignment


def _measure_attention_alignment(
    multiple: int, *, hidden: int, heads: int, groups: int, channels: int, ranks: int
) -> tuple[int, ...]:
    """Return the greatest common divisor of `multiple` and each projection's width on a rank."""
    query_width = heads * channels // ranks
    # The fused projection makes queries, keys and values.
    fused_width = (heads + 2 * groups) * channels // ranks
    return (
        gcd(hidden, multiple),
        channels % 2,
        gcd(query_width, multiple),
        gcd(fused_width, multiple),
    )


def _shrink_latent(small_run: SmallRun, latent: Latent, heads: int, ratio: float) -> int:
    """Make the widths of latent attention small, and return the hidden size.

    Args:
        latent: The widths of latent attention in the full run.
        heads: Heads of the rehearsal.
        ratio: Hidden size of the full run, divided by the channels of all its heads.
    """
    dims = {}
    for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        size = getattr(latent, name)
        if size:
            dims[name] = size
    scale = 2 * small_run.alignment / min(dims.values())
    for name, size in dims.items():
        small_run.set(
            f"model.{name}", small_run.fit_width(size, size * scale), "keeps the alignment"
        )
    channels = small_run.shape.kv_channels * scale
    hidden = small_run.fit_width(small_run.shape.hidden_size, ratio * heads * channels)
    for name in ("q_lora_rank", "kv_lora_rank"):
        rank = getattr(latent, name)
        if rank is not None:
            wanted = rank * hidden / small_run.shape.hidden_size
            small_run.set(f"model.{name}", small_run.fit_width(rank, wanted), WIDTH_REASON)
    return hidden


def _shrink_state_space(small_run: SmallRun, mixer: StateSpace) -> None:
    """Make the heads of Mamba few, and keep the alignment of the projections on a rank."""
    small = _find_state_space(small_run, mixer)
    reason = "keeps the alignment of Mamba's projections on a rank"
    for name in ("num_heads", "head_dim", "state_dim", "num_groups"):
        small_run.set(f"model.mamba_{name}", getattr(small, name), reason)


def _find_state_space(small_run: SmallRun, mixer: StateSpace) -> StateSpace:
    """Return the least sizes of Mamba with the alignment of the full run.

    If no number of heads has this alignment, the returned sizes have aligned projections.
    """
    multiple = small_run.alignment
    groups = small_run.tensor_ranks
    if mixer.num_groups % small_run.parallel.tensor:
        groups += 1  # the ranks must not divide the groups, as in the full run
    without_heads = StateSpace(
        num_heads=0,
        head_dim=4,
        state_dim=small_run.fit_width(mixer.state_dim, 16),
        num_groups=groups,
    )
    wanted = _measure_state_space_alignment(multiple, mixer, small_run.parallel.tensor)
    for num_heads in range(groups, 8 * groups * multiple + 1):
        small = replace(without_heads, num_heads=num_heads)
        if _measure_state_space_alignment(multiple, small, small_run.tensor_ranks) == wanted:
            return small
    return replace(without_heads, num_heads=groups * multiple)


def _measure_state_space_alignment(
    multiple: int, mixer: StateSpace, ranks: int
) -> tuple[object, ...]:
    """Return the divisibility of Mamba's heads and of the projections' widths on a rank."""
    return (
        mixer.num_heads % mixer.num_groups,
        mixer.num_heads % ranks == 0,
        gcd(mixer.inner // ranks, multiple),
        gcd(mixer.projected_width // ranks, multiple),
    )


def _shrink_delta_net(small_run: SmallRun, net: DeltaNet) -> None:
    """Make the heads of a gated delta net few, and keep the projections' alignment on a rank."""
    small = _find_delta_net(small_run, net)
    reason = "keeps the alignment of the projections on a rank"
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        small_run.set(f"model.linear_{name}", getattr(small, name), reason)


def _find_delta_net(small_run: SmallRun, net: DeltaNet) -> DeltaNet:
    """Return the least sizes of a gated delta net with the alignment of the full run.

    If no smaller number of heads has this alignment, the sizes of the full run are returned.
    """
    multiple, small_ranks = small_run.alignment, small_run.tensor_ranks
    values_per_key = net.num_value_heads // net.num_key_heads
    wanted = _measure_delta_net_alignment(multiple, net, small_run.parallel.tensor)
    for num_keys in range(small_ranks, 8 * small_ranks * multiple + 1):
        small = replace(
            net,
            num_key_heads=num_keys,
            num_value_heads=num_keys * values_per_key,
            key_head_dim=DELTA_CHANNELS,
            value_head_dim=DELTA_CHANNELS,
        )
        if _measure_delta_net_alignment(multiple, small, small_ranks) == wanted:
            return small
    return net


def _measure_delta_net_alignment(multiple: int, net: DeltaNet, ranks: int) -> tuple[object, ...]:
    """Return the divisibility of a delta net's heads and of the projections' widths on a rank."""
    return (
        net.num_key_heads % ranks == 0,
        gcd(net.value_width // ranks, multiple),
        gcd(net.projected_width // ranks, multiple),
    )


def _shrink_indexer(small_run: SmallRun, indexer: Indexer) -> None:
    """Make the indexer of sparse attention small.

    A head of the indexer must be wide enough for the rotated channels of the model's heads.
    """
    rotated = small_run.model.get("qk_pos_emb_head_dim") or 0
    width = 1 << (max(small_run.alignment, 2 * rotated) - 1).bit_length()
    reason = "a power of two, which the rotation takes"
    small_run.set("model.dsa_indexer_head_dim", min(indexer.head_dim, width), reason)
    small_run.set(
        "model.dsa_indexer_n_heads", min(indexer.num_heads, small_run.alignment), WIDTH_REASON
    )
    small_run.set("model.dsa_indexer_topk", min(indexer.topk, INDEXER_TOPK), "the tokens are fewer")


def _shrink_feed_forward(small_run: SmallRun, hidden: int) -> None:
    """Make the feed-forward width small, and remove the size of the vocabulary.

    The rehearsal trains on bytes, and its corpus states the size.
    """
    shape = small_run.shape
    wanted = shape.ffn_hidden_size / shape.hidden_size * hidden
    width = small_run.fit_width(
        shape.ffn_hidden_size, wanted, small_run.parallel.tensor, small_run.tensor_ranks
    )
    is_stated = read_field(small_run.model, "ffn_hidden_size") is not None
    if is_stated or width != 4 * hidden:
        small_run.set("model.ffn_hidden_size", width, WIDTH_REASON)
    small_run.set("model.vocab_size", None, "the vocabulary of bytes, padded as the run's is")


def _shrink_experts(small_run: SmallRun, experts: Experts, hidden: int) -> None:
    """Make the experts few and narrow, with a router and a dispatcher that a CPU can run."""
    count = 4
    if small_run.layout.size("expert") > 1:
        count = 2 * min(2, max(1, experts.num_experts // small_run.parallel.expert))
    if experts.num_experts % small_run.parallel.expert:
        # With one more expert, the ranks do not divide the small number, as in the full run.
        count += 1
    reason = "two experts on each of two ranks, or four on one"
    small_run.set("model.num_moe_experts", min(count, experts.num_experts), reason)
    # A token keeps at least two experts: Megatron's router supports a single expert per token only
    # if its softmax runs before the choice.
    small_run.set(
        "model.moe_router_topk", min(experts.topk, max(2, count // 2)), "the experts are fewer"
    )
    if read_field(small_run.model, "moe_router_num_groups"):
        small_run.set("model.moe_router_num_groups", 2, "the experts are fewer")
        small_run.set("model.moe_router_group_topk", 1, "the groups are fewer")
    if read_field(small_run.model, "moe_token_dispatcher_type") == "flex":
        small_run.set(
            "model.moe_token_dispatcher_type", "alltoall", "the kernels of flex need a GPU"
        )
        # Megatron refuses these two fields without the dispatcher flex.
        small_run.model.pop("moe_flex_dispatcher_backend", None)
        small_run.model.pop("moe_enable_deepep", None)
    _shrink_expert_widths(small_run, experts, hidden / small_run.shape.hidden_size)


def _shrink_expert_widths(small_run: SmallRun, experts: Experts, ratio: float) -> None:
    """Make the widths of routed and shared experts small.

    Args:
        experts: The experts of the full run.
        ratio: Hidden size of the rehearsal, divided by the hidden size of the full run.
    """
    if experts.latent_size:
        width = small_run.fit_width(experts.latent_size, experts.latent_size * ratio)
        small_run.set("model.moe_latent_size", width, WIDTH_REASON)
    if read_field(small_run.model, "moe_ffn_hidden_size") is not None:
        routed = experts.ffn_hidden_size
        ranks, small_ranks = small_run.parallel.expert_tensor, small_run.layout.expert_tensor
        width = small_run.fit_width(routed, routed * ratio, ranks, small_ranks)
        small_run.set("model.moe_ffn_hidden_size", width, WIDTH_REASON)
    if experts.shared_ffn_hidden_size:
        shared = experts.shared_ffn_hidden_size
        width = small_run.fit_width(
            shared, shared * ratio, small_run.parallel.tensor, small_run.tensor_ranks
        )
        small_run.set("model.moe_shared_expert_intermediate_size", width, WIDTH_REASON)
