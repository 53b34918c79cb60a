"""Runs that break and that keep the rules of `bridge.rules.topics.training.parallel`."""

from tests.rules.cases.runs import (
    B200,
    BLOCKWISE,
    DENSE,
    H100,
    INTERLEAVED,
    MEGATRON_BRIDGE,
    MEGATRON_FSDP,
    MXFP8,
    MXFP8_FSDP,
    NVFP4,
    OVERLAPPED,
    SEQUENCE_PARALLEL,
    full,
    run,
)

MXFP8_COMPUTE = dict(MXFP8, fp8_param_gather=False, reuse_grad_buf_for_mxfp8_param_ag=False, grad_reduce_in_fp32=False)
WEIGHT_SHARDS = dict(DENSE, tensor_parallel_num_weight_shards=4)

LAID_OUT = dict(DENSE, overlap_p2p_comm=True, batch_p2p_comm=False)

CASES = {
    "PB401": (
        run(BLOCKWISE, H100, model=dict(SEQUENCE_PARALLEL, seq_length=4000), train={"micro_batch_size": 1}),
        run(
            BLOCKWISE,
            "h100x8,te2.14,cuda12.9,mcore0.19.2",
            model=dict(SEQUENCE_PARALLEL, seq_length=4000),
            train={"micro_batch_size": 1},
        ),
    ),
    "PB402": (run("bf16_mixed", model=dict(DENSE, tp_comm_overlap=True)), run("bf16_mixed", model=OVERLAPPED)),
    "PB403": (full(MXFP8, B200, dict(OVERLAPPED, ffn_hidden_size=14400)), full(MXFP8, B200, OVERLAPPED)),
    "PB404": (full(dict(NVFP4, fp4_param_gather=False), B200, WEIGHT_SHARDS), full(NVFP4, B200, WEIGHT_SHARDS)),
    "PB405": (
        full(MXFP8_COMPUTE, B200, WEIGHT_SHARDS),
        full(MXFP8_COMPUTE, B200, dict(DENSE, mla_down_proj_fusion=True)),
    ),
    "PB406": (
        run("bf16_mixed", "h100x12", model=dict(DENSE, tensor_model_parallel_size=8)),
        run("bf16_mixed", "h100x16", model=dict(DENSE, tensor_model_parallel_size=8)),
    ),
    "PB407": (
        run("bf16_mixed", model=dict(DENSE, **INTERLEAVED)),
        run("bf16_mixed", model=dict(DENSE, **INTERLEAVED, overlap_p2p_comm=True, batch_p2p_comm=False)),
    ),
    "PB408": (
        run("bf16_mixed", model=dict(DENSE, tensor_model_parallel_size=6, ffn_hidden_size=14400, num_query_groups=6)),
        run("bf16_mixed", model=dict(DENSE, tensor_model_parallel_size=8)),
    ),
    "PB409": (
        run(
            "bf16_mixed",
            "h100x3",
            model=dict(DENSE, seq_length=4096),
            train={"global_batch_size": 128, "micro_batch_size": 2},
        ),
        run(
            "bf16_mixed",
            "h100x4",
            model=dict(DENSE, seq_length=4096),
            train={"global_batch_size": 128, "micro_batch_size": 2},
        ),
    ),
    "PB410": (
        run("bf16_mixed", model=dict(DENSE, seq_length=4096), data={"seq_length": 1000}),
        run("bf16_mixed", model=dict(DENSE, seq_length=4096), data={"seq_length": 4096}),
    ),
    "PB411": (
        run("bf16_mixed", model=dict(DENSE, seq_length=4096), data={"seq_length": 1000}, program=MEGATRON_BRIDGE),
        run("bf16_mixed", model=dict(DENSE, seq_length=4096), data={"seq_length": 4096}, program=MEGATRON_BRIDGE),
    ),
    "PB412": (
        run(
            "bf16_mixed",
            model=dict(INTERLEAVED, **LAID_OUT, pipeline_model_parallel_layout="Et*8|t*8|t*8|t*4|t*2|t*2L"),
        ),
        run("bf16_mixed", model=dict(INTERLEAVED, **LAID_OUT, pipeline_model_parallel_layout="Et*8|t*8|t*8|t*8L")),
    ),
    "PB413": (
        run("bf16_mixed", model=dict(DENSE, num_layers=30, pipeline_model_parallel_size=4)),
        run("bf16_mixed", model=dict(DENSE, num_layers=32, pipeline_model_parallel_size=4)),
    ),
    "PB415": (
        full(MXFP8_FSDP, B200, dict(WEIGHT_SHARDS, tensor_model_parallel_size=2), ddp=MEGATRON_FSDP),
        full(
            MXFP8_FSDP,
            B200,
            dict(DENSE, tensor_model_parallel_size=2, tensor_parallel_num_weight_shards=2, mla_down_proj_fusion=True),
            ddp=MEGATRON_FSDP,
        ),
    ),
}
