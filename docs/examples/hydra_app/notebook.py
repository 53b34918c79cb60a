"""The same in a notebook, where Hydra composes and runs nothing."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from bridge import to_config
from bridge.registry.hydra_group import register_group

register_group()

with initialize_config_dir(str(Path(__file__).resolve().parent / "conf"), version_base=None):
    cfg = compose("config", ["mixed_precision=bf16_with_mxfp8_mixed", "mixed_precision.fp8_param_gather=false"])

precision = to_config(cfg.mixed_precision)
print(precision.fp8_recipe, precision.fp8_param_gather)
