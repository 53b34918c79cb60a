"""The default training step in FP8 and FP4 beside BF16, in one process, and what measuring quantisation costs."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

__all__ = ["RECIPES", "low_precision"]

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("fp8_current", "fp8_delayed", "blockwise", "mxfp8", "nvfp4")
GOAL = 1.25


def low_precision(rounds: int = 10, warmup: int = 3) -> list[dict[str, Any]]:
    """Measure the default run's step for each recipe and return a record each, and one for the telemetry."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from bridge.front import compose
    from bridge.megatron.backend import Backend, running
    from bridge.megatron.process import training_process
    from bridge.training.config import runtime_config_update
    from bridge.training.run import build_run

    def built(recipe: str, process: Any) -> Any:
        config = compose([f"mixed_precision={recipe}", "precision_backend=emulated"], config_path=ROOT / "conf")
        runtime_config_update(config)
        run = build_run(config, process)
        return run, run.batches_of(run.splits.train, start=0)

    first = compose(config_path=ROOT / "conf")
    seconds: dict[str, list[float]] = {name: [] for name in ("bf16_mixed", *RECIPES, "measured")}
    with ExitStack() as stack:
        process = stack.enter_context(training_process(first.model, seed=first.train.seed))
        stack.enter_context(running(Backend(name="emulated")))
        runs = {name: built(name, process) for name in ("bf16_mixed", *RECIPES)}
        for index in range(rounds + warmup):
            for name, (run, source) in runs.items():
                taken = _timed(run, source)
                if index >= warmup:
                    seconds[name].append(taken)
            run, source = runs["fp8_current"]
            with run.telemetry.measuring(index + 1):
                taken = _timed(run, source)
            if index >= warmup:
                seconds["measured"].append(taken)
        interval = first.logging.quantisation_interval
    how = f"gpt_5m, {rounds} rounds in turn in one process"
    records = []
    for name in RECIPES:
        ratio = _ratio(seconds[name], seconds["bf16_mixed"])
        records.append(_record(f"training step, {name} / bf16_mixed", ratio, goal=GOAL, how=how))
    extra = (_ratio(seconds["measured"], seconds["fp8_current"]) - 1) / interval
    how = f"{how}, one step of {interval} measured"
    return [*records, _record("measuring quantisation, share of the step", extra, goal=0.05, how=how)]


def _timed(run: Any, source: Any) -> float:
    began = time.perf_counter()
    run.trainer.step(source)
    return time.perf_counter() - began


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _record(name: str, value: float, *, goal: float, how: str) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 4),
        "unit": "ratio",
        "goal": f"<= {goal}",
        "met": value <= goal,
        "how": how,
    }
