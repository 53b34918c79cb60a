"""The attention core in FP8, and settings of it that are overruled."""

from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, Rule, mcore, sync_rule, target_rule
from bridge.rules.versions import at_least


def _no_backend(s: RuleContext) -> Any:
    if not s.model.fp8_dot_product_attention or s.is_emulated:
        return None
    if s.capability is not None and s.capability < (10, 0):
        return {"what": f"compute capability 10.0, and the target has {s.capability[0]}.{s.capability[1]}"}
    least = "9.14" if at_least(s.te, "2.15") else "9.13.1"
    if at_least(s.cudnn, least) is False:
        return {"what": f"cuDNN {least}"}
    return None


RULES = (
    target_rule(
        heading="PB441: no FP8 attention for current scaling",
        predicate=_no_backend,
        error="fp8_dot_product_attention: FP8 attention under current scaling needs {what}: there is no backend at the "
        "first forward pass",
        remedies=("set fp8_dot_product_attention=False", "use fp8_recipe='delayed'"),
        reported="NVIDIA/TransformerEngine pull request 2012; Transformer Engine 2.20 "
        "attention/dot_product_attention/utils.py",
        gate="is_tensorwise",
    ),
    sync_rule(
        heading="PB442: FP8 attention that does not reach MXFP8",
        predicate=lambda s: s.model.fp8_dot_product_attention,
        warning="fp8_dot_product_attention: has no effect: megatron-core hands it to Transformer Engine under mxfp8 "
        "from 0.18 on",
        remedies=("drop it", "use megatron-core 0.18"),
        verified="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, 0.18.2",
        gate="is_mxfp8",
        versions=(mcore(until="0.18"),),
    ),
    sync_rule(
        heading="PB443: FP8 attention that does not reach NVFP4",
        predicate=lambda s: s.model.fp8_dot_product_attention and s.scheme == "nvfp4",
        warning="fp8_dot_product_attention: has no effect: megatron-core hands it to Transformer Engine under nvfp4 "
        "from 0.17 on",
        remedies=("drop it", "use megatron-core 0.17"),
        verified="megatron-core 0.16.1 fp4_utils.get_fp4_recipe, 0.17.1",
        gate="fp4",
        versions=(mcore(until="0.17"),),
    ),
    Rule(
        heading="PB444: softmax dtype overruled",
        predicate=lambda s: s.model.apply_query_key_layer_scaling and not s.model.attention_softmax_in_fp32,
        warning="model.attention_softmax_in_fp32: apply_query_key_layer_scaling sets it to True",
        remedies=("set it to True, as it will be", "set apply_query_key_layer_scaling=False"),
        verified=MODEL_CHECK,
    ),
    target_rule(
        heading="PB445: softmax dtype of Transformer Engine's attention",
        predicate=lambda s: (
            s.stands_out("attention_softmax_in_fp32")
            and s.model.transformer_impl == "transformer_engine"
            and not s.is_emulated
        ),
        warning="attention_softmax_in_fp32: has no effect: Transformer Engine's attention does not read it",
        remedies=("drop it", "set model.transformer_impl=local"),
        verified="megatron-core 0.16.1 transformer/dot_product_attention.py:106, the one reader",
    ),
    sync_rule(
        heading="PB446: norm of an indexer that is not there",
        predicate=lambda s: (
            s.stands_out("dsa_indexer_k_norm_fp32") and s.has_model and s.model.experimental_attention_variant != "dsa"
        ),
        warning="dsa_indexer_k_norm_fp32: has no effect: the model has no sparse attention of DeepSeek",
        remedies=("drop it", "set model.experimental_attention_variant=dsa"),
        verified="megatron-core 0.19.2 transformer/experimental_attention_variant/dsa.py:1297",
        versions=(mcore(since="0.19"),),
    ),
)
