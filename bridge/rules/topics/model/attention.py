"""Rules about the attention core in FP8, and about settings of attention without effect."""

from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK_SOURCE, error, mcore, no_effect, warning
from bridge.rules.violation import Violation
from bridge.target.versions import format_dotted, is_at_least


def find_missing_attention_backend(context: RuleContext) -> Violation | None:
    """Return a violation if FP8 attention under current scaling needs another GPU or cuDNN."""
    if (
        not context.is_tensorwise
        or not context.model.fp8_dot_product_attention
        or context.is_emulated
    ):
        return None
    if context.target.capability is not None and context.target.is_before(10):
        has = format_dotted(context.target.capability)
        return Violation(what=f"compute capability 10.0, and the target has {has}")
    least = "9.13.1"
    if is_at_least(context.target.te, "2.15"):
        least = "9.14"
    if is_at_least(context.target.cudnn, least) is False:
        return Violation(what=f"cuDNN {least}")
    return None


def find_softmax_dtype_unread_by_te(context: RuleContext) -> Violation | None:
    """Return a violation if Transformer Engine's attention does not read the softmax dtype.

    The model class of a framework can have another default than Megatron. Then nobody stated the
    dtype, and the finding is an info. A value that the framework sets cannot be dropped.
    """
    if context.model.transformer_impl != "transformer_engine" or context.is_emulated:
        return None
    if not context.differs_from_default("attention_softmax_in_fp32"):
        return None
    if "attention_softmax_in_fp32" in context.stated:
        return Violation(remedy="drop it")
    return Violation(severity="info", remedy="leave it, which changes nothing")


RULES = (
    error(
        id="PB441",
        title="no FP8 attention for current scaling",
        setting="fp8_dot_product_attention",
        when=find_missing_attention_backend,
        message="FP8 attention under current scaling needs {what}: there is no backend at the "
        "first forward pass",
        remedies=("set fp8_dot_product_attention=False", "use fp8_recipe='delayed'"),
        source="NVIDIA/TransformerEngine pull request 2012; Transformer Engine 2.20 "
        "attention/dot_product_attention/utils.py",
        evidence="reported",
    ),
    no_effect(
        id="PB442",
        title="FP8 attention that does not reach MXFP8",
        setting="fp8_dot_product_attention",
        versions=(mcore(until="0.18"),),
        when=lambda context: context.is_mxfp8 and context.model.fp8_dot_product_attention,
        message="has no effect: megatron-core hands it to Transformer Engine "
        "under mxfp8 from 0.18 on",
        remedies=("drop it", "use megatron-core 0.18"),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, 0.18.2",
    ),
    no_effect(
        id="PB443",
        title="FP8 attention that does not reach NVFP4",
        setting="fp8_dot_product_attention",
        versions=(mcore(until="0.17"),),
        when=lambda context: (
            context.is_fp4 and context.model.fp8_dot_product_attention and context.is_nvfp4
        ),
        message="has no effect: megatron-core hands it to Transformer Engine "
        "under nvfp4 from 0.17 on",
        remedies=("drop it", "use megatron-core 0.17"),
        source="megatron-core 0.16.1 fp4_utils.get_fp4_recipe, 0.17.1",
    ),
    warning(
        id="PB444",
        title="softmax dtype overruled",
        setting="model.attention_softmax_in_fp32",
        when=lambda context: (
            context.model.apply_query_key_layer_scaling
            and not context.model.attention_softmax_in_fp32
        ),
        message="apply_query_key_layer_scaling sets it to True",
        remedies=(
            "set it to True, as Megatron does in any case",
            "set apply_query_key_layer_scaling=False",
        ),
        source=MODEL_CHECK_SOURCE,
    ),
    warning(
        id="PB445",
        title="softmax dtype of Transformer Engine's attention",
        setting="attention_softmax_in_fp32",
        when=find_softmax_dtype_unread_by_te,
        message="has no effect: Transformer Engine's attention does not read it",
        remedies=("{remedy}",),
        source="megatron-core 0.16.1 transformer/dot_product_attention.py:106, the one reader",
    ),
    no_effect(
        id="PB446",
        title="norm of an indexer that is not there",
        setting="dsa_indexer_k_norm_fp32",
        versions=(mcore(since="0.19"),),
        when=lambda context: (
            context.has_model
            and context.differs_from_default("dsa_indexer_k_norm_fp32")
            and context.model.experimental_attention_variant != "dsa"
        ),
        message="has no effect: the model has no sparse attention of DeepSeek",
        remedies=("drop it", "set model.experimental_attention_variant=dsa"),
        source="megatron-core 0.19.2 transformer/experimental_attention_variant/dsa.py:1297",
    ),
)
