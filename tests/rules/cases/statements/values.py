"""Runs that break and that keep the rules of `bridge.rules.topics.statements.values`."""

from bridge.errors import Finding
from tests.rules.cases.runs import DELAYED, DENSE, H100, full, run

REFUSED = Finding(
    path="--bf16",
    rule="Megatron-LM's parser takes no value after it and refuses to start; it is read as on",
    remedy="Write the flag alone, or drop it",
    value="True",
)

CASES = {
    "PB121": (
        run("bf16_mixed", model=dict(DENSE, first_last_layers_bf16="sometimes")),
        run("bf16_mixed", model=dict(DENSE, first_last_layers_bf16="no")),
    ),
    "PB122": (
        run("bf16_mixed", model=dict(DENSE, moe_router_dtyep="fp32")),
        run("bf16_mixed", model=dict(DENSE, a_providers_own_field="fp32")),
    ),
    "PB126": (
        run(model=dict(DENSE, fp8="", bf16=True, params_dtype="bf16")),
        run(model=dict(DENSE, fp8=None, bf16=True, params_dtype="bf16")),
    ),
    "PB127": (
        run("bf16_mixed", model=dict(DENSE, pipeline_model_parallel_size=0)),
        run("bf16_mixed", model=dict(DENSE, pipeline_model_parallel_size=1)),
    ),
    "PB128": (full(dict(DELAYED, fp8_margin=-1), H100), full(dict(DELAYED, fp8_margin=0), H100)),
    "PB132": (
        run("bf16_mixed", model={name: value for name, value in DENSE.items() if "dropout" not in name}),
        run("bf16_mixed", model=DENSE),
    ),
    "PB134": (run("bf16_mixed", model=DENSE, refused_arguments=(REFUSED,)), run("bf16_mixed", model=DENSE)),
}
