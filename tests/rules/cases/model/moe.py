"""Runs that break and that keep the rules of `bridge.rules.topics.model.moe`."""

from tests.rules.cases.runs import (
    B200,
    BF16,
    CURRENT,
    DENSE,
    H100,
    MEGATRON_BRIDGE,
    MOE,
    MXFP8,
    NVFP4,
    OVERLAP,
    PADDED_MOE,
    full,
    run,
)

UNSPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
BIASED = dict(
    MOE,
    num_moe_experts=128,
    moe_router_topk=8,
    seq_length=4096,
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
)
NCCLEP = dict(
    PADDED_MOE,
    moe_token_dispatcher_type="flex",  # noqa: S106  a dispatcher
    moe_flex_dispatcher_backend="ncclep",
    moe_expert_capacity_factor=1.0,
)

CASES = {
    "PB421": (full(CURRENT, H100, MOE), full(CURRENT, H100, PADDED_MOE)),
    "PB422": (
        full(CURRENT, H100, dict(PADDED_MOE, moe_token_dispatcher_type="allgather")),  # noqa: S106  a dispatcher
        full(CURRENT, H100, PADDED_MOE),
    ),
    "PB423": (run("bf16_mixed", H100, model=PADDED_MOE), run("bf16_mixed", H100, model=MOE)),
    "PB424": (full(CURRENT, H100, dict(MOE, moe_router_padding_for_fp8=True)), full(CURRENT, H100, PADDED_MOE)),
    "PB426": (run("bf16_mixed", model=dict(MOE, moe_router_dtype=None)), run("bf16_mixed", model=MOE)),
    "PB427": (
        run("fp32", model=dict(MOE, overlap_moe_expert_parallel_comm=True)),
        run("bf16_mixed", model=dict(MOE, overlap_moe_expert_parallel_comm=True)),
    ),
    "PB428": (
        full(NVFP4, "b200x8,te2.14,cuda12.9,mcore0.18", dict(PADDED_MOE, overlap_moe_expert_parallel_comm=True)),
        full(NVFP4, B200, dict(PADDED_MOE, overlap_moe_expert_parallel_comm=True)),
    ),
    "PB429": (
        full(CURRENT, H100, dict(PADDED_MOE, use_transformer_engine_op_fuser=True)),
        full(MXFP8, B200, dict(PADDED_MOE, use_transformer_engine_op_fuser=True)),
    ),
    "PB430": (
        full(CURRENT, H100, dict(PADDED_MOE, moe_single_grouped_weight=True)),
        full(MXFP8, B200, dict(PADDED_MOE, moe_single_grouped_weight=True)),
    ),
    "PB431": (
        run("bf16_mixed", "mcore0.20", model=dict(MOE, moe_dispatch_fwd_dtype="mxfp8")),
        run("bf16_mixed", "mcore0.20", model=MOE),
    ),
    "PB432": (
        full(CURRENT, "h100x8,te2.9,cuda12.9,mcore0.20", dict(PADDED_MOE, batch_invariant_mode=True)),
        full(BF16, "h100x8,te2.9,cuda12.9,mcore0.20", dict(MOE, batch_invariant_mode=True)),
    ),
    "PB433": (
        run("fp16_mixed", "v100x8", model=dict(MOE, moe_grouped_gemm=True)),
        run("fp16_mixed", "a100x8", model=dict(MOE, moe_grouped_gemm=True)),
    ),
    "PB434": (
        full(CURRENT, "h100x8,te2.9,cuda12.9,mcore0.20", NCCLEP),
        full(CURRENT, "h100x8,te2.9,cuda12.9,mcore0.20", dict(NCCLEP, moe_expert_capacity_factor=None)),
    ),
    "PB435": (
        run(dict(BF16, moe_router_dtype="fp32"), model=DENSE),
        run(dict(BF16, moe_router_dtype="fp32"), model=MOE),
    ),
    "PB436": (
        full(CURRENT, "h100x8,te2.18,cuda12.9,mcore0.18", dict(PADDED_MOE, moe_grouped_gemm=True)),
        full(CURRENT, "h100x8,te2.18,cuda12.9,mcore0.19", dict(PADDED_MOE, moe_grouped_gemm=True)),
    ),
    "PB437": (
        run(
            "bf16_mixed",
            "mcore0.20",
            model=dict(MOE, moe_deepep_num_sms=20, moe_hybridep_num_sms=16),
            program=MEGATRON_BRIDGE,
        ),
        run("bf16_mixed", "mcore0.20", model=dict(MOE, moe_hybridep_num_sms=16), program=MEGATRON_BRIDGE),
    ),
    "PB438": (
        run("bf16_mixed", "mcore0.18.2", model=dict(MOE, **UNSPLIT)),
        run("bf16_mixed", "mcore0.18.2", model=dict(MOE, **UNSPLIT, expert_model_parallel_size=2)),
    ),
    "PB439": (
        run("bf16_mixed", "mcore0.19.2", model=BIASED, optimizer=OVERLAP, train={"global_batch_size": 512}),
        run("bf16_mixed", "mcore0.19.2", model=BIASED, optimizer=OVERLAP, train={"global_batch_size": 1}),
    ),
}
