"""Runs that break and that keep the rules of `bridge.rules.topics.delayed`."""

from tests.rules.cases.runs import DELAYED, DELAYED_RECIPE, DENSE, H100, full

CASES = {
    "PB221": (full(DELAYED, H100, dict(DENSE, pipeline_model_parallel_size=2)), full(DELAYED, H100)),
    "PB222": (full(dict(DELAYED, fp8_amax_history_len=1), H100), full(DELAYED, H100)),
    "PB223": (full(DELAYED_RECIPE, H100), full(DELAYED, H100)),
}
