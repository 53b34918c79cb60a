"""`GemmWatch`: records every GEMM of a model in a block of code, from three separate sources.

- `bridge.runtime.numerics` announces the GEMMs that it emulates.
- Transformer Engine's Python calls its extension (`te_gemms.py`).
- Any other matrix multiplication is an operator of torch. A dispatch mode sees it below autograd.

The first two sources multiply with operators of torch themselves. The dispatch mode does not count
those operators a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.precision.schemes import GEMMS
from bridge.runtime.audit.record import GemmRow, HealthRow, format_tile, merge_gemm_rows
from bridge.runtime.numerics.linear import Observer, observe_calls
from bridge.runtime.numerics.operand import GemmOperand
from bridge.runtime.pytorch.record import te_gemms
from bridge.runtime.pytorch.record.health import measure_emulated_health, measure_te_health
from bridge.runtime.pytorch.record.modules import (
    ModuleTracker,
    get_dtype_name,
    label_modules,
    mixes_tokens,
)
from bridge.runtime.pytorch.record.operand_format import (
    OperandFormat,
    get_autocast_scheme,
    get_dtype_token,
    get_operand_format,
    is_quantised,
    is_te_module,
)
from bridge.runtime.pytorch.record.te_gemms import TeGemm

LINEAR_OPERATORS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "_scaled_mm", "_grouped_mm"}
)
"""Operators below autograd that multiply the matrices of a linear layer.

Attention and convolution are counted, without a row.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedGemm:
    """The operands of an emulated fprop GEMM, until its result is known."""

    module: torch.nn.Module
    operands: tuple[GemmOperand, GemmOperand]
    """Input and weight."""


class GemmWatch(Observer):
    """A record of the GEMMs that ran: rows, counts, and the health of low-precision modules."""

    def __init__(self, model: Iterable[torch.nn.Module]) -> None:
        """Label the modules of a model, or of its chunks. Nothing is recorded yet."""
        self.labels = label_modules(model)
        self.running = ModuleTracker(self._note_te_module)
        self.calls: Counter[str] = Counter()
        """Formats as in rows, or torch's dtype -> number of matrix multiplications.

        Multiplications outside of linear layers count too.
        """
        self._rows: set[GemmRow] = set()
        self._gemm_depth = 0
        """Running GEMMs of the first two sources. Operators inside them do not count."""
        self._contexts: dict[torch.nn.Module, str] = {}
        """Module of Transformer Engine -> scheme of the autocast around its forward pass."""
        self._inputs: dict[torch.nn.Module, Any] = {}
        """Module of Transformer Engine -> positional arguments of its forward pass."""
        self._parameter_addresses: set[int] = set()
        self._emulated_input: torch.Tensor | None = None
        """Input of the emulated layer that runs, before quantisation."""
        self._emulated_gemm: EmulatedGemm | None = None
        self._health: dict[tuple[torch.nn.Module, int | None], HealthRow | None] = {}
        """Module, and the part of a grouped GEMM -> health of its first fprop GEMM."""

    @property
    def rows(self) -> tuple[GemmRow, ...]:
        """The recorded rows without repetition, in the order of layers."""
        return merge_gemm_rows(self._rows)

    @property
    def health(self) -> tuple[HealthRow, ...]:
        """The health of each low-precision module in its first forward pass."""
        return tuple(sorted(row for row in self._health.values() if row is not None))

    @contextmanager
    def record_gemms(self) -> Iterator[GemmWatch]:
        """Record the GEMMs of a ``with`` block."""
        self._parameter_addresses = set()
        for module in self.labels:
            for parameter in module.parameters(recurse=False):
                if not is_quantised(parameter):
                    self._parameter_addresses.add(parameter.data_ptr())
        with (
            self.running.follow(self.labels),
            observe_calls(self),
            te_gemms.report_gemms(self._record_te_gemm, self._pause_operators),
            _Dispatch(self),
        ):
            yield self

    def _note_te_module(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        """Note autocast and input of a module of Transformer Engine whose forward pass begins."""
        if is_te_module(module):
            self._contexts[module] = get_autocast_scheme()
            self._inputs[module] = arguments

    @contextmanager
    def _pause_operators(self) -> Iterator[None]:
        """Count no operator of torch in a ``with`` block."""
        self._gemm_depth += 1
        try:
            yield
        finally:
            self._gemm_depth -= 1

    def after_quantisation(self, source: torch.Tensor, operand: GemmOperand) -> None:
        """Keep the input of an emulated layer for the check of its GEMM."""
        if operand.role == "input" and not operand.columnwise:
            self._emulated_input = source.detach()

    def before_gemm(self, gemm: str, left: GemmOperand, right: GemmOperand) -> None:
        """Record an emulated GEMM before it runs."""
        self._gemm_depth += 1
        self._record(gemm, _get_emulated_format(left), _get_emulated_format(right))
        module = self.running.module
        if gemm == "fprop" and module is not None and (module, None) not in self._health:
            self._emulated_gemm = EmulatedGemm(module=module, operands=(left, right))

    def after_gemm(self, gemm: str, out: torch.Tensor, bias: torch.Tensor | None) -> None:  # noqa: ARG002
        """Record the health of an emulated layer after its GEMM."""
        pending = self._emulated_gemm
        if pending is not None and self._emulated_input is not None:
            module = pending.module
            self._health[module, None] = measure_emulated_health(
                module,
                self.labels[module],
                self._emulated_input,
                pending.operands,
                out,
                bias=bias,
            )
        self._emulated_input = None
        self._emulated_gemm = None
        self._gemm_depth -= 1

    def _record_te_gemm(self, call: TeGemm) -> None:
        """Record a GEMM of Transformer Engine after it has run."""
        sides = GEMMS[call.gemm]
        left = get_operand_format(call.left, columnwise=sides.left_columnwise)
        right = get_operand_format(call.right, columnwise=sides.right_columnwise)
        columns = {"output": ""}
        if call.out is not None and not is_quantised(call.out):
            columns["output"] = get_dtype_token(call.out.dtype)
        if not left.is_quantised:
            self.calls[get_dtype_name(call.right)] += 1
        elif call.split_accumulator:
            columns["accumulate"] = "fp32"
        else:
            columns["accumulate"] = "fp32 fast"
        self._record(call.gemm, left, right, **columns)
        if call.gemm == "fprop" and left.scheme not in ("none", "custom"):
            self._check_te_gemm(call, left)

    def _check_te_gemm(self, call: TeGemm, input_format: OperandFormat) -> None:
        """Record the health of the first fprop GEMM of a module of Transformer Engine."""
        module = self.running.module
        if module not in self._inputs or (module, call.part) in self._health:
            return
        label = self.labels[module]
        with self._pause_operators():
            health = measure_te_health(module, label, self._inputs[module], call, input_format)
        self._health[module, call.part] = health

    def operator(self, name: str, arguments: Any, out: Any) -> None:
        """Count an operator of torch, and record it where a linear layer runs it."""
        if self._gemm_depth:
            return
        dtypes = []
        low_dtypes = []
        for value in arguments:
            if isinstance(value, torch.Tensor) and value.dim() > 1:
                dtype = get_dtype_name(value)
                dtypes.append(dtype)
                if dtype.startswith(("float8", "float4")):
                    low_dtypes.append(dtype)
        if not dtypes:
            return
        if low_dtypes:  # the other tensors are scales
            self.calls[low_dtypes[-1]] += 1
        else:
            self.calls[dtypes[-1]] += 1
        module = self.running.module
        if name in LINEAR_OPERATORS and module is not None and not is_te_module(module):
            self._record_operator(module, name, arguments, out)

    def _record_operator(
        self, module: torch.nn.Module, name: str, arguments: Any, out: torch.Tensor
    ) -> None:
        """Record an operator of torch in a linear layer."""
        factors = arguments[:2]
        if name in ("addmm", "baddbmm"):  # their first argument is added to the product
            factors = arguments[1:3]
        if len(factors) < 2 or not all(isinstance(value, torch.Tensor) for value in factors):
            return
        left_matrix, right_matrix = factors
        scheme = "none"
        if "_scaled" in name:
            scheme = "scaled"
        left = OperandFormat(format=get_dtype_token(left_matrix.dtype), scheme=scheme)
        right = OperandFormat(format=get_dtype_token(right_matrix.dtype), scheme=scheme)
        gemm = self._classify_operator(module, left_matrix, right_matrix)
        self._record(gemm, left, right, output=get_dtype_token(out.dtype))

    def _classify_operator(
        self, module: torch.nn.Module, left: torch.Tensor, right: torch.Tensor
    ) -> str:
        """Return the GEMM that an operator computes for a linear layer.

        In a backward pass dgrad reads the weight, and the result of wgrad has the weight's shape.
        """
        if not self.running.is_backward:
            return "fprop"
        if {left.data_ptr(), right.data_ptr()} & self._parameter_addresses:
            return "dgrad"
        weight_sizes = []
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 2:
                weight_sizes.append({*parameter.shape})
        if weight_sizes and {left.shape[-2], right.shape[-1]} not in weight_sizes:
            return "dgrad"
        if left.stride(-2) == 1:  # wgrad reads its left operand transposed
            return "wgrad"
        return "dgrad"

    def _record(self, gemm: str, left: OperandFormat, right: OperandFormat, **columns: str) -> None:
        """Count a low-precision GEMM, and add the row of a GEMM of a linear layer."""
        if left.scheme not in ("none", "scaled"):
            self.calls[f"{left.format} x {right.format} ({left.scheme})"] += 1
        module = self.running.module
        if module is None:
            return
        layer, name = self.labels[module]
        if mixes_tokens(name):  # a product of attention, and not of a linear layer
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
            storage=_get_weight_format(module),
            by=_format_class_name(module),
            context=self._contexts.get(module, ""),
            **columns,
        )
        self._rows.add(row)


class _Dispatch(TorchDispatchMode):
    """Calls a watch with the operators below autograd that multiply matrices."""

    def __init__(self, watch: GemmWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in LINEAR_OPERATORS or "attention" in name or "convolution" in name:
            self._watch.operator(name, args, out)
        return out


def _get_emulated_format(operand: GemmOperand) -> OperandFormat:
    """Return the format of an operand of the emulation."""
    spec = operand.spec
    hadamard = spec.hadamard and operand.columnwise
    tile = format_tile(spec.tile(operand.columnwise), hadamard=hadamard, stochastic=spec.stochastic)
    return OperandFormat(format=spec.format, scheme=spec.scheme, tile=tile)


def _get_weight_format(module: torch.nn.Module) -> str:
    """Return the format of a module's weight between steps, "" for a module without a weight."""
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1:
            return get_operand_format(parameter, columnwise=False).format
    return ""


def _format_class_name(module: torch.nn.Module) -> str:
    """Return the class of a module, with the package that it is from."""
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        return f"torch.nn.{kind.__name__}"
    package = kind.__module__.partition(".")[0]
    return f"{package} {kind.__name__}"
