"""Fixtures shared by the suite."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


@pytest.fixture
def registered() -> Iterator[None]:
    """Put the registry back as it was after a test that registers recipes."""
    from bridge.registry.registry import REGISTRY

    REGISTRY.recipes()
    recipes, aliases = dict(REGISTRY._recipes), dict(REGISTRY._aliases)
    yield
    REGISTRY._recipes, REGISTRY._aliases = recipes, aliases


@pytest.fixture
def megatron_owners():
    """Return a function that makes fresh Megatron configs: model, optimizer and DDP by role."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import TransformerConfig

    def make(*, sharded: bool = True, **model):
        shape = {"num_layers": 20, "hidden_size": 64, "num_attention_heads": 4, **model}
        return {
            "model": TransformerConfig(**shape),
            "optimizer": OptimizerConfig(use_distributed_optimizer=sharded),
            "ddp": DistributedDataParallelConfig(use_distributed_optimizer=sharded),
        }

    return make
