"""Runs that break and that keep the rules of `bridge.rules.topics.training.reduction`."""

from tests.rules.cases.runs import (
    BF16,
    BF16_MODEL,
    DELAYED,
    DENSE,
    H100,
    OVERLAP,
    PRECISION_AWARE,
    run,
)

BF16_SUMS = dict(BF16, grad_reduce_in_fp32=False)

CASES = {
    "PB361": (
        run(model=BF16_MODEL, optimizer=dict(OVERLAP, bf16=True), ddp=OVERLAP),
        run("bf16_mixed", model=BF16_MODEL, optimizer=dict(OVERLAP, bf16=True), ddp=OVERLAP),
    ),
    "PB369": (
        run(
            dict(DELAYED, fp8_param_gather=True),
            model=DENSE,
            optimizer=dict(PRECISION_AWARE, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
        ),
        run(
            dict(DELAYED, fp8_param_gather=True),
            model=DENSE,
            optimizer=dict(PRECISION_AWARE, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp32"),
        ),
    ),
    "PB368": (
        run("bf16_mixed", model=DENSE, ddp={"use_torch_fsdp2": True}),
        run("bf16_mixed", model=DENSE, ddp={"use_torch_fsdp2": False}),
    ),
    "PB362": (
        run(dict(BF16, grad_reduce_in_fp32=False), model=DENSE, ddp=OVERLAP),
        run(BF16, model=DENSE, ddp=OVERLAP),
    ),
    "PB363": (
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(PRECISION_AWARE, main_grads_dtype="bf16"), ddp=OVERLAP),
        run("bf16_mixed", H100, model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
    ),
    "PB364": (
        run(
            "bf16_mixed", model=DENSE, optimizer=OVERLAP, ddp=dict(OVERLAP, reduce_scatter_with_fp32_accumulation=True)
        ),
        run("bf16_mixed", model=DENSE, optimizer=OVERLAP, ddp=OVERLAP),
    ),
    "PB365": (
        run(
            "bf16_mixed",
            "mcore0.17",
            model=DENSE,
            optimizer=OVERLAP,
            ddp=dict(OVERLAP, param_name_patterns_for_fp32_local_accumulation=[".*norm.*"]),
        ),
        run(
            "fp16_mixed",
            "mcore0.17",
            model=DENSE,
            optimizer=OVERLAP,
            ddp=dict(OVERLAP, param_name_patterns_for_fp32_local_accumulation=[".*norm.*"]),
        ),
    ),
    "PB366": (
        run(dict(BF16_SUMS, reduce_scatter_with_fp32_accumulation=True), model=DENSE, optimizer={}, ddp={}),
        run(BF16_SUMS, model=DENSE, optimizer={}, ddp={}),
    ),
    "PB367": (
        run("bf16_mixed", H100, model=dict(DENSE, tensor_parallel_num_weight_shards=2), ddp=OVERLAP),
        run("bf16_mixed", H100, model=dict(DENSE, mla_down_proj_fusion=True), ddp=OVERLAP),
    ),
}
