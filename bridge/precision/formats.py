"""The number formats as rows: what every bit pattern of each of them means.

A finite value is (-1)^sign * 2^(exponent - bias) * 1.mantissa. With a zero exponent field it is a subnormal,
(-1)^sign * 2^(1 - bias) * 0.mantissa. What the formats do with the top exponent field differs, and that decides their
largest value:

- FP32, TF32, BF16, FP16 and E5M2 follow IEEE 754: the top exponent field holds infinity and NaN only.
- E4M3 gives up infinity: the top field holds ordinary values, and one NaN per sign, so its largest value is 448.
- E2M1 has neither: every code is a number.
- E8M0 is a bare exponent, without sign, zero, subnormals or infinity: it can only be a power-of-two scale.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One row: a binary floating-point format."""

    name: str
    """Lower-case name, as Megatron's `fp8` and `fp4` fields spell it where they have it."""
    title: str
    """What people call it."""
    bits: int
    """Bits of one value, the sign among them."""
    exponent_bits: int
    """Width of the exponent field."""
    mantissa_bits: int
    """Width of the mantissa field, the hidden leading 1 not counted."""
    bias: int
    """What is subtracted from the exponent field."""
    max: float
    """Largest finite value."""
    smallest_normal: float
    """Smallest positive value with full precision."""
    smallest_subnormal: float | None
    """Smallest positive value, None where there are no subnormals."""
    signed: bool = True
    """Has a sign bit."""
    infinity: int | None = None
    """Encoding of +infinity, None where there is none."""
    nan: int | None = None
    """The canonical encoding of NaN, None where there is none."""
    nan_codes: int = 0
    """How many encodings are NaN, both signs together."""
    torch_dtype: str | None = None
    """Name of the `torch.dtype` that stores it, None where torch has none."""
    source: str = ""
    """Where the row was read."""

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; subnormals have the same step."""
        return 1 - self.bias if self.smallest_subnormal is not None else -self.bias

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits


_IEEE = "IEEE 754-2019, table 3.5"
_OCP_FP8 = "OCP 8-bit Floating Point Specification 1.0, table 1"
_OCP_MX = "OCP Microscaling Formats Specification 1.0, sections 5.3.3 and 5.4.1"

_ROWS = (
    Format(
        name="fp32",
        title="FP32, IEEE binary32",
        bits=32,
        exponent_bits=8,
        mantissa_bits=23,
        bias=127,
        max=(2 - 2.0**-23) * 2.0**127,
        smallest_normal=2.0**-126,
        smallest_subnormal=2.0**-149,
        infinity=0x7F800000,
        nan=0x7FC00000,
        nan_codes=2 * (2**23 - 1),
        torch_dtype="float32",
        source=_IEEE,
    ),
    Format(
        name="tf32",
        title="TF32, FP32 with 10 mantissa bits, inside tensor cores only",
        bits=19,
        exponent_bits=8,
        mantissa_bits=10,
        bias=127,
        max=(2 - 2.0**-10) * 2.0**127,
        smallest_normal=2.0**-126,
        smallest_subnormal=2.0**-136,
        infinity=0x3FC00,
        nan=0x3FE00,
        nan_codes=2 * (2**10 - 1),
        source="NVIDIA A100 Tensor Core GPU Architecture whitepaper, section TF32",
    ),
    Format(
        name="bf16",
        title="BF16, the upper half of FP32",
        bits=16,
        exponent_bits=8,
        mantissa_bits=7,
        bias=127,
        max=(2 - 2.0**-7) * 2.0**127,
        smallest_normal=2.0**-126,
        smallest_subnormal=2.0**-133,
        infinity=0x7F80,
        nan=0x7FC0,
        nan_codes=2 * (2**7 - 1),
        torch_dtype="bfloat16",
        source="Intel BFLOAT16 Hardware Numerics Definition 1.0",
    ),
    Format(
        name="fp16",
        title="FP16, IEEE binary16",
        bits=16,
        exponent_bits=5,
        mantissa_bits=10,
        bias=15,
        max=65504.0,
        smallest_normal=2.0**-14,
        smallest_subnormal=2.0**-24,
        infinity=0x7C00,
        nan=0x7E00,
        nan_codes=2 * (2**10 - 1),
        torch_dtype="float16",
        source=_IEEE,
    ),
    Format(
        name="e4m3",
        title="FP8 E4M3, finite numbers and NaN",
        bits=8,
        exponent_bits=4,
        mantissa_bits=3,
        bias=7,
        max=448.0,
        smallest_normal=2.0**-6,
        smallest_subnormal=2.0**-9,
        nan=0x7F,
        nan_codes=2,
        torch_dtype="float8_e4m3fn",
        source=_OCP_FP8,
    ),
    Format(
        name="e5m2",
        title="FP8 E5M2, the upper half of FP16",
        bits=8,
        exponent_bits=5,
        mantissa_bits=2,
        bias=15,
        max=57344.0,
        smallest_normal=2.0**-14,
        smallest_subnormal=2.0**-16,
        infinity=0x7C,
        nan=0x7F,
        nan_codes=6,
        torch_dtype="float8_e5m2",
        source=_OCP_FP8,
    ),
    Format(
        name="e2m1",
        title="FP4 E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives",
        bits=4,
        exponent_bits=2,
        mantissa_bits=1,
        bias=1,
        max=6.0,
        smallest_normal=1.0,
        smallest_subnormal=0.5,
        source=_OCP_MX,
    ),
    Format(
        name="e8m0",
        title="E8M0, a power of two from 2^-127 to 2^127",
        bits=8,
        exponent_bits=8,
        mantissa_bits=0,
        bias=127,
        max=2.0**127,
        smallest_normal=2.0**-127,
        smallest_subnormal=None,
        signed=False,
        nan=0xFF,
        nan_codes=1,
        torch_dtype="float8_e8m0fnu",
        source=_OCP_MX,
    ),
)

FORMATS = {row.name: row for row in _ROWS}
