"""The plugin in nemo-run's own experiments, which are not started."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from bridge.errors import CheckError

ROOT = Path(__file__).parents[2]
PLACES = (Path(sys.prefix) / "nemo-run", ROOT / ".venv/nemo-run")
LAUNCH = (
    *("torchrun", "--nproc_per_node", "8", "pretrain_gpt.py", "--num-layers", "32", "--hidden-size", "4096"),
    *("--num-attention-heads", "32", "--seq-length", "4096", "--max-position-embeddings", "4096"),
    *("--micro-batch-size", "1", "--global-batch-size", "64", "--tensor-model-parallel-size", "8", "--bf16"),
)
SIZES = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 1024, "vocab_size": 32000}
MXFP8 = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}


@pytest.fixture(scope="module")
def run() -> Iterator[ModuleType]:
    """The package, from a folder beside the environment where it is in none: its own dependencies are many."""
    before = list(sys.path)
    sys.path += [str(place) for place in PLACES if place.exists()]
    yield pytest.importorskip("nemo_run", reason="needs nemo-run beside the environment: make test-interop")
    sys.path[:] = before


def say(text: str) -> None:
    """A task that nobody starts."""


def added(run: ModuleType, task: Any, home: Path, **options: Any) -> Any:
    """Add a task to an experiment, as `run.run` does before it submits."""
    from bridge.front.nemo_run import CheckBeforeSubmit

    executor = run.LocalExecutor(launcher="torchrun", ntasks_per_node=8, env_vars={"NVTE_DEBUG": "1"})
    with run.Experiment("pretrain", executor=executor, base_dir=str(home)) as experiment:
        experiment.add(task, plugins=[CheckBeforeSubmit(**options)])
        return experiment


def test_a_task_that_the_gpus_cannot_run_is_not_submitted(run: ModuleType, tmp_path: Path) -> None:
    words = [*LAUNCH[3:], "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
    task = run.Script(path=words[0], entrypoint="python", args=words[1:])
    with pytest.raises(CheckError) as raised:
        added(run, task, tmp_path, target="h100x8,te2.9,cuda12.9,mcore0.16")
    headline, finding = str(raised.value).splitlines()[:2]
    assert headline == "The task must pass the check before it is submitted:"
    assert "mxfp8 needs compute capability 10.0" in finding


def test_a_shell_script_is_checked_with_its_arguments(run: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(f"{' '.join(LAUNCH)} --fp8-format $1 --fp8-recipe $2\n")
    experiment = added(run, run.Script(path=str(script), args=["hybrid", "tensorwise"]), tmp_path / "home")
    assert [job.id for job in experiment.jobs] == ["pretrain.sh"]
    task = run.Script(path=str(script), args=["e4m3", "mxfp8"])
    with pytest.raises(CheckError, match="compute capability"):
        added(run, task, tmp_path / "home", target="h100x8,te2.9,cuda12.9,mcore0.16")


class Container:
    """A config with Megatron Bridge's method to write itself."""

    def to_yaml(self, yaml_path: str) -> None:
        model = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", **SIZES}
        precision = {"_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig", **MXFP8}
        content = {"_target_": "megatron.bridge.training.config.ConfigContainer", "model": model}
        Path(yaml_path).write_text(yaml.safe_dump({**content, "mixed_precision": precision}))


def test_a_config_of_megatron_bridge_is_checked_as_it_writes_itself(run: ModuleType) -> None:
    from bridge.front.nemo_run import CheckBeforeSubmit

    task = run.Partial(say, text=Container())
    with pytest.raises(CheckError, match="compute capability"):
        CheckBeforeSubmit(target="h100x8,te2.9,cuda12.9,mcore0.16").setup(task, run.LocalExecutor())


def test_a_task_without_a_run_is_submitted_with_a_warning(run: ModuleType, tmp_path: Path) -> None:
    texts: list[str] = []
    handler = logging.Handler()  # nemo-run replaces those of the root
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bridge.front").addHandler(handler)
    try:
        added(run, run.Script(inline="echo hello"), tmp_path)
        added(run, run.Partial(say, text="hello"), tmp_path)
    finally:
        logging.getLogger("bridge.front").removeHandler(handler)
    assert len(texts) == 2
    assert "must start a run of Megatron-LM" in texts[0]
    assert texts[1] == "check: Partial holds no config that can be read."
