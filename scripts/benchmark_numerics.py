"""Speed of the quantisers and of the emulated linear layer, against a copy, BF16 and other libraries.

    python scripts/benchmark_numerics.py [--json]

All candidates take turns in one process with one thread. The least CPU time of the rounds counts, so that other work
on the machine shows little. Libraries that cannot be imported are listed with the reason.

On a CPU without BF16 instructions the plain BF16 GEMM of torch is a scalar loop that would hide any overhead. There
both sides run on the widened GEMM that training runs on.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import torch
from benchmark import table
from rivals import LINEARS, NOT_CALLED, QUANTISERS

from bridge.runtime.numerics import DelayedScaling, GemmPrecision, LinearCall, make_operand, scaled_linear, use

MATRIX = (4096, 2048)
"""Rows and columns of the matrix that becomes an operand."""
COMPARED = (2048, 1024)
"""Those of the matrix for other libraries, the slowest of which takes seconds."""
SHAPES = ((4096, 512, 2048), (2048, 1024, 4096))
"""Tokens, inputs and outputs of the linear layers."""
SCHEMES = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3", "nvfp4": "e2m1"}
"""Scheme -> format."""
OURS = {"FP8": "tensorwise", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
"""Format of the comparison -> scheme."""
BUDGET_SECONDS = 20.0
"""CPU time after which a slow candidate takes no more turns."""
ROLES = ("input, row", "input, column", "weight, row", "weight, column", "gradient, row", "gradient, column")
"""Operands of a scheme."""
Shares = dict[str, dict[str, float]]
"""Scheme -> operand -> share of a copy's rate."""

Step = Callable[[], object]
Row = tuple[str, ...]


def seconds_of(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return each step's least CPU time, the steps taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            if turn > 1 and sum(taken[name]) > BUDGET_SECONDS:
                continue
            began = time.process_time()
            step()
            if turn:  # the first call may compile
                taken[name].append(time.process_time() - began)
    return {name: min(times) for name, times in taken.items()}


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: the page faults of fresh memory are no part of a quantiser, and hit at random."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, its largest value


@contextlib.contextmanager
def fast_gemm() -> Iterator[str]:
    """Make BF16 GEMMs as fast as they are in training; yields native, widened or scalar."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield "native"
        return
    from bridge.runtime.megatron.cpu.wide_gemm import find_slow_dtypes, widen_gemms

    with widen_gemms(find_slow_dtypes()) as is_installed:
        if is_installed:
            yield "widened"
        else:
            yield "scalar"


def operands(rounds: int) -> tuple[list[Row], Shares]:
    """Measure each operand that a scheme makes of a matrix, against a copy of it."""
    x = _matrix(MATRIX)
    target = torch.empty_like(x)
    steps: dict[str, Step] = {"copy": lambda: target.copy_(x)}
    copies = list(product(("input", "weight", "grad_output"), (False, True)))
    for scheme, number_format in SCHEMES.items():
        scale = None
        if scheme == "delayed":
            scale = 1.0
        for role, columnwise in copies:
            spec = GemmPrecision(scheme=scheme, format=number_format).spec(role)
            make = partial(make_operand, x, spec, role, columnwise=columnwise, tensor_scale=scale)
            steps[f"{scheme} {role} {columnwise}"] = make
    seconds = seconds_of(steps, rounds)
    rows: list[Row] = [("copy", *[f"{_gigabytes(x, seconds['copy']):.1f}"] * 6)]
    shares: Shares = {}
    for scheme in SCHEMES:
        shares[scheme] = {}
        cells = []
        for title, (role, columnwise) in zip(ROLES, copies, strict=True):
            taken = seconds[f"{scheme} {role} {columnwise}"]
            share = seconds["copy"] / taken
            shares[scheme][title] = share
            cells.append(f"{_gigabytes(x, taken):.1f} ({share:.2f})")
        rows.append((scheme, *cells))
    return rows, shares


def quantisers(rounds: int, missing: dict[str, str]) -> list[Row]:
    """Measure quantisers of other libraries against ours."""
    x = _matrix(COMPARED)
    steps: dict[str, Step] = {}
    about: dict[str, tuple[str, str, str, str]] = {}
    rounding = partial(make_operand, x, GemmPrecision(scheme="delayed").spec("input"), "input", tensor_scale=1.0)
    for name, scheme in OURS.items():
        spec = GemmPrecision(scheme=scheme, format=SCHEMES[scheme]).spec("input")
        ours = partial(make_operand, x, spec, "input")
        steps[name] = ours
        our_rule = ""
        if name == "FP8":
            our_rule = "current scaling"
        about[name] = (name, "Precision Bridge", our_rule, "")
        for library, rule, quantiser in QUANTISERS[name]:
            imported = _imported(f"{library}, {name}", missing, partial(quantiser, x))
            if imported is None:
                continue
            step, values = imported
            operand = ours()
            if rule == "rounding alone":
                operand = rounding()
            expected = operand.dequantise(torch.bfloat16)
            equal = (values(step()).bfloat16() == expected).float().mean().item()
            steps[f"{name} {library}"] = step
            about[f"{name} {library}"] = (name, f"{library} {_version(library)}", rule, f"{100 * equal:.4g} %")
    seconds = seconds_of(steps, rounds)
    rows = []
    for key, (name, library, rule, equal) in about.items():
        times = seconds[key] / seconds[name]
        rows.append((name, library, rule, f"{_gigabytes(x, seconds[key]):.3g}", f"{times:.3g}", equal))
    return rows


def linears(
    rounds: int, schemes: Iterable[str], libraries: Iterable[str] = (), missing: dict[str, str] | None = None
) -> list[Row]:
    """Measure forward and backward of a linear layer under some schemes and libraries.

    Libraries that cannot be imported are added to `missing`.
    """
    rows = []
    if missing is None:
        missing = {}
    for tokens, inputs, outputs in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(tokens, inputs).bfloat16().requires_grad_()
        w = (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16().requires_grad_()
        dy = (torch.randn(tokens, outputs) * 1e-3).bfloat16()
        plain = partial(torch.nn.functional.linear, x, w)
        steps: dict[str, Step] = {"BF16, torch": partial(_both_passes, plain, (x, w), dy)}
        for scheme in schemes:
            precision = GemmPrecision(scheme=scheme, format=SCHEMES[scheme])
            state = None
            if scheme == "delayed":
                state = DelayedScaling(precision)
            forward = partial(scaled_linear, x, w, call=LinearCall(precision=precision, state=state))
            steps[f"{scheme}, Precision Bridge"] = partial(_both_passes, forward, (x, w), dy)
        for library in libraries:
            rule, make = LINEARS[library]
            layer = _imported(f"{library}, linear", missing, partial(make, w))
            if layer is not None:
                name = f"{rule}, {library} {_version(library)}"
                steps[name] = partial(_both_passes, partial(layer, x), (x, *layer.parameters()), dy)
        seconds = seconds_of(steps, rounds)
        shape = f"{tokens} x {inputs} x {outputs}"
        base = seconds["BF16, torch"]
        for name, taken in seconds.items():
            rows.append((shape, name, f"{1e3 * taken:.1f}", f"{taken / base:.2f}"))
        gc.collect()
    return rows


def _both_passes(forward: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...], dy: torch.Tensor) -> object:
    return torch.autograd.grad(forward(), leaves, dy)


def _matrix(shape: tuple[int, int]) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape).bfloat16()


def _gigabytes(x: torch.Tensor, seconds: float) -> float:
    return x.numel() * x.element_size() / seconds / 1e9


def _imported(name: str, missing: dict[str, str], call: Callable[[], Any]) -> Any:
    """Return what a library makes, or None and the reason in `missing`."""
    try:
        return call()
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        missing[name] = reason.partition(" (/")[0]  # without the folder of this machine
        return None


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def report(rounds: int) -> tuple[str, Shares]:
    """Measure everything; return the tables, and the shares of a copy's rate."""
    problem = use("native")
    kernel = "the C kernel"
    if problem is not None:
        use("torch")
        kernel = f"plain torch ({problem})"
    missing = dict(NOT_CALLED)
    fewer = max(3, rounds // 2)
    with fast_gemm() as gemm:
        faulting = linears(fewer, ("nvfp4",))
        keep_freed_memory()
        (made, shares), against = operands(rounds), quantisers(rounds, missing)
        layers = linears(fewer, SCHEMES, LINEARS, missing)
    operand = f"{MATRIX[0]} x {MATRIX[1]}"
    compared = f"{COMPARED[0]} x {COMPARED[1]}"
    text = f"""\
## Quantisers alone

One thread, torch {torch.__version__}, {kernel}, {gemm} BF16 GEMM. Least CPU time of {rounds} rounds; the candidates
took turns in one process, whose C library kept freed memory.

### Operands against a copy

GB of BF16 input per second, {operand}, and in brackets the share of a copy's rate.

{table(("scheme", *ROLES), made)}
### Quantisers of other libraries

GB of BF16 input per second for {compared}; *times ours* is the time over that of Precision Bridge's row of the
format. *Equal* is the share of dequantised values, in BF16, that equal Precision Bridge's. Libraries that round alone,
without a scale, are compared with the same rounding.

{table(("format", "library", "rule", "GB/s", "times ours", "equal"), against)}
### Forward and backward of a linear layer

CPU milliseconds for tokens x inputs x outputs, and the ratio to BF16.

{table(("shape", "layer", "ms", "to BF16"), layers)}
The same where freed memory goes back to the system, so that each tensor pays page faults:

{table(("shape", "layer", "ms", "to BF16"), faulting)}
### Not measured

{table(("library", "reason"), list(missing.items()))}"""
    return text, shares


def main() -> int:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each candidate")
    parser.add_argument("--json", action="store_true", help="print tables and shares as JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # torchao on CUDA extensions that are not for this machine
    warnings.simplefilter("ignore")
    tables, shares = report(chosen.rounds)
    if chosen.json:
        print(json.dumps({"tables": tables, "shares": shares}))
    else:
        print(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
