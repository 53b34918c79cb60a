"""Runs that break and that keep the rules of `bridge.rules.topics.precision.blackwell`."""

from tests.rules.cases.runs import (
    B200,
    CURRENT,
    DENSE,
    HYBRID,
    MXFP8,
    NVFP4,
    NVFP4_RECIPE,
    OVERLAP,
    full,
    recipe,
    run,
)

SHARDED = {"use_distributed_optimizer": True}

CASES = {
    "PB241": (
        full(MXFP8, "b200x8,te2.14,cuda12.9,mcore0.16.1", optimizer=SHARDED, ddp=SHARDED),
        full(MXFP8, B200, optimizer=SHARDED, ddp=SHARDED),
    ),
    "PB242": (full(MXFP8, "b200x8,te2.14,cuda12.9,mcore0.18"), full(MXFP8, B200)),
    "PB243": (full(dict(MXFP8, reuse_grad_buf_for_mxfp8_param_ag=False), B200), full(MXFP8, B200)),
    "PB244": (full(dict(CURRENT, reuse_grad_buf_for_mxfp8_param_ag=True), B200), full(CURRENT, B200)),
    "PB245": (
        full(
            MXFP8,
            B200,
            dict(DENSE, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
            optimizer=dict(OVERLAP, overlap_param_gather_with_optimizer_step=True),
        ),
        full(
            MXFP8,
            B200,
            dict(DENSE, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
            optimizer=dict(OVERLAP, overlap_param_gather_with_optimizer_step=False),
        ),
    ),
    "PB246": (
        run({"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": False}, B200),
        run(MXFP8, B200),
    ),
    "PB247": (full(NVFP4, "b200x8,te2.8,cuda12.9,mcore0.18"), full(NVFP4, B200)),
    "PB248": (full(NVFP4, "b200x8,te2.14,cuda12.9,mcore0.17.1"), full(NVFP4, B200)),
    "PB249": (full(NVFP4_RECIPE, B200), full(NVFP4, B200)),
    "PB250": (full(NVFP4, B200, dict(DENSE, mtp_num_layers=1)), full(MXFP8, B200, dict(DENSE, mtp_num_layers=1))),
    "PB251": (
        full(
            dict(NVFP4, fp4_param_gather=False, first_last_layers_bf16=True),
            "b200x8,te2.14,cuda12.9,mcore0.16.1",
            HYBRID,
        ),
        full(dict(NVFP4, fp4_param_gather=False), "b200x8,te2.14,cuda12.9,mcore0.17", HYBRID),
    ),
    "PB252": (
        full(
            dict(
                recipe("fp16_mixed"),
                fp4="e2m1",
                first_last_layers_bf16=True,
                num_layers_at_start_in_bf16=0,
                num_layers_at_end_in_bf16=4,
            ),
            B200,
        ),
        full(NVFP4, B200),
    ),
}
