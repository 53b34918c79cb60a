"""Runs that break and that keep the rules of `bridge.rules.topics.frameworks`."""

from bridge.errors import Finding
from tests.rules.cases.runs import DENSE, run

DROPPED = Finding(
    path="--first-last-layers-bf16",
    rule="miles does not forward it: the model is Megatron Bridge's",
    remedy="Drop it; or change the framework",
    value=True,
    severity="warning",
)

CASES = {
    "PB801": (run("bf16_mixed", model=DENSE, not_forwarded=(DROPPED,)), run("bf16_mixed", model=DENSE)),
}
