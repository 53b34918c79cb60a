"""Runs that break and that keep the rules of `bridge.rules.topics.training.determinism`."""

from tests.rules.cases.runs import CURRENT, DENSE, H100, MEGATRON_BRIDGE, OVERLAPPED, full, run

NEW, OLD = "mcore0.19.2", "mcore0.18.2"
INVARIANT = {
    **DENSE,
    "batch_invariant_mode": True,
    "attention_backend": "flash",
    "flash_attention_version": 3,
    "attention_dropout": 0.0,
}
DETERMINISTIC = dict(DENSE, deterministic_mode=True)
RING = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}

CASES = {
    "PB531": (
        run("bf16_mixed", NEW, model=dict(INVARIANT, attention_backend="fused")),
        run("bf16_mixed", NEW, model=INVARIANT),
    ),
    "PB532": (
        run("bf16_mixed", NEW, model=dict(INVARIANT, flash_attention_version=2)),
        run("bf16_mixed", NEW, model=INVARIANT),
    ),
    "PB533": (
        run("bf16_mixed", NEW, model=dict(INVARIANT, context_parallel_size=2)),
        run("bf16_mixed", OLD, model=dict(INVARIANT, context_parallel_size=2)),
    ),
    "PB534": (
        run("bf16_mixed", NEW, model={**INVARIANT, **OVERLAPPED}),
        run("bf16_mixed", NEW, model=OVERLAPPED),
    ),
    "PB535": (full(CURRENT, H100, INVARIANT), full(CURRENT, H100, DENSE)),
    "PB536": (
        run("bf16_mixed", NEW, model=dict(DETERMINISTIC, cross_entropy_loss_fusion=True)),
        run("bf16_mixed", NEW, model=dict(DENSE, cross_entropy_loss_fusion=True)),
    ),
    "PB537": (
        full("bf16_mixed", NEW, DETERMINISTIC, environment={**RING, "NCCL_ALGO": "NVLS"}, program=MEGATRON_BRIDGE),
        full("bf16_mixed", NEW, DETERMINISTIC, environment=RING, program=MEGATRON_BRIDGE),
    ),
}
