"""A tiny live model of Megatron Core with its optimizer, as a trainer's loop has it; as a script, in two ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.runtime.megatron.backend import choose_backend_of_phases, use_backend
from bridge.runtime.megatron.process import training_process
from bridge.runtime.megatron.trainer import Trainer
from bridge.trainers.audit import attach_audit
from bridge.training.run import build_run, list_phase_models
from tests.training.loop_tiny import tiny


class Live:
    """A built run and the batches that it takes."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.trainer: Trainer = run.trainer
        self.model: list[Any] = run.trainer.model
        self.optimizer: Any = run.trainer.optimizer
        self.batches = run.batches_of(run.splits.train, start=0)

    def step(self) -> None:
        self.trainer.step(self.batches)

    def hooks(self) -> int:
        """Return how many forward hooks the modules have."""
        number = 0
        for chunk in self.model:
            for module in chunk.modules():
                number += len(module._forward_hooks) + len(module._forward_pre_hooks)
        return number


@contextmanager
def live(*, backend: str = "auto", debugger: tuple[Path, Path] | None = None, **arguments: Any) -> Iterator[Live]:
    """Build a run with arguments of `tiny`, in a process group of this process or launch.

    `debugger` has the features file and the log folder of Transformer Engine's debugger.
    """
    config = replace(tiny(**arguments), precision_backend=backend)
    chosen = choose_backend_of_phases(config.precision_backend, list_phase_models(config), os.environ)
    process = training_process(config.model, seed=1, fingerprint={})
    with process as started, use_backend(chosen):
        if debugger is not None:
            start_debugger(*debugger)
        run = Live(build_run(config, started, backend=chosen))
        if debugger is not None:
            import nvdlfw_inspect.api as debug_api

            debug_api.infer_and_assign_layer_names(run.model)
        yield run


def start_debugger(features: Path, folder: Path) -> None:
    """Start Transformer Engine's debugger, as Megatron Bridge does before it builds a model.

    A process may have had models before: the state of the debugger and of Transformer Engine is set back.
    """
    import nvdlfw_inspect.api as debug_api
    import transformer_engine
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    TEDebugState._reset()
    feature_dirs = [str(Path(transformer_engine.__file__).parent / "debug" / "features")]
    debug_api.initialize(
        config_file=str(features), feature_dirs=feature_dirs, log_dir=str(folder), default_logging_enabled=True
    )
    debug_api.transformer_engine._api_cache.clear()


def main(folder: Path) -> None:
    """Audit three steps of a pipeline of two stages, then attach with another learning rate on rank 1.

    Each rank writes what it saw.
    """
    rank = os.environ["RANK"]
    model = {"num_layers": 4, "pipeline_model_parallel_size": 2}
    with live(low="tensorwise", sharded=True, model=model) as run:
        attached = attach_audit(run.model, run.optimizer, folder=folder)
        for _ in range(3):
            run.step()
        layers = sorted({row.layer for row in attached.audits.record.gemms})
        seen = {"step": attached.audits.record.step, "layers": layers, "hooks": run.hooks()}
        run.optimizer.config.lr *= 1 + int(rank)
        try:
            attach_audit(run.model, run.optimizer)
        except BridgeError as error:
            seen["error"] = str(error)
        seen["wrapped"] = "step" in vars(run.optimizer)
        (folder / f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
