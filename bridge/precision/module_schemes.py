"""The scaling scheme of each linear layer of a model, as rows of `modules` and `first_last_layers_bf16` decide.

    schemes = ModuleSchemes.of(config, num_layers=32)
    schemes.chosen(0, "mlp.linear_fc2")        # Chosen("mxfp8", "e4m3"); None: the dtype of the run

Systems outside of Megatron that choose modules by a function or a list of names follow it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from bridge.errors import WrongValueError
from bridge.precision.config import PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.modules import ModuleRow, module_rows


class Chosen(NamedTuple):
    """A scaling scheme and its format."""

    scheme: str
    format: str


@dataclass(frozen=True, kw_only=True)
class ModuleSchemes:
    """The rows of a precision, its scheme, and the layers that it keeps in the dtype of the run."""

    rows: tuple[ModuleRow, ...]
    run: Chosen | None
    """The scheme of the run; None: neither FP8 nor FP4."""
    num_layers: int | None
    kept: tuple[int, int]
    """Layers at either end that `first_last_layers_bf16` keeps."""

    @classmethod
    def of(cls, config: PrecisionConfig, num_layers: int | None = None) -> ModuleSchemes:
        """Return the schemes of a precision; WrongValueError where layers are not known, or not there."""
        rows = module_rows(config.reading("modules"))
        kept = (0, 0)
        if config.scheme is not None and config.reading("first_last_layers_bf16"):
            start, end = (config.reading(name) if config.is_stated(name) else 1 for name in LAYER_COUNTS)
            kept = (start, end)
        numbers = [number for row in rows for number in row.layer_numbers]
        if num_layers is None and (any(kept) or numbers):
            rule = "the precision chooses single layers, so the number of layers must be known"
            raise WrongValueError(rule, None, "Give the number of the model's layers.")
        if num_layers is not None and (type(num_layers) is not int or num_layers < 1):
            raise WrongValueError("the number of layers must be a whole number from 1", num_layers, "Correct it.")
        beyond = [number for row in rows for number in row.layers_beyond(num_layers)] if num_layers is not None else []
        if beyond:
            raise WrongValueError(f"rows name layer {beyond[0]}", num_layers, "Correct the rows or the number.")
        return cls(rows=rows, run=cls.of_run(config), num_layers=num_layers, kept=kept)

    @staticmethod
    def of_run(config: PrecisionConfig) -> Chosen | None:
        """Return the scheme of the run; None: neither FP8 nor FP4."""
        return Chosen(config.scheme, str(config.fp8 or config.fp4)) if config.scheme is not None else None

    @property
    def chooses(self) -> bool:
        """Whether some linear layer may differ from others."""
        return bool(self.rows) or any(self.kept)

    def chosen(self, layer: int, name: str) -> Chosen | None:
        """Return the scheme of a linear layer by its number from 0 and Megatron's name; None: the dtype of the run."""
        row = self.row_of(layer, name)
        is_kept = self.num_layers is not None and not self.kept[0] <= layer < self.num_layers - self.kept[1]
        if is_kept and (row is None or not row.names_layers):
            return None
        return self.run if row is None else self.of_row(row)

    def of_row(self, row: ModuleRow) -> Chosen | None:
        """Return the scheme of a row; None: the dtype of the run."""
        scheme = row.precision.scheme
        return Chosen(scheme, row.precision.format_in(self.run.format if self.run else None)) if scheme else None

    def row_of(self, layer: int, name: str) -> ModuleRow | None:
        """Return the row that decides for a linear layer, None for none."""
        path = f"decoder.layers.{layer}.{name}"
        return next((row for row in self.rows if _takes(row, path, self.num_layers)), None)

    def empty(self, modules: Iterable[tuple[int, str]]) -> tuple[ModuleRow, ...]:
        """Return the rows that select none of some linear layers, each by layer and name."""
        paths = [f"decoder.layers.{layer}.{name}" for layer, name in modules]
        return tuple(row for row in self.rows if not any(_takes(row, path, self.num_layers) for path in paths))


def _takes(row: ModuleRow, path: str, num_layers: int | None) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in row.patterns(num_layers or 0))
