"""Hold `precision-bridge memory` against what GPUs measured, and write docs/explain/memory-measured.md.

    python scripts/measured_memory.py ../Megatron-LM                       the page, from a clone with its work tree
    python scripts/measured_memory.py ../Megatron-LM --rows                every run, on the terminal

Megatron-LM's functional tests keep what a run logged under `--log-memory-to-tensorboard`: after each iteration the
bytes that PyTorch's allocator has given out, and the most that it ever had, on the last rank. Their `model_config.yaml`
is the run. What a file leaves to its data, the vocabulary, is stated by the kind of its tokenizer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from bridge.cli.main import main as precision_bridge

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explain" / "memory-measured.md"
CASES = Path("tests/functional_tests/test_cases")
RECIPES = Path("tests/test_utils/recipes")
PLATFORMS = {"h100": "dev_dgx_h100", "gb200": "dev_dgx_gb200"}
"""GPU, as a folder of recipes and a target -> the end of the names of its files of golden values."""
VOCABULARIES = {"merge-file": 50257, "nemotron_2_256k": 256000, "vocab.txt": 30522}
"""Word of a file that names a tokenizer -> its vocabulary: that of GPT-2, of Nemotron and of BERT."""
CHANGES = ("cuda-graph-impl", "overlap-moe-expert-parallel-comm", "moe-flex-dispatcher-backend", "optimizer")
"""Options that change the memory of a run and are named next to it."""
MIB, GIB = 2**20, 2**30
LISTED_BYTES = 3 * GIB
"""Runs with a lower peak are in the first table alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """What a GPU measured of a run, and what is counted for its last rank; bytes."""

    name: str
    gpu: str
    layout: str
    precision: str
    options: str
    at_rest: int
    """Allocated after the last iteration."""
    peak: int
    """The most that was allocated."""
    counted_at_rest: int
    """Weights, gradients, masters and states."""
    counted_of_step: int
    """FP32 gradients that the optimizer makes of narrower ones, and frees when the next iteration begins."""
    counted_activations: int
    not_counted: tuple[str, ...]
    """Parts that the command names as not counted, and settings that keep less than it counts."""

    @property
    def kind(self) -> str:
        """The kind of its layers."""
        folder = self.name.partition("/")[0]
        kinds = {"moe": "experts", "mixtral": "experts", "hybrid": "hybrid", "nemotron": "hybrid", "bert": "BERT"}
        return kinds.get(folder, "dense")

    @property
    def rest(self) -> int:
        """Bytes at rest that are not counted."""
        return self.at_rest - self.counted_at_rest - self.counted_of_step

    @property
    def step(self) -> int:
        """Bytes of a step that are not counted, negative where too much is."""
        return self.measured_step - self.counted_activations

    @property
    def measured_step(self) -> int:
        """The peak less what is at rest, without what the optimizer frees before a step."""
        return self.peak - self.at_rest + self.counted_of_step

    @property
    def error(self) -> float:
        """How far the whole count is from the peak, as a share of it."""
        return (self.counted_at_rest + self.counted_activations) / self.peak - 1


def main(words: Sequence[str] | None = None) -> int:
    """Measure the runs of a clone, and write the page or print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a clone of Megatron-LM with its work tree")
    parser.add_argument("--rows", action="store_true", help="print every run, and write nothing")
    options = parser.parse_args(words)
    runs, refused = measured_runs(options.clone)
    if options.rows:
        sys.stdout.write("\n".join(row_of(run) for run in runs) + "\n")
        return 0
    PAGE.write_text(page_of(runs, refused, options.clone), encoding="utf-8")
    return 0


def measured_runs(clone: Path) -> tuple[list[MeasuredRun], int]:
    """Return the runs of a clone whose number of GPUs is known, and how many more are refused."""
    runs: list[MeasuredRun] = []
    refused = 0
    for gpu, platform in PLATFORMS.items():
        gpus = gpus_of_tests(clone / RECIPES / gpu)
        for golden in sorted((clone / CASES).glob(f"**/golden_values_{platform}.json")):
            measured = measured_bytes(golden)
            test = golden.parent.name
            if measured is None or test not in gpus or not trains(golden.parent):
                continue
            run = measured_run(clone, golden.parent, gpu, gpus_of_test(golden.parent, gpus[test]), measured)
            if run is None:
                refused += 1
            else:
                runs.append(run)
    return runs, refused


def trains(test: Path) -> bool:
    """Return whether a test trains: neither generates text nor samples for reinforcement learning."""
    config = yaml.safe_load((test / "model_config.yaml").read_text(encoding="utf-8"))
    return config.get("MODE", "pretraining") == "pretraining" and "MODEL_ARGS" in config and "grpo" not in test.name


def gpus_of_tests(folder: Path) -> dict[str, int]:
    """Return test -> number of GPUs, by the recipes that launch the tests."""
    gpus: dict[str, int] = {}
    for file in sorted(folder.glob("*.yaml")):
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
        spec = recipe["spec"]
        for product in recipe["products"]:
            for test in product["test_case"]:
                gpus[test] = int(spec["nodes"]) * int(spec["gpus"])
    return gpus


def gpus_of_test(test: Path, gpus: int) -> int:
    """Return the GPUs of a test's first run, which its own file may limit."""
    config = yaml.safe_load((test / "model_config.yaml").read_text(encoding="utf-8"))
    limits = config.get("MODEL_ENV_VARS", {}).get("MODEL_ARGS", {})
    return int(limits.get("GPUS_PER_NODE", gpus))


def measured_bytes(golden: Path) -> tuple[int, int] | None:
    """Return the bytes at rest and at the peak that a test measured; None where it did not."""
    values = json.loads(golden.read_text(encoding="utf-8"))
    numbers: list[int] = []
    for name in ("mem-allocated-bytes", "mem-max-allocated-bytes"):
        logged = values.get(name, {}).get("values", {}).values()
        numeric = [value for value in logged if isinstance(value, int | float) and not math.isnan(value)]
        if not numeric:
            return None
        numbers.append(round(numeric[-1]))
    at_rest, peak = numbers
    return at_rest, peak


def measured_run(clone: Path, test: Path, gpu: str, gpus: int, measured: tuple[int, int]) -> MeasuredRun | None:
    """Return a run with its count; None where it is refused."""
    text = (test / "model_config.yaml").read_text(encoding="utf-8")
    overrides = [f"model.vocab_size={size}" for word, size in VOCABULARIES.items() if word in text][:1]
    words = ["memory", "--config", str(test / "model_config.yaml"), "--json", "--target", f"{gpu}x{gpus}", *overrides]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        precision_bridge(words)
    if not printed.getvalue().startswith("{"):
        return None
    answer = json.loads(printed.getvalue())
    rank = answer["ranks"][-1]
    counted: Mapping[str, int] = rank["bytes_of"]
    at_rest, peak = measured
    return MeasuredRun(
        name=test.relative_to(clone / CASES).as_posix(),
        gpu=gpu.upper(),
        layout=answer["layout"].replace(", distributed optimizer", ", sharded"),
        precision=answer["precision"].partition(",")[0],
        options=", ".join(options_of(text)),
        at_rest=at_rest,
        peak=peak,
        counted_at_rest=sum(counted.values()) - counted["activations"],
        counted_of_step=rank["step_bytes"],
        counted_activations=counted["activations"],
        not_counted=(*answer["not_counted"], *answer["may_keep_less"], *answer["read"]["uncounted"]),
    )


def options_of(text: str) -> Iterator[str]:
    """Yield the options of a test that are named next to its row."""
    for line in text.splitlines():
        name, _, value = line.strip().removeprefix("--").partition(":")
        if name in CHANGES:
            yield f"{name} {value.partition('#')[0].strip()}".removesuffix(" true")


def page_of(runs: Sequence[MeasuredRun], refused: int, clone: Path) -> str:
    """Return the page."""
    counted = [run for run in runs if not run.not_counted]
    named = [run for run in runs if run.not_counted]
    git = ["git", "-C", str(clone), "log", "-1", "--format=%H of %cs"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    lines = [HEAD.format(commit=commit, runs=len(runs), counted=len(counted), named=len(named), refused=refused)]
    lines += kinds_table(counted)
    lines.append(MIDDLE)
    lines += rows_table(run for run in counted if run.peak >= LISTED_BYTES)
    lines.append(NAMED)
    lines += named_table(named)
    return "\n".join(lines) + "\n"


def kinds_table(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """Yield the table of the kinds of models."""
    yield "| GPU | layers | runs | at rest, MiB more than counted | in a step, % of the peak more than counted |"
    yield "|---|---|---|---|---|"
    for gpu, kind in sorted({(run.gpu, run.kind) for run in runs}):
        alike = [run for run in runs if (run.gpu, run.kind) == (gpu, kind)]
        rest = spread([run.rest / MIB for run in alike], ".0f")
        step = spread([100 * run.step / run.peak for run in alike], "+.1f")
        yield f"| {gpu} | {kind} | {len(alike)} | {rest} | {step} |"


def spread(numbers: Sequence[float], pattern: str) -> str:
    """Return the median of numbers, and the least and the greatest."""
    middle = format(statistics.median(numbers), pattern)
    return f"{middle} ({min(numbers):{pattern}} to {max(numbers):{pattern}})"


def rows_table(runs: Iterable[MeasuredRun]) -> Iterator[str]:
    """Yield the table of single runs, the largest first."""
    yield "| run | GPU | layout | at rest: measured, counted | in a step: measured, counted | whole count |"
    yield "|---|---|---|---|---|---|"
    for run in sorted(runs, key=lambda run: -run.peak):
        yield row_of(run)


def row_of(run: MeasuredRun) -> str:
    """Return the row of a run."""
    rest = f"{gib(run.at_rest)}, {gib(run.counted_at_rest + run.counted_of_step)}"
    step = f"{gib(run.measured_step)}, {gib(run.counted_activations)}"
    name = run.name
    if run.options:
        name += f" ({run.options})"
    return f"| {name} | {run.gpu} | {run.layout} | {rest} | {step} | {run.error:+.1%} |"


def named_table(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """Yield the table of runs of which a part is named as not counted."""
    yield "| run | GPU | named as not counted | measured peak | counted |"
    yield "|---|---|---|---|---|"
    for run in sorted(runs, key=lambda run: (run.not_counted, run.name)):
        total = gib(run.counted_at_rest + run.counted_activations)
        yield f"| {run.name} | {run.gpu} | {'; '.join(run.not_counted)} | {gib(run.peak)} | {total} |"


def gib(size: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / GIB:.2f} GiB"


HEAD = """<!-- Written by scripts/measured_memory.py; change that, not this page. -->

# Memory against measurement

`precision-bridge memory` counts the bytes of a run without a GPU. NVIDIA's functional tests of Megatron-LM measure
them: after each iteration they log what PyTorch's allocator has given out, and the most that it ever had, on the last
rank. This page holds the count against the log, for every test that trains and whose number of GPUs is known.

- Source: [NVIDIA/Megatron-LM](https://github.com/NVIDIA/Megatron-LM) `tests/functional_tests` at
  {commit}:
  `model_config.yaml` is the run, `golden_values_*.json` the log, `tests/test_utils/recipes` the number of GPUs.
- {runs} runs were counted. Of {named} of them the command names a part that it does not count, {counted} are compared
  below. {refused} more are refused: T5, vision and BERT of another kind.
- The files name the tokenizer and not its vocabulary. It is stated as 50,257 (GPT-2), 256,000 (Nemotron) or 30,522
  (BERT).
- *At rest* is what is allocated between two iterations: weights, gradients, masters, states, and the FP32 gradients
  that an optimizer makes of BF16 ones. *In a step* is the peak less that: activations, and what lives inside one
  operator.

The median, and in brackets the least and the greatest:
"""
MIDDLE = f"""
At rest the count is exact but for workspaces of cuBLAS and Transformer Engine: about 100 MiB of a dense model on an
H100, and 130 MiB more where experts' GEMMs are grouped. A run of which less than 300 MiB are left may not fit
([what is counted](../howto/plan-and-memory.md#what-it-takes-on-a-rank)). More is taken by CUDA graphs, the buffers of
`tp_comm_overlap` and HybridEP, and pipelines of many chunks.

In a step most dense and hybrid runs are within 1 %. The largest tensors that live inside one operator are counted: the
gradient of the logits next to the softmax, and a second FP32 tensor of the logits under
`cross_entropy_fusion_impl=native`. Not counted are the buffers of the experts' dispatcher, an uneven load of experts,
and the gradients of unfused attention's scores, so that models of experts take 2 % more than counted in the median.
Under CUDA graphs a step takes less than counted, since graphs share their memory.

Not measured here: the CUDA context and NCCL's buffers, which are outside of PyTorch's allocator, and fragmentation.

## Runs with a peak of {LISTED_BYTES // GIB} GiB and more
"""
NAMED = """
## Runs of which a part is named as not counted
"""

if __name__ == "__main__":
    sys.exit(main())
