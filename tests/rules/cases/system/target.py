"""Runs that break and that keep the rules of `bridge.rules.topics.system.target`."""

from tests.rules.cases.runs import (
    B200,
    BF16,
    BLOCKWISE,
    CURRENT,
    CUSTOM,
    DENSE,
    H100,
    MXFP8,
    NVFP4,
    full,
    run,
)

MXFP8_COMPUTE = dict(MXFP8, fp8_param_gather=False, reuse_grad_buf_for_mxfp8_param_ag=False)

CASES = {
    "PB601": (run(CURRENT), run(CURRENT, H100)),
    "PB602": (full(CURRENT, "a100x8,te2.9,cuda12.9,mcore0.19.2"), full(CURRENT, "l40x8,te2.9,cuda12.9,mcore0.19.2")),
    "PB603": (full(MXFP8, "rtxprox8,te2.14,cuda12.9,mcore0.19.2"), full(MXFP8, "b300x8,te2.14,cuda12.9,mcore0.19.2")),
    "PB604": (full(NVFP4, "rtxprox8,te2.14,cuda12.9,mcore0.19.2"), full(NVFP4, B200)),
    "PB605": (run(BLOCKWISE, "h100x8,te2.9,cuda12.4"), run(BLOCKWISE, "h100x8,te2.9,cuda12.9")),
    "PB606": (full(CURRENT, "h100x8,te2.1,cuda12.9,mcore0.19.2"), full(CURRENT, H100)),
    "PB607": (full(CURRENT, "h100x8,mcore0.19.2"), full(CURRENT, H100)),
    "PB608": (full(CURRENT, "h100x8,te-none,mcore0.19.2"), full(CURRENT, H100)),
    "PB609": (run(BLOCKWISE, B200), run(BLOCKWISE, H100)),
    "PB610": (run(BLOCKWISE, "b200x8,te2.8,cuda12.9"), run(BLOCKWISE, B200)),
    "PB611": (full(CURRENT, "cpu,mcore0.19.2"), full(BF16, "cpu,mcore0.19.2")),
    "PB612": (full(CURRENT, "cpu,mcore0.19.2", backend="te"), full(CURRENT, H100, backend="te")),
    "PB613": (run("bf16_mixed", "v100x8"), run("bf16_mixed", "a100x8")),
    "PB614": (full(CURRENT, "mi300xx8,mcore0.19.2"), full(CURRENT, H100)),
    "PB615": (
        full(dict(CURRENT, fp8_dot_product_attention=True), H100, backend="emulated"),
        full(CURRENT, H100, backend="emulated"),
    ),
    "PB616": (
        run(CUSTOM, H100, model=dict(DENSE, fp8_quantizer_factory="house.quantizers.make"), backend="emulated"),
        run(CURRENT, H100, model=DENSE, backend="emulated"),
    ),
    "PB617": (run(BLOCKWISE, "rtx50x8,te2.14,cuda12.9"), run(BLOCKWISE, B200)),
    "PB618": (
        full("bf16_mixed", "h100x8,mcore0.19.2", dict(DENSE, seq_length=16384)),
        full("bf16_mixed", "h200x8,mcore0.19.2", dict(DENSE, seq_length=16384)),
    ),
    "PB619": (
        full("bf16_mixed", H100, dict(DENSE, experimental_attention_variant="gdn2")),
        full("bf16_mixed", H100, DENSE),
    ),
    "PB620": (full(CURRENT, "h100x8,te2.6,cuda12.9,mcore0.19.2"), full(CURRENT, H100)),
    "PB623": (full(NVFP4, "mi355xx8,mcore0.19.2"), full(NVFP4, "b200x8,mcore0.19.2")),
    "PB622": (run(BLOCKWISE, "mi300xx8"), run(BLOCKWISE, "h100x8,te2.9,cuda12.9")),
    "PB621": (full(MXFP8_COMPUTE, "mi325xx8,mcore0.19.2"), full(MXFP8_COMPUTE, "mi355xx8,mcore0.19.2")),
}
