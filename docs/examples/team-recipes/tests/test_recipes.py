"""Every recipe of the team can be right, reaches Megatron Core, and runs on the team's GPUs."""

from pathlib import Path

from bridge import get_mixed_precision_config
from bridge.testing import RecipeConformance


class TestAcmeRecipes(RecipeConformance):
    package = "acme_recipes"
    config_dir = Path(__file__).parents[1] / "conf"
    target = "h100x8,te2.9,cuda12.9,mcore0.16"


def test_long_runs_keep_bf16_weights() -> None:
    assert not get_mixed_precision_config("acme_fp8_long").fp8_param_gather
