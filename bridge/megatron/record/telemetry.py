"""Errors of the quantisers of a run, every so many steps.

Of each emulated layer the row-wise copies of input, weight and grad_output are compared with their sources, in the
first micro-batch; the numbers are of this rank's shard. A sample of the same sources shows the error that other schemes
would have. A stored weight is compared with its master where this rank holds all of it. Nothing is drawn or changed: a
measured step trains as any other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from bridge.audit.quantisation import OPERANDS, QuantisationRow
from bridge.megatron.emulation.linear import EmulatedLinear
from bridge.megatron.emulation.model import global_layer_number
from bridge.megatron.emulation.stored_weight import StoredWeight
from bridge.numerics import GemmOperand, Observer, quantisation_error, stored_operand, what_if_db


def global_layer_names(model: Sequence[torch.nn.Module]) -> dict[torch.nn.Module, tuple[int, str]]:
    """Return the global number of the layer and the name in it, for every module in a transformer or prediction layer.

    Prediction layers are numbered after the others; names in the transformer layer inside one are as in any other.
    """
    names: dict[torch.nn.Module, tuple[int, str]] = {}
    for chunk in model:
        for layer in chunk.modules():
            if isinstance(layer, (TransformerLayer, MultiTokenPredictionLayer)):
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
        self._layers: list[tuple[Any, tuple[int, str]]] = [
            (module, where) for module, where in global_layer_names(model).items() if isinstance(module, EmulatedLinear)
        ]

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Measure the operands that are quantised in a ``with`` block, and the stored weights as they are before it."""
        self.step = step
        for layer, where in self._layers:
            layer.observer = _ErrorObserver(step, layer, where, self.rows)
            if isinstance(layer.weight, StoredWeight):
                self._measure_stored(step, where, layer.weight, layer.config.fp8)
        try:
            yield
        finally:
            for layer, _ in self._layers:
                layer.observer = None

    def _measure_stored(self, step: int, where: tuple[int, str], weight: StoredWeight, fp8: str | None) -> None:
        master = getattr(weight, "main_param", None)
        if master is None or master.numel() != weight.numel():
            return
        source = master.detach().view(weight.shape).to(weight.gathered_dtype)
        held = stored_operand(weight.stored, "weight")
        row = _row(step, where, source, held, fp8)
        scale_inv = weight.stored.scale_inv
        scale = 1 / scale_inv.item() if weight.stored.spec.whole_tensor and scale_inv is not None else None
        self.rows.append(replace(row, amax=weight.stored.amax.item(), scale=scale))

    def of_all_stages(self, step: int | None = None) -> list[QuantisationRow]:
        """Return the rows of all pipeline stages in order, those of one step or all; a collective call."""
        own = [row for row in self.rows if step in (None, row.step)]
        group = parallel_state.get_pipeline_model_parallel_group()
        parts: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(parts, own, group=group)
        rows = [row for part in parts for row in part]
        return sorted(rows, key=lambda row: (row.step, row.layer, row.module, OPERANDS.index(row.operand)))
