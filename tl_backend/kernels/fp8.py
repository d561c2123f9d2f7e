"""8-bit floats on their bits, for caches: one path for every target, also where the hardware lacks the format.

Formats as in "FP8 Formats for Deep Learning" (arXiv 2209.05433): e4m3fn and e5m2; e4m3fnuz as on AMD's gfx942, with
bias 8 and no negative zero. Decoding is exact; encoding rounds to nearest even and saturates. NaN is neither made nor
recognised: caches hold finite values.
"""

import struct
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

FLOAT32_BIAS = 127
FLOAT32_MANTISSA = 23


@dataclass(frozen=True)
class Float8:
    """One format: bits of the mantissa, bias of the exponent, largest finite value, whether it has a negative zero."""

    mantissa: int
    bias: int
    largest: float
    signed_zero: bool = True

    def decode(self, bits: Any) -> Any:
        """uint8 -> float32."""
        shift = FLOAT32_MANTISSA - self.mantissa
        magnitude = T.cast(bits, "int32") & 0x7F
        rebased = T.reinterpret((magnitude << shift) + ((FLOAT32_BIAS - self.bias) << FLOAT32_MANTISSA), "float32")
        # Below the smallest normal the mantissa counts quanta. Divided, since the C target prints a constant in seven
        # decimal digits, which 2^-16 has not.
        small = T.cast(magnitude, "float32") / 2.0 ** (self.bias + self.mantissa - 1)
        value = T.if_then_else(magnitude < (1 << self.mantissa), small, rebased)
        return T.if_then_else(T.cast(bits, "int32") > 0x7F, -value, value)

    def encode(self, value: Any) -> Any:
        """float32 -> uint8."""
        shift = FLOAT32_MANTISSA - self.mantissa
        magnitude = T.min(T.if_then_else(value < 0, -value, value), self.largest)
        bits = T.reinterpret(magnitude, "int32")
        is_small = bits < _float32_bits(2.0 ** (1 - self.bias))
        has_sign = T.reinterpret(value, "int32") < 0
        normal = ((bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift) - (
            (FLOAT32_BIAS - self.bias) << self.mantissa
        )
        # Adding 2^23 quanta leaves the count of quanta, rounded to even, in the low bits.
        anchor = 2.0 ** (FLOAT32_MANTISSA + 1 - self.bias - self.mantissa)
        small = T.reinterpret(magnitude + anchor, "int32") - _float32_bits(anchor)
        unsigned = T.if_then_else(is_small, small, normal)
        # Half the smallest value and less becomes zero, which has no sign in every format. ``unsigned`` stands once in
        # the sum: TileLang simplifies each place where it stands, in more than a minute for three.
        negative = (
            has_sign if self.signed_zero else T.And(has_sign, bits > _float32_bits(2.0 ** -(self.bias + self.mantissa)))
        )
        return T.cast(unsigned + T.if_then_else(negative, 0x80, 0), "uint8")


def _float32_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


FORMATS = {
    "float8_e4m3fn": Float8(mantissa=3, bias=7, largest=448.0),
    "float8_e4m3fnuz": Float8(mantissa=3, bias=8, largest=240.0, signed_zero=False),
    "float8_e5m2": Float8(mantissa=2, bias=15, largest=57344.0),
}
