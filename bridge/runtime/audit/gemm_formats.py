"""Functions that write the formats of recorded GEMMs as text, for a model, a layer or a module."""

from collections.abc import Sequence

from bridge.plan.precision_plan import format_ranges
from bridge.precision.schemes import GEMMS
from bridge.runtime.audit.mismatch import count_layer_numbers, format_layer_noun
from bridge.runtime.audit.record import GemmRow

HIGH_PRECISION_FORMATS = frozenset({"bf16", "fp16", "fp32", "fp64"})
"""Formats of layers in high precision."""


def format_gemms(rows: Sequence[GemmRow]) -> str:
    """Return the formats of all GEMMs. Layers with the same formats are listed together.

    For example ``layers 2-5: ...; layers 1, 6, output: bf16``. The text is empty without rows.
    """
    rows_of: dict[str, list[GemmRow]] = {}
    for row in rows:
        rows_of.setdefault(row.layer, []).append(row)
    layers_of: dict[str, list[str]] = {}
    for layer, layer_rows in rows_of.items():
        layers_of.setdefault(_format_layer_gemms(layer_rows), []).append(layer)
    parts = []
    for formats, layers in layers_of.items():
        label = format_ranges(layers, limit=len(layers))
        count = count_layer_numbers(layers)
        if count:
            label = f"{format_layer_noun(count)} {label}"
        if label:
            parts.append(f"{label}: {formats}")
        else:
            parts.append(formats)
    return "; ".join(parts)


def _format_layer_gemms(rows: Sequence[GemmRow]) -> str:
    """Return the formats of a layer. Modules are named if they differ or are in low precision."""
    rows_of: dict[str, list[GemmRow]] = {}
    for row in rows:
        rows_of.setdefault(row.module, []).append(row)
    modules_of: dict[str, list[str]] = {}
    for module, module_rows in rows_of.items():
        modules_of.setdefault(_format_module_gemms(module_rows), []).append(module)
    if len(modules_of) == 1 and set(modules_of) <= HIGH_PRECISION_FORMATS:
        return "".join(modules_of)
    parts = []
    for formats, modules in modules_of.items():
        parts.append(f"{formats} ({', '.join(sorted(modules))})")
    return " and ".join(parts)


def _format_module_gemms(rows: Sequence[GemmRow]) -> str:
    """Return the formats of a module. In low precision each GEMM is named."""
    schemes: dict[str, None] = {}
    formats: dict[str, None] = {}
    operands_of: dict[str, list[str]] = {}
    for row in rows:
        schemes[row.scheme] = None
        formats[row.formats] = None
        operands_of.setdefault(row.gemm, []).append(f"{row.left} x {row.right}")
    schemes.pop("none", None)
    if not schemes:
        return " and ".join(formats)
    parts = [" and ".join(schemes)]
    for gemm in GEMMS:
        if gemm in operands_of:
            parts.append(f"{gemm} {' and '.join(operands_of[gemm])}")
    return ", ".join(parts)


def format_recorded_tiles(row: GemmRow) -> str:
    """Return the tiles of a GEMM's operands; empty if an operand has no tile."""
    if not (row.left_tile and row.right_tile):
        return ""
    return f"{row.left_tile} and {row.right_tile}"
