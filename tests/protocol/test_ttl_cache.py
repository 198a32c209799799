"""A table that forgets keeps what is young, up to its capacity, and drops the oldest first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tokenbus.protocol.ttl_cache import TTLCache


def test_an_entry_is_there_until_its_time_has_passed() -> None:
    recent: TTLCache[str] = TTLCache(ttl_s=10.0, capacity=5)
    recent.put("a", "x", 0.0)
    assert (recent.get("a", 9.99), recent.get("a", 10.0), recent.get("b", 0.0)) == ("x", None, None)


def test_the_oldest_go_when_there_are_too_many() -> None:
    recent: TTLCache[int] = TTLCache(ttl_s=10.0, capacity=2)
    for number, key in enumerate("abc"):
        recent.put(key, number, 0.0)
    assert [recent.get(key, 0.0) for key in "abc"] == [None, 1, 2]


def test_putting_again_makes_it_young() -> None:
    recent: TTLCache[int] = TTLCache(ttl_s=10.0, capacity=2)
    for key in ("a", "b", "a", "c"):
        recent.put(key, 0, 0.0)
    assert [recent.get(key, 0.0) for key in "abc"] == [0, None, 0]


def test_what_is_heavier_than_all_room_is_not_kept_and_pushes_nothing_out() -> None:
    recent: TTLCache[int] = TTLCache(ttl_s=10.0, capacity=10)
    recent.put("a", 1, 0.0, weight=4)
    recent.put("b", 2, 0.0, weight=11)
    assert (recent.get("a", 0.0), recent.get("b", 0.0)) == (1, None)


class TTLCacheHistory(RuleBasedStateMachine):
    """Random puts and looks, against a list."""

    @initialize(capacity=st.integers(1, 8))
    def make(self, capacity: int) -> None:
        self.recent: TTLCache[int] = TTLCache(ttl_s=5.0, capacity=capacity)
        self.capacity = capacity
        self.known: list[tuple[str, int, int, float]] = []
        self.now = 0.0

    @rule(key=st.sampled_from("abcd"), value=st.integers(), weight=st.integers(1, 9), wait=st.integers(0, 3))
    def put(self, key: str, value: int, weight: int, wait: int) -> None:
        self.now += wait
        self.recent.put(key, value, self.now, weight)
        self.known = [one for one in self.known if one[0] != key and self.now - one[3] < 5]
        if weight <= self.capacity:
            self.known.append((key, value, weight, self.now))
        while sum(one[2] for one in self.known) > self.capacity:
            self.known.pop(0)

    @rule(key=st.sampled_from("abcd"))
    def pop(self, key: str) -> None:
        self.recent.pop(key)
        self.known = [one for one in self.known if one[0] != key]

    @rule(wait=st.integers(0, 6))
    def look(self, wait: int) -> None:
        self.now += wait
        fresh = {one[0]: one[1] for one in self.known if self.now - one[3] < 5}
        assert {key: self.recent.get(key, self.now) for key in fresh} == fresh
        assert all(self.recent.get(key, self.now) is None for key in set("abcd") - fresh.keys())

    @invariant()
    def holds_together(self) -> None:
        self.recent.check_integrity()


TestTTLCacheHistory = TTLCacheHistory.TestCase
TestTTLCacheHistory.settings = settings(max_examples=80)
