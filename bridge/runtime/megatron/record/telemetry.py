"""Errors of the quantisers of a run, every so many steps.

Of each emulated layer, and of Transformer Engine's on its CPU, the row-wise copies of input, weight and grad_output are
compared with their sources, in the first micro-batch. The numbers are of this rank's shard. A sample of the sources
shows the error that other schemes would have. A stored weight is compared with its master where this rank holds all of
it. Nothing is drawn or changed: a measured step trains as any other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state

from bridge.runtime.audit.quantisation import OPERANDS, QuantisationRow
from bridge.runtime.megatron.agreement import from_all_ranks
from bridge.runtime.megatron.emulation.linear import EmulatedLinear
from bridge.runtime.megatron.emulation.model import numbered_layers
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.megatron.te_cpu.storage import WATCHERS
from bridge.runtime.numerics import (
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


def global_layer_names(model: Sequence[torch.nn.Module]) -> dict[Any, tuple[int, str]]:
    """Return the global number of the layer and the name in it, for every module in a transformer or prediction layer.

    Prediction layers are numbered after the others; names in the transformer layer inside one are as in any other.
    """
    names: dict[Any, tuple[int, str]] = {}
    for chunk in model:
        for layer, number in numbered_layers(chunk).items():
            names |= {module: (number, name) for name, module in layer.named_modules()}
    return names


class _Place(NamedTuple):
    where: tuple[int, str]
    role: str
    fp8: str | None
    """The FP8 format of the layer's config."""


class _ErrorObserver(Observer):
    """Measures one emulated layer's row-wise operands, under its own scheme and under others."""

    def __init__(self, telemetry: "Telemetry", where: tuple[int, str], fp8: str | None) -> None:
        self.telemetry, self.where, self.fp8 = telemetry, where, fp8

    def quantised(self, source: torch.Tensor, operand: GemmOperand) -> None:
        place = _Place(self.where, operand.role, self.fp8)
        if not operand.columnwise and self.telemetry.is_new(place):
            self.telemetry.add(place, source, operand)


class Telemetry:
    """The measurements of a run."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self.rows: list[QuantisationRow] = []
        self.step: int | None = None
        names = global_layer_names(model)
        self._layers = [
            (layer, where) for layer, where in names.items() if isinstance(layer, EmulatedLinear)
        ]
        self._of_te = [
            (layer, where) for layer, where in names.items() if hasattr(layer, "quantizers")
        ]
        self._seen: set[_Place] = set()

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Measure the operands that are quantised in a ``with`` block, and the stored weights as they are before it."""
        self.step = step
        self._seen.clear()
        for layer, where in self._layers:
            layer.observer = _ErrorObserver(self, where, layer.config.fp8)
            if isinstance(layer.weight, StoredWeight):
                self._measure_stored(_Place(where, "weight", layer.config.fp8), layer.weight)
        WATCHERS.append(self._watch)
        try:
            yield
        finally:
            WATCHERS.remove(self._watch)
            for layer, _ in self._layers:
                layer.observer = None

    def is_new(self, place: _Place) -> bool:
        """Return whether an operand is the first one of its place in this step."""
        is_first = place not in self._seen
        self._seen.add(place)
        return is_first

    def add(self, place: _Place, source: torch.Tensor, operand: GemmOperand) -> None:
        """Add the row of an operand."""
        (layer, module), role, fp8 = place
        amax = float(source.abs().max()) if operand.amax is None else operand.amax
        row = QuantisationRow(
            step=self.step or 0,
            layer=layer,
            module=module,
            operand=role,
            format=operand.spec.format,
            **quantisation_error(source, operand),
            **{
                f"{scheme}_db": value
                for scheme, value in what_if_db(source, role, fp8_format=fp8, amax=amax).items()
            },
        )
        self.rows.append(row)

    def _add_held(self, place: _Place, source: torch.Tensor, held: Quantised) -> None:
        """Add the row of codes and scales that are held already."""
        self.add(place, source, stored_operand(held, place.role))
        scale = (
            1 / held.scale_inv.item()
            if held.spec.whole_tensor and held.scale_inv is not None
            else None
        )
        self.rows[-1] = replace(self.rows[-1], amax=held.amax.item(), scale=scale)

    def _measure_stored(self, place: _Place, weight: StoredWeight) -> None:
        master = getattr(weight, "main_param", None)
        if master is not None and master.numel() == weight.numel():
            self._add_held(
                place,
                master.detach().view(weight.shape).to(weight.store.gathered_dtype),
                weight.stored,
            )

    def _watch(self, source: torch.Tensor, quantizer: Any, found: Quantised) -> None:
        """Measure what Transformer Engine quantises on its CPU, if it is row-wise and the first of its place."""
        place = next(self._places(source, quantizer), None)
        if found.codes is None or place is None or not self.is_new(place):
            return
        matrix, spec = source.reshape(-1, source.shape[-1]), found.spec
        if not spec.whole_tensor:
            self._add_held(place, matrix, found)
            return
        scale = quantizer.scale.item() if spec.scheme == "delayed" else None
        self.add(place, matrix, make_operand(matrix, spec, place.role, scale=scale))

    def _places(self, source: torch.Tensor, quantizer: Any) -> Iterator[_Place]:
        """Yield the operands that a tensor may be; a cached weight has a copy of its quantizer."""
        for layer, where in self._of_te:
            if (
                getattr(layer, "weight", None) is not None
                and source.data_ptr() == layer.weight.data_ptr()
            ):
                yield _Place(where, "weight", layer.config.fp8)
            for key, role in TE_ROLES.items():
                if any(own is quantizer for own in layer.quantizers[key][:1]):
                    yield _Place(where, role, layer.config.fp8)

    def of_all_stages(self, step: int | None = None) -> list[QuantisationRow]:
        """Return the rows of all pipeline stages in order, those of one step or all; a collective call."""
        group = parallel_state.get_pipeline_model_parallel_group()
        parts = from_all_ranks(
            lambda: [row for row in self.rows if step in (None, row.step)], group=group
        )
        rows = [row for part in parts for row in part]
        return sorted(
            rows, key=lambda row: (row.step, row.layer, row.module, OPERANDS.index(row.operand))
        )
