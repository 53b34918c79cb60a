"""Fixtures shared by the suite."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import releases
from tests.plugins import hide_others

# One thread for each worker of pytest-xdist: the models are tiny, and more threads only wait for each other. The
# variable is read when torch is imported, so it stands here, and the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Python keeps what it compiled, even where the environment says otherwise: a hundred processes import the same files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A machine may have somebody's plugin of recipes, which would be in every list.
hide_others()

# Compiled kernels and tokenised text of this clone: another one beside it may run its own tests at the same time.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "home")

# A property that needs more examples than these is tested in full by `make test-all`. No test asks for more by itself.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("suite")


# Files whose tests share one dear fixture, a training run say: all of them go to one worker, which starts with them.
TOGETHER = (
    "tests/cli/test_wheel.py",
    "tests/front/test_any_application.py",
    "tests/front/test_runs.py",
    "tests.plan.test_memory_report.py",
    "tests/model/test_modules.py",
    "tests/training/test_loop.py",
    "tests/training/test_loop_low_precision_parallel.py",
    "tests/training/test_loop_parallel.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the release of Megatron Core."""
    text = "release of Megatron Core: installed, next (of `make setup`), rest (what that one leaves), or a source tree"
    parser.addoption("--megatron", default="installed", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Put the chosen release first on the path, before a test module imports Megatron Core."""
    choice = config.getoption("--megatron")
    fault = releases.fault_of(choice)
    if config.rootpath != releases.ROOT:  # pytest takes a folder behind a blank for a folder of tests
        fault = f"pytest reads its settings from {config.rootpath}: write --megatron={choice}"
    if fault is not None:
        raise pytest.UsageError(fault)
    releases.use(choice)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests where the chosen release is not there."""
    if config.getoption("--megatron") == "next" and not releases.is_there():
        releases.skip_all(items)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that the chosen release does without."""
    return True if releases.leaves_out(config.getoption("--megatron"), collection_path) else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a run end well for which the chosen release leaves no test, of the two that `make test` makes."""
    is_part = session.config.getoption("--megatron") != "installed"
    if is_part and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Return a scheduler that hands each test to the next free worker, and a file of `TOGETHER` as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in TOGETHER else nodeid

    return Scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """Put the environment back after each test: runs write Transformer Engine's variables, and workers share tests."""
    before = dict(os.environ)
    try:
        return (yield)
    finally:
        if dict(os.environ) != before:
            os.environ.clear()
            os.environ.update(before)


def pytest_collection_finish() -> None:
    """Take what collection imported out of the garbage collector, which Megatron calls for each checkpoint."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the contents of the wheel, to put in front of the environment."""
    from tests.package import installed_into, sources

    folder = tmp_path_factory.mktemp("installed")
    packages = installed_into(folder / "site", sources(folder / "source"))
    assert packages == {"bridge", "hydra_plugins", "precision_bridge_recipes"}
    return folder / "site"


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
