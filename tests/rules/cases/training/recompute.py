"""Runs that break and that keep the rules of `bridge.rules.topics.training.recompute`."""

from tests.rules.cases.runs import B200, CURRENT, DELAYED, DENSE, H100, MXFP8, PADDED_MOE, full, run

RECOMPUTED = dict(PADDED_MOE, recompute_granularity="selective", recompute_modules=["moe_act"])

FP8_ATTENTION = dict(MXFP8, fp8_dot_product_attention=True)
PREDICTION = dict(
    DENSE, mtp_num_layers=1, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
CAPTURED_EXPERTS = dict(
    PADDED_MOE, moe_grouped_gemm=True, cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn", "moe"]
)

CASES = {
    "PB461": (full(DELAYED, H100, RECOMPUTED), full(DELAYED, H100, dict(RECOMPUTED, recompute_modules=["core_attn"]))),
    "PB464": (
        full(CURRENT, "h100x8,te2.7,cuda12.9,mcore0.19.2", dict(DENSE, cuda_graph_impl="local")),
        full(CURRENT, H100, dict(DENSE, cuda_graph_impl="local")),
    ),
    "PB465": (
        run("bf16_mixed", model=dict(DENSE, cuda_graph_impl="full_iteration"), train={"check_for_nan_in_loss": True}),
        run("bf16_mixed", model=dict(DENSE, cuda_graph_impl="full_iteration"), train={"check_for_nan_in_loss": False}),
    ),
    "PB466": (
        full(CURRENT, H100, dict(DENSE, inference_cuda_graph_scope="block")),
        full(CURRENT, H100, dict(DENSE, inference_cuda_graph_scope="layer")),
    ),
    "PB467": (full(MXFP8, B200, dict(DENSE, transformer_impl="inference_optimized")), full(MXFP8, B200)),
    "PB468": (
        full(
            CURRENT,
            H100,
            dict(
                PADDED_MOE,
                recompute_granularity="selective",
                recompute_modules=["shared_experts"],
                cuda_graph_impl="local",
                gtp_weight_remat_size=2,
            ),
        ),
        full(
            CURRENT,
            H100,
            dict(
                PADDED_MOE,
                recompute_granularity="selective",
                recompute_modules=["shared_experts"],
                gtp_weight_remat_size=2,
            ),
        ),
    ),
    "PB469": (
        full(FP8_ATTENTION, B200, dict(DENSE, recompute_granularity="selective", recompute_modules=["core_attn"])),
        full(FP8_ATTENTION, B200, dict(DENSE, recompute_granularity="selective", recompute_modules=["mlp"])),
    ),
    "PB471": (
        full(CURRENT, "h100x8,te2.9,cuda12.9,mcore0.17.1", PREDICTION),
        full(CURRENT, "h100x8,te2.9,cuda12.9,mcore0.18.0", PREDICTION),
    ),
    "PB473": (
        full("fp16_mixed", H100, dict(DENSE, cuda_graph_impl="transformer_engine")),
        full("fp16_mixed", H100, dict(DENSE, cuda_graph_impl="local")),
    ),
    "PB475": (
        full(CURRENT, "h100x8,te2.16,cuda12.9,mcore0.19.2", CAPTURED_EXPERTS),
        full(CURRENT, "h100x8,te2.17,cuda12.9,mcore0.19.2", CAPTURED_EXPERTS),
    ),
}
