"""Runs that break and that keep the rules of `bridge.rules.topics.model.attention`."""

from tests.rules.cases.runs import (
    B200,
    BF16,
    CURRENT,
    DENSE,
    H100,
    MEGATRON_FSDP,
    MXFP8_FSDP,
    NVFP4,
    full,
    run,
)

NVFP4_ATTENTION = dict(NVFP4, fp4_param_gather=False, fp8_dot_product_attention=True)

SCALED = dict(DENSE, apply_query_key_layer_scaling=True, transformer_impl="local")

CASES = {
    "PB441": (
        full(dict(CURRENT, fp8_dot_product_attention=True), H100),
        full(dict(CURRENT, fp8_dot_product_attention=True), B200),
    ),
    "PB442": (
        run(dict(MXFP8_FSDP, fp8_dot_product_attention=True), "b200x8,te2.14,cuda12.9,mcore0.17", ddp=MEGATRON_FSDP),
        run(dict(MXFP8_FSDP, fp8_dot_product_attention=True), "b200x8,te2.14,cuda12.9,mcore0.18", ddp=MEGATRON_FSDP),
    ),
    "PB443": (
        full(NVFP4_ATTENTION, "b200x8,te2.14,cuda12.9,mcore0.16.1"),
        full(NVFP4_ATTENTION, "b200x8,te2.14,cuda12.9,mcore0.17"),
    ),
    "PB444": (run("bf16_mixed", model=dict(SCALED, attention_softmax_in_fp32=False)), run("bf16_mixed", model=SCALED)),
    "PB445": (
        run(dict(BF16, attention_softmax_in_fp32=False), H100, model=DENSE),
        run(dict(BF16, attention_softmax_in_fp32=False), H100, model=dict(DENSE, transformer_impl="local")),
    ),
    "PB446": (
        run(dict(BF16, dsa_indexer_k_norm_fp32=True), "mcore0.19.2", model=DENSE),
        run(
            dict(BF16, dsa_indexer_k_norm_fp32=True),
            "mcore0.19.2",
            model=dict(DENSE, experimental_attention_variant="dsa"),
        ),
    ),
}
