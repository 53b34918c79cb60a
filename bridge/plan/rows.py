"""The rows of one module: each GEMM and tensor, and the formats it is computed, scaled, kept and sent in."""

from dataclasses import dataclass, replace
from functools import lru_cache

from bridge.model.modules import Module
from bridge.plan.settings import Settings
from bridge.precision.copies import Copies, Copy, Pair, copies_of
from bridge.precision.schemes import GEMMS, OPERAND_FORMATS, WHOLE

OF_ROW = "column-wise of the row-wise copy"
"""The column-wise copy is made from the values of the row-wise one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One GEMM or one tensor of a module. An empty text means that the column does not apply."""

    item: str
    """fprop, dgrad, wgrad, qk, pv, forward, ... or input, weight, grad_output, output."""
    format: str = ""
    """Formats that are multiplied, or that the tensor is rounded to: "e4m3", "e5m2 x e4m3", "bf16", ...; of a tensor
    whose row-wise and column-wise copy differ "e4m3 / bf16"."""
    scale: str = ""
    """Elements that share one scale: tensor, or tiles of rows x columns, row-wise / column-wise copy; none: no scale.
    What else is done to the copies follows, as "hadamard"."""
    accumulate: str = ""
    """Accumulator of the products; "fp32 fast" is Hopper's short accumulator."""
    storage: str = ""
    """A weight between steps."""
    master: str = ""
    gradient: str = ""
    reduction: str = ""
    """Dtype that data-parallel ranks send each other."""
    checkpoint: str = ""


@lru_cache(maxsize=4096)
def module_rows(module: Module, settings: Settings, *, low: bool) -> tuple[PlanRow, ...]:
    """Return the rows of a module in a layer that is (`low`), or is not, in the scheme's context."""
    low = low and not module.is_high and not (module.is_absorbed and settings.absorbs)
    if module.is_fp32 and module.kind != "attention":
        settings = settings.in_fp32
    rows = _rows(module, settings, low=low)
    if not module.is_frozen:
        return rows
    kept = (row for row in rows if row.item != "wgrad")
    return tuple(replace(row, master="", gradient="", reduction="", checkpoint="") for row in kept)


def _rows(module: Module, settings: Settings, *, low: bool) -> tuple[PlanRow, ...]:
    if module.kind in ("linear", "adapter"):
        is_grouped = module.is_expert and settings.are_experts_grouped
        rows = _linear(
            settings,
            low=low and settings.family is not None,
            bias=module.bias,
            is_grouped=is_grouped,
        )
        return tuple(row for row in rows if row.item != "dgrad") if module.is_detached else rows
    if module.kind == "head":
        return _linear(settings, low=settings.output_layer, bias=False, is_head=True)
    if module.kind == "attention":
        kept = settings.in_fp32 if module.is_fp32 else settings
        offsets = tuple(_weight(kept, low=False, item=name) for name, _ in module.vectors)
        return _attention(settings, low=low and settings.attention) + offsets
    if module.kind == "router":
        return (
            *_gemms(settings.autocast or settings.router or settings.mode),
            _weight(settings, low=False),
        )
    if module.kind == "mixing" and module.outputs:
        return (*_gemms(settings.mode), _weight(settings, low=False))
    if module.kind == "embedding":
        return PlanRow(item="lookup", format=settings.mode), _weight(settings, low=False)
    dtype = settings.mode if module.kind == "norm" else settings.autocast or settings.mode
    forward = PlanRow(item="forward", format=dtype, accumulate="fp32")
    return (forward, _weight(settings, low=False)) if module.parameters else (forward,)


def _gemms(dtype: str) -> tuple[PlanRow, ...]:
    return tuple(PlanRow(item=gemm, format=dtype, accumulate=_wide(dtype)) for gemm in GEMMS)


def _linear(
    settings: Settings, *, low: bool, bias: bool, is_head: bool = False, is_grouped: bool = False
) -> tuple[PlanRow, ...]:
    is_stored_low = settings.low_parameters and low and not is_head
    weight = _weight(settings, low=is_stored_low, is_grouped=is_grouped)
    biases = (_weight(settings, low=False, item="bias"),) if bias else ()
    copies = settings.copies(is_grouped=is_grouped) if low else None
    if copies is None:
        dtype = settings.autocast or settings.mode
        return (*_gemms(dtype), PlanRow(item="output", format=dtype), weight, *biases)
    mode = settings.mode
    gemms = [_gemm(name, copies, mode) for name in GEMMS]
    operands = [
        PlanRow(item=name, format=_formats(copies.of(name), mode), scale=_scale(copies.of(name)))
        for name in ("input", "grad_output")
    ]
    rounded = replace(weight, format=_formats(copies.weight, mode), scale=_scale(copies.weight))
    return (*gemms, *operands, PlanRow(item="output", format=mode), rounded, *biases)


def _gemm(name: str, copies: Copies, mode: str) -> PlanRow:
    left, right = (copy.format or mode for copy in copies.read_by(name))
    accumulate = "fp32" if copies.is_split(name) else "fp32 fast"
    return PlanRow(
        item=name, format=left if left == right else f"{left} x {right}", accumulate=accumulate
    )


def _attention(settings: Settings, *, low: bool) -> tuple[PlanRow, ...]:
    dtype = settings.autocast or settings.mode
    forward, backward = (
        OPERAND_FORMATS.get(settings.format or "", ("e4m3", "e5m2")) if low else (dtype, dtype)
    )
    if low and settings.family == "fp4":
        forward, backward = "e4m3", "e4m3"
    scale = "tensor" if low else ""
    if low and settings.scheme == "mxfp8" and settings.row is not None:
        # Transformer Engine main of 2026-08-22 attention/dot_product_attention/utils.py get_attention_quantizers
        scale = _scale(copies_of(settings.row, settings.format or "").input)
    out = forward if low and settings.multi_head_attention else dtype
    mixed = backward if backward == forward else f"{backward} x {forward}"
    return (
        PlanRow(item="qk", format=forward, scale=scale, accumulate=_wide(dtype)),
        PlanRow(item="softmax", format="fp32"),
        PlanRow(item="pv", format=forward, scale=scale, accumulate=_wide(dtype)),
        PlanRow(item="backward", format=mixed, scale=scale, accumulate=_wide(dtype)),
        PlanRow(item="output", format=out),
    )


def _weight(
    settings: Settings, *, low: bool, item: str = "weight", is_grouped: bool = False
) -> PlanRow:
    mode = settings.mode
    master = "itself" if settings.master is None else settings.master
    if settings.remainders:
        master = "fp32 as 16-bit remainder"
    if settings.distributed and settings.master is not None:
        master += " (sharded)"
    if settings.offload_share and settings.master is not None:
        share = "" if settings.offload_share == 1 else f"{settings.offload_share:.0%} "
        master += f", {share}on the host"
    sent = (
        f"{settings.grad_sent}, summed in fp32" if settings.reduce_in_fp32 else settings.grad_sent
    )
    return PlanRow(
        item=item,
        format="" if item == "weight" else mode,
        storage=settings.stored_format(is_grouped=is_grouped) if low else mode,
        master=master,
        gradient=settings.grad_reduce,
        reduction=sent,
        checkpoint=mode if settings.master is None else f"{mode} + {settings.master} master",
    )


def _formats(pair: Pair, mode: str) -> str:
    """Return the format of a tensor's copies: "e4m3", or "e4m3 / bf16" for the row-wise and the column-wise copy."""
    row, column = pair.row.format or mode, pair.column.format or mode
    return row if row == column else f"{row} / {column}"


def _scale(pair: Pair) -> str:
    """Return the tile of a scale, and what else is done to the copies.

    The tile is "tensor", "128x128", or "1x32 / 32x1" for the row-wise and column-wise copies; empty without any scale.
    """
    if pair.row.scheme is None and pair.column.scheme is None:
        return ""
    row, column = _tile(pair.row), _tile(pair.column)
    details = [row if row == column else f"{row} / {column}"]
    if pair.column.hadamard:
        details.append("hadamard")
    if pair.row.stochastic or pair.column.stochastic:
        details.append("stochastic")
    if pair.row.is_row_scaled:
        details.append("a second scale per row")
    if pair.row.is_four_over_six:
        details.append("4over6")
    if pair.column.is_of_row:
        details.append(OF_ROW)
    return ", ".join(details)


def _tile(copy: Copy) -> str:
    if copy.scheme in (None, "custom"):
        return copy.scheme or "none"
    if copy.tile == WHOLE:
        return "tensor"
    rows, columns = copy.tile
    return f"{rows}x{columns}"


def _wide(dtype: str) -> str:
    return "fp64" if dtype == "fp64" else "fp32"
