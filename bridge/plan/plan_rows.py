"""`PlanRow`: a GEMM or tensor of a module, with the formats to compute, store and send it."""

from dataclasses import dataclass, replace
from functools import lru_cache

from bridge.model.modules import Module
from bridge.plan.plan_settings import PlanSettings
from bridge.precision.operand_copies import CopyPair, LayerCopies, OperandCopy, make_scheme_copies
from bridge.precision.schemes import GEMMS, OPERAND_FORMATS, WHOLE_TENSOR

COLUMN_FROM_ROW = "column-wise of the row-wise copy"
"""The column-wise copy is made from the values of the row-wise one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """A GEMM or a tensor of a module. An empty text means that the column does not apply."""

    item: str
    """fprop, dgrad, wgrad, qk, pv, forward, ... or input, weight, grad_output, output."""
    format: str = ""
    """Formats that are multiplied, or that the tensor is rounded to: "e4m3", "e5m2 x e4m3", ...

    A tensor whose row-wise and column-wise copies differ has "e4m3 / bf16".
    """
    scale: str = ""
    """The elements that share a scale: tensor, or tiles of rows x columns. "none": no scale.

    Two tiles belong to the row-wise and the column-wise copy. Further changes of the copies follow,
    such as "hadamard".
    """
    accumulate: str = ""
    """Accumulator of the products. "fp32 fast" is Hopper's short accumulator."""
    storage: str = ""
    """Format in which a weight is stored between steps."""
    master: str = ""
    gradient: str = ""
    reduction: str = ""
    """Dtype of the gradients that data-parallel ranks send to each other."""
    checkpoint: str = ""


@lru_cache(maxsize=4096)
def make_module_rows(module: Module, settings: PlanSettings, *, low: bool) -> tuple[PlanRow, ...]:
    """Return the rows of a module.

    Args:
        low: Whether the layer of the module is in the low-precision context.
    """
    low = low and not module.is_high_precision and not (module.is_absorbed and settings.absorbs)
    if module.is_fp32 and module.kind != "attention":
        settings = settings.in_fp32
    rows = _make_rows(module, settings, low=low)
    if not module.is_frozen:
        return rows
    frozen_rows = []
    for row in rows:
        if row.item != "wgrad":
            frozen_rows.append(replace(row, master="", gradient="", reduction="", checkpoint=""))
    return tuple(frozen_rows)


def _make_rows(module: Module, settings: PlanSettings, *, low: bool) -> tuple[PlanRow, ...]:
    """Return the rows of a trained module, by its kind."""
    kind = module.kind
    if kind in ("linear", "adapter"):
        return _make_linear_module_rows(module, settings, low=low)
    if kind == "head":
        return _make_linear_rows(settings, low=settings.output_layer, bias=False, is_head=True)
    if kind == "attention":
        of_vectors = settings.in_fp32 if module.is_fp32 else settings
        rows = list(_make_attention_rows(settings, low=low and settings.attention))
        for name, _ in module.vectors:
            rows.append(_make_weight_row(of_vectors, low=False, item=name))
        return tuple(rows)
    weight = _make_weight_row(settings, low=False)
    if kind == "router":
        dtype = settings.autocast or settings.router or settings.mode
        return (*_make_gemm_rows(dtype), weight)
    if kind == "mixing" and module.outputs:
        return (*_make_gemm_rows(settings.mode), weight)
    if kind == "embedding":
        return PlanRow(item="lookup", format=settings.mode), weight
    dtype = settings.mode
    if kind != "norm" and settings.autocast is not None:
        dtype = settings.autocast
    forward = PlanRow(item="forward", format=dtype, accumulate="fp32")
    if not module.parameters:
        return (forward,)
    return forward, weight


def _make_linear_module_rows(
    module: Module, settings: PlanSettings, *, low: bool
) -> tuple[PlanRow, ...]:
    """Return the rows of a linear layer of a transformer layer, or of an adapter."""
    rows = _make_linear_rows(
        settings,
        low=low and settings.family is not None,
        bias=module.bias,
        is_grouped=module.is_expert and settings.are_experts_grouped,
    )
    if module.is_detached:
        return tuple(row for row in rows if row.item != "dgrad")
    return rows


def _make_gemm_rows(dtype: str) -> tuple[PlanRow, ...]:
    return tuple(
        PlanRow(item=gemm, format=dtype, accumulate=_get_accumulator(dtype)) for gemm in GEMMS
    )


def _make_linear_rows(
    settings: PlanSettings,
    *,
    low: bool,
    bias: bool,
    is_head: bool = False,
    is_grouped: bool = False,
) -> tuple[PlanRow, ...]:
    is_stored_low = settings.low_parameters and low and not is_head
    weight = _make_weight_row(settings, low=is_stored_low, is_grouped=is_grouped)
    biases: tuple[PlanRow, ...] = ()
    if bias:
        biases = (_make_weight_row(settings, low=False, item="bias"),)
    copies = None
    if low:
        copies = settings.copies(is_grouped=is_grouped)
    if copies is None:
        dtype = settings.autocast or settings.mode
        return (*_make_gemm_rows(dtype), PlanRow(item="output", format=dtype), weight, *biases)
    mode = settings.mode
    gemms = [_make_gemm_row(name, copies, mode) for name in GEMMS]
    operands = []
    for name in ("input", "grad_output"):
        pair = copies.get_pair(name)
        operands.append(
            PlanRow(item=name, format=_format_copies(pair, mode), scale=_format_scale(pair))
        )
    output = PlanRow(item="output", format=mode)
    rounded = replace(
        weight, format=_format_copies(copies.weight, mode), scale=_format_scale(copies.weight)
    )
    return (*gemms, *operands, output, rounded, *biases)


def _make_gemm_row(name: str, copies: LayerCopies, mode: str) -> PlanRow:
    left_copy, right_copy = copies.get_gemm_operands(name)
    left = left_copy.format or mode
    right = right_copy.format or mode
    formats = left
    if left != right:
        formats = f"{left} x {right}"
    accumulate = "fp32" if copies.uses_split_accumulator(name) else "fp32 fast"
    return PlanRow(item=name, format=formats, accumulate=accumulate)


def _make_attention_rows(settings: PlanSettings, *, low: bool) -> tuple[PlanRow, ...]:
    """Return the rows of a core of attention. With `low` it runs in FP8."""
    dtype = settings.autocast or settings.mode
    forward = backward = output = dtype
    scale = ""
    if low:
        forward, backward = OPERAND_FORMATS.get(settings.format or "", ("e4m3", "e5m2"))
        if settings.family == "fp4":
            forward = backward = "e4m3"
        scale = "tensor"
        if settings.scheme == "mxfp8" and settings.scheme_row is not None:
            # Transformer Engine main of 2026-08-22 attention/dot_product_attention/utils.py
            # get_attention_quantizers
            scale = _format_scale(
                make_scheme_copies(settings.scheme_row, settings.format or "").input
            )
        if settings.multi_head_attention:
            output = forward
    mixed = backward
    if backward != forward:
        mixed = f"{backward} x {forward}"
    return (
        PlanRow(item="qk", format=forward, scale=scale, accumulate=_get_accumulator(dtype)),
        PlanRow(item="softmax", format="fp32"),
        PlanRow(item="pv", format=forward, scale=scale, accumulate=_get_accumulator(dtype)),
        PlanRow(item="backward", format=mixed, scale=scale, accumulate=_get_accumulator(dtype)),
        PlanRow(item="output", format=output),
    )


def _make_weight_row(
    settings: PlanSettings, *, low: bool, item: str = "weight", is_grouped: bool = False
) -> PlanRow:
    mode = settings.mode
    checkpoint = mode
    if settings.master is not None:
        checkpoint = f"{mode} + {settings.master} master"
    storage = mode
    if low:
        storage = settings.stored_format(is_grouped=is_grouped)
    format_ = mode
    if item == "weight":
        format_ = ""
    reduction = settings.grad_sent
    if settings.reduce_in_fp32:
        reduction += ", summed in fp32"
    return PlanRow(
        item=item,
        format=format_,
        storage=storage,
        master=_format_master(settings),
        gradient=settings.grad_reduce,
        reduction=reduction,
        checkpoint=checkpoint,
    )


def _format_master(settings: PlanSettings) -> str:
    """Return the dtype of a weight's master copy, and where the copy is."""
    master = settings.master
    if settings.remainders:
        master = "fp32 as 16-bit remainder"
    if master is None:
        return "itself"
    if settings.distributed:
        master += " (sharded)"
    if settings.offload_share:
        share = ""
        if settings.offload_share != 1:
            share = f"{settings.offload_share:.0%} "
        master += f", {share}on the host"
    return master


def _format_copies(pair: CopyPair, mode: str) -> str:
    """Return the format of a tensor's copies.

    It is "e4m3", or "e4m3 / bf16" if the row-wise and the column-wise copy differ.
    """
    row = pair.row.format or mode
    column = pair.column.format or mode
    return _format_both(row, column)


def _format_both(row: str, column: str) -> str:
    """Return the values of the row-wise and the column-wise copy, or a single value if equal."""
    if row == column:
        return row
    return f"{row} / {column}"


def _format_scale(pair: CopyPair) -> str:
    """Return the tile of a scale, and further changes of the copies.

    The tile is "tensor", "128x128", or "1x32 / 32x1" for the row-wise and column-wise copies. Empty
    if there is no scale.
    """
    rounded_to = _format_both(pair.row.rounded_to or "none", pair.column.rounded_to or "none")
    details = []
    if pair.row.scheme is not None or pair.column.scheme is not None:
        details.append(_format_both(_format_tile(pair.row), _format_tile(pair.column)))
    elif rounded_to == "none":
        return ""
    if rounded_to != "none":
        details.append(f"rounded to {rounded_to}")
    if pair.column.hadamard:
        details.append("hadamard")
    if pair.row.stochastic or pair.column.stochastic:
        details.append("stochastic")
    if pair.row.is_row_scaled:
        details.append("a second scale per row")
    if pair.row.is_four_over_six:
        details.append("4over6")
    if pair.column.is_from_rowwise:
        details.append(COLUMN_FROM_ROW)
    return ", ".join(details)


def _format_tile(copy: OperandCopy) -> str:
    if copy.scheme is None:
        return "none"
    if copy.scheme == "custom":
        return "custom"
    if copy.tile == WHOLE_TENSOR:
        return "tensor"
    rows, columns = copy.tile
    return f"{rows}x{columns}"


def _get_accumulator(dtype: str) -> str:
    return "fp64" if dtype == "fp64" else "fp32"
