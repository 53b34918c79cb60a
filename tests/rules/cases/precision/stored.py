"""Runs that break and that keep the rules of `bridge.rules.topics.precision.stored_weights`."""

from tests.rules.cases.runs import (
    B200,
    BF16_MODEL,
    CURRENT,
    DENSE,
    FP32_DDP,
    H100,
    HYBRID,
    MXFP8,
    NVFP4,
    OVERLAP,
    full,
    recipe,
    run,
)

TE_2_15 = "b200x8,te2.15,cuda12.9,cudnn9.14,mcore0.19.2"
H200 = "h200x8,te2.9,cuda12.9,cudnn9.14,mcore0.19.2"
FP8_MODEL = dict(BF16_MODEL, fp8="hybrid", fp8_recipe="tensorwise")
FP8_OPTIMIZER = dict(OVERLAP, bf16=True, fp8_recipe="tensorwise")
FP32_WITH_FP8 = {"fp32": True, "fp8": "hybrid", "fp8_param_gather": True}
MAMBA = dict(HYBRID, hybrid_layer_pattern="M" * DENSE["num_layers"])
SHARDED = {"use_distributed_optimizer": True}

CASES = {
    "PB301": (full(CURRENT, H200, optimizer={}, ddp={}), full(CURRENT, H200)),
    "PB302": (full(NVFP4, B200, optimizer={}, ddp={}), full(NVFP4, B200)),
    "PB303": (
        run(None, H100, model=dict(FP8_MODEL, fp8_param=True), optimizer=FP8_OPTIMIZER, ddp=FP32_DDP),
        run(
            None,
            H100,
            model=dict(FP8_MODEL, fp8_param=True),
            optimizer=FP8_OPTIMIZER,
            ddp=dict(FP32_DDP, fp8_param_gather=True),
        ),
    ),
    "PB304": (run(dict(CURRENT, fp8_param=False), H100), run(dict(CURRENT, fp8_param=True), H100)),
    "PB305": (
        run({"bf16": True, "fp8_param_gather": True}),
        run({"bf16": True, "fp8": "hybrid", "fp8_param_gather": True}, H100),
    ),
    "PB306": (full(dict(CURRENT, fp8_param_gather=False), H100), full(CURRENT, H100)),
    "PB307": (
        full(recipe("fp16_with_mxfp8_mixed", grad_reduce_in_fp32=True), B200),
        full(recipe("fp16_with_mxfp8_mixed", grad_reduce_in_fp32=False), B200),
    ),
    "PB308": (full(CURRENT, H100, model=dict(DENSE, use_cpu_initialization=True)), full(CURRENT, H100)),
    "PB309": (
        full(dict(FP32_WITH_FP8, fp8_recipe="tensorwise"), H100),
        full(dict(FP32_WITH_FP8, fp8_recipe="delayed"), H100),
    ),
    "PB310": (full(MXFP8, B200), full(MXFP8, B200, ddp=SHARDED, optimizer=SHARDED)),
    "PB311": (full(NVFP4, TE_2_15, model=MAMBA), full(NVFP4, B200, model=MAMBA)),
}
