"""Runs that break and that keep the rules of `bridge.rules.topics.training.optimizer`."""

from tests.rules.cases.runs import (
    B200,
    BF16,
    BF16_MODEL,
    CURRENT,
    DELAYED,
    DENSE,
    FP32_DDP,
    H100,
    NVFP4,
    OVERLAP,
    PRECISION_AWARE,
    full,
    run,
)

NVFP4_STORED = dict(NVFP4, fp4_param_gather=True)
OFFLOADED = dict(PRECISION_AWARE, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)

CASES = {
    "PB341": (
        run(
            "bf16_mixed",
            model=DENSE,
            optimizer=dict(OVERLAP, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0),
            ddp=OVERLAP,
        ),
        run("bf16_mixed", model=DENSE, optimizer=OFFLOADED, ddp=OVERLAP),
    ),
    "PB342": (
        full(CURRENT, H100, optimizer=OFFLOADED),
        full(dict(DELAYED, fp8_param_gather=False), H100, optimizer=OFFLOADED),
    ),
    "PB343": (
        run("bf16_mixed", model=DENSE, optimizer=dict(OVERLAP, exp_avg_dtype="bf16"), ddp=OVERLAP),
        run("bf16_mixed", model=DENSE, optimizer=dict(PRECISION_AWARE, exp_avg_dtype="bf16"), ddp=OVERLAP),
    ),
    "PB344": (
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(PRECISION_AWARE, main_params_dtype="bf16"), ddp=OVERLAP),
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(PRECISION_AWARE, main_params_dtype="fp16"), ddp=OVERLAP),
    ),
    "PB345": (
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(PRECISION_AWARE, optimizer="sgd"), ddp=OVERLAP),
        run("bf16_mixed", H100, model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
    ),
    "PB346": (
        run("bf16_mixed", H100, model=DENSE, optimizer={"use_precision_aware_optimizer": True}, ddp={}),
        run("bf16_mixed", H100, model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
    ),
    "PB347": (
        run(
            None,
            H100,
            model=BF16_MODEL,
            optimizer=dict(PRECISION_AWARE, bf16=True, fp8_recipe="tensorwise"),
            ddp=FP32_DDP,
        ),
        run(None, H100, model=BF16_MODEL, optimizer=dict(PRECISION_AWARE, bf16=True), ddp=FP32_DDP),
    ),
    "PB348": (full(CURRENT, H100, optimizer=PRECISION_AWARE), full(DELAYED, H100, optimizer=PRECISION_AWARE)),
    "PB350": (
        run(
            "bf16_mixed",
            "h100x8,te-none",
            model=DENSE,
            optimizer=dict(PRECISION_AWARE, store_param_remainders=False),
            ddp=OVERLAP,
        ),
        run("bf16_mixed", H100, model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
    ),
    "PB351": (
        run(
            "bf16_mixed",
            model=DENSE,
            optimizer=dict(OVERLAP, overlap_param_gather_with_optimizer_step=True),
            ddp=OVERLAP,
        ),
        run(
            "bf16_mixed",
            model=dict(DENSE, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
            optimizer=dict(OVERLAP, overlap_param_gather_with_optimizer_step=True),
            ddp=OVERLAP,
        ),
    ),
    "PB352": (
        run(
            "bf16_mixed",
            model=DENSE,
            optimizer=dict(PRECISION_AWARE, use_layer_wise_distributed_optimizer=True, store_param_remainders=False),
            ddp=OVERLAP,
        ),
        run("bf16_mixed", model=DENSE, optimizer=dict(OVERLAP, use_layer_wise_distributed_optimizer=True), ddp=OVERLAP),
    ),
    "PB353": (
        full(dict(BF16, store_param_remainders=False), H100),
        full(dict(BF16, store_param_remainders=True), H100),
    ),
    "PB354": (full(dict(BF16, muon_fp32_matmul_prec="high"), H100), full(BF16, H100)),
    "PB356": (
        full(dict(NVFP4_STORED, main_params_dtype="fp16"), B200, optimizer=PRECISION_AWARE),
        full(NVFP4_STORED, B200, optimizer=PRECISION_AWARE),
    ),
    "PB358": (
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(OFFLOADED, exp_avg_dtype="bf16"), ddp=OVERLAP),
        run("bf16_mixed", H100, model=DENSE, optimizer=OFFLOADED, ddp=OVERLAP),
    ),
    "PB360": (
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(OFFLOADED, optimizer_offload_fraction=0.0), ddp=OVERLAP),
        run("bf16_mixed", H100, model=DENSE, optimizer=OFFLOADED, ddp=OVERLAP),
    ),
}
