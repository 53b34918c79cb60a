"""Low-precision arithmetic in plain torch, with the same bits as Transformer Engine.

    spec.py       `GemmPrecision` of a linear layer -> `QuantSpec` of an operand, from the rows of
                  `bridge.precision`
    linear.py     `scaled_linear`: a linear layer of three GEMMs, by one `LinearCall`
    delayed.py    `DelayedScaling`: scales from the amaxes of earlier steps
    operand.py    `make_operand`: a matrix -> `GemmOperand`, without codes on the way
    gemm.py       `multiply_operands`: two operands -> the result in BF16
    quantise.py   `choose_tensor_scale`: the scale of a tensorwise operand, for operand.py; `quantise`:
                  a tensor -> codes and scales (`Quantised` in quantised.py), for storage and comparisons

Below them, dispatch.py gives each pass over memory to tiles.py (plain torch) or, by the choice of
native.py, to kernel.py. It calls kernel.c (the same bits, faster), which kernel_build.py compiles.
grid.py, scaling.py and hadamard.py have the formulas. quantisation_error.py and round_trip.py measure errors.
The tests compare all of them with the slow, simple version in `scripts/reference_quantisers.py`.
"""

from bridge.runtime.numerics.delayed import DelayedScaling, update_scaling_factors
from bridge.runtime.numerics.linear import LinearCall, Observer, WeightCache, scaled_linear
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
    "LinearCall",
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
