"""`Record`: one row per GEMM and per kind of tensor, with the formats that a run really had.

Rows have only text and numbers, so that two records can be compared, saved as JSON and sent between
ranks. An empty text means that the source of the row cannot see the column. A comparison skips such
a column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.module_paths import is_mtp_label
from bridge.precision.schemes import WHOLE_TENSOR, Tile

RECORD_FILE = "record.json"
"""Name of the file in a run's folder."""
RECORD_VERSION = 1
"""Version of the file's form."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class GemmRow:
    """One GEMM of one linear layer.

    Equal rows of several experts, micro-batches or ranks are merged into one row.
    """

    layer: str
    """Label of the plan: the layer's number in the whole model from 1, "mtp 1" or "output".

    It is empty for a model without Megatron's layers.
    """
    module: str
    """Name in the layer as in the plan, for example ``linear_fc1`` or ``experts.linear_fc1``.

    For a module outside of Megatron's layers it is the whole path.
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
    """Elements of the right operand that share a scale."""
    output: str = ""
    """Dtype of the result."""
    accumulate: str = ""
    """Accumulator of the products: fp32, or "fp32 fast" for Hopper's short accumulator."""
    storage: str = ""
    """Format of the weight's parameter."""
    by: str = ""
    """Class of the module."""
    context: str = ""
    """Scheme of Transformer Engine's autocast around the module's forward pass.

    It is "off" for a module of Transformer Engine outside of an autocast.
    """

    @property
    def formats(self) -> str:
        """The multiplied formats and the scheme, as the plan writes them."""
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
    """The kind of tensor: parameters, activations, sent between stages, gradients, gradient
    reduction, master weights or optimizer state.
    """
    dtype: str
    """Torch's name without ``torch.``, or format and scheme of stored weights."""
    bytes: int
    """Size on this rank.

    For activations it is the size of the outputs of all linear layers in one micro-batch.
    """
    read_from: str
    """A description of the object from which the dtype was read."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class HealthRow:
    """The error of the result of one low-precision module, and the age of its weight."""

    layer: str
    module: str
    error: float
    """Relative error of the result of the first fprop GEMM.

    The reference is the FP32 product of the operands before quantisation.
    """
    limit: float
    """Largest error of a healthy GEMM in the format."""
    is_fresh: bool = True
    """Whether the GEMM multiplied the weight of this step. False: the weight of an earlier step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The rows that were recorded in one step."""

    gemms: tuple[GemmRow, ...]
    """GEMMs of all ranks."""
    health: tuple[HealthRow, ...] = ()
    census: tuple[CensusRow, ...] = ()
    """Tensors of one rank."""
    backend: str = ""
    """te, te_cpu, emulated, or local for a run in high precision."""
    step: int | None = None
    """Number of the step. None: a step that was recorded outside of a run."""
    audit: tuple[str, ...] = ()
    """Mismatches with the plan, as sentences."""

    def write(self, path: Path) -> None:
        """Write the record as JSON, a line per row.

        The file is renamed into place when it is complete: `watch` reads it while the run goes on.
        """
        head = {
            "version": RECORD_VERSION,
            "backend": self.backend,
            "step": self.step,
            "audit": self.audit,
        }
        parts = []
        for name, value in head.items():
            parts.append(f"  {json.dumps(name)}: {json.dumps(value)}")
        parts.append(_format_table("gemms", self.gemms))
        parts.append(_format_table("census", self.census))
        parts.append(_format_table("health", self.health))
        scratch = path.with_suffix(".tmp")
        scratch.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the record of a file.

        Raises:
            RunConfigError: The file cannot be read, or is not a record.
        """
        try:
            if path.exists() and not path.is_file():  # a pipe or a device could block for ever
                raise ValueError("it is no regular file")  # noqa: TRY301  reported below
            return cls._from_content(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror
            rule = f"must be a record of a run ({reason})"
            remedy = "Give the record.json of a run of this version."
            raise RunConfigError.of("record", rule, str(path), remedy) from None

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> Record:
        """Return the record of the content of its file.

        Raises:
            ValueError, KeyError, TypeError: The content is not a record.
        """
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


def _format_table(name: str, rows: Iterable[Any]) -> str:
    """Return rows as an entry of a JSON object, each on a separate line without its empty texts."""
    lines = []
    for row in rows:
        columns = {column: value for column, value in asdict(row).items() if value != ""}
        lines.append(f"    {json.dumps(columns)}")
    if not lines:
        return f'  "{name}": []'
    joined = ",\n".join(lines)
    return f'  "{name}": [\n{joined}\n  ]'


def _require_text_columns(row: dict[str, Any]) -> dict[str, str]:
    """Return the columns of a `GemmRow` that a row of a file has.

    Other columns are ignored, because release 0.1.0 wrote more columns.

    Raises:
        ValueError: A column is not text.
    """
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
    """Return the tile of one copy as the plan writes it: "tensor" or "16x1, hadamard, stochastic"."""
    text = f"{tile[0]}x{tile[1]}"
    if tile == WHOLE_TENSOR:
        text = "tensor"
    if hadamard:
        text += ", hadamard"
    if stochastic:
        text += ", stochastic"
    return text


def make_layer_sort_key(label: str) -> tuple[float, str]:
    """Return a key that sorts labels of layers: numbers, prediction layers, other labels."""
    if label.isdecimal():
        return float(label), ""
    group = 1
    if is_mtp_label(label):
        group = 0
    return math.inf, f"{group} {label}"


def merge_gemm_rows(rows: Iterable[GemmRow]) -> tuple[GemmRow, ...]:
    """Return the rows without repetition, in the order of layers."""
    return tuple(sorted({*rows}, key=lambda row: (make_layer_sort_key(row.layer), row)))
