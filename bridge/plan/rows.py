"""The rows of one module: each GEMM and tensor, and the formats it is computed, scaled, kept and sent in."""

from dataclasses import dataclass, replace
from functools import lru_cache

from bridge.model.modules import Module
from bridge.plan.settings import Settings
from bridge.precision.schemes import GEMMS, OPERAND_FORMATS, WHOLE, Operand


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One GEMM or one tensor of a module. An empty text means that the column does not apply."""

    item: str
    """fprop, dgrad, wgrad, qk, pv, forward, ... or input, weight, grad_output, output."""
    format: str = ""
    """Formats that are multiplied, or that the tensor is rounded to: "e4m3", "e5m2 x e4m3", "bf16", ..."""
    scale: str = ""
    """Elements that share one scale: tensor, or tiles of rows x columns, row-wise / column-wise copy."""
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
    rows = _rows(module, settings, low=low)
    if not module.is_frozen:
        return rows
    kept = (row for row in rows if row.item != "wgrad")
    return tuple(replace(row, master="", gradient="", reduction="", checkpoint="") for row in kept)


def _rows(module: Module, settings: Settings, *, low: bool) -> tuple[PlanRow, ...]:
    if module.kind in ("linear", "adapter"):
        rows = _linear(settings, low=low and settings.family is not None, bias=module.bias)
        return tuple(row for row in rows if row.item != "dgrad") if module.is_detached else rows
    if module.kind == "head":
        return _linear(settings, low=settings.output_layer, bias=False, is_head=True)
    if module.kind == "attention":
        offsets = tuple(_weight(settings, low=False, item=name) for name, _ in module.vectors)
        return _attention(settings, low=low and settings.attention) + offsets
    if module.kind == "router":
        return (*_gemms(settings.autocast or settings.router or settings.mode), _weight(settings, low=False))
    if module.kind == "embedding":
        return PlanRow(item="lookup", format=settings.mode), _weight(settings, low=False)
    dtype = settings.mode if module.kind == "norm" else settings.autocast or settings.mode
    forward = PlanRow(item="forward", format=dtype, accumulate="fp32")
    return (forward, _weight(settings, low=False)) if module.parameters else (forward,)


def _gemms(dtype: str) -> tuple[PlanRow, ...]:
    return tuple(PlanRow(item=gemm, format=dtype, accumulate=_wide(dtype)) for gemm in GEMMS)


def _linear(settings: Settings, *, low: bool, bias: bool, is_head: bool = False) -> tuple[PlanRow, ...]:
    weight = _weight(settings, low=settings.low_parameters and low and not is_head)
    biases = (_weight(settings, low=False, item="bias"),) if bias else ()
    if not low:
        dtype = settings.autocast or settings.mode
        return (*_gemms(dtype), PlanRow(item="output", format=dtype), weight, *biases)
    forward, backward = settings.operand_formats
    of = {"input": forward, "weight": forward, "grad_output": backward}
    scheme = settings.row
    split = (scheme.split_accumulator if scheme is not None else None) or (True, True, True)
    tiles = {operand.name: _tile(operand) for operand in scheme.operands} if scheme is not None else {}
    gemms = tuple(
        PlanRow(
            item=gemm.name,
            format=of[gemm.left] if of[gemm.left] == of[gemm.right] else f"{of[gemm.left]} x {of[gemm.right]}",
            accumulate="fp32" if is_split else "fp32 fast",
        )
        for gemm, is_split in zip(GEMMS.values(), split, strict=True)
    )
    operands = tuple(
        PlanRow(item=name, format=of[name], scale=tiles.get(name, "custom")) for name in ("input", "grad_output")
    )
    rounded = replace(weight, format=of["weight"], scale=tiles.get("weight", "custom"))
    return (*gemms, *operands, PlanRow(item="output", format=settings.mode), rounded, *biases)


def _attention(settings: Settings, *, low: bool) -> tuple[PlanRow, ...]:
    dtype = settings.autocast or settings.mode
    forward, backward = OPERAND_FORMATS.get(settings.format or "", ("e4m3", "e5m2")) if low else (dtype, dtype)
    if low and settings.family == "fp4":
        forward, backward = "e4m3", "e4m3"
    scale = "tensor" if low else ""
    if low and settings.scheme == "mxfp8" and settings.row is not None:
        # Transformer Engine main of 2026-08-22 attention/dot_product_attention/utils.py get_attention_quantizers
        scale = _tile(settings.row.operand("input"))
    out = forward if low and settings.multi_head_attention else dtype
    mixed = backward if backward == forward else f"{backward} x {forward}"
    return (
        PlanRow(item="qk", format=forward, scale=scale, accumulate=_wide(dtype)),
        PlanRow(item="softmax", format="fp32"),
        PlanRow(item="pv", format=forward, scale=scale, accumulate=_wide(dtype)),
        PlanRow(item="backward", format=mixed, scale=scale, accumulate=_wide(dtype)),
        PlanRow(item="output", format=out),
    )


def _weight(settings: Settings, *, low: bool, item: str = "weight") -> PlanRow:
    mode = settings.mode
    master = "itself" if settings.master is None else settings.master
    if settings.remainders:
        master = "fp32 as 16-bit remainder"
    if settings.distributed and settings.master is not None:
        master += " (sharded)"
    if settings.offload_share and settings.master is not None:
        share = "" if settings.offload_share == 1 else f"{settings.offload_share:.0%} "
        master += f", {share}on the host"
    sent = f"{settings.grad_sent}, summed in fp32" if settings.reduce_in_fp32 else settings.grad_sent
    return PlanRow(
        item=item,
        format="" if item == "weight" else mode,
        storage=settings.operand_formats[0] if low else mode,
        master=master,
        gradient=settings.grad_reduce,
        reduction=sent,
        checkpoint=mode if settings.master is None else f"{mode} + {settings.master} master",
    )


def _tile(operand: Operand) -> str:
    """Return the tile of a scale: "tensor", "128x128", or "1x32 / 32x1" for the row-wise and column-wise copies."""
    if operand.row == WHOLE:
        return "tensor"
    row, column = (f"{rows}x{columns}" for rows, columns in (operand.row, operand.column))
    text = row if row == column else f"{row} / {column}"
    return text + (", hadamard" if operand.hadamard else "") + (", stochastic" if operand.stochastic else "")


def _wide(dtype: str) -> str:
    return "fp64" if dtype == "fp64" else "fp32"
