"""Megatron Bridge's own module, from its wheel, beside ours: the same recipes written into the same configs."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bridge.precision.dtypes import dtype_token
from bridge.training import mixed_precision as ours

PEER = Path(sys.prefix) / "peer/megatron/bridge/training/mixed_precision.py"
pytestmark = [
    pytest.mark.skipif(not PEER.exists(), reason="needs Megatron Bridge's file beside the environment: make setup"),
    pytest.mark.filterwarnings("ignore"),
]
RECIPES = sorted(name for name in ours.MIXED_PRECISION_RECIPES)
OURS_ALONE = {"fp32", "bf16_autocast_mixed", "nanov2_bf16_with_fp8_subchannel_scaling_mixed"}
DIFFERENT = {
    ("model", "autocast_dtype"): "derived from the mode, where the peer leaves None",
    ("model", "num_layers_at_start_in_bf16"): "Megatron's own 1 stays where first_last_layers_bf16 is off",
    ("model", "num_layers_at_end_in_bf16"): "Megatron's own 1 stays where first_last_layers_bf16 is off",
    ("model", "fp8_recipe"): "no FP8 recipe is left in a run without FP8",
    ("optimizer", "fp8_recipe"): "no FP8 recipe is left in a run without FP8",
}
"""Owner and field that ours leaves otherwise than the peer, on purpose -> why."""


@pytest.fixture(scope="module")
def peer() -> Any:
    """The real module; of Megatron Bridge's models, which it names in annotations, only two names stand in."""
    pytest.importorskip("megatron.core")
    models = ModuleType("megatron.bridge.models")
    models.GPTModelProvider = models.T5ModelProvider = object
    package = ModuleType("megatron.bridge")
    package.__path__ = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.bridge", package)
        patch.setitem(sys.modules, "megatron.bridge.models", models)
        spec = importlib.util.spec_from_file_location("peer_mixed_precision", PEER)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        patch.setattr(module, "is_te_min_version", lambda _: True)  # no Transformer Engine is needed to compare
        yield module


def plain(value: Any) -> Any:
    return dtype_token(value) if isinstance(value, torch.dtype) else value


def test_every_recipe_of_the_peer_is_here_under_both_spellings(peer: Any) -> None:
    assert all(name in ours.MIXED_PRECISION_RECIPES for name in peer.MIXED_PRECISION_RECIPES)
    theirs = {name for name in peer.MIXED_PRECISION_RECIPES if "-" not in name}
    assert set(RECIPES) - theirs == OURS_ALONE


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in OURS_ALONE])
def test_a_recipe_reads_and_writes_as_the_peers_does(name: str, peer: Any, megatron_owners) -> None:
    theirs, mine = peer.get_mixed_precision_config(name), ours.get_mixed_precision_config(name)
    theirs.finalize()
    fields = [field.name for field in dataclasses.fields(theirs)]
    assert {f: plain(getattr(mine, f)) for f in fields} == {f: plain(getattr(theirs, f)) for f in fields}

    left, right = megatron_owners(), megatron_owners()
    theirs.setup(*left.values())
    mine.setup(*right.values())
    differs = {
        (owner, field.name)
        for owner in left
        for field in dataclasses.fields(left[owner])
        if str(getattr(left[owner], field.name)) != str(getattr(right[owner], field.name))
    }
    assert differs <= DIFFERENT.keys()
    if mine.fp8:
        assert not differs & {("model", "fp8_recipe"), ("optimizer", "fp8_recipe")}
    if mine.first_last_layers_bf16:
        assert not any(field.startswith("num_layers") for _, field in differs)


def test_the_class_takes_what_the_peers_takes_and_has_its_defaults(peer: Any) -> None:
    theirs, mine = peer.MixedPrecisionConfig(), ours.MixedPrecisionConfig()
    theirs.finalize()
    for field in dataclasses.fields(theirs):
        assert plain(getattr(mine, field.name)) == plain(getattr(theirs, field.name)), field.name
