"""Counters and their shards: what was counted is in the bucket once, however writes, folds and losses interleave."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tokenbus.protocol.access import usage
from tokenbus.protocol.access.usage import Counts, UsageKind, UsageName, UsageQuery, UsageSum
from tokenbus.router.usage import counters as counting
from tokenbus.router.usage import folding
from tokenbus.router.usage.counters import UsageCounter, UsageCounters

DAYS = ("2026-11-22", "2026-11-23")
TODAY = "2026-11-24"
KINDS = (UsageKind("generate"), UsageKind("generate", "pirate"), UsageKind("embed"))


def name(day: str = TODAY, tenant: str = "acme", key: str = "", model: str = "chat") -> UsageName:
    return UsageName(day, tenant, key, model)


def one_request(prompt: int = 3, completion: int = 2) -> Counts:
    return Counts(requests=1, prompt_tokens=prompt, completion_tokens=completion, errors={"internal": 1})


def test_a_counter_is_changed_until_the_bucket_has_all_of_it() -> None:
    counters = UsageCounters("r")
    counters.count(name(), KINDS[0], one_request(), 1.0)
    counters.count(name(), KINDS[0], one_request(), 2.0)
    (counter,) = counters.unsaved()
    assert counters.oldest_unsaved_at() == 1.0
    value = usage.encode_rows(counter.rows)
    counters.count(name(), KINDS[0], one_request(), 3.0)  # while it is written
    counters.saved(counter, 5, value, 4.0)
    assert counters.unsaved() == [counter]
    counters.saved(counter, 6, usage.encode_rows(counter.rows), 5.0)
    assert not counters.unsaved()
    assert counters.oldest_unsaved_at() is None
    assert counter.rows[KINDS[0]].requests == 3


def test_counters_of_a_day_that_is_over_are_forgotten_once_they_are_saved() -> None:
    counters = UsageCounters("r")
    counters.count(name(DAYS[0]), KINDS[0], one_request(), 1.0)
    counters.forget_before(TODAY)
    assert len(counters) == 1
    (counter,) = counters.unsaved()
    counters.saved(counter, 1, usage.encode_rows(counter.rows), 2.0)
    counters.forget_before(TODAY)
    assert len(counters) == 0
    counters.count(name(DAYS[0]), KINDS[0], one_request(), 3.0)  # the broker's clock was set back
    assert counters.unsaved()[0].shard != counter.shard
    counters.check_integrity()


def test_names_beyond_the_limit_are_counted_together() -> None:
    counters = UsageCounters("r", max_rows=2)
    for key in "abcd":
        counters.count(name(key=key), KINDS[0], one_request(), 1.0)
    counters.count(name(key="a"), KINDS[0], one_request(), 1.0)
    counters.check_integrity()
    found = {one.name: one.rows for one in counters}
    assert set(found) == {name(key="a"), name(key="b"), UsageName(TODAY, "", "", "")}
    assert found[UsageName(TODAY, "", "", "")][KINDS[0]].requests == counters.num_other == 2
    assert found[name(key="a")][KINDS[0]].requests == 2


def test_a_value_with_the_longest_names_of_all_its_adapters_fits_in_the_bucket() -> None:
    counters = UsageCounters("r")
    for number in range(1_000):
        kind = UsageKind("generate", f"{number:04}{'ü' * 62}")
        counters.count(name(), kind, Counts(requests=2**50, prompt_tokens=2**60), 1.0)
    (counter,) = counters
    assert len(counter.rows) == counting.MAX_KINDS + 1
    assert counter.rows[UsageKind("generate", usage.OTHER)].requests == 2**50 * (1_000 - counting.MAX_KINDS)
    assert len(usage.encode_rows(counter.rows)) < 64 * 1024


class Histories(RuleBasedStateMachine):
    """Two routers and one bucket: writes may go unanswered, routers are killed, and folding begins at any time and
    stops anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket: dict[str, tuple[int, bytes, float]] = {}
        self.revision = 0
        self.now = 0.0
        self.incarnations = 0
        self.routers = [self.new_router(), self.new_router()]
        self.expected = 0
        self.unsaved = [0, 0]
        """Requests of each router that no answer has confirmed."""
        self.lost = 0

    def new_router(self) -> UsageCounters:
        self.incarnations += 1
        return UsageCounters(f"r{self.incarnations}")

    def put(self, key: str, value: bytes, revision: int) -> int | None:
        if self.bucket.get(key, (0,))[0] != revision:
            return None
        self.revision += 1
        self.bucket[key] = (self.revision, value, self.now)
        return self.revision

    @rule(router=st.integers(0, 1), day=st.sampled_from(DAYS), kind=st.sampled_from(KINDS), key=st.sampled_from("ab"))
    def count(self, router: int, day: str, kind: UsageKind, key: str) -> None:
        self.routers[router].count(name(day, key=key), kind, one_request(), self.now)
        self.expected += 1
        self.unsaved[router] += 1

    @rule(router=st.integers(0, 1), is_answered=st.booleans())
    def save(self, router: int, is_answered: bool) -> None:
        counters = self.routers[router]
        for counter in counters.unsaved():
            self.save_one(counters, counter, is_answered)
        while is_answered and (left := counters.unsaved()):
            for counter in left:
                self.save_one(counters, counter, is_answered)
        if is_answered:
            self.unsaved[router] = 0
            counters.forget_before(TODAY)

    def save_one(self, counters: UsageCounters, counter: UsageCounter, is_answered: bool) -> None:
        if counter.is_in_doubt:
            self.resolve(counters, counter)
        value = usage.encode_rows(counter.rows)
        revision = self.put(counter.key, value, counter.revision)
        if revision is None:
            self.resolve(counters, counter)
        elif is_answered:
            counters.saved(counter, revision, value, self.now)
        else:
            counters.maybe_saved(counter, value)

    def resolve(self, counters: UsageCounters, counter: UsageCounter) -> None:
        folded = self.bucket.get(usage.entry_key(counter.name, usage.FOLDED))
        stored = usage.Stored({}) if folded is None else usage.decode(folded[1])
        if counter.key in self.bucket:
            counters.found(counter, *self.bucket[counter.key][:2])
        elif counter.shard in stored.pending or counter.shard in stored.folded:
            counters.folded_away(counter)
        else:
            counters.not_there(counter)

    @rule(router=st.integers(0, 1))
    def kill(self, router: int) -> None:
        self.lost += self.unsaved[router]
        self.unsaved[router] = 0
        self.routers[router] = self.new_router()

    @rule(steps=st.integers(0, 6), hours=st.sampled_from([0.0, 2.0]))
    def fold(self, steps: int, hours: float) -> None:
        """Folds, and stops after a number of steps."""
        self.now += hours * 3_600
        for day in DAYS:
            entries = [
                folding.StoredCounts(key, value, revision, at)
                for key, (revision, value, at) in self.bucket.items()
                if key.startswith(day)
            ]
            for fold in folding.plan_folds(entries, self.now):
                if steps <= 0:
                    return
                steps -= 1
                assert self.put(fold.key, fold.value, fold.revision) is not None
                for key, revision in fold.removed:
                    if steps > 0 and self.bucket.get(key, (0,))[0] == revision:
                        del self.bucket[key]
                    steps -= 1

    @invariant()
    def nothing_is_counted_twice_and_only_what_was_not_saved_is_lost(self) -> None:
        found = UsageSum(UsageQuery(DAYS[0], DAYS[1], ()))
        for day in DAYS:
            for key, (_, value, _) in sorted(self.bucket.items(), key=lambda one: one[1][0]):
                if key.startswith(day):
                    found.add(key, value)
            found.end_day()
        total = usage.total_of(found.rows())
        assert self.expected - self.lost - sum(self.unsaved) <= total.requests <= self.expected
        assert total.prompt_tokens == 3 * total.requests
        assert total.completion_tokens == 2 * total.requests
        for counters in self.routers:
            counters.check_integrity()


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=30, deadline=None)


def test_a_single_entry_is_not_folded_and_two_become_one() -> None:
    def stored(shard: str, requests: int, at: float = 0.0) -> folding.StoredCounts:
        value = usage.encode_rows({KINDS[0]: Counts(requests=requests)})
        return folding.StoredCounts(usage.entry_key(name(DAYS[0]), shard), value, requests, at)

    assert not list(folding.plan_folds([stored("a", 1)], 1e6))
    assert not list(folding.plan_folds([stored("a", 1), stored("b", 2, 1e6)], 1e6)), "one was just written"
    (first,) = folding.plan_folds([stored("a", 1), stored("b", 2)], 1e6)
    assert first.revision == 0
    assert {revision for _, revision in first.removed} == {1, 2}
    folded = folding.StoredCounts(first.key, first.value, 3, 1e6)
    assert not list(folding.plan_folds([folded], 1e6 + 60)), "somebody may be adding up"
    (second,) = folding.plan_folds([folded], 1e6 + folding.QUIET_S)
    assert not second.removed
    assert usage.decode(second.value) == usage.Stored({KINDS[0]: Counts(requests=3)}, {}, ["a", "b"])
    assert not list(folding.plan_folds([folded._replace(value=second.value, revision=4)], 2e6))


def test_the_days_that_are_folded_are_over() -> None:
    days = folding.days_to_fold("2026-03-01")
    assert days[0] == "2026-02-28"
    assert len(days) == folding.DAYS


@pytest.mark.parametrize("offset", [-1e6, 0.0, 86_400.0])
def test_the_day_is_that_of_the_brokers_clock(offset: float) -> None:
    from tokenbus.router.usage.broker_clock import BrokerClock

    clock = BrokerClock(1_000.0, 10.0)
    assert clock.at(11.0) == 1_001.0
    clock.observe(1_000.0 + offset, 20.0)
    assert clock.at(21.0) == 1_001.0 + offset
