"""Measure what Precision Bridge costs: `python scripts/benchmark.py [startup|sync|step|all] [--json]`.

Each record says what was measured, how often, and beside what. Machines are noisy: ratios were measured in one run with
both sides in turn, and medians are quoted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
COMMAND = Path(sys.executable).parent / "precision-bridge"


def record(name: str, value: float, unit: str, *, goal: str, met: bool, how: str) -> dict[str, Any]:
    """Return one line of the result."""
    return {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "met": met, "how": how}


def startup(repeats: int = 9) -> list[dict[str, Any]]:
    """Measure the cost of importing the compatible module beside that of torch, and of `precision-bridge recipes`."""
    torch_us, bridge_us = [], []
    for _ in range(repeats):
        torch_us.append(_import_microseconds("torch", "torch"))
        bridge_us.append(_import_microseconds("torch, bridge.training.mixed_precision", "bridge"))
    share = statistics.median(ours / theirs for ours, theirs in zip(bridge_us, torch_us, strict=True))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run([COMMAND, "recipes"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    wall = statistics.median(seconds)
    how, processes = f"python -X importtime, median of {repeats} pairs", f"median of {repeats} processes"
    return [
        record(
            "import bridge.training.mixed_precision / import torch",
            share,
            "ratio",
            goal="< 0.15",
            met=share < 0.15,
            how=how,
        ),
        record("precision-bridge recipes", wall, "s wall", goal="< 0.4", met=wall < 0.4, how=processes),
    ]


def _import_microseconds(modules: str, counted: str) -> int:
    """Return the microseconds of importing `counted` after the modules before it, all it imports included."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {modules}"], check=True, capture_output=True, text=True
    )
    rows = (re.match(r"import time:\s+\d+ \|\s+(\d+) \| (\S+)", line) for line in done.stderr.splitlines())
    microseconds = sum(int(row[1]) for row in rows if row and row[2].partition(".")[0] == counted)
    if not microseconds:
        raise RuntimeError(f"-X importtime said nothing of {counted}")
    return microseconds


def sync(repeats: int = 300) -> list[dict[str, Any]]:
    """Measure one sync of all three owners with its checks, on fresh owners each time."""
    warnings.simplefilter("ignore")  # Megatron's own, once per object
    from megatron.core.transformer import TransformerConfig

    from bridge.megatron.owners import DistributedDataParallelConfig, OptimizerConfig
    from bridge.precision.registry import get_mixed_precision_config
    from bridge.sync import synchronize

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


SUITES: dict[str, Callable[[], list[dict[str, Any]]]] = {"startup": startup, "sync": sync}


def main() -> int:
    """Run the chosen suites and print their records."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", nargs="?", default="all", choices=[*SUITES, "all"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    names = list(SUITES) if chosen.suite == "all" else [chosen.suite]
    records = [row for name in names for row in SUITES[name]()]
    if chosen.json:
        print(json.dumps(records, indent=2))
        return 0
    for row in records:
        verdict = "met" if row["met"] else "NOT met"
        print(f"{row['name']}: {row['value']} {row['unit']} (goal {row['goal']}: {verdict}; {row['how']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
