"""Runs that break and that keep the rules of `bridge.rules.topics.system.train_script`."""

from tests.rules.cases.runs import BF16, DENSE, H100, full

CASES = {
    "PB701": (
        full(BF16, H100, dict(DENSE, qk_clip=True), is_own=True),
        full(BF16, H100, dict(DENSE, qk_clip=True)),
    ),
    "PB702": (
        full(BF16, H100, dict(DENSE, position_embedding_type="mrope"), is_own=True),
        full(BF16, H100, dict(DENSE, position_embedding_type="rope"), is_own=True),
    ),
    "PB703": (
        full(BF16, H100, dict(DENSE, virtual_pipeline_model_parallel_size=2), is_own=True),
        full(BF16, H100, DENSE, is_own=True),
    ),
}
