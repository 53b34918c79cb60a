"""Runs that break and that keep the rules of `bridge.rules.topics.precision.mode`."""

from tests.rules.cases.runs import BF16, DENSE, HYBRID, MOE, recipe, run

FP16 = recipe("fp16_mixed")

CASES = {
    "PB101": (run({"bf16": True, "fp16": True}), run({"bf16": True})),
    "PB102": (run({"bf16": True, "params_dtype": "fp16"}), run({"bf16": True, "params_dtype": "fp32"})),
    "PB103": (run(model=dict(DENSE, params_dtype="bf16")), run(model=dict(DENSE, params_dtype="bf16", bf16=True))),
    "PB104": (
        run({"fp32": True, "autocast_enabled": True}),
        run({"fp32": True, "autocast_enabled": True, "autocast_dtype": "bf16"}),
    ),
    "PB105": (
        run({"fp32": True, "autocast_dtype": "bf16"}),
        run({"fp32": True, "autocast_enabled": True, "autocast_dtype": "bf16"}),
    ),
    "PB106": (
        run("fp32", model=dict(DENSE, fp32_residual_connection=True)),
        run("bf16_mixed", model=dict(DENSE, fp32_residual_connection=True)),
    ),
    "PB107": (
        run("bf16_mixed", model=dict(DENSE, fp16_lm_cross_entropy=True)),
        run("fp16_mixed", model=dict(DENSE, fp16_lm_cross_entropy=True)),
    ),
    "PB108": (
        run(model=dict(DENSE, bf16=True, params_dtype="bf16", pipeline_model_parallel_size=4)),
        run(model=dict(DENSE, bf16=True, params_dtype="bf16", pipeline_dtype="bf16", pipeline_model_parallel_size=4)),
    ),
    "PB109": (
        run("bf16_autocast_mixed", "mcore0.16.1", model=dict(DENSE, pipeline_model_parallel_size=2)),
        run("bf16_autocast_mixed", "mcore0.17.1", model=dict(DENSE, pipeline_model_parallel_size=2)),
    ),
    "PB110": (
        run("bf16_mixed", model=dict(MOE, enable_autocast=True, overlap_moe_expert_parallel_comm=True)),
        run("bf16_mixed", model=dict(MOE, enable_autocast=True)),
    ),
    "PB111": (
        run("bf16_mixed", model=dict(DENSE, disable_bf16_reduced_precision_matmul=True)),
        run("fp32", model=dict(DENSE, disable_bf16_reduced_precision_matmul=True)),
    ),
    "PB112": (
        run("fp32", model=dict(DENSE, batch_invariant_mode=True)),
        run("bf16_mixed", model=dict(DENSE, batch_invariant_mode=True)),
    ),
    "PB113": (run(dict(BF16, autocast_dtype="fp64", autocast_enabled=True)), run(dict(BF16, autocast_enabled=True))),
    "PB114": (
        run(dict(FP16, disable_bf16_reduced_precision_matmul=True)),
        run(dict(FP16, disable_bf16_reduced_precision_matmul=False)),
    ),
    "PB115": (
        run(dict(BF16, mamba_training_ssm_states_dtype="fp32"), "mcore0.19.2", model=DENSE),
        run(dict(BF16, mamba_training_ssm_states_dtype="fp32"), "mcore0.19.2", model=HYBRID),
    ),
    "PB116": (run({"fp8": "hybrid"}), run({"fp8": "hybrid", "fp32": True})),
    "PB117": (run(dict(BF16, bf16=False)), run(BF16)),
}
