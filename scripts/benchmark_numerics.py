"""Cost of the emulated low-precision linear: against the plain BF16 linear, torchao's emulation, and a tensor copy.

Forward and backward of one linear layer, all candidates in turn within each round so that a disturbance hits them
alike, medians over the rounds. `ratio_to_x` is our time over that of x: 1.1 is 10 % slower, 0.2 five times faster.

On a CPU without BF16 instructions the plain BF16 GEMM of torch is a scalar loop that would hide any overhead. There the
benchmark runs both sides on the widened GEMM that training runs on (`gemm: widened` in the records).
"""

from __future__ import annotations

import argparse
import contextlib
import json as json_module
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bridge.numerics import DelayedScaling, GemmPrecision, make_operand, scaled_linear, selection, use, why_not

SHAPES = ((4096, 512, 2048), (2048, 1024, 4096))
"""Tokens, inputs, outputs."""

SCHEMES = {
    "delayed": "hybrid",
    "tensorwise": "hybrid",
    "blockwise": "e4m3",
    "mxfp8": "e4m3",
    "nvfp4": "e2m1",
}
"""Scheme -> format."""

GOALS = {"delayed": 1.3, "tensorwise": 1.3, "blockwise": 1.6, "mxfp8": 1.6, "nvfp4": 1.6}
"""Scheme -> `ratio_to_bf16` it should not exceed."""

Record = dict[str, Any]
Step = Callable[[], object]


def numerics(json: bool = False, *, rounds: int = 11) -> list[Record]:
    """Measure all shapes and schemes.

    Args:
        json: print the records as JSON rather than as lines.
        rounds: measurements of each candidate; the median counts.

    Returns:
        One record per shape and scheme (`kind: linear`), one per scheme for the quantisation alone (`kind: quantise`).
    """
    if selection().choice == "auto":
        use("native")
        use("auto")
    with fast_gemm() as gemm:
        records = [record for shape in SHAPES for record in linear_records(shape, gemm, rounds)]
        records += quantise_records(SHAPES[0], rounds)
    if json:
        print(json_module.dumps(records, indent=2))
    else:
        for record in records:
            print(line(record))
    return records


@contextlib.contextmanager
def fast_gemm() -> Iterator[str]:
    """Make BF16 GEMMs as fast as they are in training; yields native, widened or scalar."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield "native"
        return
    try:
        from bridge.megatron.wide_gemm import widened
    except ImportError:
        yield "scalar"
        return
    with widened() as installed:
        yield "widened" if installed else "scalar"


def median_seconds(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return each step's median time, the steps taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def linear_records(shape: tuple[int, int, int], gemm: str, rounds: int) -> list[Record]:
    """Measure forward and backward of one linear layer under every scheme."""
    tokens, inputs, outputs = shape
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs).bfloat16().requires_grad_()
    w = (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16().requires_grad_()
    dy = (torch.randn(tokens, outputs) * 1e-3).bfloat16()

    def both_ways(forward: Callable[..., torch.Tensor], *weights: torch.Tensor, **options: Any) -> Step:
        return lambda: torch.autograd.grad(forward(x, *weights, **options), (x, *(weights or other_weights)), dy)

    other, reason = torchao_linear(w)
    other_weights = [] if other is None else list(other.parameters())
    steps = {"bf16": both_ways(torch.nn.functional.linear, w)}
    for scheme, number_format in SCHEMES.items():
        precision = GemmPrecision(scheme=scheme, format=number_format)
        state = DelayedScaling(precision) if scheme == "delayed" else None
        steps[scheme] = both_ways(scaled_linear, w, precision=precision, state=state)
    if other is not None:
        steps["torchao"] = both_ways(other)
    seconds = median_seconds(steps, rounds)
    theirs = seconds.get("torchao")
    return [
        {
            "kind": "linear",
            "shape": list(shape),
            "scheme": scheme,
            "milliseconds": round(1e3 * seconds[scheme], 3),
            "bf16_milliseconds": round(1e3 * seconds["bf16"], 3),
            "torchao_milliseconds": None if theirs is None else round(1e3 * theirs, 3),
            "ratio_to_bf16": round(seconds[scheme] / seconds["bf16"], 3),
            "ratio_to_torchao": None if theirs is None else round(seconds[scheme] / theirs, 3),
            "torchao_reason": reason,
            "goal_ratio_to_bf16": GOALS[scheme],
            "met": seconds[scheme] <= GOALS[scheme] * seconds["bf16"],
            "gemm": gemm,
            "kernel": kernel(),
            "threads": torch.get_num_threads(),
        }
        for scheme in SCHEMES
    ]


def torchao_linear(w: torch.Tensor) -> tuple[torch.nn.Module | None, str | None]:
    """Return torchao's emulated tensorwise FP8 linear, or None and why there is none."""
    logging.disable(logging.WARNING)  # about CUDA extensions that are not for this machine
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        return None, f"torchao is not installed ({error})"
    finally:
        logging.disable(logging.NOTSET)
    plain = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.bfloat16)
    plain.weight.data.copy_(w.detach())
    holder = torch.nn.Sequential(plain)
    convert_to_float8_training(holder, config=Float8LinearConfig(emulate=True))
    return holder[0], None


def quantise_records(shape: tuple[int, int, int], rounds: int) -> list[Record]:
    """Measure the quantisation of a gradient alone, against a copy of it."""
    tokens, _, outputs = shape
    dy = (torch.randn(tokens, outputs) * 1e-3).bfloat16()
    target = torch.empty_like(dy)
    steps: dict[str, Step] = {"copy": lambda: target.copy_(dy)}
    for scheme, number_format in SCHEMES.items():
        spec = GemmPrecision(scheme=scheme, format=number_format).spec("grad_output")
        scale = 1.0 if scheme == "delayed" else None
        for columnwise in (False, True):
            name = f"{scheme} {'column' if columnwise else 'row'}"
            steps[name] = partial(make_operand, dy, spec, "grad_output", columnwise=columnwise, scale=scale)
    seconds = median_seconds(steps, 2 * rounds)
    return [
        {
            "kind": "quantise",
            "shape": [tokens, outputs],
            "scheme": scheme,
            "row_milliseconds": round(1e3 * seconds[f"{scheme} row"], 3),
            "column_milliseconds": round(1e3 * seconds[f"{scheme} column"], 3),
            "copy_milliseconds": round(1e3 * seconds["copy"], 3),
            "row_fraction_of_copy_bandwidth": round(seconds["copy"] / seconds[f"{scheme} row"], 3),
            "column_fraction_of_copy_bandwidth": round(seconds["copy"] / seconds[f"{scheme} column"], 3),
            "kernel": kernel(),
        }
        for scheme in SCHEMES
    ]


def kernel() -> str:
    """Return which implementation of the quantisers ran."""
    return "torch" if selection().choice == "torch" or why_not() else "native"


def line(record: Record) -> str:
    """Return one record as a line of text."""
    shape = "x".join(map(str, record["shape"]))
    if record["kind"] == "quantise":
        row, column = record["row_fraction_of_copy_bandwidth"], record["column_fraction_of_copy_bandwidth"]
        return f"quantise {shape:15} {record['scheme']:10}  row {row:5.2f} column {column:5.2f} of a copy's bandwidth"
    theirs = record["ratio_to_torchao"]
    against = record["torchao_reason"] if theirs is None else f"{theirs:.3f} x torchao"
    times = f"{record['milliseconds']:8.1f} ms  {record['ratio_to_bf16']:.3f} x BF16"
    return f"linear   {shape:15} {record['scheme']:10}  {times}  {against}  ({record['gemm']} GEMM)"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON records")
    parser.add_argument("--rounds", type=int, default=11, help="measurements per candidate")
    options = parser.parse_args()
    numerics(options.json, rounds=options.rounds)
    sys.exit(0)
