"""The low-precision scaling schemes as rows: Megatron's names, their formats and settings.

A linear layer runs three GEMMs. Each contracts over another dimension of its operands, so each needs
copies of them that are scaled along that dimension. With tokens M, inputs K and outputs N:

    fprop  y_MN  = x_MK  w_NK^T    contracts over K: both scaled along their last axis, "row-wise"
    dgrad  dx_MK = dy_MN w_NK      contracts over N: dy row-wise, w along its first axis,
                                   "column-wise"
    wgrad  dw_NK = dy_MN^T x_MK    contracts over M: both column-wise

`GEMMS` is this table. An `Operand` has the tile of the tensor that shares a scale, for each copy.
If the tile is the whole tensor, or square, both copies have the same values. A 1x128 tile of the
row-wise copy becomes 128x1 in the column-wise copy, so that the same tensor is rounded differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Tile = tuple[int, int]

WHOLE_TENSOR: Tile = (0, 0)
"""The tile of a scale that the whole tensor shares."""

COMPARED_SCHEMES = ("tensorwise", "blockwise", "mxfp8", "nvfp4")
"""The schemes for which an operand's quantisation error is computed, in addition to its scheme.

The row of an operand has the columns `tensorwise_db`, `blockwise_db` and so on.
"""

OPERAND_FORMATS = {
    "e4m3": ("e4m3", "e4m3"),
    "hybrid": ("e4m3", "e5m2"),
    "e5m2": ("e5m2", "e5m2"),
    "e2m1": ("e2m1", "e2m1"),
}
"""A value of `fp8` or `fp4` -> (format of input and weight, format of the output's gradient).

Transformer Engine refuses E5M2 in the forward pass. The e5m2 row is for comparisons with a bad
recipe.
"""


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """A GEMM of a linear layer, with the copies of two operands that it multiplies."""

    name: str
    left: str
    """Operand with the result's first axis."""
    left_columnwise: bool
    right: str
    """Operand with the result's last axis."""
    right_columnwise: bool


_GEMMS = (
    Gemm(name="fprop", left="input", left_columnwise=False, right="weight", right_columnwise=False),
    Gemm(
        name="dgrad",
        left="grad_output",
        left_columnwise=False,
        right="weight",
        right_columnwise=True,
    ),
    Gemm(
        name="wgrad", left="grad_output", left_columnwise=True, right="input", right_columnwise=True
    ),
)
GEMMS = {row.name: row for row in _GEMMS}


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand of a linear layer, with the tiles that share a scale."""

    name: str
    rowwise_tile: Tile = WHOLE_TENSOR
    """The tile (rows, columns) of the row-wise copy, or `WHOLE_TENSOR`."""
    columnwise_tile: Tile = WHOLE_TENSOR
    """Tile of the column-wise copy, in the axes of the tensor itself, not of its transpose."""
    hadamard: bool = False
    """The column-wise copy is of the tensor after a random Hadamard transform along its first axis.
    """
    stochastic: bool = False
    """Values are rounded up or down at random, in proportion to the distances."""


def _make_operands(input_: Tile, weight: Tile, grad_output: Tile) -> tuple[Operand, ...]:
    """Return the three operands with these row-wise tiles and the transposed tiles column-wise."""
    operands = []
    for name, tile in (("input", input_), ("weight", weight), ("grad_output", grad_output)):
        rows, columns = tile
        operands.append(Operand(name=name, rowwise_tile=tile, columnwise_tile=(columns, rows)))
    return tuple(operands)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One row: a value of `fp8_recipe` or `fp4_recipe`."""

    name: str
    family: str
    """fp8 or fp4: the field that holds its format."""
    title: str
    formats: tuple[str, ...]
    """Legal values of `fp8` or `fp4`; `OPERAND_FORMATS` has their meaning forward and backward."""
    first_last_layers_bf16: bool = True
    """Megatron can keep the first and last layers in BF16 under this scheme."""
    operands: tuple[Operand, ...] = ()
    """input, weight and grad_output. Empty: a factory decides."""
    scale_format: str | None = None
    """Format of the scale that each tile stores."""
    tensor_scale_format: str | None = None
    """The format of a second scale over the whole tensor. None: no second scale."""
    transposes_columnwise: bool = True
    """Whether Transformer Engine stores the column-wise codes and scales with exchanged axes."""
    repeats_square_scales: bool = False
    """Whether the scale of a square tile is stored once for each of its rows."""
    power_of_two_scale: bool = False
    split_accumulator: tuple[bool, bool, bool] | None = None
    """Whether partial sums are promoted to full FP32 in fprop, dgrad and wgrad.

    False is Hopper's fast accumulation.
    """
    alignment: tuple[int, int, int] | None = None
    """M, N and K must be multiples of these for all three GEMMs to run in Transformer Engine."""
    min_compute_capability: tuple[int, int] | None = None
    below_compute_capability: tuple[int, int] | None = None
    """The first compute capability that no longer runs the scheme. None: no upper limit."""
    min_cuda: str | None = None
    min_transformer_engine: str | None = None
    te_class: str = "CustomRecipe"
    """The class in `transformer_engine.common.recipe`."""
    te_keywords: Mapping[str, str] = field(default_factory=dict)
    """Keyword of `te_class` -> the field that Megatron passes.

    Source: megatron-core 0.16.1 and 0.19.2 fp8_utils.get_fp8_recipe, fp4_utils.get_fp4_recipe,
    TEDelayedScaling.
    """
    source: str = ""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether GPUs of this compute capability run the scheme."""
        least = self.min_compute_capability
        limit = self.below_compute_capability
        if least is not None and capability < least:
            return False
        return limit is None or capability < limit

    def operand(self, name: str) -> Operand:
        """Return the operand called `name`."""
        for operand in self.operands:
            if operand.name == name:
                return operand
        raise LookupError(f"{self.name} has no operand {name!r}")


_DPA = {"fp8_dpa": "fp8_dot_product_attention"}
_TE = (
    "Transformer Engine 2.20 common/recipe/__init__.py, pytorch/quantization.py, "
    "common/gemm/cublaslt_gemm.cu"
)

_TENSORWISE = Scheme(
    name="tensorwise",
    family="fp8",
    title="per-tensor current scaling",
    formats=("e4m3", "hybrid"),
    operands=_make_operands(WHOLE_TENSOR, WHOLE_TENSOR, WHOLE_TENSOR),
    scale_format="fp32",
    split_accumulator=(False, True, True),
    alignment=(16, 16, 16),
    min_compute_capability=(8, 9),
    min_cuda="12.1",
    min_transformer_engine="2.2",
    te_class="Float8CurrentScaling",
    te_keywords=_DPA,
    source=f"megatron-core 0.16.1 fp8_utils.get_fp8_recipe; {_TE}",
)
_CUSTOM = Scheme(
    name="custom",
    family="fp8",
    title="a quantizer factory of the team's own",
    formats=("e4m3", "hybrid"),
    min_transformer_engine="2.9",
    source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe",
)

SCHEMES = (
    replace(
        _TENSORWISE,
        name="delayed",
        title="per-tensor delayed scaling",
        first_last_layers_bf16=False,
        min_transformer_engine="1.0",
        te_class="DelayedScaling",
        te_keywords={
            "margin": "fp8_margin",
            "amax_history_len": "fp8_amax_history_len",
            "amax_compute_algo": "fp8_amax_compute_algo",
            **_DPA,
            "fp8_mha": "fp8_multi_head_attention",
        },
        source=(
            "megatron-core 0.16.1 fp8_utils.get_fp8_recipe, transformer_config.__post_init__; "
            f"{_TE}"
        ),
    ),
    _TENSORWISE,
    Scheme(
        name="blockwise",
        family="fp8",
        title="subchannel scaling in 1x128 and 128x128 blocks",
        formats=("e4m3", "hybrid"),
        operands=_make_operands((1, 128), (128, 128), (1, 128)),
        scale_format="fp32",
        power_of_two_scale=True,
        split_accumulator=(True, True, True),
        alignment=(16, 16, 16),
        min_compute_capability=(9, 0),
        min_cuda="12.9",
        min_transformer_engine="2.3",
        te_class="Float8BlockScaling",
        source=f"megatron-core 0.16.1 fp8_utils.get_fp8_recipe; {_TE}",
    ),
    Scheme(
        name="mxfp8",
        family="fp8",
        title="MXFP8, power-of-two scales per 32 values",
        formats=("e4m3",),
        operands=_make_operands((1, 32), (1, 32), (1, 32)),
        scale_format="e8m0",
        transposes_columnwise=False,
        repeats_square_scales=True,
        power_of_two_scale=True,
        split_accumulator=(False, True, True),
        alignment=(32, 32, 32),
        min_compute_capability=(10, 0),
        below_compute_capability=(12, 0),
        min_cuda="12.8",
        min_transformer_engine="2.1",
        te_class="MXFP8BlockScaling",
        te_keywords=_DPA,
        source=(
            "megatron-core 0.16.1 and 0.19.2 fp8_utils.get_fp8_recipe; "
            f"E4M3 only: Megatron Bridge issue 638; {_TE}"
        ),
    ),
    _CUSTOM,
    Scheme(
        name="nvfp4",
        family="fp4",
        title="NVFP4, E4M3 scales per 16 values under one FP32 scale",
        formats=("e2m1",),
        operands=(
            Operand(name="input", rowwise_tile=(1, 16), columnwise_tile=(16, 1), hadamard=True),
            Operand(name="weight", rowwise_tile=(16, 16), columnwise_tile=(16, 16)),
            Operand(
                name="grad_output",
                rowwise_tile=(1, 16),
                columnwise_tile=(16, 1),
                hadamard=True,
                stochastic=True,
            ),
        ),
        scale_format="e4m3",
        tensor_scale_format="fp32",
        repeats_square_scales=True,
        split_accumulator=(False, True, True),
        alignment=(16, 16, 16),
        min_compute_capability=(10, 0),
        min_cuda="12.8",
        min_transformer_engine="2.8",
        te_class="NVFP4BlockScaling",
        te_keywords=_DPA,
        source=f"megatron-core 0.16.1 fp4_utils.get_fp4_recipe; {_TE}",
    ),
    replace(
        _CUSTOM,
        family="fp4",
        formats=("e2m1",),
        source="megatron-core 0.16.1 fp4_utils.get_fp4_recipe",
    ),
)

FOREIGN_SCHEMES = (
    Scheme(
        name="mxfp4",
        family="fp4",
        title="MXFP4, power-of-two scales per 32 values, of AMD's Transformer Engine",
        formats=("e2m1",),
        operands=_make_operands((1, 32), (1, 32), (1, 32)),
        scale_format="e8m0",
        power_of_two_scale=True,
        te_class="MXFP4BlockScaling",
        source=(
            "ROCm/TransformerEngine pull request 537 of 2026-04-17: common/recipe/__init__.py "
            "MXFP4BlockScaling, pytorch/module/fp4_handler_gemm.py fp4_gemm_layout"
        ),
    ),
)
"""Schemes that a fork of Megatron Core adds.

They are planned, and never emulated. PB202 refuses them in runs of every other framework.
"""

FP8_SCHEMES = {scheme.name: scheme for scheme in SCHEMES if scheme.family == "fp8"}
FP4_SCHEMES = {scheme.name: scheme for scheme in SCHEMES if scheme.family == "fp4"}


def find_scheme(name: str | None, family: str | None = None) -> Scheme | None:
    """Return the row of a scheme, or None if there is no such scheme.

    Args:
        name: The name of the scheme.
        family: fp8 or fp4. None: the first family that has the name.
    """
    for row in (*SCHEMES, *FOREIGN_SCHEMES):
        if row.name == name and family in (None, row.family):
            return row
    return None
