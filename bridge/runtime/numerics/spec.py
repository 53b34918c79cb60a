"""`QuantSpec` and `GemmPrecision`: the quantisation of an operand, and of a linear layer's GEMMs.

Both are plain values.
"""

from dataclasses import dataclass
from functools import lru_cache

from bridge.errors import Finding, PrecisionConfigError, close_matches, did_you_mean
from bridge.precision.formats import FORMATS, Format
from bridge.precision.operand_copies import BACKWARD_OVERRIDES
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, OPERAND_FORMATS, WHOLE_TENSOR, Tile

EMULATED_SCHEMES = {
    name: row for name, row in {**FP4_SCHEMES, **FP8_SCHEMES}.items() if row.operands
}
"""The schemes that have operands: all schemes except the custom factories."""


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Quantisation of a tensor: element format, scale rule, and the tiles that share a scale."""

    scheme: str
    """delayed, tensorwise, blockwise, mxfp8 or nvfp4."""
    format: str
    """e4m3, e5m2 or e2m1."""
    rowwise_tile: Tile = WHOLE_TENSOR
    """Rows and columns that share a scale in the row-wise copy. (0, 0) is the whole tensor."""
    columnwise_tile: Tile = WHOLE_TENSOR
    """The same for the column-wise copy, in the axes of the tensor, not transposed."""
    power_of_two_scale: bool = False
    """Whether the scale is rounded down to a power of two (current and blockwise scaling)."""
    eps: float = 0.0
    """Smallest amax from which a scale is computed (current and blockwise scaling)."""
    hadamard: bool = False
    """Whether the column-wise copy is transformed along its first axis before quantisation (NVFP4)."""
    stochastic: bool = False
    """Whether a value is rounded up or down at random, in proportion to the distances (NVFP4)."""

    @property
    def element(self) -> Format:
        """The row of the element format."""
        return FORMATS[self.format]

    @property
    def has_single_scale(self) -> bool:
        """Whether the whole tensor has a single scale."""
        return self.rowwise_tile == WHOLE_TENSOR

    @property
    def needs_amax(self) -> bool:
        """Whether the amax of the whole tensor must be known before a value is rounded."""
        return self.has_single_scale or self.has_second_level

    @property
    def scale_rule(self) -> str:
        """The rule by which scales are computed and stored.

        - tensor: one FP32 scale of the whole tensor, known before the pass.
        - fp32: an FP32 scale per tile, from the tile's amax.
        - e8m0: a power of two per tile, as MXFP8 has it.
        - nvfp4: an E4M3 scale per tile under an FP32 scale of the whole tensor.
        """
        if self.has_single_scale:
            return "tensor"
        if self.scheme == "mxfp8":
            return "e8m0"
        if self.scheme == "nvfp4":
            return "nvfp4"
        return "fp32"

    @property
    def copies_share_values(self) -> bool:
        """Whether row-wise and column-wise copy have the same values, so that one copy is enough."""
        has_equal_tiles = self.rowwise_tile == self.columnwise_tile
        return has_equal_tiles and not (self.hadamard or self.stochastic)

    @property
    def has_second_level(self) -> bool:
        """Whether the tiles have scales under an FP32 scale of the whole tensor (NVFP4)."""
        return EMULATED_SCHEMES[self.scheme].tensor_scale_format is not None

    @property
    def repeats_square_scales(self) -> bool:
        """Whether the scale of a square tile is stored once for each of its rows."""
        return EMULATED_SCHEMES[self.scheme].repeats_square_scales

    def is_transposed(self, columnwise: bool) -> bool:
        """Return whether codes and scales of a copy are stored with exchanged axes."""
        return columnwise and EMULATED_SCHEMES[self.scheme].transposes_columnwise

    def is_transformed(self, columnwise: bool) -> bool:
        """Return whether a copy is transformed before quantisation (`hadamard.py`)."""
        return columnwise and self.hadamard

    def tile(self, columnwise: bool) -> Tile:
        """Return the tile of the row-wise or the column-wise copy."""
        if columnwise:
            return self.columnwise_tile
        return self.rowwise_tile


@dataclass(frozen=True, kw_only=True)
class GemmPrecision:
    """The low-precision recipe of a linear layer, with the names of Megatron's config."""

    scheme: str
    """Megatron's `fp8_recipe` (delayed, tensorwise, blockwise, mxfp8) or `fp4_recipe` (nvfp4)."""
    format: str = "hybrid"
    """Megatron's `fp8` (e4m3, hybrid) or `fp4` (e2m1).

    e5m2, which Megatron does not offer, is E5M2 everywhere.
    """
    margin: int = 0
    """Megatron's `fp8_margin`: delayed scales aim at the format's maximum times 2^-margin."""
    amax_history_len: int = 1024
    """Megatron's `fp8_amax_history_len`: the number of steps in the history of a delayed scale."""
    amax_compute_algo: str = "max"
    """Megatron's `fp8_amax_compute_algo`: max of the history, or its most_recent entry."""
    disable_stochastic_rounding: bool = False
    """Whether NVFP4 gradients are rounded to nearest, and not at random."""
    backward_override: str | None = None
    """Transformer Engine's `backward_override`.

    - None: dgrad and wgrad run in low precision.
    - high_precision: dgrad and wgrad multiply the original tensors, in the dtype of the run.
    - dequantized: dgrad and wgrad multiply the dequantised operands of fprop, in the same dtype.
    """

    def __post_init__(self) -> None:
        findings = list(_collect_findings(self))
        if findings:
            raise PrecisionConfigError("This low-precision recipe cannot be run:", findings)

    def spec(self, role: str) -> QuantSpec:
        """Return the quantisation of an operand: input, weight or grad_output."""
        return _make_spec(self, role)


@lru_cache(maxsize=256)
def _make_spec(precision: GemmPrecision, role: str) -> QuantSpec:
    """Return the quantisation of an operand, the same object for equal arguments."""
    scheme = EMULATED_SCHEMES[precision.scheme]
    operand = scheme.operand(role)
    forward_format, backward_format = OPERAND_FORMATS[precision.format]
    format_ = forward_format
    if role == "grad_output":
        format_ = backward_format
    return QuantSpec(
        scheme=precision.scheme,
        format=format_,
        rowwise_tile=operand.rowwise_tile,
        columnwise_tile=operand.columnwise_tile,
        power_of_two_scale=scheme.power_of_two_scale,
        hadamard=operand.hadamard,
        stochastic=operand.stochastic and not precision.disable_stochastic_rounding,
    )


def _collect_findings(precision: GemmPrecision) -> list[Finding]:
    """Return a finding for each field that Transformer Engine, or the emulation, refuses."""
    findings: list[Finding] = []

    def add_finding(path: str, rule: str, remedy: str) -> None:
        value = getattr(precision, path)
        findings.append(Finding(path=path, rule=rule, remedy=remedy, value=value))

    scheme = EMULATED_SCHEMES.get(precision.scheme)
    if scheme is None:
        near = did_you_mean(close_matches(precision.scheme, EMULATED_SCHEMES))
        remedy = near or "Run a custom factory on Transformer Engine."
        add_finding("scheme", f"must be one of {', '.join(sorted(EMULATED_SCHEMES))}", remedy)
        return findings
    formats = []
    for name, (forward, _) in OPERAND_FORMATS.items():
        if (forward == "e2m1") == (scheme.family == "fp4"):
            formats.append(name)
    if precision.format not in formats:
        add_finding(
            "format", f"must be {' or '.join(formats)} under {scheme.name}", "Use one of these."
        )
    if precision.amax_history_len < 1:
        add_finding(
            "amax_history_len", "must be at least 1", "Use 1024, Transformer Engine's default."
        )
    if precision.amax_compute_algo not in ("max", "most_recent"):
        add_finding("amax_compute_algo", "must be 'max' or 'most_recent'", "Use one of these.")
    if precision.disable_stochastic_rounding and scheme.name != "nvfp4":
        rule = f"has no effect under {scheme.name}"
        add_finding("disable_stochastic_rounding", rule, "Drop it, or use nvfp4.")
    if precision.backward_override not in (None, *BACKWARD_OVERRIDES):
        rule = f"must be {' or '.join(BACKWARD_OVERRIDES)}"
        add_finding("backward_override", rule, "Use one of these, or None.")
    elif precision.backward_override is not None and scheme.name == "delayed":
        add_finding(
            "backward_override", "is refused by the recipe of delayed scaling", "Use tensorwise."
        )
    return findings
