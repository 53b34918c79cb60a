"""Low-precision arithmetic in plain torch, bit for bit what Transformer Engine computes.

Imports bridge.precision and bridge.errors only.

    formats and schemes   rows (bridge.precision) -> spec.GemmPrecision -> spec.QuantSpec
    codes and scales      quantise.quantise -> quantised.Quantised, for storage and comparisons
    operands of a GEMM    operand.make_operand -> operand.GemmOperand, without codes on the way
    the GEMM              gemm.scaled_product: two operands -> the result in BF16
    the linear layer      linear.scaled_linear, delayed.DelayedScaling: three GEMMs, their autograd

Below them, `dispatch` gives each pass over memory to `tiles` (plain torch) or, through `native`, to
`kernel.c` (the same bits, faster), which `build` compiles. `grid`, `scaling` and `hadamard` hold the
formulas. `error` measures the error of a quantisation. ``scripts/reference_quantisers.py`` is the slow, obvious
version that both are compared with.
"""

from bridge.runtime.numerics.delayed import DelayedScaling, update_scaling_factors
from bridge.runtime.numerics.linear import Observer, WeightCache, scaled_linear
from bridge.runtime.numerics.native import use
from bridge.runtime.numerics.operand import GemmOperand, make_operand, make_stored_operand
from bridge.runtime.numerics.quantisation_error import (
    compute_what_if_sqnr,
    measure_quantisation_error,
)
from bridge.runtime.numerics.quantise import quantise
from bridge.runtime.numerics.quantised import Quantised, pad_scales
from bridge.runtime.numerics.spec import GemmPrecision, QuantSpec

__all__ = [
    "DelayedScaling",
    "GemmOperand",
    "GemmPrecision",
    "Observer",
    "QuantSpec",
    "Quantised",
    "WeightCache",
    "compute_what_if_sqnr",
    "make_operand",
    "make_stored_operand",
    "measure_quantisation_error",
    "pad_scales",
    "quantise",
    "scaled_linear",
    "update_scaling_factors",
    "use",
]
