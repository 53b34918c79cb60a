"""One record of every GEMM of a model in a block of code, from three sources that do not overlap.

- `bridge.runtime.numerics` announces the GEMMs that it emulates.
- Transformer Engine's Python calls its extension (`te.py`).
- Any other matrix multiplication is an operator of torch. A dispatch mode sees it below autograd.

The first two multiply with operators of torch themselves, or hide them; these are kept out of the
third.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.precision.schemes import GEMMS
from bridge.runtime.audit.record import GemmRow, HealthRow, merged, tile_name
from bridge.runtime.numerics.linear import Observer, observing
from bridge.runtime.numerics.operand import GemmOperand
from bridge.runtime.pytorch.record import te
from bridge.runtime.pytorch.record.health import of_emulated, of_te
from bridge.runtime.pytorch.record.modules import Running, dtype_of, mixes_tokens, places
from bridge.runtime.pytorch.record.te import (
    Described,
    TeGemm,
    describe,
    dtype_name,
    is_quantised,
    is_te,
)

OPERATORS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "_scaled_mm", "_grouped_mm"}
)
"""Operators below autograd that multiply matrices in a linear layer.

Others are counted and have no row.
"""


class GemmWatch(Observer):
    """The rows of the GEMMs that ran."""

    def __init__(self, model: Iterable[torch.nn.Module]) -> None:
        self.places = places(model)
        self.running = Running(self._entered)
        self.calls: Counter[str] = Counter()
        """Formats as rows have them, or torch's dtype -> matrix multiplications.

        Those outside of linear layers count, too.
        """
        self._rows: set[GemmRow] = set()
        self._depth = 0
        self._contexts: dict[torch.nn.Module, str] = {}
        self._parameters: set[int] = set()
        self._inputs: dict[torch.nn.Module, Any] = {}
        self._source: torch.Tensor | None = None
        self._pending: tuple[torch.nn.Module, tuple[GemmOperand, GemmOperand]] | None = None
        self._health: dict[tuple[torch.nn.Module, int | None], HealthRow | None] = {}

    @property
    def rows(self) -> tuple[GemmRow, ...]:
        """The different rows, in the order of layers."""
        return merged(self._rows)

    @property
    def health(self) -> tuple[HealthRow, ...]:
        """The health of each low-precision module, of its first forward pass."""
        return tuple(sorted(row for row in self._health.values() if row is not None))

    @contextmanager
    def watching(self) -> Iterator[GemmWatch]:
        """Record for a ``with`` block."""
        self._parameters = set()
        for module in self.places:
            for parameter in module.parameters(recurse=False):
                if not is_quantised(parameter):
                    self._parameters.add(parameter.data_ptr())
        of_te = te.watching(self._te_gemm, self._quiet)
        with self.running.following(self.places), observing(self), of_te, _Dispatch(self):
            yield self

    def _entered(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if is_te(module):
            self._contexts[module] = te.context()
            self._inputs[module] = arguments

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def quantised(self, source: torch.Tensor, operand: GemmOperand) -> None:
        """Remember the input that was quantised last."""
        if operand.role == "input" and not operand.columnwise:
            self._source = source.detach()

    def multiplied(self, gemm: str, left: GemmOperand, right: GemmOperand) -> None:
        """Note an emulated GEMM."""
        self._depth += 1
        self._note(gemm, _of_operand(left), _of_operand(right))
        module = self.running.module
        if gemm == "fprop" and module is not None and (module, None) not in self._health:
            self._pending = module, (left, right)

    def finished(self, gemm: str, out: torch.Tensor, bias: torch.Tensor | None) -> None:  # noqa: ARG002
        """Leave an emulated GEMM."""
        if self._pending is not None and self._source is not None:
            module, operands = self._pending
            place = self.places[module]
            self._health[module, None] = of_emulated(
                module, place, self._source, operands, out, bias=bias
            )
        self._source = self._pending = None
        self._depth -= 1

    def _te_gemm(self, call: TeGemm) -> None:
        row, out = GEMMS[call.gemm], call.out
        left = describe(call.left, columnwise=row.left_columnwise)
        right = describe(call.right, columnwise=row.right_columnwise)
        columns = {"output": ""}
        if out is not None and not is_quantised(out):
            columns["output"] = dtype_name(out.dtype)
        if left.scheme == "none":
            self.calls[dtype_of(call.right)] += 1
        elif call.split_accumulator:
            columns["accumulate"] = "fp32"
        else:
            columns["accumulate"] = "fp32 fast"
        self._note(call.gemm, left, right, **columns)
        if call.gemm == "fprop" and left.scheme not in ("none", "custom"):
            self._check_te(call, (left.format, left.scheme))

    def _check_te(self, call: TeGemm, format_: tuple[str, str]) -> None:
        module = self.running.module
        if module in self._inputs and (module, call.part) not in self._health:
            with self._quiet():
                health = of_te(module, self.places[module], self._inputs[module], call, format_)
            self._health[module, call.part] = health

    def operator(self, name: str, arguments: Any, out: Any) -> None:
        """Note an operator of torch."""
        if self._depth:
            return
        dtypes, low = [], []
        for value in arguments:
            if isinstance(value, torch.Tensor) and value.dim() > 1:
                dtype = dtype_of(value)
                dtypes.append(dtype)
                if dtype.startswith(("float8", "float4")):
                    low.append(dtype)
        if not dtypes:
            return
        if low:  # the others are scales
            self.calls[low[-1]] += 1
        else:
            self.calls[dtypes[-1]] += 1
        module = self.running.module
        if name in OPERATORS and module is not None and not is_te(module):
            self._note_linear(module, name, arguments, out)

    def _note_linear(
        self, module: torch.nn.Module, name: str, arguments: Any, out: torch.Tensor
    ) -> None:
        """Note an operator of torch in a linear layer."""
        factors = arguments[:2]
        if name in ("addmm", "baddbmm"):  # whose first argument is added to the product
            factors = arguments[1:3]
        if len(factors) < 2 or not all(isinstance(value, torch.Tensor) for value in factors):
            return
        left_matrix, right_matrix = factors
        scheme = "none"
        if "_scaled" in name:
            scheme = "scaled"
        left = Described(format=dtype_name(left_matrix.dtype), scheme=scheme)
        right = Described(format=dtype_name(right_matrix.dtype), scheme=scheme)
        gemm = self._gemm_of(module, left_matrix, right_matrix)
        self._note(gemm, left, right, output=dtype_name(out.dtype))

    def _gemm_of(self, module: torch.nn.Module, left: torch.Tensor, right: torch.Tensor) -> str:
        """Return the GEMM of an operator.

        In a backward pass dgrad reads the weight, and the result of wgrad has the weight's shape.
        """
        if not self.running.is_backward:
            return "fprop"
        if {left.data_ptr(), right.data_ptr()} & self._parameters:
            return "dgrad"
        sizes = []
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 2:
                sizes.append({*parameter.shape})
        if sizes and {left.shape[-2], right.shape[-1]} not in sizes:
            return "dgrad"
        if left.stride(-2) == 1:  # wgrad reads its left operand transposed
            return "wgrad"
        return "dgrad"

    def _note(self, gemm: str, left: Described, right: Described, **columns: str) -> None:
        if left.scheme not in ("none", "scaled"):
            self.calls[f"{left.format} x {right.format} ({left.scheme})"] += 1
        module = self.running.module
        if module is None:
            return
        layer, name = self.places[module]
        if mixes_tokens(name):
            return
        row = GemmRow(
            layer=layer,
            module=name,
            gemm=gemm,
            left=left.format,
            right=right.format,
            scheme=left.scheme,
            left_tile=left.tile,
            right_tile=right.tile,
            storage=_storage(module),
            by=_class_name(module),
            context=self._contexts.get(module, ""),
            **columns,
        )
        self._rows.add(row)


class _Dispatch(TorchDispatchMode):
    def __init__(self, watch: GemmWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in OPERATORS or "attention" in name or "convolution" in name:
            self._watch.operator(name, args, out)
        return out


def _of_operand(operand: GemmOperand) -> Described:
    spec = operand.spec
    hadamard = spec.hadamard and operand.columnwise
    tile = tile_name(spec.tile(operand.columnwise), hadamard=hadamard, stochastic=spec.stochastic)
    return Described(format=spec.format, scheme=spec.scheme, tile=tile)


def _storage(module: torch.nn.Module) -> str:
    """Return the format of a module's weight between steps, "" without a weight of its own."""
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1:
            return describe(parameter, columnwise=False).format
    return ""


def _class_name(module: torch.nn.Module) -> str:
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        return f"torch.nn.{kind.__name__}"
    package = kind.__module__.partition(".")[0]
    return f"{package} {kind.__name__}"
