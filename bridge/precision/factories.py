"""The quantizer factories that Transformer Engine ships, as rows: the copies of the operands.

    ZOO = "transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo"
    factory = shipped_factory(f"{ZOO}.mxfp8_fwd_nvfp4_bwd_factory")
    factory.copies(is_grouped=False).scheme_of("dgrad")        # "nvfp4"

`fp8_quantizer_factory`, `fp4_quantizer_factory` and `custom_recipe_factory` of a per-module file
hold the import path of a factory. A factory is code: which quantizers the factory of a team makes
cannot be known before the run.

Source: Transformer Engine 2.20.2 pytorch/custom_recipes/quantizer_factories.py,
quantizer_factory_zoo.py, reference_current_scaling.py and reference_nvfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from bridge.precision.copies import HIGH, Copies, Copy, Pair, copies_of
from bridge.precision.schemes import scheme_row

PACKAGE = "transformer_engine.pytorch.custom_recipes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Factory:
    """One row: a function of Transformer Engine that makes quantizers."""

    name: str
    module: str
    linear: Copies
    """The copies of a linear layer, and of experts that are layers of their own."""
    grouped: Copies | None = None
    """The copies of experts in one grouped layer, where they are others."""
    quantises_attention: bool = False
    """It has quantizers for attention, which ask for ``CustomRecipe(fp8_dpa=True)``."""

    @property
    def path(self) -> str:
        """Its import path."""
        return f"{PACKAGE}.{self.module}.{self.name}"

    def copies(self, *, is_grouped: bool) -> Copies:
        """Return the copies of a linear layer, or of a grouped one."""
        if is_grouped and self.grouped is not None:
            return self.grouped
        return self.linear


def _scheme(name: str, format_: str) -> Copies:
    row = scheme_row(name)
    if row is None:
        raise LookupError(name)
    return copies_of(row, format_)


_HIGH = Pair(row=HIGH, column=HIGH)
_MXFP8 = _scheme("mxfp8", "e4m3")
_NVFP4 = _scheme("nvfp4", "e2m1")
_ROW_OF_NVFP4 = Copy(scheme="nvfp4", format="e2m1", tile=(1, 16))
"""NVFP4 without Hadamard transform, stochastic rounding and square tiles."""
_COLUMN_OF_NVFP4 = replace(_ROW_OF_NVFP4, tile=(16, 1), is_of_row=True)
_ROW_SCALED = replace(_ROW_OF_NVFP4, is_row_scaled=True)
_DEQUANTISED = Copy(is_of_row=True)
_ZOO, _FACTORIES = "quantizer_factory_zoo", "quantizer_factories"


def _made_from_row(copy: Copy) -> Copy:
    """Return a copy that is made from the values of the row-wise copy."""
    return replace(copy, is_of_row=True)


_NVFP4_REFERENCE = replace(
    _NVFP4,
    grad_output=Pair(
        row=replace(_NVFP4.grad_output.row, stochastic=False),
        column=replace(_NVFP4.grad_output.column, stochastic=False),
    ),
)

_ROWS = (
    Factory(
        name="high_precision_factory",
        module=_FACTORIES,
        linear=Copies(input=_HIGH, weight=_HIGH, grad_output=_HIGH),
    ),
    Factory(name="delayed_scaling_factory", module=_FACTORIES, linear=_scheme("delayed", "hybrid")),
    Factory(
        name="current_scaling_factory", module=_FACTORIES, linear=_scheme("tensorwise", "hybrid")
    ),
    Factory(
        name="float8_block_scaling_factory", module=_FACTORIES, linear=_scheme("blockwise", "e4m3")
    ),
    Factory(name="mxfp8_factory", module=_FACTORIES, linear=_MXFP8),
    Factory(name="nvfp4_factory", module=_FACTORIES, linear=_NVFP4),
    Factory(
        name="high_precision_fwd_mxfp8_bwd_factory",
        module=_ZOO,
        linear=Copies(
            input=Pair(row=HIGH, column=_MXFP8.input.column),
            weight=Pair(row=HIGH, column=_MXFP8.weight.column),
            grad_output=_MXFP8.grad_output,
        ),
    ),
    Factory(
        name="mxfp8_fwd_nvfp4_bwd_factory",
        module=_ZOO,
        linear=Copies(
            input=Pair(row=_MXFP8.input.row, column=_NVFP4.input.column),
            weight=Pair(row=_MXFP8.weight.row, column=_COLUMN_OF_NVFP4),
            grad_output=_NVFP4.grad_output,
        ),
    ),
    Factory(
        name="nvfp4_1d_weight_factory",
        module=_ZOO,
        linear=replace(_NVFP4, weight=Pair(row=_ROW_OF_NVFP4, column=_COLUMN_OF_NVFP4)),
    ),
    Factory(
        name="mxfp8_fwd_high_precision_bwd_factory",
        module=_ZOO,
        linear=Copies(
            input=Pair(row=_MXFP8.input.row, column=_DEQUANTISED),
            weight=Pair(row=_MXFP8.weight.row, column=_DEQUANTISED),
            grad_output=_HIGH,
        ),
    ),
    Factory(
        name="nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
        module=_ZOO,
        linear=_MXFP8,
        grouped=Copies(
            input=Pair(row=_ROW_SCALED, column=_made_from_row(_MXFP8.input.column)),
            weight=Pair(row=_ROW_OF_NVFP4, column=_made_from_row(_MXFP8.weight.column)),
            grad_output=_MXFP8.grad_output,
        ),
    ),
    Factory(
        name="nvfp4_row_scaled_fwd_high_precision_bwd_factory",
        module=_ZOO,
        linear=Copies(
            input=Pair(row=_ROW_SCALED, column=_DEQUANTISED),
            weight=Pair(row=_ROW_OF_NVFP4, column=_DEQUANTISED),
            grad_output=_HIGH,
        ),
    ),
    Factory(
        name="nvfp4_linear_fp8_dpa_factory", module=_ZOO, linear=_NVFP4, quantises_attention=True
    ),
    Factory(
        name="current_scaling_ref_factory",
        module="reference_current_scaling",
        linear=_scheme("tensorwise", "hybrid"),
    ),
    Factory(name="nvfp4_ref_rht_2d_factory", module="reference_nvfp4", linear=_NVFP4_REFERENCE),
)

FACTORIES: Mapping[str, Factory] = MappingProxyType({row.path: row for row in _ROWS})
"""Import path -> its row."""


def shipped_factory(path: str | None) -> Factory | None:
    """Return the row of a factory by its import path.

    None for a factory that Transformer Engine does not ship.
    """
    return FACTORIES.get(path or "")
