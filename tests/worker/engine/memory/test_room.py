"""The memory of a device is divided among the processes that have claimed some of it."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.engine.memory.fit import OtherClaim, reserve_bytes, room_of
from tokenbus.worker.files.device_memory import HOST, DeviceMemory

MIB = 1 << 20
GIB = 1 << 30
EIGHT = DeviceMemory(HOST, 8 * GIB, 7 * GIB)
RESERVE = 512 * MIB


def test_a_process_alone_may_have_what_is_free_and_leaves_a_reserve_for_others() -> None:
    assert room_of(EIGHT, 0, 0, (), 1.0) == (8 * GIB, 7 * GIB, 7 * GIB - RESERVE)


def test_the_reserve_is_a_sixteenth_and_neither_tiny_nor_huge() -> None:
    assert [reserve_bytes(size * GIB) for size in (1, 4, 8, 32, 64, 512)] == [
        256 * MIB, 512 * MIB, 512 * MIB, 2 * GIB, 4 * GIB, 4 * GIB,
    ]  # fmt: skip


def test_claims_of_others_count_as_taken_before_they_are() -> None:
    half = OtherClaim(claimed_bytes=3 * GIB, taken_bytes=1 * GIB)
    assert room_of(EIGHT._replace(free_bytes=6 * GIB), 0, 0, [half], 1.0).free_bytes == 4 * GIB
    assert room_of(EIGHT._replace(free_bytes=4 * GIB), 0, 0, [OtherClaim(3 * GIB, 3 * GIB)], 1.0).free_bytes == 4 * GIB


def test_what_a_process_has_taken_itself_is_still_its_own() -> None:
    assert room_of(EIGHT._replace(free_bytes=5 * GIB), 2 * GIB, 0, (), 1.0).free_bytes == 7 * GIB
    assert room_of(EIGHT._replace(free_bytes=5 * GIB), 2 * GIB, 3 * GIB, (), 1.0).free_bytes == 4 * GIB


def test_workers_with_equal_shares_get_equal_parts_whatever_those_before_have_taken() -> None:
    first = room_of(EIGHT, 0, 0, (), 0.5).chosen_bytes
    assert first == int(3.5 * GIB) - RESERVE
    for taken in (0, GIB, first):
        left = EIGHT._replace(free_bytes=EIGHT.free_bytes - taken)
        assert room_of(left, 0, 0, [OtherClaim(first, taken)], 0.5).chosen_bytes == first


@given(
    free=st.integers(0, 1 << 40),
    taken=st.integers(0, 1 << 40),
    elsewhere=st.integers(0, 1 << 40),
    others=st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40))),
    share=st.floats(0.001, 1.0),
)
def test_sizes_are_never_chosen_for_more_than_is_free(
    free: int, taken: int, elsewhere: int, others: list[tuple[int, int]], share: float
) -> None:
    claims = [OtherClaim(max(pair), min(pair)) for pair in others]
    found = room_of(DeviceMemory(HOST, 1 << 41, free), taken, elsewhere, claims, share)
    assert 0 <= found.chosen_bytes <= found.free_bytes <= free + taken
