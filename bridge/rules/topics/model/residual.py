"""Rules about an FP32 residual stream: layers that refuse it, and releases that cast it."""

from bridge.model.layout import RESIDUAL_DTYPE_SINCE
from bridge.model.shape import TRANSFORMER_KIND, is_moe_kind, make_moe_kind
from bridge.rules.context import RuleContext
from bridge.rules.rule import error, mcore, warning
from bridge.rules.run_context import RunContext
from bridge.target.versions import is_at_least

_FUSED = ("delta_net", "delta_net_moe", "attention", "mlp")
"""Kinds of layers whose first linear layer normalises its input itself."""
_FUSED_ATTENTION = (*_FUSED, TRANSFORMER_KIND, make_moe_kind(TRANSFORMER_KIND))
"""The kinds in a model without latent attention. Before latent attention the norm is separate."""


def keeps_fp32_residual(context: RuleContext) -> bool:
    """Return whether a half-precision run states an FP32 residual stream."""
    return (
        context.has_model and context.model.fp32_residual_connection and context.is_half_precision
    )


def feeds_fp32_residual_to_fused_norm(context: RunContext) -> bool:
    """Return whether a fused norm of Transformer Engine receives the stream in FP32."""
    return (
        keeps_fp32_residual(context)
        and context.model.transformer_impl == "transformer_engine"
        and not context.is_emulated
        and not context.model.enable_autocast
        and not context.model.enable_mhc_connections
        and _reaches_fused_norm(context)
    )


def _reaches_fused_norm(context: RunContext) -> bool:
    """Return whether a layer whose norm is fused gets the FP32 stream.

    In every release, the embedding passes an FP32 stream to the first layer. Later layers get an
    FP32 stream only in releases that keep the dtype of the sum. Mamba casts the stream itself. A
    separate norm, before latent attention or experts, accepts any dtype.
    """
    shape = context.shape
    fused: tuple[str, ...] = _FUSED_ATTENTION
    if shape.latent is not None:
        fused = _FUSED
    if shape.kinds[0] in fused:
        return True
    has_dense_mlp = not shape.is_hybrid and not all(map(is_moe_kind, shape.kinds))
    if not is_at_least(context.target.mcore, RESIDUAL_DTYPE_SINCE):
        return False
    return has_dense_mlp or not {*fused}.isdisjoint(shape.kinds)


RULES = (
    error(
        id="PB151",
        title="FP32 residual into fused norms",
        setting="fp32_residual_connection",
        versions=(mcore(until="0.20"),),
        when=feeds_fp32_residual_to_fused_norm,
        message="Transformer Engine's LayerNormLinear gets the FP32 residual with {run.mode} "
        "weights, and stops in the first forward pass: data types for parameters must match when "
        "outside of autocasted region",
        remedies=(
            "set fp32_residual_connection=False",
            "use megatron-core 0.20, which casts the input of the norm",
        ),
        source="megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2 "
        "models/common/embeddings/language_model_embedding.py, extensions/transformer_engine.py "
        "TELayerNormColumnParallelLinear.forward; fixed in Megatron-LM main of 2026-08-22; "
        "Transformer Engine 2.7 to 2.20 pytorch/module/base.py set_activation_dtype (a TypeError "
        "since 2.14, an AssertionError before); executed with 2.20.2 on a CPU; "
        "NVIDIA/Megatron-LM issue 1402",
    ),
    warning(
        id="PB153",
        title="FP32 residual that is cast down",
        setting="fp32_residual_connection",
        versions=(mcore(until=RESIDUAL_DTYPE_SINCE),),
        when=keeps_fp32_residual,
        message="the first sum of residual and output casts the residual to {run.mode}, so that "
        "no further layer gets an FP32 stream",
        remedies=("set fp32_residual_connection=False", "use megatron-core 0.20, which keeps it"),
        source="megatron-core 0.16.1 fusions/fused_bias_dropout.py _bias_dropout_add_func; fixed "
        "in 0.17.0 (NVIDIA/Megatron-LM pull request 3504, 2026-02-24)",
    ),
    error(
        id="PB155",
        title="FP32 residual with hyper-connections",
        setting="fp32_residual_connection",
        versions=(mcore(since="0.20"),),
        when=lambda context: keeps_fp32_residual(context) and context.model.enable_mhc_connections,
        message="cannot be on with model.enable_mhc_connections, whose residual streams are mixed "
        "in the dtype of the activations: Megatron refuses it when the config is made",
        remedies=("set fp32_residual_connection=False", "set model.enable_mhc_connections=False"),
        source="Megatron-LM main of 2026-08-22 "
        "transformer/transformer_config.py:2103 __post_init__",
    ),
    warning(
        id="PB157",
        title="FP32 residual into captured layers",
        setting="fp32_residual_connection",
        versions=(mcore(since=RESIDUAL_DTYPE_SINCE),),
        when=lambda context: (
            keeps_fp32_residual(context)
            and context.model.cuda_graph_impl == "transformer_engine"
            and not context.is_emulated
        ),
        message="graphs that Transformer Engine captures take BF16 inputs, to which the FP32 "
        "stream is cast before each captured layer",
        remedies=("set model.cuda_graph_impl=none", "set fp32_residual_connection=False"),
        source="megatron-core 0.17.1, 0.19.2 and Megatron-LM main of 2026-08-22 "
        "transformer/module.py get_layer_static_inputs; NVIDIA/Megatron-LM pull "
        "request 6508, 2026-08-13",
    ),
)
