"""Runs that break and that keep the rules of `bridge.rules.topics.system.environment`."""

from tests.rules.cases.runs import B200, CURRENT, DELAYED, DENSE, H100, NVFP4, full, run

CASES = {
    "PB521": (
        run(
            {"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"},
            B200,
            environment={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"},
        ),
        run({"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"}, B200, environment={}),
    ),
    "PB522": (
        run("bf16_mixed", model=dict(DENSE, apply_query_key_layer_scaling=True), environment={}),
        run(
            "bf16_mixed",
            model=dict(DENSE, apply_query_key_layer_scaling=True),
            environment={"NVTE_APPLY_QK_LAYER_SCALING": "1"},
        ),
    ),
    "PB523": (
        run("bf16_mixed", model=dict(DENSE, deterministic_mode=True), environment={}),
        run(
            "bf16_mixed",
            model=dict(DENSE, deterministic_mode=True),
            environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
        ),
    ),
    "PB524": (
        run("bf16_mixed", model=DENSE, environment={"ACCELERATE_MIXED_PRECISION": "fp16"}),
        run("bf16_mixed", model=DENSE, environment={"ACCELERATE_MIXED_PRECISION": "bf16"}),
    ),
    "PB525": (
        full(dict(CURRENT, fp8_dot_product_attention=True), B200, environment={"NVTE_DPA_FP8_RECIPE": "F16"}),
        full(CURRENT, B200, environment={"NVTE_DPA_FP8_RECIPE": "F16"}),
    ),
    "PB526": (
        full(DELAYED, H100, environment={"NVTE_BACKWARD_OVERRIDE": "dequantized"}),
        full(DELAYED, H100, environment={}),
    ),
    "PB527": (
        full(NVFP4, B200, environment={"NVTE_NVFP4_DISABLE_RHT": "1"}),
        full(NVFP4, B200, environment={"NVTE_NVFP4_DISABLE_RHT": "0"}),
    ),
    "PB528": (
        run("bf16_mixed", H100, model=DENSE, environment={"NVTE_FUSED_ATTN": "0"}),
        run(
            "bf16_mixed",
            H100,
            model=dict(DENSE, attention_backend="unfused"),
            environment={"NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "1"},
        ),
    ),
}
