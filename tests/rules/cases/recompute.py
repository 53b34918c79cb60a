"""Runs that break and that keep the rules of `bridge.rules.topics.recompute`."""

from tests.rules.cases.runs import B200, CURRENT, DELAYED, DENSE, H100, MXFP8, PADDED_MOE, full, run

RECOMPUTED = dict(PADDED_MOE, recompute_granularity="selective", recompute_modules=["moe_act"])

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
}
