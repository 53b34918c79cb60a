"""Record of the GEMMs of a step, noted by the layers themselves while it runs: their formats, and quantisation errors.

Every so many steps, of each emulated layer the row-wise copies of input, weight and grad_output are compared with their
sources, in the first micro-batch; the numbers are of this rank's shard. A stored weight is compared with its master
where this rank holds all of it. Nothing is drawn or changed: a measured step trains as any other.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from bridge.megatron.emulation.linear import EmulatedLinear
from bridge.megatron.emulation.model import global_layer_number
from bridge.megatron.emulation.stored_weight import StoredWeight
from bridge.megatron.te_cpu import record as te_record
from bridge.numerics import GemmOperand, Observer, QuantisationError, quantisation_error, stored_operand
from bridge.plan.precision_plan import compact
from bridge.precision.schemes import GEMMS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


HIGH = frozenset({"bf16", "fp16", "fp32"})
"""Formats of layers in high precision."""


@dataclass(frozen=True, kw_only=True, order=True)
class GemmRecord:
    """One GEMM of one linear layer."""

    layer: int
    """Number of the transformer layer in the whole model, from 1 on."""
    module: str
    """Name in the layer, ``mlp.linear_fc1`` say."""
    gemm: str
    """fprop, dgrad or wgrad; of a layer in high precision, all three are one record, "all"."""
    left: str
    """Format of the left operand."""
    right: str
    scheme: str
    """Scaling scheme, or "none"."""


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


class _Observer(Observer):
    """Notes the GEMMs of one layer, each once."""

    def __init__(self, where: tuple[int, str], seen: set[GemmRecord]) -> None:
        self.where = where
        self.seen = seen

    def multiplied(self, gemm: str, left: GemmOperand, right: GemmOperand) -> None:
        """Note a GEMM."""
        layer, module = self.where
        formats = {"left": left.spec.format, "right": right.spec.format}
        self.seen.add(GemmRecord(layer=layer, module=module, gemm=gemm, scheme=left.spec.scheme, **formats))


@contextmanager
def watch_gemms(model: Sequence[torch.nn.Module]) -> Iterator[set[GemmRecord]]:
    """Note the GEMMs of emulated layers and of Transformer Engine's on a CPU, and the other layers, for a block."""
    seen: set[GemmRecord] = set()
    noted: set[GemmRecord] = set()
    modules: dict[torch.nn.Module, tuple[int, str]] = {}
    watched: list[Any] = []
    for module, where in global_layer_names(model).items():
        if isinstance(module, EmulatedLinear) and module.gemm_precision is not None:
            module.observer = _Observer(where, seen)
            watched.append(module)
        elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            dtype = _dtype_name(module.weight)
            seen.add(GemmRecord(layer=where[0], module=where[1], gemm="all", left=dtype, right=dtype, scheme="none"))
        elif hasattr(module, "fp8_meta"):  # Transformer Engine's
            modules[module] = where
    try:
        with te_record.watching(modules, partial(_note_te, noted)) if modules else nullcontext():
            yield seen
        seen |= _merged(noted)
    finally:
        for module in watched:
            module.observer = None


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def _note_te(noted: set[GemmRecord], where: tuple[int, str] | None, gemm: str, left: Any, right: Any) -> None:
    """Note a GEMM of one of Transformer Engine's modules in a transformer layer."""
    if where is None:
        return
    if isinstance(left, GemmOperand):
        formats, scheme = {"left": left.spec.format, "right": right.spec.format}, left.spec.scheme
    else:
        formats, scheme = {"left": _dtype_name(left), "right": _dtype_name(right)}, "none"
    noted.add(GemmRecord(layer=where[0], module=where[1], gemm=gemm, scheme=scheme, **formats))


def _merged(noted: set[GemmRecord]) -> set[GemmRecord]:
    """Return the records with the three of a module in high precision as one, "all"."""
    kinds: dict[GemmRecord, set[GemmRecord]] = {}
    for record in noted:
        kinds.setdefault(replace(record, gemm="all"), set()).add(record)
    return {
        record
        for one, several in kinds.items()
        for record in ({one} if one.scheme == "none" and len(several) == len(GEMMS) else several)
    }


def of_all_stages(seen: set[GemmRecord]) -> tuple[GemmRecord, ...]:
    """Return the records of all pipeline stages; a collective call."""
    return tuple(sorted(set[GemmRecord]().union(*gather_stages(seen))))


def gather_stages(own: Any) -> list[Any]:
    """Return an object of each pipeline stage, in order; a collective call."""
    group = parallel_state.get_pipeline_model_parallel_group()
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, own, group=group)
    return gathered


def format_gemms(records: Sequence[GemmRecord]) -> str:
    """Return the formats of each layer's GEMMs in one sentence, ``layers 2-5: ...; layers 1, 6: bf16`` say."""
    by_kind: dict[str, set[int]] = {}
    for layer in dict.fromkeys(record.layer for record in records):
        by_kind.setdefault(_kind([record for record in records if record.layer == layer]), set()).add(layer)
    parts = sorted(by_kind.items(), key=lambda item: min(item[1]))
    return "; ".join(
        f"layers {compact([*map(str, sorted(layers))], limit=len(layers))}: {kind}" for kind, layers in parts
    )


def _kind(records: Sequence[GemmRecord]) -> str:
    """Return the formats of a layer's GEMMs, modules of equal formats together."""
    modules: dict[str, list[str]] = {}
    for module in dict.fromkeys(record.module for record in records):
        own = [record for record in records if record.module == module]
        modules.setdefault(_formats(own), []).append(_short(module))
    if set(modules) <= HIGH:
        return next(iter(modules))
    return " and ".join(f"{formats} ({', '.join(sorted(set(names)))})" for formats, names in modules.items())


def _short(module: str) -> str:
    """Return a module's name without its place in the layer; all experts of a layer have one name."""
    owner, _, name = module.rpartition(".")
    parts = owner.split(".")
    return f"experts.{name}" if "experts" in parts else f"shared_experts.{name}" if "shared_experts" in parts else name


def _formats(records: Sequence[GemmRecord]) -> str:
    """Return the formats of one module's GEMMs."""
    if records[0].scheme == "none":
        return records[0].left
    gemms = {record.gemm: f"{record.left} x {record.right}" for record in records}
    return f"{records[0].scheme}, " + ", ".join(f"{gemm} {gemms[gemm]}" for gemm in GEMMS if gemm in gemms)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantisationRow:
    """One operand of one layer at one step."""

    step: int
    layer: int
    """Number of the transformer layer in the whole model, from 1 on."""
    module: str
    operand: str
    """input, weight or grad_output."""
    format: str
    amax: float
    scale: float | None
    underflow: float
    saturated: float
    sqnr_db: float


class _ErrorObserver(Observer):
    """Measures one layer's operands, each once."""

    def __init__(self, step: int, where: tuple[int, str], rows: list[QuantisationRow]) -> None:
        self.step = step
        self.where = where
        self.rows = rows
        self.seen: set[str] = set()

    def quantised(self, source: torch.Tensor, operand: GemmOperand) -> None:
        """Measure an operand, if it is row-wise and the first of its role."""
        if operand.columnwise or operand.role in self.seen:
            return
        self.seen.add(operand.role)
        self.rows.append(_row(self.step, self.where, operand, quantisation_error(source, operand)))


def _row(step: int, where: tuple[int, str], operand: GemmOperand, found: QuantisationError) -> QuantisationRow:
    layer, module = where
    return QuantisationRow(
        step=step, layer=layer, module=module, operand=operand.role, format=operand.spec.format, **asdict(found)
    )


class Telemetry:
    """The measurements of a run."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        """Find the emulated layers of this rank's model chunks."""
        self.rows: list[QuantisationRow] = []
        self._layers: list[tuple[Any, tuple[int, str]]] = [
            (module, where) for module, where in global_layer_names(model).items() if isinstance(module, EmulatedLinear)
        ]

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Measure the operands that are quantised in a ``with`` block, and the stored weights as they are before it."""
        for layer, where in self._layers:
            layer.observer = _ErrorObserver(step, where, self.rows)
            if isinstance(layer.weight, StoredWeight):
                self._measure_stored(step, where, layer.weight)
        try:
            yield
        finally:
            for layer, _ in self._layers:
                layer.observer = None

    def _measure_stored(self, step: int, where: tuple[int, str], weight: StoredWeight) -> None:
        master = getattr(weight, "main_param", None)
        if master is None or master.numel() != weight.numel():
            return
        source = master.detach().view(weight.shape).to(weight.gathered_dtype)
        held = stored_operand(weight.stored, "weight")
        row = _row(step, where, held, quantisation_error(source, held))
        scale_inv = weight.stored.scale_inv
        scale = 1 / scale_inv.item() if weight.stored.spec.whole_tensor and scale_inv is not None else None
        self.rows.append(replace(row, amax=weight.stored.amax.item(), scale=scale))

    def of_all_stages(self) -> list[QuantisationRow]:
        """Return the rows of all pipeline stages in order; a collective call."""
        order = {"input": 0, "weight": 1, "grad_output": 2}
        rows = [row for part in gather_stages(self.rows) for row in part]
        return sorted(rows, key=lambda row: (row.step, row.layer, row.module, order[row.operand]))
