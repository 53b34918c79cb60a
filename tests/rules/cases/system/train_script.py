"""Runs that break and that keep the rules of `bridge.rules.topics.system.train_script`."""

from tests.rules.cases.runs import BF16, DENSE, H100, TRAIN_SCRIPT, full

CASES = {
    "PB701": (
        full(BF16, H100, dict(DENSE, qk_clip=True), program=TRAIN_SCRIPT),
        full(BF16, H100, dict(DENSE, qk_clip=True)),
    ),
    "PB702": (
        full(BF16, H100, dict(DENSE, position_embedding_type="mrope"), program=TRAIN_SCRIPT),
        full(BF16, H100, dict(DENSE, position_embedding_type="rope"), program=TRAIN_SCRIPT),
    ),
    "PB703": (
        full(BF16, H100, dict(DENSE, virtual_pipeline_model_parallel_size=2), program=TRAIN_SCRIPT),
        full(BF16, H100, DENSE, program=TRAIN_SCRIPT),
    ),
}
