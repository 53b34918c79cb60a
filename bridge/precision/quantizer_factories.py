"""The quantizer factories that Transformer Engine ships, as rows: the copies of the operands.

    ZOO = "transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo"
    factory = shipped_factory(f"{ZOO}.mxfp8_fwd_nvfp4_bwd_factory")
    factory.copies(is_grouped=False).scheme_of("dgrad")        # "nvfp4"

`fp8_quantizer_factory`, `fp4_quantizer_factory` and `custom_recipe_factory` of a per-module file
hold the import path of a factory. A factory is code. The quantizers that another factory makes are
not known before the run.

Source: Transformer Engine 2.20.2 pytorch/custom_recipes/quantizer_factories.py,
quantizer_factory_zoo.py, reference_current_scaling.py and reference_nvfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from bridge.precision.operand_copies import (
    HIGH_PRECISION_COPY,
    CopyPair,
    LayerCopies,
    OperandCopy,
    make_scheme_copies,
)
from bridge.precision.schemes import find_scheme

FACTORY_PACKAGE = "transformer_engine.pytorch.custom_recipes"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizerFactory:
    """One row: a function of Transformer Engine that makes quantizers."""

    name: str
    module: str
    linear: LayerCopies
    """The copies of a linear layer, and of an expert that is a separate layer."""
    grouped: LayerCopies | None = None
    """The copies of experts in one grouped layer. None: as `linear`."""
    quantises_attention: bool = False
    """Whether the factory has quantizers for attention, which need `CustomRecipe(fp8_dpa=True)`."""

    @property
    def path(self) -> str:
        """Its import path."""
        return f"{FACTORY_PACKAGE}.{self.module}.{self.name}"

    def copies(self, *, is_grouped: bool) -> LayerCopies:
        """Return the copies of a linear layer, or of a grouped layer."""
        if is_grouped and self.grouped is not None:
            return self.grouped
        return self.linear


def _make_copies(name: str, format_: str) -> LayerCopies:
    row = find_scheme(name)
    if row is None:
        raise LookupError(name)
    return make_scheme_copies(row, format_)


_HIGH_PRECISION_PAIR = CopyPair(row=HIGH_PRECISION_COPY, column=HIGH_PRECISION_COPY)
_MXFP8 = _make_copies("mxfp8", "e4m3")
_NVFP4 = _make_copies("nvfp4", "e2m1")
_ROW_OF_NVFP4 = OperandCopy(scheme="nvfp4", format="e2m1", tile=(1, 16))
"""NVFP4 without Hadamard transform, stochastic rounding and square tiles."""
_COLUMN_OF_NVFP4 = replace(_ROW_OF_NVFP4, tile=(16, 1), is_from_rowwise=True)
_ROW_SCALED = replace(_ROW_OF_NVFP4, is_row_scaled=True)
_DEQUANTISED = OperandCopy(is_from_rowwise=True)
_ZOO, _FACTORIES = "quantizer_factory_zoo", "quantizer_factories"


def _derive_from_rowwise(copy: OperandCopy) -> OperandCopy:
    """Return a copy that is made from the values of the row-wise copy."""
    return replace(copy, is_from_rowwise=True)


_NVFP4_REFERENCE = replace(
    _NVFP4,
    grad_output=CopyPair(
        row=replace(_NVFP4.grad_output.row, stochastic=False),
        column=replace(_NVFP4.grad_output.column, stochastic=False),
    ),
)

_ROWS = (
    QuantizerFactory(
        name="high_precision_factory",
        module=_FACTORIES,
        linear=LayerCopies(
            input=_HIGH_PRECISION_PAIR,
            weight=_HIGH_PRECISION_PAIR,
            grad_output=_HIGH_PRECISION_PAIR,
        ),
    ),
    QuantizerFactory(
        name="delayed_scaling_factory", module=_FACTORIES, linear=_make_copies("delayed", "hybrid")
    ),
    QuantizerFactory(
        name="current_scaling_factory",
        module=_FACTORIES,
        linear=_make_copies("tensorwise", "hybrid"),
    ),
    QuantizerFactory(
        name="float8_block_scaling_factory",
        module=_FACTORIES,
        linear=_make_copies("blockwise", "e4m3"),
    ),
    QuantizerFactory(name="mxfp8_factory", module=_FACTORIES, linear=_MXFP8),
    QuantizerFactory(name="nvfp4_factory", module=_FACTORIES, linear=_NVFP4),
    QuantizerFactory(
        name="high_precision_fwd_mxfp8_bwd_factory",
        module=_ZOO,
        linear=LayerCopies(
            input=CopyPair(row=HIGH_PRECISION_COPY, column=_MXFP8.input.column),
            weight=CopyPair(row=HIGH_PRECISION_COPY, column=_MXFP8.weight.column),
            grad_output=_MXFP8.grad_output,
        ),
    ),
    QuantizerFactory(
        name="mxfp8_fwd_nvfp4_bwd_factory",
        module=_ZOO,
        linear=LayerCopies(
            input=CopyPair(row=_MXFP8.input.row, column=_NVFP4.input.column),
            weight=CopyPair(row=_MXFP8.weight.row, column=_COLUMN_OF_NVFP4),
            grad_output=_NVFP4.grad_output,
        ),
    ),
    QuantizerFactory(
        name="nvfp4_1d_weight_factory",
        module=_ZOO,
        linear=replace(_NVFP4, weight=CopyPair(row=_ROW_OF_NVFP4, column=_COLUMN_OF_NVFP4)),
    ),
    QuantizerFactory(
        name="mxfp8_fwd_high_precision_bwd_factory",
        module=_ZOO,
        linear=LayerCopies(
            input=CopyPair(row=_MXFP8.input.row, column=_DEQUANTISED),
            weight=CopyPair(row=_MXFP8.weight.row, column=_DEQUANTISED),
            grad_output=_HIGH_PRECISION_PAIR,
        ),
    ),
    QuantizerFactory(
        name="nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
        module=_ZOO,
        linear=_MXFP8,
        grouped=LayerCopies(
            input=CopyPair(row=_ROW_SCALED, column=_derive_from_rowwise(_MXFP8.input.column)),
            weight=CopyPair(row=_ROW_OF_NVFP4, column=_derive_from_rowwise(_MXFP8.weight.column)),
            grad_output=_MXFP8.grad_output,
        ),
    ),
    QuantizerFactory(
        name="nvfp4_row_scaled_fwd_high_precision_bwd_factory",
        module=_ZOO,
        linear=LayerCopies(
            input=CopyPair(row=_ROW_SCALED, column=_DEQUANTISED),
            weight=CopyPair(row=_ROW_OF_NVFP4, column=_DEQUANTISED),
            grad_output=_HIGH_PRECISION_PAIR,
        ),
    ),
    QuantizerFactory(
        name="nvfp4_linear_fp8_dpa_factory", module=_ZOO, linear=_NVFP4, quantises_attention=True
    ),
    QuantizerFactory(
        name="current_scaling_ref_factory",
        module="reference_current_scaling",
        linear=_make_copies("tensorwise", "hybrid"),
    ),
    QuantizerFactory(
        name="nvfp4_ref_rht_2d_factory", module="reference_nvfp4", linear=_NVFP4_REFERENCE
    ),
)

SHIPPED_FACTORIES: Mapping[str, QuantizerFactory] = MappingProxyType(
    {row.path: row for row in _ROWS}
)
"""Import path -> its row."""


def find_shipped_factory(path: str | None) -> QuantizerFactory | None:
    """Return the row of a factory, or None if Transformer Engine does not ship the factory.

    Args:
        path: The import path of the factory. None: no factory.
    """
    return SHIPPED_FACTORIES.get(path or "")
