"""Measure the cost of Precision Bridge: `python scripts/benchmark.py [startup|sync|step|low_precision|all] [--json]`.

Each record names the measurement, its repetitions and its reference. Machines are noisy: ratios were measured in one
run with both sides in turn, and medians are quoted. Steps are measured in CPU time of one thread, which other processes
change less than wall time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
import resource
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HERE = Path(__file__).resolve().parent
COMMAND = Path(sys.executable).parent / "precision-bridge"
STEP_GOALS = {"fp8_current": 1.08, "fp8_delayed": 1.08, "blockwise": 1.08, "mxfp8": 1.12, "nvfp4": 1.15}
"""Recipe -> the most that its step may cost, in steps of `bf16_mixed`."""


def record(name: str, value: float, unit: str, *, goal: str, met: bool, how: str) -> dict[str, Any]:
    """Return one line of the result."""
    return {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "met": met, "how": how}


def startup(repeats: int = 11) -> list[dict[str, Any]]:
    """Measure what an import and three commands cost against the libraries that they stand on, all in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in STARTS}
    for _ in range(repeats):
        for name, words in STARTS.items():
            seconds[name].append(_cpu_seconds(words))
    how = f"CPU time of fresh processes in turn, median of {repeats}"
    return [
        record(title, ratio, "ratio", goal=f"<= {goal}", met=ratio <= goal, how=how)
        for title, name, reference, share, goal in START_GOALS
        for ratio in [_ratio(seconds[name], seconds[reference]) - share]
    ]


LIBRARIES = "import hydra, omegaconf, yaml"
STARTS: dict[str, list[str | Path]] = {
    "torch": [sys.executable, "-c", "import torch"],
    "face": [sys.executable, "-c", "import torch, bridge.training.mixed_precision"],
    "libraries": [sys.executable, "-c", LIBRARIES],
    "recipes": [COMMAND, "recipes"],
    "check": [COMMAND, "check"],
    "check of a file": [COMMAND, "check", "--config", HERE.parent / "docs/showcase/llama3_70b.yaml"],
}
"""Name -> the words of a process whose start is measured."""
START_GOALS = (
    ("import bridge.training.mixed_precision on top of import torch", "face", "torch", 1, 0.08),
    (f"precision-bridge recipes / {LIBRARIES}", "recipes", "libraries", 0, 1.4),
    (f"precision-bridge check / {LIBRARIES}", "check", "libraries", 0, 3.0),
    (f"precision-bridge check --config llama3_70b.yaml / {LIBRARIES}", "check of a file", "libraries", 0, 2.5),
)
"""Title, the process, its reference, what the reference itself counts for, and the goal."""


def _cpu_seconds(words: Sequence[str | Path]) -> float:
    """Return the CPU seconds of a process, which other processes of the machine change little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, capture_output=True, cwd=HERE.parent)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def sync(repeats: int = 300) -> list[dict[str, Any]]:
    """Measure one sync of all three owners with its checks, on fresh owners each time."""
    warnings.simplefilter("ignore")  # Megatron's own, once per object
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from bridge import get_mixed_precision_config, synchronize

    records = []
    for name in ("bf16_mixed", "bf16_with_fp8_current_scaling_mixed"):
        config = get_mixed_precision_config(name)
        seconds = []
        for _ in range(repeats):
            owners = {
                "model": TransformerConfig(num_layers=16, hidden_size=64, num_attention_heads=4),
                "optimizer": OptimizerConfig(use_distributed_optimizer=True),
                "ddp": DistributedDataParallelConfig(use_distributed_optimizer=True),
            }
            began = time.perf_counter()
            synchronize(config, **owners)
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds) * 1e3
        how = f"model, optimizer and ddp, checks included, median of {repeats}"
        records.append(record(f"synchronize {name}", median, "ms", goal="< 5", met=median < 5, how=how))
    return records


def step(rounds: int = 12, warmup: int = 3) -> list[dict[str, Any]]:
    """Measure the default run's training step against a plain PyTorch loop of the same model and data, in turn."""
    from plain_gpt import PlainStep

    seconds: dict[str, list[float]] = {"megatron": [], "Megatron's calls alone": [], "plain": []}
    with _default_run() as run:
        source = run.batches_of(run.splits.train, start=0)
        plain = PlainStep(_plain_sizes())
        trainer = run.trainer

        def calls_alone() -> None:
            trainer.forward_backward(source)
            trainer.optimizer.step()
            trainer.scheduler.step(increment=trainer.global_batch_size)

        for index in range(rounds + warmup):
            batch = next(source)
            for name, take in (
                ("megatron", lambda: trainer.step(source)),
                ("Megatron's calls alone", calls_alone),
                ("plain", lambda batch=batch: plain.step(batch["tokens"], batch["labels"])),
            ):
                began = time.process_time()
                take()
                if index >= warmup:
                    seconds[name].append(time.process_time() - began)
    ratio = _ratio(seconds["megatron"], seconds["plain"])
    own = _ratio(seconds["megatron"], seconds["Megatron's calls alone"]) - 1
    how = f"gpt_5m, bf16_mixed, CPU time, {rounds} rounds in turn in one process"
    peak = {name: _peak_mib(name) for name in ("megatron", "plain")}
    more = peak["megatron"] / peak["plain"]
    return [
        record(f"training step, {name}", statistics.median(taken) * 1e3, "ms", goal="", met=True, how=how)
        for name, taken in seconds.items()
    ] + [
        record("training step, megatron / plain", ratio, "ratio", goal="<= 1.06", met=ratio <= 1.06, how=how),
        record("share of the step that is not Megatron's", own, "ratio", goal="", met=True, how=how),
        record("peak memory, megatron", peak["megatron"], "MiB", goal="", met=True, how="resident, own process"),
        record("peak memory, plain", peak["plain"], "MiB", goal="", met=True, how="resident, own process"),
        record(
            "peak memory, megatron / plain",
            more,
            "ratio",
            goal="<= 1.1",
            met=more <= 1.1,
            how="with Megatron's imports",
        ),
    ]


@contextmanager
def _default_run() -> Iterator[Any]:
    """Build the run of `make train`."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from bridge.front.decode import container
    from bridge.front.loader import load_run
    from bridge.megatron.process import training_process

    config = container(load_run((), HERE.parent / "conf"))
    with training_process(config.model, seed=config.train.seed) as process:
        yield _built(process)


def _built(process: Any, *words: str) -> Any:
    """Build a run of `make train` with some overrides."""
    from bridge.front.decode import container
    from bridge.front.loader import load_run
    from bridge.training.config import runtime_config_update
    from bridge.training.run import build_run

    config = container(load_run(words, HERE.parent / "conf"))
    runtime_config_update(config)
    return build_run(config, process)


def _wide_gemm() -> Any:
    """Return `bridge.megatron.wide_gemm` without the package around it, which imports Megatron."""
    path = HERE.parent / "bridge" / "megatron" / "wide_gemm.py"
    spec = importlib.util.spec_from_file_location("wide_gemm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain_sizes() -> Any:
    """Return the plain model with the attention that is fastest here: the comparison is with PyTorch at its best."""
    import torch
    from plain_gpt import PlainConfig

    slow = torch.bfloat16 in _wide_gemm().slow_dtypes()
    return PlainConfig(attention="sdpa", sdpa_dtype=torch.float32 if slow else torch.bfloat16)


def _peak_mib(kind: str) -> float:
    """Return the peak resident memory of a process that takes five steps of one kind."""
    child = [sys.executable, __file__, "--peak-of", kind]
    done = subprocess.run(child, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def _take_five_steps(kind: str) -> None:
    """Take five steps and print this process's peak resident memory in MiB."""
    import torch

    if kind == "megatron":
        with _default_run() as run:
            source = run.batches_of(run.splits.train, start=0)
            for _ in range(5):
                run.trainer.step(source)
    else:
        from plain_gpt import PlainStep

        sizes = _plain_sizes()
        plain = PlainStep(sizes)
        wide = _wide_gemm()
        with wide.widened(wide.slow_dtypes()):
            for _ in range(5):
                tokens = torch.randint(sizes.vocab_size, (4, sizes.seq_length))
                plain.step(tokens, tokens)
    # Not ru_maxrss: a child process begins with its parent's.
    high_water = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    print(int(high_water[1]) / 1024 if high_water else "nan")


def low_precision(rounds: int = 10, warmup: int = 3) -> list[dict[str, Any]]:
    """Measure the default run's step for each recipe and return a record each, and one for the telemetry."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from bridge.front.decode import container
    from bridge.front.loader import load_run
    from bridge.megatron.backend import Backend, running
    from bridge.megatron.process import training_process

    def built(recipe: str, process: Any) -> Any:
        run = _built(process, f"mixed_precision={recipe}", "precision_backend=emulated")
        return run, run.batches_of(run.splits.train, start=0)

    first = container(load_run((), HERE.parent / "conf"))
    seconds: dict[str, list[float]] = {name: [] for name in ("bf16_mixed", *STEP_GOALS, "measured")}
    with ExitStack() as stack:
        process = stack.enter_context(training_process(first.model, seed=first.train.seed))
        stack.enter_context(running(Backend(name="emulated")))
        runs = {name: built(name, process) for name in ("bf16_mixed", *STEP_GOALS)}
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
    how = f"gpt_5m, CPU time, {rounds} rounds in turn in one process"
    records = []
    for name, goal in STEP_GOALS.items():
        ratio = _ratio(seconds[name], seconds["bf16_mixed"])
        title = f"training step, {name} / bf16_mixed"
        records.append(record(title, ratio, "ratio", goal=f"<= {goal}", met=ratio <= goal, how=how))
    extra = (_ratio(seconds["measured"], seconds["fp8_current"]) - 1) / interval
    how = f"{how}, one step of {interval} measured"
    share = "measuring quantisation, share of the step"
    return [*records, record(share, extra, "ratio", goal="<= 0.05", met=extra <= 0.05, how=how)]


def _timed(run: Any, source: Any) -> float:
    began = time.process_time()
    run.trainer.step(source)
    return time.process_time() - began


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


SUITES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "startup": startup,
    "sync": sync,
    "step": step,
    "low_precision": low_precision,
}


def main() -> int:
    """Run the chosen suites and print their records."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", nargs="?", default="all", choices=[*SUITES, "all"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--peak-of", choices=["megatron", "plain"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if chosen.peak_of:
        _take_five_steps(chosen.peak_of)
        return 0
    names = list(SUITES) if chosen.suite == "all" else [chosen.suite]
    records = [row for name in names for row in SUITES[name]()]
    if chosen.json:
        print(json.dumps(records, indent=2))
        return 0
    for row in records:
        verdict = f"goal {row['goal']}: {'met' if row['met'] else 'NOT met'}; " if row["goal"] else ""
        print(f"{row['name']}: {row['value']} {row['unit']} ({verdict}{row['how']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
