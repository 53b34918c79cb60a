"""The number formats as rows: what every bit pattern of each of them means.

A finite value is (-1)^sign * 2^(exponent - bias) * 1.mantissa. With a zero exponent field it is a subnormal,
(-1)^sign * 2^(1 - bias) * 0.mantissa. The formats differ in the top exponent field, which decides their
largest value:

- FP32, TF32, BF16, FP16 and E5M2 follow IEEE 754: the top exponent field holds infinity and NaN only.
- E4M3 gives up infinity: the top field holds ordinary values, and one NaN per sign, so its largest value is 448.
- E2M1 has neither: every code is a number.
- E8M0 is a bare exponent, without sign, zero, subnormals or infinity: it can only be a power-of-two scale.
"""

import math
from dataclasses import dataclass

BIT_DB = 20 * math.log10(2)
"""Every mantissa bit halves the rounding error."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One row: a binary floating-point format."""

    name: str
    """Lower-case name, as Megatron's `fp8` and `fp4` fields spell it where they have it."""
    title: str
    bits: int
    exponent_bits: int
    """Width of the exponent field."""
    mantissa_bits: int
    """Width of the mantissa field, the hidden leading 1 not counted."""
    bias: int
    """The number that is subtracted from the exponent field."""
    max: float
    smallest_normal: float
    """Smallest positive value with full precision."""
    smallest_subnormal: float | None
    """Smallest positive value, None where there are no subnormals."""
    signed: bool = True
    infinity: int | None = None
    """Encoding of +infinity, None where there is none."""
    nan: int | None = None
    """The canonical encoding of NaN, None where there is none."""
    nan_codes: int = 0
    """How many encodings are NaN, both signs together."""
    torch_dtype: str | None = None
    """Name of the `torch.dtype` that stores it, None where torch has none."""
    source: str = ""

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; subnormals have the same step."""
        return 1 - self.bias if self.smallest_subnormal is not None else -self.bias

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def healthy_db(self) -> float:
        """Signal to quantisation noise of a normal sample, in dB, under a scale that fits."""
        return 13.42 + BIT_DB * self.mantissa_bits


_IEEE = "IEEE 754-2019, table 3.5"
_OCP_FP8 = "OCP 8-bit Floating Point Specification 1.0, table 1"
_OCP_MX = "OCP Microscaling Formats Specification 1.0, sections 5.3.3 and 5.4.1"


def _format(
    name: str,
    title: str,
    exponent_bits: int,
    mantissa_bits: int,
    *,
    nan: int | None,
    source: str,
    reserved: int | None = None,
    signed: bool = True,
    torch_dtype: str | None = None,
) -> Format:
    """Return a row: it follows from the widths of the fields and from the codes that are no finite number.

    Those are the `reserved` largest of each sign; None: the whole top exponent field, infinity first, as in IEEE 754.
    Without a sign there is no zero and no subnormal either.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    special = 2**mantissa_bits if reserved is None else reserved
    largest = 2 ** (exponent_bits + mantissa_bits) - 1 - special
    exponent, mantissa = divmod(largest, 2**mantissa_bits)
    return Format(
        name=name,
        title=title,
        bits=signed + exponent_bits + mantissa_bits,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        max=(1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias),
        smallest_normal=2.0 ** (1 - bias if signed else -bias),
        smallest_subnormal=2.0 ** (1 - bias - mantissa_bits) if signed else None,
        signed=signed,
        infinity=largest + 1 if reserved is None else None,
        nan=nan,
        nan_codes=(special - (reserved is None)) * (1 + signed),
        torch_dtype=torch_dtype,
        source=source,
    )


_A100 = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, section TF32"
_BFLOAT16 = "Intel BFLOAT16 Hardware Numerics Definition 1.0"
_E2M1 = "FP4 E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives"
_E8M0 = "E8M0, a power of two from 2^-127 to 2^127"

_ROWS = (
    _format("fp32", "FP32, IEEE binary32", 8, 23, nan=0x7FC00000, torch_dtype="float32", source=_IEEE),
    _format("tf32", "TF32, FP32 with 10 mantissa bits, inside tensor cores only", 8, 10, nan=0x3FE00, source=_A100),
    _format("bf16", "BF16, the upper half of FP32", 8, 7, nan=0x7FC0, torch_dtype="bfloat16", source=_BFLOAT16),
    _format("fp16", "FP16, IEEE binary16", 5, 10, nan=0x7E00, torch_dtype="float16", source=_IEEE),
    _format(
        "e4m3",
        "FP8 E4M3, finite numbers and NaN",
        4,
        3,
        nan=0x7F,
        reserved=1,
        torch_dtype="float8_e4m3fn",
        source=_OCP_FP8,
    ),
    _format("e5m2", "FP8 E5M2, the upper half of FP16", 5, 2, nan=0x7F, torch_dtype="float8_e5m2", source=_OCP_FP8),
    _format("e2m1", _E2M1, 2, 1, nan=None, reserved=0, source=_OCP_MX),
    _format("e8m0", _E8M0, 8, 0, nan=0xFF, reserved=1, signed=False, torch_dtype="float8_e8m0fnu", source=_OCP_MX),
)

FORMATS = {row.name: row for row in _ROWS}
