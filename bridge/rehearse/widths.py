"""`shrink_widths`: small widths of a model: heads, channels, hidden size, feed-forward, experts.

A small width keeps two properties of the width in the full run. The first is its ratio to the
hidden size. The second is its alignment: the greatest common divisor of a rank's part and the
multiple that the scaling scheme needs. Heads and channels depend on each other, so they are found
by search: the alignments of the full run are computed, and the smallest counts with the same
alignments are taken.
"""

from dataclasses import replace
from math import gcd

from bridge.model.attention_variants import DeltaNet, Indexer
from bridge.model.shape import Experts, Latent, StateSpace
from bridge.rehearse.small_run import MIN_ALIGNMENT, SmallRun
from bridge.target.fields import read_field

MAX_HEADS_PER_GROUP = 8
"""The most query heads that share one key and value."""
DELTA_CHANNELS = {"key_head_dim": 8, "value_head_dim": 8}
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
        # A model without attention: nothing else decides its hidden size.
        return small_run.alignment * 2
    heads, groups = _choose_heads(small_run)
    channels = _choose_channels(small_run, heads, groups)
    is_stated = read_field(small_run.model, "kv_channels") is not None
    ratio = shape.hidden_size / (shape.num_attention_heads * shape.kv_channels)
    if shape.latent is not None:
        hidden = _shrink_latent(small_run, shape.latent, heads, ratio)
    elif is_stated:
        hidden = small_run.fit_width(shape.hidden_size, ratio * heads * channels)
    else:
        hidden = heads * channels
    small_run.set("model.num_attention_heads", heads, HEADS_REASON)
    if groups != heads or read_field(small_run.model, "num_query_groups") is not None:
        small_run.set("model.num_query_groups", groups, HEADS_REASON)
    if is_stated and shape.latent is None:
        small_run.set("model.kv_channels", channels, "keeps the alignment on a rank")
    small_run.set("model.hidden_size", hidden, "keeps the ratio to the heads and the alignment")
    return hidden


def _choose_heads(small_run: SmallRun) -> tuple[int, int]:
    """Return small numbers of query heads and of query groups.

    A number that is not divisible by the tensor-parallel ranks of the full run is not divisible by
    those of the rehearsal either. So Megatron's checks of these numbers have the same result.
    """
    heads, groups = small_run.shape.num_attention_heads, small_run.shape.num_query_groups
    ranks, small_ranks = small_run.parallel.tensor, small_run.tensor_ranks
    if small_run.shape.latent is not None or heads == groups:
        small_heads = min(4, small_ranks * max(1, heads // small_ranks))
        if heads % ranks:
            # One more head, so that the small number is not divisible either.
            small_heads += 1
        return small_heads, small_heads
    small_groups = small_ranks
    if groups > ranks and groups % ranks:
        # One more group, so that the small number is not divisible either.
        small_groups = small_ranks + 1
    elif groups % ranks:
        small_groups = 1
    per_group = min(heads // groups, MAX_HEADS_PER_GROUP)
    if heads % ranks == 0 and small_groups * per_group % small_ranks:
        # The heads of the full run are divisible by its ranks, so these must be too.
        per_group += 1
    return small_groups * per_group, small_groups


def _choose_channels(small_run: SmallRun, heads: int, groups: int) -> int:
    """Return the least number of channels of a head that keeps the alignment of the projections."""
    shape = small_run.shape
    is_stated = read_field(small_run.model, "kv_channels") is not None

    def alignment(
        width: int, queries: int, keys: int, channels: int, ranks: int
    ) -> tuple[int, ...]:
        """Return the common divisors of the projections' widths on a rank with the multiple."""
        query_divisor = gcd(queries * channels // ranks, small_run.alignment)
        # The fused projection makes queries, keys and values.
        fused_divisor = gcd((queries + 2 * keys) * channels // ranks, small_run.alignment)
        return gcd(width, small_run.alignment), channels % 2, query_divisor, fused_divisor

    wanted = alignment(
        shape.hidden_size,
        shape.num_attention_heads,
        shape.num_query_groups,
        shape.kv_channels,
        small_run.parallel.tensor,
    )
    for channels in range(MIN_ALIGNMENT, 4 * small_run.alignment + 1):
        width = heads * channels
        if is_stated:
            width = shape.hidden_size
        if alignment(width, heads, groups, channels, small_run.tensor_ranks) == wanted:
            return channels
    return small_run.alignment


def _shrink_latent(small_run: SmallRun, latent: Latent, heads: int, ratio: float) -> int:
    """Make the widths of latent attention small, and return the hidden size.

    Args:
        small_run: The small run.
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
    groups = small_run.tensor_ranks
    if mixer.num_groups % small_run.parallel.tensor:
        # One more group, so that the small number is not divisible either.
        groups += 1

    def alignment(space: StateSpace, ranks: int) -> tuple[object, ...]:
        """Return the divisibility of the heads and of the projections' widths on a rank."""
        inner = gcd(space.inner // ranks, small_run.alignment)
        projected = gcd(space.projected_width // ranks, small_run.alignment)
        return space.num_heads % space.num_groups, space.num_heads % ranks == 0, inner, projected

    wanted = alignment(mixer, small_run.parallel.tensor)
    state_dim = small_run.fit_width(mixer.state_dim, 16)
    without_heads = StateSpace(num_heads=0, head_dim=4, state_dim=state_dim, num_groups=groups)
    # If no number of heads has the alignments of the full run, every projection is aligned.
    small = replace(without_heads, num_heads=groups * small_run.alignment)
    for num_heads in range(groups, 8 * groups * small_run.alignment + 1):
        space = replace(without_heads, num_heads=num_heads)
        if alignment(space, small_run.tensor_ranks) == wanted:
            small = space
            break
    reason = "keeps the alignment of Mamba's projections on a rank"
    for name in ("num_heads", "head_dim", "state_dim", "num_groups"):
        small_run.set(f"model.mamba_{name}", getattr(small, name), reason)


def _shrink_delta_net(small_run: SmallRun, net: DeltaNet) -> None:
    """Make the heads of a gated delta net few, and keep the alignment of the projections on a rank.

    The heads of the full run stay if no smaller number keeps it.
    """
    values_per_key = net.num_value_heads // net.num_key_heads

    def alignment(sizes: DeltaNet, ranks: int) -> tuple[object, ...]:
        """Return the divisibility of the heads and of the projections' widths on a rank."""
        value = gcd(sizes.value // ranks, small_run.alignment)
        projected = gcd(sizes.projected_width // ranks, small_run.alignment)
        return sizes.num_key_heads % ranks == 0, value, projected

    wanted = alignment(net, small_run.parallel.tensor)
    small = net
    for num_keys in range(
        small_run.tensor_ranks, 8 * small_run.tensor_ranks * small_run.alignment + 1
    ):
        heads = {"num_key_heads": num_keys, "num_value_heads": num_keys * values_per_key}
        sizes = replace(net, **heads, **DELTA_CHANNELS)
        if alignment(sizes, small_run.tensor_ranks) == wanted:
            small = sizes
            break
    reason = "keeps the alignment of the projections on a rank"
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        small_run.set(f"model.linear_{name}", getattr(small, name), reason)


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
        # One more expert, so that the small number is not divisible by the ranks either.
        count += 1
    reason = "two experts on each of two ranks, or four on one"
    small_run.set("model.num_moe_experts", min(count, experts.num_experts), reason)
    # Two experts per token are not reduced to one: Megatron's router takes a single expert only if
    # its softmax is before the choice.
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
        # Megatron refuses these two without flex.
        small_run.model.pop("moe_flex_dispatcher_backend", None)
        small_run.model.pop("moe_enable_deepep", None)
    _shrink_expert_widths(small_run, experts, hidden / small_run.shape.hidden_size)


def _shrink_expert_widths(small_run: SmallRun, experts: Experts, ratio: float) -> None:
    """Make the widths of routed and shared experts small.

    Args:
        small_run: The small run.
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
