"""The types of numbers in models' files and of keys and values, as ggml lays them out in memory."""

from typing import NamedTuple


class NumberType(NamedTuple):
    """The layout of a type's numbers in memory, little-endian."""

    name: str
    ggml: int
    """Its number in ggml.h."""
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
        return count * (self.group_bytes or self.width // 8) // self.group_numbers


F32 = NumberType("f32", 0, 32, 0x7F800000)
F16 = NumberType("f16", 1, 16, 0x7C00)
BF16 = NumberType("bf16", 30, 16, 0x7F80)
Q8_0 = NumberType("q8_0", 8, 16, 0x7C00, num_scales=1, group_bytes=34, group_numbers=32)
Q5_1 = NumberType("q5_1", 7, 16, 0x7C00, num_scales=2, group_bytes=24, group_numbers=32)
Q5_0 = NumberType("q5_0", 6, 16, 0x7C00, num_scales=1, group_bytes=22, group_numbers=32)
Q4_1 = NumberType("q4_1", 3, 16, 0x7C00, num_scales=2, group_bytes=20, group_numbers=32)
Q4_0 = NumberType("q4_0", 2, 16, 0x7C00, num_scales=1, group_bytes=18, group_numbers=32)
ALL = (F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0)
BY_GGML = {kind.ggml: kind for kind in ALL}
