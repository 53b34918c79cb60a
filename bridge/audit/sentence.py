"""The formats of a record's GEMMs in one sentence."""

from collections.abc import Sequence

from bridge.audit.record import GemmRow
from bridge.plan.precision_plan import compact
from bridge.precision.schemes import GEMMS

HIGH = frozenset({"bf16", "fp16", "fp32", "fp64"})
"""Formats of layers in high precision."""


def format_gemms(rows: Sequence[GemmRow]) -> str:
    """Return the formats of each layer's GEMMs, ``layers 2-5: ...; layers 1, 6, output: bf16`` say."""
    by_kind: dict[str, list[str]] = {}
    for layer in dict.fromkeys(row.layer for row in rows):
        by_kind.setdefault(_kind([row for row in rows if row.layer == layer]), []).append(layer)
    parts = []
    for kind, layers in by_kind.items():
        count = sum(layer.isdecimal() for layer in layers)
        word = f"layer{'s' * (count > 1)} " if count else ""
        where = word + compact(layers, limit=len(layers))
        parts.append(f"{where}: {kind}" if where else kind)
    return "; ".join(parts)


def _kind(rows: Sequence[GemmRow]) -> str:
    modules: dict[str, list[str]] = {}
    for module in dict.fromkeys(row.module for row in rows):
        modules.setdefault(_formats([row for row in rows if row.module == module]), []).append(module)
    if set(modules) <= HIGH and len(modules) == 1:
        return next(iter(modules))
    return " and ".join(f"{formats} ({', '.join(sorted(names))})" for formats, names in modules.items())


def _formats(rows: Sequence[GemmRow]) -> str:
    if {row.scheme for row in rows} == {"none"}:
        return " and ".join(dict.fromkeys(row.formats for row in rows))
    gemms: dict[str, list[str]] = {}
    for row in rows:
        gemms.setdefault(row.gemm, []).append(f"{row.left} x {row.right}")
    schemes = " and ".join(dict.fromkeys(row.scheme for row in rows))
    return f"{schemes}, " + ", ".join(f"{gemm} {' and '.join(gemms[gemm])}" for gemm in GEMMS if gemm in gemms)
