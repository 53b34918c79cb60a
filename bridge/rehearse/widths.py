"""The widths of a model, made small: heads and channels, hidden size, feed-forward and experts.

A width of the rehearsal keeps two things of the width of the run: its ratio to the hidden size, and
its alignment, the greatest common divisor of a rank's part with the scheme's multiple. Heads and
channels depend on each other, so that their smallest counts are searched for: the alignments of the
run are computed first, and the first counts with the same ones are taken.
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
INDEXER_TOPK = 16
"""Keys that a query of sparse attention takes."""

WIDTH_REASON = "keeps the ratio to hidden_size and the alignment on a rank"
HEADS_REASON = "keeps the queries of a key on a rank"


def shrink_widths(run: SmallRun) -> None:
    """Make every width small."""
    hidden = _shrink_attention(run)
    if run.shape.state_space is not None:
        _shrink_state_space(run, run.shape.state_space)
    if run.shape.delta_net is not None:
        _shrink_delta_net(run, run.shape.delta_net)
    if run.shape.indexer is not None:
        _shrink_indexer(run, run.shape.indexer)
    _shrink_feed_forward(run, hidden)
    if run.shape.experts is not None:
        _shrink_experts(run, run.shape.experts, hidden)


def _shrink_attention(run: SmallRun) -> int:
    """Make the heads, their channels and the hidden size small; return the hidden size."""
    shape = run.shape
    if not shape.num_attention_heads:
        return run.unit * 2
    heads, groups = _choose_heads(run)
    channels = _choose_channels(run, heads, groups)
    is_stated = read_field(run.model, "kv_channels") is not None
    ratio = shape.hidden_size / (shape.num_attention_heads * shape.kv_channels)
    if shape.latent is not None:
        hidden = _shrink_latent(run, shape.latent, heads, ratio)
    elif is_stated:
        hidden = run.fit_width(shape.hidden_size, ratio * heads * channels)
    else:
        hidden = heads * channels
    run.set("model.num_attention_heads", heads, HEADS_REASON)
    if groups != heads or read_field(run.model, "num_query_groups") is not None:
        run.set("model.num_query_groups", groups, HEADS_REASON)
    if is_stated and shape.latent is None:
        run.set("model.kv_channels", channels, "keeps the alignment on a rank")
    run.set("model.hidden_size", hidden, "keeps the ratio to the heads and the alignment")
    return hidden


def _choose_heads(run: SmallRun) -> tuple[int, int]:
    """Return the query heads and the groups that share a key, few of both.

    A number that the tensor-parallel ranks of the run do not divide is not divided here either.
    """
    heads, groups = run.shape.num_attention_heads, run.shape.num_query_groups
    ranks, small_ranks = run.parallel.tensor, run.tensor_ranks
    if run.shape.latent is not None or heads == groups:
        small_heads = min(4, small_ranks * max(1, heads // small_ranks))
        if heads % ranks:
            small_heads += 1
        return small_heads, small_heads
    small_groups = small_ranks
    if groups > ranks and groups % ranks:
        small_groups = small_ranks + 1
    elif groups % ranks:
        small_groups = 1
    per_group = min(heads // groups, MAX_HEADS_PER_GROUP)
    if heads % ranks == 0 and small_groups * per_group % small_ranks:
        per_group += 1
    return small_groups * per_group, small_groups


def _choose_channels(run: SmallRun, heads: int, groups: int) -> int:
    """Return the smallest channels of a head whose projections keep their alignment on a rank."""
    shape = run.shape
    is_stated = read_field(run.model, "kv_channels") is not None

    def alignment(
        width: int, queries: int, keys: int, channels: int, ranks: int
    ) -> tuple[int, ...]:
        """Return the divisors of the widths that the run's projections have on a rank."""
        of_queries = gcd(queries * channels // ranks, run.unit)
        of_all = gcd((queries + 2 * keys) * channels // ranks, run.unit)
        return gcd(width, run.unit), channels % 2, of_queries, of_all

    wanted = alignment(
        shape.hidden_size,
        shape.num_attention_heads,
        shape.num_query_groups,
        shape.kv_channels,
        run.parallel.tensor,
    )
    for channels in range(MIN_ALIGNMENT, 4 * run.unit + 1):
        width = heads * channels
        if is_stated:
            width = shape.hidden_size
        if alignment(width, heads, groups, channels, run.tensor_ranks) == wanted:
            return channels
    return run.unit


def _shrink_latent(run: SmallRun, latent: Latent, heads: int, ratio: float) -> int:
    """Make the widths of latent attention small; return the hidden size.

    `ratio` is that of the run's hidden size to the channels of all heads.
    """
    dims = {}
    for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        size = getattr(latent, name)
        if size:
            dims[name] = size
    scale = 2 * run.unit / min(dims.values())
    for name, size in dims.items():
        run.set(f"model.{name}", run.fit_width(size, size * scale), "keeps the alignment")
    channels = run.shape.kv_channels * scale
    hidden = run.fit_width(run.shape.hidden_size, ratio * heads * channels)
    for name in ("q_lora_rank", "kv_lora_rank"):
        rank = getattr(latent, name)
        if rank is not None:
            wanted = rank * hidden / run.shape.hidden_size
            run.set(f"model.{name}", run.fit_width(rank, wanted), WIDTH_REASON)
    return hidden


def _shrink_state_space(run: SmallRun, mixer: StateSpace) -> None:
    """Make the heads of Mamba small: the fewest whose projections keep their alignment."""
    groups = run.tensor_ranks
    if mixer.num_groups % run.parallel.tensor:
        groups += 1

    def alignment(space: StateSpace, ranks: int) -> tuple[object, ...]:
        """Return the divisors of the widths that the run's projections have on a rank."""
        inner = gcd(space.inner // ranks, run.unit)
        projected = gcd(space.projected_width // ranks, run.unit)
        return space.num_heads % space.num_groups, space.num_heads % ranks == 0, inner, projected

    wanted = alignment(mixer, run.parallel.tensor)
    state_dim = run.fit_width(mixer.state_dim, 16)
    without_heads = StateSpace(num_heads=0, head_dim=4, state_dim=state_dim, num_groups=groups)
    small = replace(without_heads, num_heads=groups * run.unit)
    for num_heads in range(groups, 8 * groups * run.unit + 1):
        space = replace(without_heads, num_heads=num_heads)
        if alignment(space, run.tensor_ranks) == wanted:
            small = space
            break
    why = "keeps the alignment of Mamba's projections on a rank"
    for name in ("num_heads", "head_dim", "state_dim", "num_groups"):
        run.set(f"model.mamba_{name}", getattr(small, name), why)


def _shrink_delta_net(run: SmallRun, net: DeltaNet) -> None:
    """Make the heads of a gated delta net small.

    They are the fewest whose projections keep their alignment on a rank.
    """
    values_per_key = net.num_value_heads // net.num_key_heads

    def alignment(sizes: DeltaNet, ranks: int) -> tuple[object, ...]:
        """Return the divisors of the widths that the run's projections have on a rank."""
        value = gcd(sizes.value // ranks, run.unit)
        projected = gcd(sizes.projected_width // ranks, run.unit)
        return sizes.num_key_heads % ranks == 0, value, projected

    wanted = alignment(net, run.parallel.tensor)
    small = net
    for num_keys in range(run.tensor_ranks, 8 * run.tensor_ranks * run.unit + 1):
        heads = {"num_key_heads": num_keys, "num_value_heads": num_keys * values_per_key}
        sizes = replace(net, **heads, **DELTA_CHANNELS)
        if alignment(sizes, run.tensor_ranks) == wanted:
            small = sizes
            break
    why = "keeps the alignment of the projections on a rank"
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        run.set(f"model.linear_{name}", getattr(small, name), why)


def _shrink_indexer(run: SmallRun, indexer: Indexer) -> None:
    """Make the indexer of sparse attention small.

    The queries of a head are rotated with those of the model.
    """
    rotated = run.model.get("qk_pos_emb_head_dim") or 0
    width = 1 << (max(run.unit, 2 * rotated) - 1).bit_length()
    why = "a power of two, which the rotation takes"
    run.set("model.dsa_indexer_head_dim", min(indexer.head_dim, width), why)
    run.set("model.dsa_indexer_n_heads", min(indexer.num_heads, run.unit), WIDTH_REASON)
    run.set("model.dsa_indexer_topk", min(indexer.topk, INDEXER_TOPK), "the tokens are fewer")


def _shrink_feed_forward(run: SmallRun, hidden: int) -> None:
    """Make the feed-forward width small, and leave the vocabulary to the corpus of bytes."""
    shape = run.shape
    wanted = shape.ffn_hidden_size / shape.hidden_size * hidden
    width = run.fit_width(shape.ffn_hidden_size, wanted, run.parallel.tensor, run.tensor_ranks)
    is_stated = read_field(run.model, "ffn_hidden_size") is not None
    if is_stated or width != 4 * hidden:
        run.set("model.ffn_hidden_size", width, WIDTH_REASON)
    run.set("model.vocab_size", None, "the vocabulary of bytes, padded as the run's is")


def _shrink_experts(run: SmallRun, experts: Experts, hidden: int) -> None:
    """Make the experts few and narrow, with a router and a dispatcher that a CPU can run."""
    count = 4
    if run.layout.size("expert") > 1:
        count = 2 * min(2, max(1, experts.num_experts // run.parallel.expert))
    if experts.num_experts % run.parallel.expert:
        count += 1
    why = "two experts on each of two ranks, or four on one"
    run.set("model.num_moe_experts", min(count, experts.num_experts), why)
    # Megatron's router takes one expert a token only where it applies its softmax before it chooses
    run.set("model.moe_router_topk", min(experts.topk, max(2, count // 2)), "the experts are fewer")
    if read_field(run.model, "moe_router_num_groups"):
        run.set("model.moe_router_num_groups", 2, "the experts are fewer")
        run.set("model.moe_router_group_topk", 1, "the groups are fewer")
    if read_field(run.model, "moe_token_dispatcher_type") == "flex":
        run.set("model.moe_token_dispatcher_type", "alltoall", "the kernels of flex need a GPU")
        # Megatron refuses these two without flex.
        run.model.pop("moe_flex_dispatcher_backend", None)
        run.model.pop("moe_enable_deepep", None)
    _shrink_expert_widths(run, experts, hidden / run.shape.hidden_size)


def _shrink_expert_widths(run: SmallRun, experts: Experts, ratio: float) -> None:
    """Make the widths of routed and shared experts small by the ratio of the hidden sizes."""
    if experts.latent_size:
        width = run.fit_width(experts.latent_size, experts.latent_size * ratio)
        run.set("model.moe_latent_size", width, WIDTH_REASON)
    if read_field(run.model, "moe_ffn_hidden_size") is not None:
        routed = experts.ffn_hidden_size
        ranks, small_ranks = run.parallel.expert_tensor, run.layout.expert_tensor
        width = run.fit_width(routed, routed * ratio, ranks, small_ranks)
        run.set("model.moe_ffn_hidden_size", width, WIDTH_REASON)
    if experts.shared_ffn_hidden_size:
        shared = experts.shared_ffn_hidden_size
        width = run.fit_width(shared, shared * ratio, run.parallel.tensor, run.tensor_ranks)
        run.set("model.moe_shared_expert_intermediate_size", width, WIDTH_REASON)
