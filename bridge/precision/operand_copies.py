"""The two copies of each operand of a linear layer: the format and the scales each GEMM reads.

    copies = copies_of(FP8_SCHEMES["mxfp8"], "e4m3")
    # the row-wise copy of the gradient, the column-wise copy of the weight
    copies.read_by("dgrad")

A scheme gives both copies of an operand one format. `backward_override` of Transformer Engine and
its quantizer factories (`bridge.precision.quantizer_factories`) do not: their backward GEMMs read other
formats than their forward GEMM. `GEMMS` in `bridge.precision.schemes` says which GEMM reads which
copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bridge.precision.schemes import GEMMS, OPERAND_FORMATS, WHOLE_TENSOR, Scheme, Tile, find_scheme

BACKWARD_OVERRIDES = ("high_precision", "dequantized")
"""Values of `backward_override`: the source of the values that the backward GEMMs multiply.

They are the original tensors, or what the forward GEMM read.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandCopy:
    """One copy of an operand."""

    scheme: str | None = None
    """The scaling scheme; None: high precision, in the dtype of the run."""
    format: str = ""
    """Format of the elements; empty in high precision."""
    tile: Tile = WHOLE_TENSOR
    """Rows and columns that share a scale, in the axes of the tensor itself."""
    hadamard: bool = False
    """A random Hadamard transform comes first."""
    stochastic: bool = False
    """Values are rounded up or down at random."""
    is_row_scaled: bool = False
    """Each row has a second-level scale of its own (NVFP4)."""
    is_four_over_six: bool = False
    """Each block is mapped to a maximum of 4 or of 6, whichever errs less (NVFP4)."""
    is_from_rowwise: bool = False
    """It is made from the values of the row-wise copy instead of the tensor."""
    rounded_to: str = ""
    """Format that the values of a copy in high precision are rounded to (fake quantisation)."""


HIGH_PRECISION_COPY = OperandCopy()
"""A copy in high precision of the tensor itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPair:
    """The row-wise and the column-wise copy of an operand."""

    row: OperandCopy
    column: OperandCopy

    def copy(self, *, columnwise: bool) -> OperandCopy:
        """Return one of the two."""
        if columnwise:
            return self.column
        return self.row


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCopies:
    """The copies of all three operands."""

    input: CopyPair
    weight: CopyPair
    grad_output: CopyPair
    saves_rowwise_input: bool = False
    """The row-wise copy of the input is kept from the forward to the backward pass.

    Otherwise the column-wise copy is kept.
    """

    def get_pair(self, operand: str) -> CopyPair:
        """Return the copies of input, weight or grad_output."""
        named = {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}
        return named[operand]

    def get_gemm_operands(self, gemm: str) -> tuple[OperandCopy, OperandCopy]:
        """Return the copies that fprop, dgrad or wgrad multiplies: the left and the right one."""
        row = GEMMS[gemm]
        left = self.get_pair(row.left).copy(columnwise=row.left_columnwise)
        right = self.get_pair(row.right).copy(columnwise=row.right_columnwise)
        return left, right

    def get_gemm_scheme(self, gemm: str) -> str | None:
        """Return the scaling scheme of a GEMM; None: it multiplies in high precision."""
        left, right = self.get_gemm_operands(gemm)
        return left.scheme or right.scheme

    def uses_split_accumulator(self, gemm: str) -> bool:
        """Return whether partial sums of a GEMM are promoted to full FP32."""
        scheme = find_scheme(self.get_gemm_scheme(gemm))
        if scheme is None or scheme.split_accumulator is None:
            return True
        return scheme.split_accumulator[list(GEMMS).index(gemm)]

    @property
    def saved_input(self) -> OperandCopy:
        """The copy of the input that is kept from the forward to the backward pass."""
        return self.input.copy(columnwise=not self.saves_rowwise_input)


_UNKNOWN_PAIR = CopyPair(
    row=OperandCopy(scheme="custom", format="custom"),
    column=OperandCopy(scheme="custom", format="custom"),
)
UNKNOWN_COPIES = LayerCopies(input=_UNKNOWN_PAIR, weight=_UNKNOWN_PAIR, grad_output=_UNKNOWN_PAIR)
"""The copies of a quantizer factory that is not known."""


def make_scheme_copies(scheme: Scheme, format_: str) -> LayerCopies:
    """Return the copies of a scheme under a value of `fp8` or `fp4`.

    They are `UNKNOWN_COPIES` for the scheme `custom`.
    """
    if not scheme.operands:
        return UNKNOWN_COPIES
    forward, backward = OPERAND_FORMATS.get(format_, (format_, format_))
    pairs = {}
    for operand in scheme.operands:
        element = forward
        if operand.name == "grad_output":
            element = backward
        row = OperandCopy(
            scheme=scheme.name, format=element, tile=operand.row, stochastic=operand.stochastic
        )
        column = replace(row, tile=operand.column, hadamard=operand.hadamard)
        pairs[operand.name] = CopyPair(row=row, column=column)
    return LayerCopies(
        input=pairs["input"], weight=pairs["weight"], grad_output=pairs["grad_output"]
    )


def apply_backward_override(copies: LayerCopies, override: str | None) -> LayerCopies:
    """Return copies whose backward GEMMs multiply in high precision, as `backward_override` says.

    None: the copies as they are.

    Source: Transformer Engine 2.20.2 pytorch/module/linear.py, grouped_linear.py and
    layernorm_linear.py.
    """
    if override is None:
        return copies
    again = OperandCopy(is_from_rowwise=override == "dequantized")
    return LayerCopies(
        input=replace(copies.input, column=again),
        weight=replace(copies.weight, column=again),
        grad_output=CopyPair(row=HIGH_PRECISION_COPY, column=HIGH_PRECISION_COPY),
        saves_rowwise_input=override == "dequantized",
    )


def apply_nvfp4_options(copies: LayerCopies, options: Mapping[str, object]) -> LayerCopies:
    """Return the copies of NVFP4 under further keywords of `NVFP4BlockScaling`, by name.

    Source: Transformer Engine 2.20.2 common/recipe/__init__.py, pytorch/quantization.py
    NVFP4BlockScalingRecipeState.
    """
    pairs = {}
    for name in ("input", "weight", "grad_output"):
        row, column = copies.get_pair(name).row, copies.get_pair(name).column
        if options.get("disable_rht"):
            column = replace(column, hadamard=False)
        if options.get("disable_stochastic_rounding"):
            row = replace(row, stochastic=False)
            column = replace(column, stochastic=False)
        pairs[name] = CopyPair(row=row, column=column)
    input_, weight = pairs["input"], pairs["weight"]
    if options.get("disable_2d_quantization"):
        weight = CopyPair(
            row=replace(weight.row, tile=(1, 16)), column=replace(weight.column, tile=(16, 1))
        )
    scope = options.get("nvfp4_4over6", "none")
    if scope in ("all", "activations"):
        input_ = _enable_four_over_six(input_)
    if scope in ("all", "weights"):
        weight = _enable_four_over_six(weight)
    if options.get("row_scaled_activation"):
        input_ = replace(input_, row=replace(input_.row, is_row_scaled=True))
    return replace(copies, input=input_, weight=weight, grad_output=pairs["grad_output"])


def _enable_four_over_six(pair: CopyPair) -> CopyPair:
    return CopyPair(
        row=replace(pair.row, is_four_over_six=True),
        column=replace(pair.column, is_four_over_six=True),
    )
