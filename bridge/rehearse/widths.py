"""The widths of a model, made small: heads and channels, hidden size, feed-forward and experts."""

from dataclasses import replace
from math import gcd

from bridge.model.shape import Latent, StateSpace
from bridge.model.variants import DeltaNet, Indexer
from bridge.rehearse.sections import LEAST_ALIGNMENT, SmallRun
from bridge.target.fields import read_field

HEADS_PER_GROUP = 8
"""The most query heads that share one key and value."""
WIDTH = "keeps the ratio to hidden_size and the alignment on a rank"
DELTA_CHANNELS = {"key_head_dim": 8, "value_head_dim": 8}
TOPK = 16
"""Keys that a query of sparse attention takes."""
HEADS = "keeps the queries of a key on a rank"


def shrink_widths(run: SmallRun) -> None:
    """Make every width small."""
    hidden = _attention(run)
    if run.shape.state_space is not None:
        _state_space(run, run.shape.state_space)
    if run.shape.delta_net is not None:
        _delta_net(run, run.shape.delta_net)
    if run.shape.indexer is not None:
        _indexer(run, run.shape.indexer)
    _feed_forward(run, hidden)
    _experts(run, hidden)


def _attention(run: SmallRun) -> int:
    shape = run.shape
    if not shape.num_attention_heads:
        return run.unit * 2
    heads, groups = _heads(run)
    channels = _channels(run, heads, groups)
    is_stated = read_field(run.model, "kv_channels") is not None
    ratio = shape.hidden_size / (shape.num_attention_heads * shape.kv_channels)
    if shape.latent is not None:
        hidden = _latent(run, shape.latent, heads, ratio)
    elif is_stated:
        hidden = run.fitted(shape.hidden_size, ratio * heads * channels)
    else:
        hidden = heads * channels
    run.set("model.num_attention_heads", heads, HEADS)
    if groups != heads or read_field(run.model, "num_query_groups") is not None:
        run.set("model.num_query_groups", groups, HEADS)
    if is_stated and shape.latent is None:
        run.set("model.kv_channels", channels, "keeps the alignment on a rank")
    run.set("model.hidden_size", hidden, "keeps the ratio to the heads and the alignment")
    return hidden


def _heads(run: SmallRun) -> tuple[int, int]:
    heads, groups = run.shape.num_attention_heads, run.shape.num_query_groups
    tp, small = run.parallel.tensor, run.layout.size("tensor")
    if run.shape.latent is not None or heads == groups:
        few = min(4, small * max(1, heads // small))
        if heads % tp:
            few += 1
        return few, few
    few = small
    if groups > tp and groups % tp:
        few = small + 1
    elif groups % tp:
        few = 1
    each = min(heads // groups, HEADS_PER_GROUP)
    if heads % tp == 0 and few * each % small:
        each += 1
    return few * each, few


def _channels(run: SmallRun, heads: int, groups: int) -> int:
    """Return the smallest channels of a head whose projections keep their alignment on a rank."""
    shape, tp, small = run.shape, run.parallel.tensor, run.layout.size("tensor")
    is_stated = read_field(run.model, "kv_channels") is not None

    def residues(width: int, queries: int, keys: int, channels: int, ranks: int) -> tuple[int, ...]:
        of_queries = gcd(queries * channels // ranks, run.unit)
        of_all = gcd((queries + 2 * keys) * channels // ranks, run.unit)
        return gcd(width, run.unit), channels % 2, of_queries, of_all

    wanted = residues(
        shape.hidden_size, shape.num_attention_heads, shape.num_query_groups, shape.kv_channels, tp
    )
    for channels in range(LEAST_ALIGNMENT, 4 * run.unit + 1):
        width = heads * channels
        if is_stated:
            width = shape.hidden_size
        if residues(width, heads, groups, channels, small) == wanted:
            return channels
    return run.unit


def _latent(run: SmallRun, latent: Latent, heads: int, ratio: float) -> int:
    """Make the widths of latent attention small; return the hidden size."""
    dims = {}
    for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        size = getattr(latent, name)
        if size:
            dims[name] = size
    scale = 2 * run.unit / min(dims.values())
    for name, size in dims.items():
        run.set(f"model.{name}", run.fitted(size, size * scale), "keeps the alignment")
    value = ratio * run.shape.kv_channels / latent.v_head_dim * heads * latent.v_head_dim * scale
    hidden = run.fitted(run.shape.hidden_size, value)
    for name in ("q_lora_rank", "kv_lora_rank"):
        size = getattr(latent, name)
        if size is not None:
            run.set(f"model.{name}", run.fitted(size, size * hidden / run.shape.hidden_size), WIDTH)
    return hidden


def _state_space(run: SmallRun, mixer: StateSpace) -> None:
    """Make the heads of Mamba small: the fewest whose projections keep their alignment."""
    tp, small = run.parallel.tensor, run.layout.size("tensor")
    groups = small
    if mixer.num_groups % tp:
        groups += 1

    def residues(space: StateSpace, ranks: int) -> tuple[object, ...]:
        inner = gcd(space.inner // ranks, run.unit)
        projected = gcd(space.projected // ranks, run.unit)
        return space.num_heads % space.num_groups, space.num_heads % ranks == 0, inner, projected

    wanted = residues(mixer, tp)
    state_dim = run.fitted(mixer.state_dim, 16)
    least = StateSpace(num_heads=0, head_dim=4, state_dim=state_dim, num_groups=groups)
    fitting = replace(least, num_heads=groups * run.unit)
    for count in range(groups, 8 * groups * run.unit + 1):
        space = replace(least, num_heads=count)
        if residues(space, small) == wanted:
            fitting = space
            break
    why = "keeps the alignment of Mamba's projections on a rank"
    for name in ("num_heads", "head_dim", "state_dim", "num_groups"):
        run.set(f"model.mamba_{name}", getattr(fitting, name), why)


def _delta_net(run: SmallRun, net: DeltaNet) -> None:
    """Make the heads of a gated delta net small.

    They are the fewest whose projections keep their alignment on a rank.
    """
    tp, small = run.parallel.tensor, run.layout.size("tensor")
    each = net.num_value_heads // net.num_key_heads

    def residues(sizes: DeltaNet, ranks: int) -> tuple[object, ...]:
        value = gcd(sizes.value // ranks, run.unit)
        projected = gcd(sizes.projected // ranks, run.unit)
        return sizes.num_key_heads % ranks == 0, value, projected

    wanted = residues(net, tp)
    fitting = net
    for count in range(small, 8 * small * run.unit + 1):
        heads = {"num_key_heads": count, "num_value_heads": count * each}
        few = replace(net, **heads, **DELTA_CHANNELS)
        if residues(few, small) == wanted:
            fitting = few
            break
    why = "keeps the alignment of the projections on a rank"
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        run.set(f"model.linear_{name}", getattr(fitting, name), why)


def _indexer(run: SmallRun, indexer: Indexer) -> None:
    """Make the indexer of sparse attention small.

    The queries of a head are rotated with those of the model.
    """
    rotated = run.model.get("qk_pos_emb_head_dim") or 0
    width = 1 << (max(run.unit, 2 * rotated) - 1).bit_length()
    why = "a power of two, which the rotation takes"
    run.set("model.dsa_indexer_head_dim", min(indexer.head_dim, width), why)
    run.set("model.dsa_indexer_n_heads", min(indexer.num_heads, run.unit), WIDTH)
    run.set("model.dsa_indexer_topk", min(indexer.topk, TOPK), "the tokens are fewer")


def _feed_forward(run: SmallRun, hidden: int) -> None:
    shape = run.shape
    tp, small = run.parallel.tensor, run.layout.size("tensor")
    ratio = shape.ffn_hidden_size / shape.hidden_size
    width = run.fitted(shape.ffn_hidden_size, ratio * hidden, tp, small)
    is_stated = read_field(run.model, "ffn_hidden_size") is not None
    if is_stated or width != 4 * hidden:
        run.set("model.ffn_hidden_size", width, WIDTH)
    run.set("model.vocab_size", None, "the vocabulary of bytes, padded as the run's is")


def _experts(run: SmallRun, hidden: int) -> None:
    experts = run.shape.experts
    if experts is None:
        return
    count = 4
    if run.layout.size("expert") > 1:
        count = 2 * min(2, max(1, experts.num_experts // run.parallel.expert))
    if experts.num_experts % run.parallel.expert:
        count += 1
    why = "two experts on each of two ranks, or four on one"
    run.set("model.num_moe_experts", min(count, experts.num_experts), why)
    # Megatron's router takes one expert a token only where it applies its softmax before it chooses
    run.set("model.moe_router_topk", min(experts.topk, max(2, count // 2)), "the experts are fewer")
    model = run.model
    if read_field(model, "moe_router_num_groups"):
        run.set("model.moe_router_num_groups", 2, "the experts are fewer")
        run.set("model.moe_router_group_topk", 1, "the groups are fewer")
    if read_field(model, "moe_token_dispatcher_type") == "flex":
        run.set("model.moe_token_dispatcher_type", "alltoall", "the kernels of flex need a GPU")
        # Megatron refuses these two without flex.
        model.pop("moe_flex_dispatcher_backend", None)
        model.pop("moe_enable_deepep", None)
    ratio = hidden / run.shape.hidden_size
    if experts.latent_size:
        width = run.fitted(experts.latent_size, experts.latent_size * ratio)
        run.set("model.moe_latent_size", width, WIDTH)
    routed = run.parallel.expert_tensor, run.layout.expert_tensor
    if read_field(model, "moe_ffn_hidden_size") is not None:
        width = run.fitted(experts.ffn_hidden_size, experts.ffn_hidden_size * ratio, *routed)
        run.set("model.moe_ffn_hidden_size", width, WIDTH)
    if experts.shared_ffn_hidden_size:
        shared = experts.shared_ffn_hidden_size
        width = run.fitted(shared, shared * ratio, run.parallel.tensor, run.layout.size("tensor"))
        run.set("model.moe_shared_expert_intermediate_size", width, WIDTH)
