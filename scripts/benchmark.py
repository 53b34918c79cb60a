"""Measure what Precision Bridge costs, next to the goals: `python scripts/benchmark.py [SUITE] [--write FILE]`.

A figure is a ratio where it can be: both sides took turns in one run, and the median counts. Times are CPU time, of one
thread in a step, because wall time on a shared machine measures its neighbours; a rehearsal alone is wall time.
`--write` writes the figures of all suites into a page, and what was not reached first.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import importlib.util
import json
import logging
import os
import platform
import pstats
import re
import resource
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HERE = Path(__file__).resolve().parent
SHOWCASE = HERE.parent / "docs" / "showcase"
COMMAND = Path(sys.executable).parent / "precision-bridge"
STEP_GOALS = {"fp8_current": 1.08, "fp8_delayed": 1.08, "blockwise": 1.08, "mxfp8": 1.12, "nvfp4": 1.15}
"""Recipe -> the most that its step may cost, in steps of `bf16_mixed`."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure."""

    name: str
    value: float
    unit: str = ""
    """Empty for a ratio."""
    goal: float | None = None
    at_least: bool = False
    """The goal is the least that is wanted, not the most."""
    how: str

    @property
    def met(self) -> bool:
        """Whether the goal is reached, to the digits that are shown."""
        if self.goal is None:
            return True
        if self.at_least:
            return round(self.value, 2) >= self.goal
        return round(self.value, 2) <= self.goal

    @property
    def shown(self) -> str:
        """The value with its unit."""
        if self.unit == "%":
            return f"{100 * self.value:.1f} %"
        if not self.unit:
            return f"{self.value:.2f}"
        if self.value < 100:
            return f"{self.value:,.1f} {self.unit}"
        return f"{self.value:,.0f} {self.unit}"

    @property
    def wanted(self) -> str:
        """The goal with its direction."""
        if self.goal is None:
            return ""
        goal = f"{self.goal:g} {self.unit}".rstrip()
        if self.unit == "%":
            goal = f"{100 * self.goal:g} %"
        if self.at_least:
            return f"at least {goal}"
        return f"at most {goal}"


def startup(repeats: int = 11) -> list[Figure]:
    """Measure what an import and three commands cost against the libraries that they stand on, all in turn."""
    seconds = _in_turn(STARTS, repeats)
    how = f"CPU time of fresh processes in turn, median of {repeats}"
    more = _ratio(seconds["face"], seconds["torch"]) - 1
    title = "import bridge.training.mixed_precision, on top of import torch"
    figures = [Figure(name=title, value=more, unit="%", goal=0.08, how=how)]
    for title, name, reference, goal in START_GOALS:
        ratio = _ratio(seconds[name], seconds[reference])
        figures.append(Figure(name=title, value=ratio, goal=goal, how=how))
    return figures


LIBRARIES = "import hydra, omegaconf, yaml"
STARTS: dict[str, list[str | Path]] = {
    "torch": [sys.executable, "-c", "import torch"],
    "face": [sys.executable, "-c", "import torch, bridge.training.mixed_precision"],
    "libraries": [sys.executable, "-c", LIBRARIES],
    "recipes": [COMMAND, "recipes"],
    "check": [COMMAND, "check"],
    "check of a file": [COMMAND, "check", "--config", SHOWCASE / "llama3_70b.yaml"],
}
"""Name -> the words of a process whose start is measured."""
START_GOALS = (
    (f"precision-bridge recipes / {LIBRARIES}", "recipes", "libraries", 1.4),
    (f"precision-bridge check / {LIBRARIES}", "check", "libraries", 3.0),
    (f"precision-bridge check --config llama3_70b.yaml / {LIBRARIES}", "check of a file", "libraries", 2.5),
)
"""Title, the process, its reference, and the goal."""


def layers(repeats: int = 5) -> list[Figure]:
    """Measure two commands on a model of 8,000 layers against one of 80."""
    commands = ("check", "memory")
    runs = {}
    for command, count in product(commands, (80, 8_000)):
        runs[command, count] = [COMMAND, command, f"model.num_layers={count}"]
    seconds = _in_turn(runs, repeats)
    how = f"CPU time of fresh processes in turn, median of {repeats}"
    figures = []
    for command in commands:
        ratio = _ratio(seconds[command, 8_000], seconds[command, 80])
        figures.append(Figure(name=f"{command}, 8,000 layers / 80 layers", value=ratio, goal=1.5, how=how))
    return figures


def rehearsal() -> list[Figure]:
    """Measure the rehearsals of two large runs, in wall time: what a person waits for."""
    figures = []
    for title, file, goal in (("70B", "llama3_70b.yaml", 15), ("DeepSeek-V3", "deepseek_v3.yaml", 30)):
        began = time.monotonic()
        subprocess.run([COMMAND, "rehearse", "--config", SHOWCASE / file], check=False, capture_output=True)
        how = f"wall time of one run of {file}, {os.cpu_count()} cores"
        seconds = time.monotonic() - began
        figures.append(Figure(name=f"rehearsal of {title}", value=seconds, unit="s", goal=goal, how=how))
    return figures


def fuzz(seconds: int = 60) -> list[Figure]:
    """Measure how many damaged inputs a second the readers answer."""
    words = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", "--seconds", str(seconds)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=HERE.parent)
    rates = [float(found.replace(",", "")) for found in re.findall(r"([\d,]+) per second", done.stdout)]
    how = f"CPU time of one process, areas in turn for {seconds} s, the mean of {len(rates)} areas"
    name = "cases a second that fuzzing reads"
    return [Figure(name=name, value=statistics.mean(rates), unit="/s", goal=1_000, at_least=True, how=how)]


def _in_turn(commands: Mapping[Any, Sequence[str | Path]], repeats: int) -> dict[Any, list[float]]:
    """Return the CPU seconds of processes that took turns."""
    seconds: dict[Any, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, words in commands.items():
            seconds[name].append(_cpu_seconds(words))
    return seconds


def _cpu_seconds(words: Sequence[str | Path]) -> float:
    """Return the CPU seconds of a process, which other processes of the machine change little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, capture_output=True, cwd=HERE.parent)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def sync(repeats: int = 300) -> list[Figure]:
    """Measure one sync of all three owners with its checks, on fresh owners each time."""
    warnings.simplefilter("ignore")  # Megatron's own, once per object
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from bridge import get_mixed_precision_config, synchronize

    figures = []
    for name in ("bf16_mixed", "bf16_with_fp8_current_scaling_mixed"):
        config = get_mixed_precision_config(name)
        seconds = []
        for _ in range(repeats):
            owners = {
                "model": TransformerConfig(num_layers=16, hidden_size=64, num_attention_heads=4),
                "optimizer": OptimizerConfig(use_distributed_optimizer=True),
                "ddp": DistributedDataParallelConfig(use_distributed_optimizer=True),
            }
            began = time.process_time()
            synchronize(config, **owners)
            seconds.append(time.process_time() - began)
        how = f"CPU time with all checks, median of {repeats}"
        median = 1e3 * statistics.median(seconds)
        figures.append(Figure(name=f"synchronize {name}", value=median, unit="ms", goal=5, how=how))
    return figures


def step(rounds: int = 12, warmup: int = 3) -> list[Figure]:
    """Measure the default run's training step against a plain PyTorch loop of the same model and data, in turn."""
    from plain_gpt import PlainStep

    seconds: dict[str, list[float]] = {"ours": [], "Megatron's calls alone": [], "plain": []}
    with _started() as process:
        run = _built(process)
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
                ("ours", lambda: trainer.step(source)),
                ("Megatron's calls alone", calls_alone),
                ("plain", lambda batch=batch: plain.step(batch["tokens"], batch["labels"])),
            ):
                began = time.process_time()
                take()
                if index >= warmup:
                    seconds[name].append(time.process_time() - began)
    how = f"gpt_5m, bf16_mixed, CPU time of one thread, {rounds} rounds in turn in one process"
    peak = {name: _peak_mib(name) for name in ("ours", "plain")}
    resident = f"resident, processes of five steps; {peak['ours']:.0f} and {peak['plain']:.0f} MiB"
    over = _ratio(seconds["ours"], seconds["plain"])
    calls = _ratio(seconds["ours"], seconds["Megatron's calls alone"])
    return [
        Figure(name="training step / step of a plain PyTorch loop", value=over, goal=1.06, how=how),
        Figure(name="training step / Megatron's calls alone", value=calls, how=how),
        Figure(name="peak memory / that of a plain loop", value=peak["ours"] / peak["plain"], goal=1.1, how=resident),
    ]


@contextmanager
def _started(*words: str, backend: str = "local") -> Iterator[Any]:
    """Start the process of `make train`, for the runs that are built in it."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from bridge.front.container import build_container
    from bridge.front.loader import load_run
    from bridge.runtime.megatron.backend import Backend, use_backend
    from bridge.runtime.megatron.process.training_process import training_process

    config = build_container(load_run(words, HERE.parent / "conf"))
    with training_process(config.model, seed=config.train.seed) as process, use_backend(Backend(name=backend)):
        yield process


def _built(process: Any, *words: str) -> Any:
    """Build a run of `make train` with some overrides."""
    from bridge.front.container import build_container
    from bridge.front.loader import load_run
    from bridge.runtime.megatron.backend import choose_backend
    from bridge.training.config import runtime_config_update
    from bridge.training.run import build_run

    config = build_container(load_run(words, HERE.parent / "conf"))
    runtime_config_update(config)
    return build_run(config, process, backend=choose_backend(config.precision_backend, config.model))


def _wide_gemm() -> Any:
    """Return `bridge.runtime.megatron.cpu.wide_gemm` without the package around it, which imports Megatron."""
    path = HERE.parent / "bridge" / "runtime" / "megatron" / "cpu" / "wide_gemm.py"
    spec = importlib.util.spec_from_file_location("wide_gemm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain_sizes() -> Any:
    """Return the plain model with the attention that is fastest here: the comparison is with PyTorch at its best."""
    import torch
    from plain_gpt import PlainConfig

    dtype = torch.bfloat16
    if dtype in _wide_gemm().find_slow_dtypes():
        dtype = torch.float32
    return PlainConfig(attention="sdpa", sdpa_dtype=dtype)


def _peak_mib(kind: str) -> float:
    """Return the peak resident memory of a process that takes five steps of one kind."""
    return _of_child("--peak-of", kind)


def _of_child(*words: str) -> float:
    """Return the number that this script prints in another process."""
    done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def _take_five_steps(kind: str) -> None:
    """Take five steps and print this process's peak resident memory in MiB."""
    import torch

    if kind == "ours":
        with _started() as process:
            run = _built(process)
            source = run.batches_of(run.splits.train, start=0)
            for _ in range(5):
                run.trainer.step(source)
    else:
        from plain_gpt import PlainStep

        sizes = _plain_sizes()
        plain = PlainStep(sizes)
        wide = _wide_gemm()
        with wide.widen_gemms(wide.find_slow_dtypes()):
            for _ in range(5):
                tokens = torch.randint(sizes.vocab_size, (4, sizes.seq_length))
                plain.step(tokens, tokens)
    # Not ru_maxrss: a child process begins with its parent's.
    high_water = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if high_water is None:
        print("nan")
    else:
        print(int(high_water[1]) / 1024)


def low_precision(rounds: int = 10, warmup: int = 3) -> list[Figure]:
    """Measure the default run's step for each recipe against BF16, and what the telemetry adds to one."""
    seconds: dict[str, list[float]] = {name: [] for name in ("bf16_mixed", *STEP_GOALS, "measured")}
    with _emulated_runs() as runs:
        for index in range(rounds + warmup):
            for name, (run, source) in runs.items():
                taken = _timed(run, source)
                if index >= warmup:
                    seconds[name].append(taken)
            run, source = runs["fp8_current"]
            with run.telemetry.measure_step(index + 1):
                taken = _timed(run, source)
            if index >= warmup:
                seconds["measured"].append(taken)
            interval = run.config.logging.quantisation_interval
    how = f"gpt_5m, CPU time of one thread, {rounds} rounds in turn in one process"
    figures = []
    for name, goal in STEP_GOALS.items():
        ratio = _ratio(seconds[name], seconds["bf16_mixed"])
        figures.append(Figure(name=f"training step, {name} / bf16_mixed", value=ratio, goal=goal, how=how))
    extra = (_ratio(seconds["measured"], seconds["fp8_current"]) - 1) / interval
    how = f"{how}, one step of {interval} measured"
    return [*figures, Figure(name="measuring quantisation, of a step", value=extra, unit="%", goal=0.05, how=how)]


@contextmanager
def _emulated_runs() -> Iterator[dict[str, Any]]:
    """Build a run of `make train` for each recipe, BF16 first, each with its batches."""
    with _started(backend="emulated") as process:
        runs = {}
        for name in ("bf16_mixed", *STEP_GOALS):
            run = _built(process, f"mixed_precision={name}", "precision_backend=emulated")
            runs[name] = (run, run.batches_of(run.splits.train, start=0))
        yield runs


PARTS = {
    "making operands, those of weights that are not stored too": ("numerics/operand.py", "make_operand"),
    "of this and of writing: the largest magnitude, before a value is rounded": ("numerics/kernel.py", "compute_amax"),
    "reading stored weights as operands": ("numerics/operand.py", "make_stored_operand"),
    "writing stored weights after the optimizer": ("emulation/stored_weight.py", "quantize_"),
    "renewing delayed scales": ("numerics/delayed.py", "update_all"),
}
"""Part of a step that BF16 does not have -> file and function."""


def profile(rounds: int = 10, warmup: int = 3) -> list[tuple[str, ...]]:
    """Return the rows of a table: where a step of each recipe spends its milliseconds beyond BF16."""
    spent: dict[str, Any] = {}
    with _emulated_runs() as runs:
        for name in STEP_GOALS:
            run, source = runs[name]
            for _ in range(warmup):
                run.trainer.step(source)
            profiler = cProfile.Profile(time.process_time)
            with profiler:
                for _ in range(rounds):
                    run.trainer.step(source)
            spent[name] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # typeshed leaves it out
    rows = [("part", *STEP_GOALS)]
    for title, (file, function) in PARTS.items():
        cells = []
        for stats in spent.values():
            seconds = 0.0
            for (path, _, name), (_, _, _, cumulative_seconds, _) in stats.items():
                if path.endswith(file) and name == function:
                    seconds += cumulative_seconds
            cells.append(f"{1e3 * seconds / rounds:.1f}")
        rows.append((title, *cells))
    return rows


TE_CPU_STEPS = 6
IN_BOTH = {"nvfp4": ("mixed_precision.fp4_param_gather=false",)}
"""Recipe -> overrides for both backends: Megatron Core 0.16.1 keeps no NVFP4 weights of Transformer Engine's."""


def te_cpu(processes: int = 3) -> list[Figure]:
    """Measure a step under Transformer Engine's Python against one of the emulation, in processes that take turns."""
    figures = []
    for recipe in STEP_GOALS:
        seconds: dict[str, list[float]] = {"te_cpu": [], "emulated": []}
        for _ in range(processes):
            for backend, taken in seconds.items():
                taken.append(_of_child("--seconds-of", f"{backend}:{recipe}"))
        how = f"gpt_5m, least CPU time of {TE_CPU_STEPS} steps, {processes} processes each, in turn"
        ratio = min(seconds["te_cpu"]) / min(seconds["emulated"])
        figures.append(Figure(name=f"training step, {recipe}: te_cpu / emulated", value=ratio, goal=1.3, how=how))
    return figures


def _least_seconds(backend: str, recipe: str) -> float:
    """Return the least CPU time of a few steps; a process has one backend."""
    if backend == "te_cpu":
        from bridge.preflight.gpu_for_te_cpu import declare

        declare("b200" if recipe in ("mxfp8", "nvfp4") else "h100")
    words = (f"mixed_precision={recipe}", f"precision_backend={backend}", *IN_BOTH.get(recipe, ()))
    with _started(*words, backend=backend) as process:
        run = _built(process, *words)
        source = run.batches_of(run.splits.train, start=0)
        return min([_timed(run, source) for _ in range(TE_CPU_STEPS + 2)][2:])


def _timed(run: Any, source: Any) -> float:
    began = time.process_time()
    run.trainer.step(source)
    return time.process_time() - began


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def quantisers() -> list[Figure]:
    """Measure each operand of NVFP4 against a copy."""
    how = "bytes of BF16 a second, least CPU time of the rounds, in turn in one process"
    return [
        Figure(name=f"NVFP4 operand / copy: {role}", value=share, goal=0.35, at_least=True, how=how)
        for role, share in _numerics()["shares"]["nvfp4"].items()
    ]


@functools.cache
def _numerics() -> dict[str, Any]:
    """Return the tables of `benchmark_numerics.py`, and the shares of a copy's rate in them."""
    words = [sys.executable, HERE / "benchmark_numerics.py", "--json"]
    others = {**os.environ, "PYTHONPATH": str(Path(sys.prefix) / "rivals")}
    found: dict[str, Any] = json.loads(subprocess.check_output(words, env=others))
    return found


SUITES: dict[str, Callable[[], list[Figure]]] = {
    "step": step,
    "low_precision": low_precision,
    "te_cpu": te_cpu,
    "quantisers": quantisers,
    "startup": startup,
    "layers": layers,
    "rehearsal": rehearsal,
    "sync": sync,
    "fuzz": fuzz,
}
BEGIN, END = "<!-- measured by scripts/benchmark.py -->", "<!-- end of the measured part -->"


def page() -> str:
    """Measure everything in one run, and return the measured part of the page."""
    figures: list[Figure] = []
    for name, suite in SUITES.items():
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        figures += suite()
    print("measuring: profile", file=sys.stderr, flush=True)
    head, *rows = profile()
    return f"""\
{datetime.now(UTC):%Y-%m-%d}, {machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.

## Not reached

{_goals(figure for figure in figures if not figure.met)}
## Reached

{_goals(figure for figure in figures if figure.met and figure.goal is not None)}
Without a goal: {"; ".join(f"{one.name} {one.shown}" for one in figures if one.goal is None)}.

## Where a step spends its time beyond BF16

CPU milliseconds of a step of gpt_5m under Python's profiler, which slows all of it.

{table(head, rows)}
{_numerics()["tables"]}"""


def _goals(figures: Iterator[Figure]) -> str:
    rows = [(figure.name, figure.shown, figure.wanted, figure.how) for figure in figures]
    if not rows:
        return "Nothing.\n"
    return table(("figure", "measured", "goal", "how"), rows)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def machine() -> str:
    """Return the name of the processor, and whether it multiplies BF16 itself."""
    text = ""
    if Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = platform.machine()
    model = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    if model is not None:
        name = model[1].strip()
    if "avx512_bf16" in text or "amx_bf16" in text:
        return f"{name} with BF16 instructions"
    return f"{name} without BF16 instructions"


def main() -> int:
    """Run the chosen suite and print its figures, or write all of them into a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", nargs="?", default="all", choices=[*SUITES, "all"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", type=Path, help="Markdown file that gets the figures of all suites")
    parser.add_argument("--peak-of", choices=["ours", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--seconds-of", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if chosen.peak_of:
        _take_five_steps(chosen.peak_of)
        return 0
    if chosen.seconds_of:
        print(_least_seconds(*chosen.seconds_of.split(":")))
        return 0
    if chosen.write:
        before, _, rest = chosen.write.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        chosen.write.write_text(f"{before}{BEGIN}\n\n{page()}\n{END}{after}", encoding="utf-8")
        return 0
    names = [chosen.suite]
    if chosen.suite == "all":
        names = [*SUITES]
    figures: list[Figure] = []
    for name in names:
        figures += SUITES[name]()
    if chosen.json:
        print(json.dumps([asdict(figure) | {"met": figure.met} for figure in figures], indent=2))
        return 0
    for figure in figures:
        print(f"{figure.name}: {figure.shown} ({_verdict(figure)}{figure.how})")
    return 0


def _verdict(figure: Figure) -> str:
    """Return whether a figure meets its goal, for the line of the figure; empty without a goal."""
    if figure.goal is None:
        return ""
    if figure.met:
        return f"goal {figure.wanted}: met; "
    return f"goal {figure.wanted}: NOT met; "


if __name__ == "__main__":
    sys.exit(main())
