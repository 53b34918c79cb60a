"""`Telemetry`: quantisation errors of a run's operands, measured in some steps.

In the first micro-batch of a measured step, the row-wise copies of input, weight and grad_output
are compared with their sources, for each emulated layer and each layer of Transformer Engine on a
CPU. The errors are the errors of this rank's shard. A sample of the sources gives the errors under
other schemes. A stored weight is compared with its master if this rank has the whole master. A
measured step trains like any other step: no random number is drawn, and no tensor is changed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state

from bridge.runtime.audit.quantisation import OPERANDS, QuantisationRow
from bridge.runtime.megatron.emulation.layer_numbers import number_layers
from bridge.runtime.megatron.emulation.parallel_linear import EmulatedParallelLinear
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.megatron.process.agreement import compute_on_all_ranks
from bridge.runtime.megatron.te_cpu.storage import QUANTISATION_WATCHERS
from bridge.runtime.numerics import (
    GemmOperand,
    Observer,
    Quantised,
    compute_what_if_sqnr,
    make_operand,
    make_stored_operand,
    measure_quantisation_error,
)

TE_OPERANDS = {"scaling_fwd": "input", "scaling_bwd": "grad_output"}
"""Transformer Engine's list of quantizers -> operand of its first quantizer."""


def name_modules_by_layer(model: Sequence[torch.nn.Module]) -> dict[Any, tuple[int, str]]:
    """Return the layer's number and the name of every module in a transformer or prediction layer.

    Layers are numbered in the whole model, and prediction layers come last. The name is the path in
    the layer. In a prediction layer it is the path in the transformer layer inside it.
    """
    names: dict[Any, tuple[int, str]] = {}
    for chunk in model:
        for layer, number in number_layers(chunk).items():
            for name, module in layer.named_modules():
                names[module] = number, name
    return names


class _OperandLocation(NamedTuple):
    """An operand of a linear layer."""

    label: tuple[int, str]
    """Number of the transformer layer in the whole model, and name of the linear layer."""
    role: str
    """input, weight or grad_output."""
    fp8: str | None
    """The FP8 format of the layer's config."""


class _ErrorObserver(Observer):
    """Measures the row-wise operands of an emulated layer."""

    def __init__(self, telemetry: "Telemetry", label: tuple[int, str], fp8: str | None) -> None:
        self.telemetry = telemetry
        self.label = label
        self.fp8 = fp8

    def after_quantisation(self, source: torch.Tensor, operand: GemmOperand) -> None:
        """Measure an operand, if it is row-wise and the first of its location in this step."""
        location = _OperandLocation(self.label, operand.role, self.fp8)
        if not operand.columnwise and self.telemetry.mark_first(location):
            self.telemetry.add(location, source, operand)


class Telemetry:
    """The measurements of a run."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self.rows: list[QuantisationRow] = []
        self.step: int | None = None
        self._emulated_layers: list[tuple[Any, tuple[int, str]]] = []
        self._te_layers: list[tuple[Any, tuple[int, str]]] = []
        for layer, where in name_modules_by_layer(model).items():
            if isinstance(layer, EmulatedParallelLinear):
                self._emulated_layers.append((layer, where))
            if hasattr(layer, "quantizers"):
                self._te_layers.append((layer, where))
        self._seen: set[_OperandLocation] = set()

    @contextmanager
    def measure_step(self, step: int) -> Iterator[None]:
        """Measure the operands that are quantised in a ``with`` block, and stored weights before it."""
        self.step = step
        self._seen.clear()
        for layer, where in self._emulated_layers:
            layer.observer = _ErrorObserver(self, where, layer.config.fp8)
            if isinstance(layer.weight, StoredWeight):
                self._measure_stored(
                    _OperandLocation(where, "weight", layer.config.fp8), layer.weight
                )
        QUANTISATION_WATCHERS.append(self._watch)
        try:
            yield
        finally:
            QUANTISATION_WATCHERS.remove(self._watch)
            for layer, _ in self._emulated_layers:
                layer.observer = None

    def mark_first(self, location: _OperandLocation) -> bool:
        """Mark a location as measured in this step, and return whether it was not marked before."""
        is_first = location not in self._seen
        self._seen.add(location)
        return is_first

    def add(self, location: _OperandLocation, source: torch.Tensor, operand: GemmOperand) -> None:
        """Add the row of an operand, which was made of `source`."""
        (layer, module), role, fp8 = location
        amax = operand.amax
        if amax is None:
            amax = float(source.abs().max())
        errors = compute_what_if_sqnr(source, role, fp8_format=fp8, amax=amax)
        what_if = {f"{scheme}_db": error for scheme, error in errors.items()}
        row = QuantisationRow(
            step=self.step or 0,
            layer=layer,
            module=module,
            operand=role,
            format=operand.spec.format,
            **measure_quantisation_error(source, operand),
            **what_if,
        )
        self.rows.append(row)

    def _add_quantised(
        self, location: _OperandLocation, source: torch.Tensor, quantised: Quantised
    ) -> None:
        """Add the row of codes and scales that exist already, and were made of `source`."""
        self.add(location, source, make_stored_operand(quantised, location.role))
        scale = None
        if quantised.spec.has_single_scale and quantised.scale_inv is not None:
            scale = 1 / quantised.scale_inv.item()
        self.rows[-1] = replace(self.rows[-1], amax=quantised.amax.item(), scale=scale)

    def _measure_stored(self, location: _OperandLocation, weight: StoredWeight) -> None:
        """Add the row of a stored weight, if this rank has its whole master."""
        master = getattr(weight, "main_param", None)
        if master is not None and master.numel() == weight.numel():
            source = master.detach().view(weight.shape).to(weight.store.gathered_dtype)
            self._add_quantised(location, source, weight.stored)

    def _watch(self, source: torch.Tensor, quantizer: Any, quantised: Quantised) -> None:
        """Measure a tensor that Transformer Engine quantises on a CPU.

        It is measured if it is row-wise, and the first of its location in this step.
        """
        location = self._find_location(source, quantizer)
        if quantised.codes is None or location is None or not self.mark_first(location):
            return
        matrix = source.reshape(-1, source.shape[-1])
        spec = quantised.spec
        if not spec.has_single_scale:
            self._add_quantised(location, matrix, quantised)
            return
        scale = None
        if spec.scheme == "delayed":
            scale = quantizer.scale.item()
        self.add(location, matrix, make_operand(matrix, spec, location.role, tensor_scale=scale))

    def _find_location(self, source: torch.Tensor, quantizer: Any) -> _OperandLocation | None:
        """Return the location of a tensor.

        The result is None for a tensor that is not an operand of a linear layer.

        A weight is recognised by its memory, since a cached weight has a copy of its quantizer.
        """
        for layer, where in self._te_layers:
            weight = getattr(layer, "weight", None)
            if weight is not None and source.data_ptr() == weight.data_ptr():
                return _OperandLocation(where, "weight", layer.config.fp8)
            for key, role in TE_OPERANDS.items():
                if any(first is quantizer for first in layer.quantizers[key][:1]):
                    return _OperandLocation(where, role, layer.config.fp8)
        return None

    def gather_stages(self, step: int | None = None) -> list[QuantisationRow]:
        """Return the rows of all pipeline stages in order, of a step or of all.

        This is a collective call.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        stage_rows = [row for row in self.rows if step in (None, row.step)]
        rows: list[QuantisationRow] = []
        for rows_of_stage in compute_on_all_ranks(lambda: stage_rows, group=group):
            rows.extend(rows_of_stage)
        rows.sort(key=lambda row: (row.step, row.layer, row.module, OPERANDS.index(row.operand)))
        return rows
