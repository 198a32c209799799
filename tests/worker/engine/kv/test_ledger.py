"""The ledger lends every byte that nobody needs, takes it back when somebody does, and never lends one twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenbus.worker.engine.kv.ledger import KvLedger, OvercommitError


def test_one_replica_may_hold_all_while_the_other_is_idle_and_half_of_it_when_both_want_all() -> None:
    ledger = KvLedger(16_000)
    one, two = ledger.join("one", 1_000, 16), ledger.join("two", 1_000, 16)
    assert ledger.request(one, used=0, idle=0, wanted=16) == 16
    assert ledger.request(two, used=0, idle=0, wanted=16) == 0, "nothing is free yet"
    assert ledger.take_woken(caller=two) == [one]
    assert ledger.request(one, used=16, idle=0, wanted=0) == 8
    assert ledger.request(two, used=0, idle=0, wanted=16) == 0, "what is to be given back is still held"
    ledger.give_back(one, 8)
    assert ledger.request(two, used=0, idle=0, wanted=16) == 8


def test_a_replica_that_wakes_gets_what_it_asks_for_and_the_other_keeps_the_rest() -> None:
    ledger = KvLedger(16_000)
    one, two = ledger.join("one", 1_000, 16), ledger.join("two", 1_000, 16)
    ledger.request(one, used=0, idle=0, wanted=16)
    ledger.request(two, used=0, idle=0, wanted=1)
    assert ledger.request(one, used=16, idle=0, wanted=0) == 15
    ledger.give_back(one, 15)
    assert ledger.request(one, used=15, idle=0, wanted=1) == 15, "the lane is not taken again on its way"
    assert ledger.request(two, used=0, idle=0, wanted=1) == 1


def test_idle_lanes_of_any_replica_go_before_one_that_is_used() -> None:
    ledger = KvLedger(16_000)
    one, two, three = (ledger.join(name, 1_000, 16) for name in ("one", "two", "three"))
    ledger.request(one, used=0, idle=0, wanted=10)
    ledger.request(two, used=0, idle=0, wanted=6)
    ledger.request(two, used=0, idle=6, wanted=0)
    assert ledger.request(three, used=0, idle=0, wanted=2) == 0
    assert ledger.take_woken(caller=three) == [two]
    assert ledger.request(one, used=10, idle=0, wanted=0) == 10
    assert ledger.request(two, used=0, idle=6, wanted=0) == 4


def test_each_waker_is_told_once_until_it_asks() -> None:
    ledger = KvLedger(4_000)
    one, two = ledger.join("one", 1_000, 4), ledger.join("two", 1_000, 4)
    ledger.request(one, used=0, idle=0, wanted=4)
    ledger.request(two, used=0, idle=0, wanted=1)
    assert [ledger.take_woken(caller=two) for _ in range(2)] == [[one], []]
    ledger.request(one, used=4, idle=0, wanted=0)
    ledger.give_back(one, 3)
    assert [ledger.take_woken(caller=one) for _ in range(2)] == [[two], []]


def test_every_replica_gets_a_lane_before_any_gets_a_second_however_large_it_is() -> None:
    ledger = KvLedger(10_000)
    small, large = ledger.join("small", 1_000, 10), ledger.join("large", 6_000, 1)
    ledger.request(small, used=0, idle=0, wanted=10)
    ledger.request(large, used=0, idle=0, wanted=1)
    assert ledger.request(small, used=10, idle=0, wanted=0) == 4
    ledger.give_back(small, 4)
    assert ledger.request(large, used=0, idle=0, wanted=1) == 1


def test_a_late_replica_is_fitted_while_there_is_a_lane_for_each_and_then_refused_by_name() -> None:
    ledger = KvLedger(3_000)
    one = ledger.join("one", 1_000, 3)
    ledger.join("two", 1_000, 3)
    assert ledger.request(one, used=0, idle=0, wanted=3) == 3
    three = ledger.join("three", 1_000, 3)
    assert ledger.usage(three).share_bytes == 1_000
    with pytest.raises(
        OvercommitError,
        match=r"^--kv-budget leaves 0 of 3000 bytes for four, which needs 1; the others keep at least: one 1000, "
        r"two 1000, three 1000: raise it, pass a smaller --context-length, or unload another model$",
    ):
        ledger.join("four", 1, 1)
    ledger.leave(three)
    ledger.join("four", 1_000, 1)


def test_fixed_memory_is_overdrawn_until_it_was_given_back_and_can_be_corrected() -> None:
    ledger = KvLedger(10_000)
    one = ledger.join("one", 1_000, 10)
    ledger.request(one, used=0, idle=0, wanted=10)
    fixed = ledger.reserve("fixed", 6_000)
    assert ledger.is_overdrawn
    assert ledger.take_woken(caller=fixed) == [one]
    assert ledger.request(one, used=10, idle=0, wanted=0) == 4
    ledger.give_back(one, 4)
    assert not ledger.is_overdrawn
    ledger.resize(fixed, 5_000)
    assert ledger.request(one, used=4, idle=0, wanted=6) == 5
    with pytest.raises(OvercommitError):
        ledger.reserve("more", 4_001)
    ledger.leave(fixed)
    assert ledger.request(one, used=5, idle=0, wanted=5) == 10


def test_usage_says_what_a_replica_holds_what_it_may_hold_and_what_it_would_get() -> None:
    ledger = KvLedger(16_000)
    one, two = ledger.join("one", 1_000, 12), ledger.join("two", 1_000, 16)
    ledger.request(one, used=0, idle=0, wanted=12)
    assert ledger.usage(one) == (16_000, 12_000, 8_000, 12_000, 12)
    assert ledger.usage(two) == (16_000, 0, 8_000, 16_000, 8)


class Replica:
    """A replica that does what the ledger says, at its own steps."""

    def __init__(self, number: int, lane_bytes: int, max_lanes: int) -> None:
        self.number, self.lane_bytes, self.max_lanes = number, lane_bytes, max_lanes
        self.used = self.idle = self.waiting = 0

    @property
    def lanes(self) -> int:
        return self.used + self.idle

    def step(self, ledger: KvLedger) -> None:
        wanted = min(self.waiting, self.max_lanes - self.used)
        allowed = ledger.request(self.number, self.used, self.idle, wanted)
        assert allowed >= min(1, self.used), "who runs keeps a lane"
        while self.lanes > allowed:
            if self.idle:
                self.idle -= 1
            else:
                self.used, self.waiting = self.used - 1, self.waiting + 1
        while self.waiting and (self.lanes < allowed or self.idle) and self.used < self.max_lanes:
            self.idle -= self.lanes >= allowed
            self.used, self.waiting = self.used + 1, self.waiting - 1
        ledger.give_back(self.number, self.lanes)


class Pool(RuleBasedStateMachine):
    """Replicas of any size come, want, idle, end and step in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = 40
        self.ledger = KvLedger(self.budget)
        self.replicas: list[Replica] = []
        self.fixed: list[int] = []

    @rule(lane_bytes=st.integers(1, 15), max_lanes=st.integers(1, 12))
    def join(self, lane_bytes: int, max_lanes: int) -> None:
        before = repr(self.ledger)
        try:
            number = self.ledger.join("replica", lane_bytes, max_lanes)
        except OvercommitError:
            assert repr(self.ledger) == before
        else:
            self.replicas.append(Replica(number, lane_bytes, max_lanes))

    @rule(num_bytes=st.integers(0, 30))
    def reserve(self, num_bytes: int) -> None:
        try:
            self.fixed.append(self.ledger.reserve("fixed", num_bytes))
        except OvercommitError:
            return
        self.settle()
        assert not self.ledger.is_overdrawn

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), count=st.integers(1, 15))
    def ask(self, data: st.DataObject, count: int) -> None:
        data.draw(st.sampled_from(self.replicas)).waiting += count

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), keeps_prefix=st.booleans())
    def end_one(self, data: st.DataObject, keeps_prefix: bool) -> None:
        one = data.draw(st.sampled_from(self.replicas))
        if one.used:
            one.used, one.idle = one.used - 1, one.idle + keeps_prefix
        else:
            one.waiting = 0

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.replicas)).step(self.ledger)

    @precondition(lambda self: self.replicas or self.fixed)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([*self.fixed, *(one.number for one in self.replicas)]))
        self.ledger.leave(number)
        self.fixed = [one for one in self.fixed if one != number]
        self.replicas = [one for one in self.replicas if one.number != number]

    @rule()
    def settle(self) -> None:
        """Everybody steps, and then only those that are woken: each reclaim ends, nobody waits for less than its share
        and nothing is left over that somebody wants."""
        for one in self.replicas:
            one.step(self.ledger)
        woken, rounds = self.ledger.take_woken(caller=0), 0
        while woken:
            rounds += 1
            assert rounds <= 3, self.ledger
            for one in self.replicas:
                if one.number in woken:
                    one.step(self.ledger)
            woken = self.ledger.take_woken(caller=0)
        left = self.budget - self.ledger.held_bytes
        for one in self.replicas:
            if one.waiting and one.used < one.max_lanes:
                assert one.used >= 1, "nobody is starved"
                assert not one.idle
                assert one.lane_bytes > left or self.contested, (one.lane_bytes, left)
                share = self.ledger.usage(one.number).share_bytes
                assert (one.lanes + 1) * one.lane_bytes > share, "nobody waits below its share"

    @property
    def contested(self) -> bool:
        """Whether several replicas want what is left, which may be too little for the one that comes next."""
        return sum(one.waiting > 0 for one in self.replicas) > 1

    @invariant()
    def nothing_is_lent_twice(self) -> None:
        self.ledger.check()
        held = sum(one.lanes * one.lane_bytes for one in self.replicas)
        assert held <= self.ledger.held_bytes <= self.budget


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)
