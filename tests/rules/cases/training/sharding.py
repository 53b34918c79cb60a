"""Runs that break and that keep the rules of `bridge.rules.topics.training.sharding`."""

from tests.rules.cases.runs import (
    B200,
    BF16,
    CURRENT,
    CURRENT_PLAIN,
    DENSE,
    H100,
    MEGATRON_FSDP,
    MOE,
    MXFP8_FSDP,
    OVERLAP,
    PRECISION_AWARE,
    full,
    run,
)

BF16_FSDP = {"bf16": True}
SHARDED_FSDP = dict(MEGATRON_FSDP, data_parallel_sharding_strategy="optim_grads_params")
SENT_IN_BF16 = dict(MEGATRON_FSDP, megatron_fsdp_grad_comm_dtype="bf16")
STEPS = {"micro_batch_size": 1, "global_batch_size": 64}

CASES = {
    "PB321": (
        full(CURRENT, H100, ddp={"use_torch_fsdp2": True}, optimizer={}),
        full(CURRENT_PLAIN, H100, ddp={"use_torch_fsdp2": True}, optimizer={}),
    ),
    "PB323": (
        run("fp16_mixed", model=DENSE, ddp={"use_torch_fsdp2": True}),
        run("bf16_mixed", model=DENSE, ddp={"use_torch_fsdp2": True}),
    ),
    "PB324": (
        full(dict(MXFP8_FSDP, reuse_grad_buf_for_mxfp8_param_ag=True), B200, ddp=MEGATRON_FSDP),
        full(MXFP8_FSDP, B200, ddp=MEGATRON_FSDP),
    ),
    "PB326": (
        run({"fp32": True}, "h100x8,mcore0.20", model=DENSE, ddp=dict(MEGATRON_FSDP, megatron_fsdp_version=2)),
        run({"bf16": True}, "h100x8,mcore0.20", model=DENSE, ddp=dict(MEGATRON_FSDP, megatron_fsdp_version=2)),
    ),
    "PB327": (
        run("bf16_mixed", "mcore0.19.2", model=DENSE, ddp=SENT_IN_BF16),
        run("bf16_mixed", "mcore0.18", model=DENSE, ddp=SENT_IN_BF16),
    ),
    "PB328": (
        run({"bf16": True}, "mcore0.19.2", model=DENSE, ddp=dict(OVERLAP, use_megatron_fsdp=True)),
        run({"bf16": True}, "mcore0.19.2", model=DENSE, ddp=MEGATRON_FSDP),
    ),
    "PB329": (
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "muon"}, ddp={"use_torch_fsdp2": True}),
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "adam"}, ddp={"use_torch_fsdp2": True}),
    ),
    "PB330": (
        run("bf16_mixed", model=DENSE, optimizer={"use_distributed_optimizer": True}, ddp={}),
        run("bf16_mixed", model=DENSE, optimizer={}, ddp={}),
    ),
    "PB331": (full(dict(BF16, megatron_fsdp_grad_comm_dtype="bf16"), H100), full(BF16, H100)),
    "PB332": (
        full(dict(BF16_FSDP, megatron_fsdp_use_decoupled_grad=True), H100, ddp=MEGATRON_FSDP),
        full(BF16_FSDP, H100, ddp=MEGATRON_FSDP),
    ),
    "PB333": (
        full(BF16_FSDP, H100, ddp=dict(MEGATRON_FSDP, megatron_fsdp_main_params_dtype="bf16")),
        full(BF16_FSDP, H100, ddp=MEGATRON_FSDP),
    ),
    "PB334": (
        full(BF16_FSDP, H100, optimizer=PRECISION_AWARE, ddp=MEGATRON_FSDP),
        full(
            BF16_FSDP, H100, optimizer=PRECISION_AWARE, ddp=dict(MEGATRON_FSDP, megatron_fsdp_use_decoupled_grad=True)
        ),
    ),
    "PB336": (
        full(BF16_FSDP, H100, model=dict(MOE, expert_model_parallel_size=8), ddp=SHARDED_FSDP, train=STEPS),
        full(BF16_FSDP, H100, model=dict(MOE, expert_model_parallel_size=4), ddp=SHARDED_FSDP, train=STEPS),
    ),
}
