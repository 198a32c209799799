"""NaN and infinity are found in every type of keys and values, wherever they are; no other number is taken for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.engine.device import non_finite
from tokenbus.worker.files import number_types
from tokenbus.worker.files.number_types import BF16, F16, F32, NumberType

PLAIN = (F32, F16, BF16)
GROUPED = tuple(kind for kind in number_types.ALL if kind.num_scales)
NONE = (np.nan, -np.nan, np.inf, -np.inf)


def pack(kind: NumberType, numbers: list[float]) -> bytes:
    """Returns numbers as a type without groups, or as scales of 16 bits."""
    if kind is BF16:
        return (np.array(numbers, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        return np.array(numbers, "<f4" if kind is F32 else "<f2").tobytes()


def groups(kind: NumberType, count: int) -> bytearray:
    """Returns groups whose quantized numbers have all bits set, and whose scales are the largest of all numbers."""
    scales = pack(F16, [65504.0] * kind.num_scales)
    return bytearray((scales + b"\xff" * (kind.group_bytes - len(scales))) * count)


@given(st.sampled_from(PLAIN), st.lists(st.floats(-60_000, 60_000, width=32), max_size=50))
def test_finite_numbers_of_any_size_are_finite(kind: NumberType, numbers: list[float]) -> None:
    assert non_finite.all_finite(pack(kind, numbers), kind)


@given(st.sampled_from(PLAIN), st.integers(1, 100_000), st.data())
def test_one_number_among_many_that_is_none_is_found_wherever_it_is(
    kind: NumberType, count: int, data: st.DataObject
) -> None:
    numbers = bytearray(pack(kind, [1.5]) * count)
    width = kind.width // 8
    place = width * data.draw(st.integers(0, count - 1))
    assert non_finite.all_finite(numbers, kind)
    numbers[place : place + width] = pack(kind, [data.draw(st.sampled_from(NONE))])
    assert not non_finite.all_finite(numbers, kind)
    assert not non_finite.all_finite(memoryview(numbers), kind)


@given(st.sampled_from(GROUPED), st.integers(1, 40_000), st.data())
def test_every_scale_of_every_group_is_looked_at_and_no_quantized_number(
    kind: NumberType, count: int, data: st.DataObject
) -> None:
    numbers = groups(kind, count)
    assert non_finite.all_finite(bytes(numbers), kind)
    group, scale = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, kind.num_scales - 1))
    place = group * kind.group_bytes + 2 * scale
    numbers[place : place + 2] = pack(F16, [data.draw(st.sampled_from(NONE))])
    assert not non_finite.all_finite(bytes(numbers), kind)


@pytest.mark.parametrize("kind", number_types.ALL, ids=lambda kind: kind.name)
def test_nothing_is_finite(kind: NumberType) -> None:
    assert non_finite.all_finite(b"", kind)
