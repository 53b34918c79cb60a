"""Fixtures shared by the suite."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import settings

# One thread for each worker of pytest-xdist: the models are tiny, and more threads only wait for each other. The
# variable is read when torch is imported, so it stands here, and the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A property that needs more examples than these is tested in full by `make test-all`. No test asks for more by itself.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests that share a module's fixture, one training run say, to one worker: it is made once."""
    for item in items:
        if isinstance(item, pytest.Function):
            shared = [name for name, found in item._fixtureinfo.name2fixturedefs.items() if found[-1].scope == "module"]
            if shared:
                item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{min(shared)}"))


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
