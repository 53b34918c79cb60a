"""`LayerCopies`: the two copies of each operand of a linear layer, with their formats and scales.

    copies = make_scheme_copies(FP8_SCHEMES["mxfp8"], "e4m3")
    # the row-wise copy of the gradient, the column-wise copy of the weight
    copies.get_gemm_operands("dgrad")

In a scheme both copies of an operand have the same format. Under `backward_override` of Transformer
Engine and under its quantizer factories (`bridge.precision.quantizer_factories`) the backward GEMMs
may read other formats than the forward GEMM. `GEMMS` in `bridge.precision.schemes` has the copies
that each GEMM reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bridge.precision.schemes import GEMMS, OPERAND_FORMATS, WHOLE_TENSOR, Scheme, Tile, find_scheme

BACKWARD_OVERRIDES = ("high_precision", "dequantized")
"""Values of `backward_override`: the source of the operands of the backward GEMMs.

The source is the original tensors, or the dequantised operands of the forward GEMM.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandCopy:
    """One copy of an operand."""

    scheme: str | None = None
    """The scaling scheme. None: the copy is in high precision, in the dtype of the run."""
    format: str = ""
    """The format of the elements. Empty: the copy is in high precision."""
    tile: Tile = WHOLE_TENSOR
    """Rows and columns that share a scale, in the axes of the tensor itself."""
    hadamard: bool = False
    """Whether a random Hadamard transform is applied before quantisation."""
    stochastic: bool = False
    """Whether values are rounded stochastically."""
    is_row_scaled: bool = False
    """Whether each row has a separate second-level scale (NVFP4)."""
    is_four_over_six: bool = False
    """Whether each block is scaled to a maximum of 4 or 6, the one with the smaller error (NVFP4)."""
    is_from_rowwise: bool = False
    """Whether the copy is made from the row-wise copy instead of the tensor."""
    rounded_to: str = ""
    """The format to which a copy in high precision is rounded (fake quantisation). Empty: none."""


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
        """Return the scaling scheme of a GEMM, or None if it multiplies in high precision."""
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
            scheme=scheme.name,
            format=element,
            tile=operand.rowwise_tile,
            stochastic=operand.stochastic,
        )
        column = replace(row, tile=operand.columnwise_tile, hadamard=operand.hadamard)
        pairs[operand.name] = CopyPair(row=row, column=column)
    return LayerCopies(
        input=pairs["input"], weight=pairs["weight"], grad_output=pairs["grad_output"]
    )


def apply_backward_override(copies: LayerCopies, override: str | None) -> LayerCopies:
    """Return the copies under `backward_override`: the backward GEMMs multiply in high precision.

    Args:
        copies: The copies of the scheme.
        override: A value of `BACKWARD_OVERRIDES`. None: the copies are returned as they are.

    Source: Transformer Engine 2.20.2 pytorch/module/linear.py, grouped_linear.py and
    layernorm_linear.py.
    """
    if override is None:
        return copies
    column = OperandCopy(is_from_rowwise=override == "dequantized")
    return LayerCopies(
        input=replace(copies.input, column=column),
        weight=replace(copies.weight, column=column),
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
