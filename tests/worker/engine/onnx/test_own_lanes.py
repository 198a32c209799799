"""Rows hold no more than their memory, although each lane has its own copy of a shared prefix."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.engine.onnx.kv_cache import LaneLengths, OwnLanes

TOKENS, CONTEXT = 1_000, 400


class Rows:
    """A cache that holds what lanes have, and what was released only by name."""

    def __init__(self, lanes: LaneLengths, stale: int = 0) -> None:
        self.lanes = lanes
        self.stale = stale

    @property
    def held_tokens(self) -> int:
        return sum(self.lanes.lengths) + self.stale

    def release_lanes(self) -> bool:
        self.stale = 0
        return False


def share(*lengths: int, stale: int = 0) -> OwnLanes:
    lanes = LaneLengths(8)
    lanes.lengths[: len(lengths)] = lengths
    return OwnLanes(Rows(lanes, stale), lanes, TOKENS, CONTEXT)  # type: ignore[arg-type]


def test_an_empty_cache_takes_all_that_wait() -> None:
    assert share().request(0, 0, 5) == 5
    assert share(1).request(1, 0, 20) == 8, "there are no more"


def test_as_many_sequences_start_as_may_each_copy_the_longest() -> None:
    assert share(200, 100).request(1, 1, 5) == 2 + 700 // 200
    assert share(400, 400, 150).request(3, 0, 5) == 3 + 1, "one may, since a copy fits in the context that is left"
    assert share(400, 400, 200).request(3, 0, 5) == 3


def test_idle_lanes_go_when_copies_take_more_than_the_pool_counts() -> None:
    assert share(400, 400, 201).request(1, 2, 0) == 2
    assert share(400, 400, 200).request(1, 2, 0) == 3


def test_the_last_sequences_go_when_the_longest_could_not_be_copied_any_more() -> None:
    assert share(400, 400, 200).request(3, 0, 0) == 3
    assert share(400, 400, 201).request(3, 0, 0) == 2
    assert share(400).request(1, 0, 3) == 1 + 1, "a lone sequence always stays"


def test_memory_that_no_lane_uses_is_released_before_it_is_short() -> None:
    one = share(100, stale=300)
    one.give_back(1)
    assert repr(one) == "<OwnLanes, 400 of 1400 tokens>"
    one = share(100, stale=401)
    one.give_back(1)
    assert repr(one) == "<OwnLanes, 100 of 1400 tokens>"


@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=8), st.data(), st.integers(0, 8))
def test_there_is_always_a_lane_and_never_fewer_than_one_less(
    lengths: list[int], data: st.DataObject, wanted: int
) -> None:
    used = data.draw(st.integers(0, len(lengths)))
    allowed = share(*lengths).request(used, len(lengths) - used, wanted)
    assert allowed >= max(1, len(lengths) - 1)
    if sum(lengths) > TOKENS and used < len(lengths):
        assert allowed == max(1, len(lengths) - 1)
