"""Finds non-finite numbers among keys and values as they lie in memory: NaN and infinity; pure.

Such a number has all bits of its exponent set. Looking at bits takes a sixteenth of what `numpy.isfinite` takes for 16
bits. A quantized type has a few scales of 16 bits at the beginning of each group; its other bits can't be anything but
numbers.
"""

from typing import NamedTuple

import numpy as np

_CHUNK = 1 << 15
"""The numbers that are looked at together, few enough for the processor's cache."""


class NumberType(NamedTuple):
    """The form of a type's numbers in memory, little-endian."""

    name: str
    width: int
    """The bits of a number, or of a scale: 16 or 32."""
    exponent: int
    """The bits of such a number's exponent."""
    num_scales: int = 0
    """The scales at the beginning of each group; 0 for a type without groups."""
    group_bytes: int = 0
    group_numbers: int = 1
    """The numbers of a group; 1 for a type without groups."""

    def num_bytes(self, count: int) -> int:
        """Returns the bytes that so many numbers take."""
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
    """Whether all numbers of a type are finite in data that hold nothing else, and groups only as a whole."""
    words = np.frombuffer(data, f"<u{kind.width // 8}")
    if kind.num_scales:
        words = words.reshape(-1, kind.group_bytes * 8 // kind.width)[:, : kind.num_scales]
    return not any(
        (words[start : start + _CHUNK] & kind.exponent).max() == kind.exponent for start in range(0, len(words), _CHUNK)
    )
