"""Runs that break and that keep the rules of `bridge.rules.topics.training.checkpoint`."""

from tests.rules.cases.runs import BLOCKWISE, CURRENT, DELAYED, H100, full

CASES = {
    "PB542": (
        full(DELAYED, "h100x8,te2.16.1,cuda12.9,mcore0.19.2", is_resumed=True, environment={}),
        full(
            DELAYED,
            "h100x8,te2.16.1,cuda12.9,mcore0.19.2",
            is_resumed=True,
            environment={"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"},
        ),
    ),
    "PB544": (
        full(CURRENT | {"fp8_param_gather": False}, H100, peft={"dim": 8}),
        full(CURRENT | {"fp8_param_gather": False}, H100, peft={"dim": 16}),
    ),
    "PB545": (
        full(BLOCKWISE | {"fp8_param_gather": True}, H100, peft={"dim": 16}),
        full(BLOCKWISE, H100, peft={"dim": 16}),
    ),
}
