"""The number formats as rows, with the meaning of every bit pattern.

A finite value is (-1)^sign * 2^(exponent - bias) * 1.mantissa. With a zero exponent field it is a
subnormal, (-1)^sign * 2^(1 - bias) * 0.mantissa. The formats differ in the top exponent field,
which decides their largest value:

- FP32, TF32, BF16, FP16 and E5M2 follow IEEE 754: the top exponent field holds infinity and NaN
  only.
- E4M3 has no infinity. Its top exponent field holds ordinary values and one NaN per sign, so its
  largest value is 448.
- E2M1 has no infinity and no NaN. Every code is a number.
- E8M0 has an exponent only, without sign, zero, subnormals or infinity. It can only be a
  power-of-two scale.
"""

import math
from dataclasses import dataclass
from functools import cached_property

BIT_DB = 20 * math.log10(2)
"""dB per mantissa bit. Each mantissa bit halves the rounding error."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One row: a binary floating-point format.

    The widths of its fields and its codes for NaN and infinity define it.
    """

    name: str
    """The name in lower case. Megatron's `fp8` and `fp4` fields use the same spelling."""
    exponent_bits: int
    mantissa_bits: int
    """Width of the mantissa field, without the hidden leading 1."""
    nan: int | None
    """The canonical encoding of NaN. None: the format has no NaN."""
    reserved: int | None = None
    """The largest codes of each sign that are not finite numbers.

    None: the whole top exponent field, infinity first.
    """
    signed: bool = True
    """Whether the format has a sign bit. A format without it has no zero and no subnormals."""
    source: str

    @cached_property
    def bits(self) -> int:
        """Bits of a value."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @cached_property
    def bias(self) -> int:
        """The number that is subtracted from the exponent field."""
        return (1 << (self.exponent_bits - 1)) - 1

    @cached_property
    def _largest(self) -> int:
        special = self.reserved
        if special is None:
            special = 1 << self.mantissa_bits
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1 - special

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        exponent, mantissa = divmod(self._largest, 1 << self.mantissa_bits)
        return (1 + mantissa * self.epsilon) * 2.0 ** (exponent - self.bias)

    @cached_property
    def infinity(self) -> int | None:
        """The encoding of +infinity. None: the format has no infinity."""
        if self.reserved is None:
            return self._largest + 1
        return None

    @cached_property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value. Subnormals have the same step."""
        if self.signed:
            return 1 - self.bias
        return -self.bias

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with full precision."""
        return 2.0**self.min_exponent

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def healthy_db(self) -> float:
        """Signal to quantisation noise of a normal sample, in dB, under a scale that fits."""
        return 13.42 + BIT_DB * self.mantissa_bits


_IEEE = "IEEE 754-2019, table 3.5"
_A100 = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, section TF32"
_BFLOAT16 = "Intel BFLOAT16 Hardware Numerics Definition 1.0"
_OCP_FP8 = "OCP 8-bit Floating Point Specification 1.0, table 1"
_OCP_MX = "OCP Microscaling Formats Specification 1.0, sections 5.3.3 and 5.4.1"

_ROWS = (
    Format(name="fp32", exponent_bits=8, mantissa_bits=23, nan=0x7FC00000, source=_IEEE),
    Format(name="tf32", exponent_bits=8, mantissa_bits=10, nan=0x3FE00, source=_A100),
    Format(name="bf16", exponent_bits=8, mantissa_bits=7, nan=0x7FC0, source=_BFLOAT16),
    Format(name="fp16", exponent_bits=5, mantissa_bits=10, nan=0x7E00, source=_IEEE),
    Format(name="e4m3", exponent_bits=4, mantissa_bits=3, nan=0x7F, reserved=1, source=_OCP_FP8),
    Format(name="e5m2", exponent_bits=5, mantissa_bits=2, nan=0x7F, source=_OCP_FP8),
    Format(name="e2m1", exponent_bits=2, mantissa_bits=1, nan=None, reserved=0, source=_OCP_MX),
    Format(
        name="e8m0",
        exponent_bits=8,
        mantissa_bits=0,
        nan=0xFF,
        reserved=1,
        signed=False,
        source=_OCP_MX,
    ),
)

FORMATS = {row.name: row for row in _ROWS}
