"""Our recipes in the table of Megatron Bridge's own module, from its wheel."""

from __future__ import annotations

from typing import Any

import pytest

from bridge import MixedPrecisionConfig, register
from bridge.trainers import register_with_megatron_bridge
from tests.recipes.test_peer import PEER, peer, wheel  # noqa: F401  fixtures

REASON = "needs Megatron Bridge's file beside the environment: make setup"
pytestmark = pytest.mark.skipif(not PEER.exists(), reason=REASON)


@pytest.fixture
def table(peer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:  # noqa: F811
    monkeypatch.setattr(peer, "MIXED_PRECISION_RECIPES", dict(peer.MIXED_PRECISION_RECIPES))
    return peer.MIXED_PRECISION_RECIPES


@pytest.mark.usefixtures("registered")
def test_a_teams_recipe_is_known_by_both_spellings(peer: Any, table: dict[str, Any], megatron_owners: Any) -> None:  # noqa: F811
    @register
    def team_bf16() -> MixedPrecisionConfig:
        """BF16 with gradients reduced in BF16."""
        return MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)

    assert "team_bf16" in register_with_megatron_bridge()
    assert table["team_bf16"].__doc__ == "BF16 with gradients reduced in BF16."
    made = megatron_owners()
    for name in ("team_bf16", "team-bf16"):
        config = peer.get_mixed_precision_config(name)
        config.finalize()
        config.setup(made["model"], made["optimizer"], made["ddp"])
    assert (made["model"].bf16, made["optimizer"].bf16, made["ddp"].grad_reduce_in_fp32) == (True, True, False)


def test_recipes_of_megatron_bridge_stay_unless_they_are_replaced(peer: Any, table: dict[str, Any]) -> None:  # noqa: F811
    theirs = table["bf16_mixed"]
    assert "bf16_mixed" not in register_with_megatron_bridge()
    assert table["bf16_mixed"] is theirs
    assert register_with_megatron_bridge() == []
    assert "bf16_mixed" in register_with_megatron_bridge(replace=True)
    assert isinstance(peer.get_mixed_precision_config("bf16-mixed"), MixedPrecisionConfig)
