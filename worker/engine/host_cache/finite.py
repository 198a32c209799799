"""Finds non-finite numbers (NaN and infinity) among keys and values as laid out in memory.

Such a number has all bits of its exponent set. Testing bits takes a sixteenth of the time of `numpy.isfinite` for 16
bits. A quantized type has a few 16-bit scales at the beginning of each group; its other bits always represent finite
numbers.
"""

from typing import NamedTuple

import numpy as np

_CHUNK = 1 << 15
"""Numbers tested at a time, few enough for the processor's cache."""


class NumberType(NamedTuple):
    """The layout of a type's numbers in memory, little-endian."""

    name: str
    width: int
    """The bits in a number, or in a scale: 16 or 32."""
    exponent: int
    """A mask of such a number's exponent bits."""
    num_scales: int = 0
    """The scales at the beginning of each group; 0 for a type without groups."""
    group_bytes: int = 0
    group_numbers: int = 1
    """The numbers in a group; 1 for a type without groups."""

    def num_bytes(self, count: int) -> int:
        """Returns the bytes that this many numbers take."""
        return count // self.group_numbers * (self.group_bytes or self.width // 8)


F32 = NumberType("f32", 32, 0x7F800000)
F16 = NumberType("f16", 16, 0x7C00)
BF16 = NumberType("bf16", 16, 0x7F80)
Q8_0 = NumberType("q8_0", 16, 0x7C00, num_scales=1, group_bytes=34, group_numbers=32)
Q5_1 = NumberType("q5_1", 16, 0x7C00, num_scales=2, group_bytes=24, group_numbers=32)
Q5_0 = NumberType("q5_0", 16, 0x7C00, num_scales=1, group_bytes=22, group_numbers=32)
Q4_1 = NumberType("q4_1", 16, 0x7C00, num_scales=2, group_bytes=20, group_numbers=32)
Q4_0 = NumberType("q4_0", 16, 0x7C00, num_scales=1, group_bytes=18, group_numbers=32)
ALL = (F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0)


def all_finite(data: bytes | bytearray | memoryview, kind: NumberType) -> bool:
    """Whether all numbers are finite in data that consists only of numbers of this type, in whole groups."""
    words = np.frombuffer(data, f"<u{kind.width // 8}")
    if kind.num_scales:
        words = words.reshape(-1, kind.group_bytes * 8 // kind.width)[:, : kind.num_scales]
    return not any(
        (words[start : start + _CHUNK] & kind.exponent).max() == kind.exponent for start in range(0, len(words), _CHUNK)
    )
