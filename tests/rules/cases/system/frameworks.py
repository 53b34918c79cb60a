"""Runs that break and that keep the rules of `bridge.rules.topics.system.frameworks`."""

from bridge.errors import Finding
from bridge.rules.program import DroppedField
from tests.rules.cases.runs import CURRENT_ALL, DENSE, run

OPTION = Finding(
    path="--first-last-layers-bf16",
    rule="miles does not forward it: the model is Megatron Bridge's",
    remedy="Drop it; or change the framework",
    value=True,
    severity="warning",
)
FIELD = DroppedField(
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
    "PB801": (
        run(CURRENT_ALL, model=DENSE, faulty_options=(OPTION,), dropped_fields=(FIELD,)),
        run(CURRENT_ALL, model=DENSE),
    ),
}
