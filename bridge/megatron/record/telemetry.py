"""Errors of the quantisers of a run, every so many steps.

Of each emulated layer, and of Transformer Engine's on its CPU, the row-wise copies of input, weight and grad_output are
compared with their sources, in the first micro-batch. The numbers are of this rank's shard. A sample of the sources
shows the error that other schemes would have. A stored weight is compared with its master where this rank holds all of
it. Nothing is drawn or changed: a measured step trains as any other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state

from bridge.audit.quantisation import OPERANDS, QuantisationRow
from bridge.megatron.emulation.linear import EmulatedLinear
from bridge.megatron.emulation.model import LAYERS, global_layer_number
from bridge.megatron.emulation.stored_weight import StoredWeight
from bridge.megatron.te_cpu.storage import WATCHERS
from bridge.numerics import (
    GemmOperand,
    Observer,
    Quantised,
    make_operand,
    quantisation_error,
    stored_operand,
    what_if_db,
)

TE_ROLES = {"scaling_fwd": "input", "scaling_bwd": "grad_output"}
"""Transformer Engine's lists of quantizers -> operand of the first one."""


def global_layer_names(model: Sequence[torch.nn.Module]) -> dict[torch.nn.Module, tuple[int, str]]:
    """Return the global number of the layer and the name in it, for every module in a transformer or prediction layer.

    Prediction layers are numbered after the others; names in the transformer layer inside one are as in any other.
    """
    names: dict[torch.nn.Module, tuple[int, str]] = {}
    for chunk in model:
        for layer in chunk.modules():
            if isinstance(layer, LAYERS):
                number = global_layer_number(layer)
                names |= {module: (number, name) for name, module in layer.named_modules()}
    return names


class _ErrorObserver(Observer):
    """Measures one layer's operands, each once, under its own scheme and under others."""

    def __init__(self, step: int, layer: Any, where: tuple[int, str], rows: list[QuantisationRow]) -> None:
        self.step = step
        self.where = where
        self.rows = rows
        self.fp8_format: str | None = layer.config.fp8
        self.seen: set[str] = set()

    def quantised(self, source: torch.Tensor, operand: GemmOperand) -> None:
        """Measure an operand, if it is row-wise and the first of its role."""
        if operand.columnwise or operand.role in self.seen:
            return
        self.seen.add(operand.role)
        self.rows.append(_row(self.step, self.where, source, operand, self.fp8_format))


class _TeOperand(NamedTuple):
    """An operand of one of Transformer Engine's modules."""

    where: tuple[int, str]
    role: str
    fp8: str | None
    """The FP8 format of its layer's config."""


class _TeWatcher:
    """Measures the operands that Transformer Engine quantises on its CPU, each once, by their quantizers."""

    def __init__(self, step: int, layers: Sequence[tuple[Any, tuple[int, str]]], rows: list[QuantisationRow]) -> None:
        self.step = step
        self.layers = layers
        self.rows = rows
        self.seen: set[_TeOperand] = set()

    def __call__(self, source: torch.Tensor, quantizer: Any, found: Quantised) -> None:
        """Measure an operand, if it is row-wise and the first of its role."""
        place = next(self._operands(source, quantizer), None)
        if found.codes is None or place is None or place in self.seen:
            return
        self.seen.add(place)
        where, role, fp8 = place
        matrix, spec = source.reshape(-1, source.shape[-1]), found.spec
        if not spec.whole_tensor:
            self.rows.append(_held_row(self.step, where, matrix, found, role=role, fp8=fp8))
            return
        scale = quantizer.scale.item() if spec.scheme == "delayed" else None
        self.rows.append(_row(self.step, where, matrix, make_operand(matrix, spec, role, scale=scale), fp8))

    def _operands(self, source: torch.Tensor, quantizer: Any) -> Iterator[_TeOperand]:
        """Yield the operands that a tensor may be; a cached weight has a copy of its quantizer."""
        for layer, where in self.layers:
            fp8 = layer.config.fp8
            if getattr(layer, "weight", None) is not None and source.data_ptr() == layer.weight.data_ptr():
                yield _TeOperand(where, "weight", fp8)
            for key, role in TE_ROLES.items():
                if any(own is quantizer for own in layer.quantizers[key][:1]):
                    yield _TeOperand(where, role, fp8)


def _held_row(
    step: int, where: tuple[int, str], source: torch.Tensor, held: Quantised, *, role: str, fp8: str | None
) -> QuantisationRow:
    """Return the row of codes and scales that are held already."""
    scale = 1 / held.scale_inv.item() if held.spec.whole_tensor and held.scale_inv is not None else None
    row = _row(step, where, source, stored_operand(held, role), fp8)
    return replace(row, amax=held.amax.item(), scale=scale)


def _row(
    step: int, where: tuple[int, str], source: torch.Tensor, operand: GemmOperand, fp8_format: str | None
) -> QuantisationRow:
    layer, module = where
    amax = float(source.abs().max()) if operand.amax is None else operand.amax
    others = what_if_db(source, operand.role, fp8_format=fp8_format, amax=amax)
    return QuantisationRow(
        step=step,
        layer=layer,
        module=module,
        operand=operand.role,
        format=operand.spec.format,
        **asdict(quantisation_error(source, operand)),
        **{f"{scheme}_db": value for scheme, value in others.items()},
    )


class Telemetry:
    """The measurements of a run."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self.rows: list[QuantisationRow] = []
        self.step: int | None = None
        names = global_layer_names(model)
        self._layers: list[tuple[Any, tuple[int, str]]] = [
            (module, where) for module, where in names.items() if isinstance(module, EmulatedLinear)
        ]
        self._of_te = [(module, where) for module, where in names.items() if hasattr(module, "quantizers")]

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Measure the operands that are quantised in a ``with`` block, and the stored weights as they are before it."""
        self.step = step
        for layer, where in self._layers:
            layer.observer = _ErrorObserver(step, layer, where, self.rows)
            if isinstance(layer.weight, StoredWeight):
                self._measure_stored(step, where, layer.weight, layer.config.fp8)
        watcher = _TeWatcher(step, self._of_te, self.rows)
        WATCHERS.append(watcher)
        try:
            yield
        finally:
            WATCHERS.remove(watcher)
            for layer, _ in self._layers:
                layer.observer = None

    def _measure_stored(self, step: int, where: tuple[int, str], weight: StoredWeight, fp8: str | None) -> None:
        master = getattr(weight, "main_param", None)
        if master is None or master.numel() != weight.numel():
            return
        source = master.detach().view(weight.shape).to(weight.gathered_dtype)
        self.rows.append(_held_row(step, where, source, weight.stored, role="weight", fp8=fp8))

    def of_all_stages(self, step: int | None = None) -> list[QuantisationRow]:
        """Return the rows of all pipeline stages in order, those of one step or all; a collective call."""
        own = [row for row in self.rows if step in (None, row.step)]
        group = parallel_state.get_pipeline_model_parallel_group()
        parts: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(parts, own, group=group)
        rows = [row for part in parts for row in part]
        return sorted(rows, key=lambda row: (row.step, row.layer, row.module, OPERANDS.index(row.operand)))
