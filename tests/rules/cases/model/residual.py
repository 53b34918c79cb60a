"""Runs that break and that keep the rules of `bridge.rules.topics.model.residual`."""

from tests.rules.cases.runs import DENSE, H100, recipe, run

FP32_RESIDUAL = recipe("bf16_mixed", fp32_residual_connection=True)
MIXED_STREAMS = dict(DENSE, enable_mhc_connections=True)

CASES = {
    "PB151": (run(FP32_RESIDUAL, H100, model=DENSE), run(FP32_RESIDUAL, "h100x8,te2.9,mcore0.20", model=DENSE)),
    "PB153": (
        run(FP32_RESIDUAL, "h100x8,te2.9,mcore0.16.1", model=DENSE),
        run(FP32_RESIDUAL, "h100x8,te2.9,mcore0.17.1", model=DENSE),
    ),
    "PB155": (
        run(FP32_RESIDUAL, "mcore0.20", model=MIXED_STREAMS),
        run("bf16_mixed", "mcore0.20", model=MIXED_STREAMS),
    ),
    "PB157": (
        run(FP32_RESIDUAL, "h100x8,te2.9,mcore0.20", model=dict(DENSE, cuda_graph_impl="transformer_engine")),
        run(FP32_RESIDUAL, "h100x8,te2.9,mcore0.20", model=dict(DENSE, cuda_graph_impl="local")),
    ),
}
