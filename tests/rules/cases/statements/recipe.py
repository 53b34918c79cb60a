"""Runs that break and that keep the rules of `bridge.rules.topics.statements.recipe`."""

from dataclasses import dataclass

from bridge.precision.stated_field import stated
from bridge.precision.statements import mark_ambiguous_fields
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.rules.cases.runs import (
    B200,
    CURRENT_RECIPE,
    DENSE,
    H100,
    MXFP8,
    NVFP4,
    OVERLAP,
    full,
    run,
)


@dataclass(kw_only=True, repr=False, eq=False)
class WithOwnField(MixedPrecisionConfig):
    """A team's class with a field that Megatron's configs do not have."""

    kernel: str | None = stated(None, kind="name", optional=True)


BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
AS_MADE_BY_THE_PEER = MixedPrecisionConfig(bf16=True, fp8="hybrid")
mark_ambiguous_fields(AS_MADE_BY_THE_PEER, ["first_last_layers_bf16"])
WITHOUT_GATHER = REGISTRY.get("bf16_with_mxfp8_mixed")
WITHOUT_GATHER.fp8_param_gather = False

CASES = {
    "PB123": (run("bf16_mixed", model=dict(DENSE, fp16=True)), run("bf16_mixed", model=dict(DENSE, bf16=True))),
    "PB124": (
        run(
            model=dict(DENSE, bf16=True, params_dtype="bf16"),
            optimizer=dict(OVERLAP, bf16=False),
            ddp=dict(OVERLAP, grad_reduce_in_fp32=True),
        ),
        run(
            model=dict(DENSE, bf16=True, params_dtype="bf16"),
            optimizer=dict(OVERLAP, bf16=True),
            ddp=dict(OVERLAP, grad_reduce_in_fp32=True),
        ),
    ),
    "PB125": (
        run(REGISTRY.get(CURRENT_RECIPE).override("command line", fp8_recipe="blockwise"), H100, model=DENSE),
        run("nanov2_bf16_with_fp8_subchannel_scaling_mixed", H100, model=DENSE),
    ),
    "PB129": (full(NVFP4, "b200x8,te2.14,cuda12.9,mcore0.16.1"), full(NVFP4, "b200x8,te2.14,cuda12.9,mcore0.17.1")),
    "PB130": (run(WITHOUT_GATHER, B200), run(dict(MXFP8, fp8_param_gather=False, **{BUFFER: False}), B200)),
    "PB131": (run(WithOwnField(bf16=True, kernel="fused")), run(WithOwnField(bf16=True))),
    "PB133": (
        run(AS_MADE_BY_THE_PEER, model=dict(DENSE, first_last_layers_bf16=True)),
        run(AS_MADE_BY_THE_PEER, model=DENSE),
    ),
}
