"""Settings that a framework does not forward."""

from bridge.rules.program import Dropped
from tests.rules.cases.runs import CURRENT_ALL, DENSE, run

FIRST_LAST = Dropped(
    key="policy.megatron_cfg.first_last_layers_bf16",
    path="model.first_last_layers_bf16",
    value=True,
    framework="NeMo-RL",
    code="NVIDIA-NeMo/RL 7ea279ab of 2026-08-22",
    because="its setup does not copy it",
    source="nemo_rl/models/megatron/setup.py setup_model_config",
    instead="policy.megatron_cfg.model_overrides.first_last_layers_bf16",
)
CASES = {
    "PB135": (
        run(CURRENT_ALL, model=DENSE, dropped=(FIRST_LAST,)),
        run(CURRENT_ALL, model=DENSE),
    ),
}
