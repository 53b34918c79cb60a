"""Runs that break and that keep the rules of `bridge.rules.topics.precision.first_last_layers`."""

from tests.rules.cases.runs import (
    B200,
    CURRENT,
    CURRENT_ALL,
    CURRENT_RECIPE,
    DELAYED,
    DENSE,
    H100,
    HYBRID,
    NVFP4,
    OVERLAPPED,
    full,
    recipe,
    run,
)

CASES = {
    "PB261": (
        run(dict(CURRENT, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0), H100),
        run(dict(CURRENT, num_layers_at_start_in_bf16=0), H100),
    ),
    "PB262": (
        run(
            dict(
                recipe(CURRENT_RECIPE),
                first_last_layers_bf16=False,
                num_layers_at_start_in_bf16=2,
                num_layers_at_end_in_bf16=0,
            ),
            H100,
        ),
        run(dict(CURRENT, num_layers_at_start_in_bf16=2), H100),
    ),
    "PB263": (full(dict(DELAYED, first_last_layers_bf16=True), H100), full(DELAYED, H100)),
    "PB264": (
        full(dict(CURRENT, num_layers_at_end_in_bf16=9), H100, dict(DENSE, pipeline_model_parallel_size=4)),
        full(dict(CURRENT, num_layers_at_end_in_bf16=8), H100, dict(DENSE, pipeline_model_parallel_size=4)),
    ),
    "PB265": (full(dict(NVFP4, num_layers_at_end_in_bf16=100), B200, dict(DENSE)), full(NVFP4, B200)),
    "PB266": (
        full(dict(CURRENT, num_layers_at_start_in_bf16=16, num_layers_at_end_in_bf16=16), H100),
        full(CURRENT, H100),
    ),
    "PB267": (
        full(CURRENT, "h100x8,te2.7,cuda12.9,mcore0.19.2", OVERLAPPED),
        full(CURRENT, "h100x8,te2.8,cuda12.9,mcore0.19.2", OVERLAPPED),
    ),
    "PB268": (
        full(CURRENT, H100, dict(DENSE, mtp_num_layers=1)),
        full(
            dict(CURRENT, first_last_layers_bf16=False, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0),
            H100,
            dict(DENSE, mtp_num_layers=1),
        ),
    ),
    "PB269": (run(recipe("bf16_mixed", first_last_layers_bf16=True)), run("bf16_mixed")),
    "PB270": (
        full(CURRENT, "h100x8,te2.7,cuda12.9,mcore0.19.2", dict(DENSE, cuda_graph_impl="transformer_engine")),
        full(CURRENT_ALL, "h100x8,te2.7,cuda12.9,mcore0.19.2", dict(DENSE, cuda_graph_impl="transformer_engine")),
    ),
    "PB271": (full(CURRENT, H100, HYBRID), full(CURRENT, H100, DENSE)),
    "PB272": (
        full(CURRENT_ALL, H100, dict(DENSE, mtp_num_layers=1, keep_mtp_spec_in_bf16=True)),
        full(CURRENT_ALL, H100, dict(DENSE, mtp_num_layers=1)),
    ),
}
