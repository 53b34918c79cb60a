"""The record: one row per GEMM and per kind of tensor, with the formats that a run really had.

Rows hold text alone, so that two records can be compared, saved as JSON and sent between ranks. An
empty text means that the source cannot see the column: a comparison skips it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bridge.errors import RunConfigError
from bridge.precision.schemes import WHOLE_TENSOR, Tile

RECORD_FILE = "record.json"
"""Name of the file in a run's folder."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class GemmRow:
    """One GEMM of one linear layer.

    Equal rows of several experts, micro-batches or ranks are one.
    """

    layer: str
    """Label of the plan: the layer's number in the whole model from 1, "mtp 1" or "output".

    Empty outside Megatron.
    """
    module: str
    """Name in the layer as in the plan, for example ``linear_fc1`` or ``experts.linear_fc1``.

    Elsewhere the whole path.
    """
    gemm: str
    """fprop, dgrad or wgrad."""
    left: str
    """Format of the operand with the result's first axis: e4m3, e5m2, e2m1, bf16, ..."""
    right: str
    """Format of the operand with the result's last axis."""
    scheme: str = "none"
    """Scaling scheme, "none" in high precision."""
    left_tile: str = ""
    """Elements of the left operand that share a scale: "tensor" or rows x columns."""
    right_tile: str = ""
    output: str = ""
    """Dtype of the result."""
    accumulate: str = ""
    """Accumulator of the products: fp32, or "fp32 fast" for Hopper's short accumulator."""
    storage: str = ""
    """Format of the weight's parameter."""
    by: str = ""
    """Class of the module."""
    context: str = ""
    """Recipe of Transformer Engine's autocast around the module's forward pass.

    "off": there is no autocast around it.
    """

    @property
    def formats(self) -> str:
        """The formats that were multiplied, as the plan writes them, with the scheme."""
        formats = f"{self.left} x {self.right}"
        if self.scheme != "none":
            return f"{formats} ({self.scheme})"
        if self.left == self.right:
            return self.left
        return formats


@dataclass(frozen=True, kw_only=True, slots=True)
class CensusRow:
    """One kind of tensor in one dtype, on this rank."""

    kind: str
    """A kind of tensor.

    parameters, activations, sent between stages, gradients, gradient reduction, master weights,
    optimizer state.
    """
    dtype: str
    """Torch's name without ``torch.``, or format and scheme of stored weights."""
    bytes: int
    """Size on this rank.

    For activations, of the outputs of all linear layers in one micro-batch.
    """
    read_from: str
    """Source of the dtype."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class HealthRow:
    """The error of the result of one low-precision module, and the age of its weight."""

    layer: str
    module: str
    error: float
    """Relative error of the first fprop GEMM.

    It is compared with FP32 on the operands before they were quantised.
    """
    limit: float
    """Largest error that the format should have."""
    is_fresh: bool = True
    """The weight's operand is the quantisation of the weight as it was in this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Everything that was recorded in one step."""

    gemms: tuple[GemmRow, ...]
    health: tuple[HealthRow, ...] = ()
    census: tuple[CensusRow, ...] = ()
    """Tensors of one rank."""
    backend: str = ""
    """te, te_cpu, emulated, or local for a run in high precision."""
    step: int | None = None
    audit: tuple[str, ...] = ()
    """Mismatches with the plan, as sentences."""

    def write(self, path: Path) -> None:
        """Write the record as JSON, a line per row."""
        rows: dict[str, tuple[Any, ...]] = {
            "gemms": self.gemms,
            "census": self.census,
            "health": self.health,
        }
        head = {"version": 1, "backend": self.backend, "step": self.step, "audit": self.audit}
        parts = []
        for name, value in head.items():
            parts.append(f"  {json.dumps(name)}: {json.dumps(value)}")
        for name, of_kind in rows.items():
            lines = []
            for row in of_kind:
                lines.append(f"    {json.dumps(_drop_empty_columns(row))}")
            if lines:
                text = ",\n".join(lines)
                parts.append(f'  "{name}": [\n{text}\n  ]')
            else:
                parts.append(f'  "{name}": []')
        scratch = path.with_suffix(".tmp")  # `watch` reads the file while the run goes on
        scratch.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the record of a file."""
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is no regular file")  # noqa: TRY301  one that could block for ever
            content = json.loads(path.read_text(encoding="utf-8"))
            gemms, census, health = [], [], []
            for row in content["gemms"]:
                gemms.append(GemmRow(**_require_text_columns(row)))
            for row in content["census"]:
                census.append(CensusRow(**row))
            for row in content["health"]:
                health.append(HealthRow(**row))
            return cls(
                gemms=tuple(gemms),
                census=tuple(census),
                health=tuple(health),
                backend=str(content["backend"]),
                step=content["step"],
                audit=tuple(content["audit"]),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            rule = f"must be a record of a run ({error})"
            remedy = "Give the record.json of a run of this version."
            raise RunConfigError.of("record", rule, str(path), remedy) from None


def _drop_empty_columns(row: Any) -> dict[str, Any]:
    """Return the columns of a row, without empty texts."""
    return {column: value for column, value in asdict(row).items() if value != ""}


def _require_text_columns(row: dict[str, Any]) -> dict[str, str]:
    """Return a row's columns, which have to be texts; 0.1.0 wrote further ones."""
    columns = {}
    for field in fields(GemmRow):
        if field.name not in row:
            continue
        value = row[field.name]
        if not isinstance(value, str):
            raise ValueError(f"{field.name} is no text column of a row")  # noqa: TRY004  read() expects it
        columns[field.name] = value
    return columns


def format_tile(tile: Tile, *, hadamard: bool = False, stochastic: bool = False) -> str:
    """Return the tile of one copy as the plan writes it: "tensor", "16x1, hadamard, stochastic"."""
    text = f"{tile[0]}x{tile[1]}"
    if tile == WHOLE_TENSOR:
        text = "tensor"
    if hadamard:
        text += ", hadamard"
    if stochastic:
        text += ", stochastic"
    return text


def make_layer_sort_key(label: str) -> tuple[float, str]:
    """Return a key that sorts labels of layers: numbers, prediction layers, the output."""
    if label.isdecimal():
        return float(label), ""
    return math.inf, f"{not label.startswith('mtp'):d} {label}"


def merge_gemm_rows(rows: Iterable[GemmRow]) -> tuple[GemmRow, ...]:
    """Return the different rows, in the order of layers."""
    return tuple(sorted({*rows}, key=lambda row: (make_layer_sort_key(row.layer), row)))
