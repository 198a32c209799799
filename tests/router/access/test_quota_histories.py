"""Routers exceed a limit by at most one request each, whatever happens to them and to their bucket, and use it up."""

import itertools
import math
import os
import random

import msgspec
import pytest

from tests.router.access.quota_world import ADDRESS, KEY_ID, QuotaWorld
from tests.sim.world import world
from tokenbus.protocol.access.keys import KeyLimits
from tokenbus.protocol.bus.bucket import Entry
from tokenbus.protocol.wire import errors
from tokenbus.router.access.limits import Account, Limits, TenantLimits, Throttled, Ticket, Wanted
from tokenbus.router.access.slots import SlotShare
from tokenbus.router.access.windows import DAY_S, WINDOW_S, Record, WindowShare

_SHORT = 12
HISTORIES = 1_000 if os.environ.get("TOKENBUS_TESTS") == "long" else _SHORT
"""`make test` plays a few; `make test-long` plays all."""
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if HISTORIES > _SHORT else []) for seed in range(HISTORIES)]
LIMITS = TenantLimits(0, 240, 60_000)
LARGEST = 400
DAY_LIMITS = KeyLimits(tokens_per_day=60_000, concurrency=8)


def prompt_of(rng: random.Random) -> int:
    return rng.choice((20, 100, LARGEST))


def faults(made: QuotaWorld) -> None:
    """Plans what goes wrong in the next minute."""
    rng, now = made.rng, made.world.now
    for _ in range(rng.randrange(1, 5)):
        kind = rng.choice(("kill", "pause", "lose", "down", "answers"))
        at = now + rng.uniform(1.0, 55.0)
        if kind == "kill" and len(made.routers) > 1:

            def kill() -> None:
                if len(made.routers) > 1:
                    made.kill(rng.choice(made.routers))

            made.world.at(at, kill)
        elif kind == "pause":
            router = rng.choice(made.routers)
            made.world.at(at, lambda router=router: setattr(router.process, "is_paused", True))  # type: ignore[misc]
            until = at + rng.uniform(0.1, 15.0)
            made.world.at(until, lambda router=router: setattr(router.process, "is_paused", False))  # type: ignore[misc]
        elif kind == "lose":
            made.world.at(at, made.broker.lose)
        elif kind == "down":
            made.world.at(at, lambda: setattr(made.broker, "is_down", True))
            made.world.at(at + rng.uniform(0.1, 20.0), lambda: setattr(made.broker, "is_down", False))
        elif kind == "answers":
            made.broker.p_lost_answer = 0.05


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_routers_exceed_a_limit_by_at_most_a_request_each(seed: int) -> None:
    with world(seed) as virtual:
        made = QuotaWorld(virtual, virtual.rng.randrange(1, 6), LIMITS)
        virtual.run(25.0)  # the bucket is new: leases begin in the window after the next one
        faults(made)
        made.load(virtual.rng.choice((2.0, 8.0, 30.0)), 60.0, lambda: prompt_of(virtual.rng))
        virtual.run(62.0)
        assert made.worst_excess(made.requests, LIMITS.requests_per_minute, 1) <= 1.0
        assert made.worst_excess(made.tokens, LIMITS.tokens_per_minute, LARGEST) <= 1.0
        assert all(not router.process.faults for router in made.routers)


@pytest.mark.parametrize("num_routers", [1, 4])
def test_what_a_limit_allows_is_used_up_and_is_charged_once(num_routers: int) -> None:
    with world(7) as virtual:
        made = QuotaWorld(virtual, num_routers, LIMITS)
        virtual.run(25.0)
        virtual.run(WINDOW_S - made.broker.now % WINDOW_S)
        made.broker.p_lost_answer = 0.02
        made.load(20.0, 60.0, lambda: 10)
        virtual.run(59.9)
        assert 240 + 0.9 * 224 <= sum(made.requests.values()) <= 480 + num_routers
        assert made.num_refused > 500
        made.broker.p_lost_answer = 0.0
        virtual.run(60.0)
        virtual.run(WINDOW_S - made.broker.now % WINDOW_S)
        made.load(4.0, 2.0, lambda: 10)
        virtual.run(3.0)
        window = int(made.broker.now // WINDOW_S)
        for unit in ("requests", "tokens"):
            shares = [router.limits.windows.get(Account("=acme", unit)) for router in made.routers]
            leased = sum(share.leased for share in shares if share is not None and share.window == window)
            entry = made.broker.entries[f"=acme.{unit}"]
            record = msgspec.msgpack.decode(entry.value or b"", type=Record)
            assert record.window == window
            assert record.taken == pytest.approx(leased)


@pytest.mark.parametrize("num_routers", [1, 3])
@pytest.mark.parametrize("limit", [6, 20, 600])
def test_a_minute_s_limit_may_be_used_up_at_once_and_again_after_a_minute(limit: int, num_routers: int) -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, num_routers, TenantLimits(0, limit, 0))
        virtual.run(25.0)
        for minute in (1, 2):
            virtual.run(WINDOW_S - made.broker.now % WINDOW_S)
            for number in range(2 * limit):
                made.routers[number % num_routers].ask(1)
            virtual.run(3.0)
            assert minute * limit <= len(made.let_through["acme"]) <= minute * (limit + num_routers)
            virtual.run(60.0)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("limits", "most"), [((0, 6, 0), 6), ((0, 20, 0), 20), ((0, 0, 2_000), 20)])
def test_no_request_is_refused_before_a_minute_s_limit_is_used_up_whenever_they_come(
    limits: tuple[int, int, int], most: int, seed: int
) -> None:
    with world(seed) as virtual:
        made = QuotaWorld(virtual, 1, TenantLimits(*limits))
        virtual.run(25.0)
        for _ in range(most):
            made.routers[0].ask(100)
            virtual.run(virtual.rng.expovariate(most / 40.0))
        assert (len(made.let_through["acme"]), made.num_refused) == (most, 0)


@pytest.mark.parametrize("num_routers", [1, 3])
@pytest.mark.parametrize("limit", [6, 60])
def test_a_client_that_keeps_within_its_limit_is_never_refused(limit: int, num_routers: int) -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, num_routers, TenantLimits(0, limit, 0))
        virtual.run(25.0)
        for number in range(3 * limit):
            made.routers[number % num_routers].ask(1)
            virtual.run(61.0 / limit)
        assert made.num_refused == 0


@pytest.mark.parametrize("cost", [1, 399, 400, 3_000])
def test_a_client_that_waits_as_long_as_it_is_told_finds_room_and_not_before(cost: int) -> None:
    share, record, now = WindowShare(6_000, WINDOW_S), None, 0.0

    def lease() -> float:
        nonlocal record
        share.roll(now)
        leased = share.lease(record, "r1", 1)
        assert leased is not None
        share.take(leased)
        record = leased.record
        return leased.lease.granted

    while lease():
        share.charge(max(0.0, share.rest))
    share.charge(cost)
    lease()  # what it costs beyond the limit is in the record
    told = share.wait_s(now)
    now = told - WINDOW_S
    share.roll(now)
    assert not lease() or not now
    now = told
    assert lease() > 0


def test_a_router_alone_without_a_bucket_lets_a_minute_s_limit_be_used_up_once() -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 0, TenantLimits(0, 20, 0))
        router = made.add()
        virtual.run(1.0)
        for _ in range(30):
            router.ask(1)
        virtual.run(0.5)
        assert len(made.let_through["acme"]) == 20
        assert not router.quota.is_leasing
        virtual.run(20.0)
        assert router.quota.is_leasing
        made.let_through.clear()
        for _ in range(30):
            router.ask(1)
        virtual.run(0.5)
        assert len(made.let_through["acme"]) < 10, "only what has passed"


def test_after_an_outage_a_client_may_not_use_again_what_routers_let_through_without_their_record() -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 2, LIMITS)
        virtual.run(25.0)
        made.load(20.0, 90.0, lambda: 10)
        virtual.run(20.0)
        made.broker.is_down = True
        virtual.run(50.0)
        made.broker.is_down = False
        virtual.run(20.0)
        assert all(router.quota.is_leasing for router in made.routers)
        assert made.worst_excess(made.requests, LIMITS.requests_per_minute, 1) <= 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_a_day_s_limit_is_exceeded_by_a_request_each_and_that_of_open_ones_never_twice(
    seed: int,
) -> None:
    """Without a record, or of a router that stands still, routers do not know each other's open requests: each keeps
    what it has, and lets in more up to its even share."""
    with world(seed) as virtual:
        made = QuotaWorld(virtual, virtual.rng.randrange(1, 6), TenantLimits(), None, DAY_LIMITS)
        virtual.run(25.0)
        faults(made)
        made.load(virtual.rng.choice((8.0, 30.0)), 60.0, lambda: prompt_of(virtual.rng))
        virtual.run(62.0)
        num_seen = len(set().union(*made.seen.values()))
        assert sum(made.tokens.values()) <= DAY_LIMITS.tokens_per_day + LARGEST * num_seen
        assert made.most_open <= 2 * DAY_LIMITS.concurrency
        assert all(not router.process.faults for router in made.routers)


def test_a_router_that_stood_still_when_the_bucket_was_lost_leases_nothing_that_others_have_leased() -> None:
    with world(3) as virtual:
        made = QuotaWorld(virtual, 2, TenantLimits(), None, KeyLimits(tokens_per_day=12_000))
        first, second = made.routers
        virtual.run(25.0)
        for router in (first, second):
            router.ask(100)
        virtual.run(5.0)
        second.process.is_paused = True
        for _ in range(60):
            first.ask(LARGEST)
            virtual.run(0.5)
        assert made.num_refused
        made.broker.lose()
        virtual.run(40.0)
        second.process.is_paused = False
        for _ in range(60):
            second.ask(LARGEST)
            virtual.run(0.5)
        assert sum(made.tokens.values()) <= 12_000 + 2 * LARGEST


@pytest.mark.parametrize("has_bucket", [True, False])
def test_a_changed_limit_counts_at_once_and_not_from_the_next_day_on(has_bucket: bool) -> None:
    share, record, used = WindowShare(100, DAY_S), None, []
    share.roll(0.0)
    for limit in (100, 300, 200, 1_000):
        share.set_limit(limit)
        while not share.is_full or share.rest > 0:
            if share.rest > 0:
                share.charge(1)
            elif has_bucket:
                leased = share.lease(record, "r1", 1)
                assert leased is not None
                share.take(leased)
                record = leased.record
            else:
                share.share_out(1, 0.0)
        used.append(share.spent)
    assert used == [100, 300, 300, 1_000]


def test_a_day_s_limit_that_open_requests_may_still_give_back_is_no_reason_to_wait_for_tomorrow() -> None:
    limits = Limits(TenantLimits(), {}, lambda key_id: KeyLimits(tokens_per_day=100))
    address, record = ADDRESS._replace(key_id=KEY_ID), None

    def admitted() -> Ticket | Throttled:
        nonlocal record
        while isinstance(found := limits.admit(address, 40, 0, 10.0), Wanted):
            (share,) = limits.windows.values()
            leased = share.lease(record, "r1", 1)
            assert leased is not None
            share.take(leased)
            share.asked_at, record = None, leased.record
        return found

    open_ones = []
    while isinstance(found := admitted(), Ticket):
        open_ones.append(found)
    assert found.retry_after_s == 1.0
    for ticket in open_ones:
        limits.close(ticket, address, 40, 0)
    found = admitted()
    assert isinstance(found, Throttled)
    assert found.retry_after_s > 80_000


def test_a_lowered_limit_ends_what_was_leased_of_the_higher_one() -> None:
    share = WindowShare(1_000_000, DAY_S)
    share.roll(0.0)
    leased = share.lease(None, "r1", 1)
    assert leased is not None
    share.take(leased)
    share.charge(10)
    assert share.rest > 900
    share.set_limit(100)
    assert share.rest == 0
    slots = SlotShare(100)
    slots.take(slots.lease(None, "r1", 1, 0.0), 0.0)
    slots.share_out(1, 0.0)
    slots.set_limit(2)
    assert not slots.has_room


def test_open_requests_of_all_routers_together_stay_within_a_limit() -> None:
    with world(3) as virtual:
        made = QuotaWorld(virtual, 3, TenantLimits(8, 0, 0))
        virtual.run(25.0)
        made.load(40.0, 30.0, lambda: 10)
        virtual.run(30.0)
        assert 6 <= made.most_open <= 8


def test_a_router_that_dies_gives_its_slots_back_within_seconds() -> None:
    with world(3) as virtual:
        made = QuotaWorld(virtual, 2, TenantLimits(4, 0, 0))
        virtual.run(25.0)
        made.rng.expovariate = lambda rate: 1e6  # type: ignore[method-assign, assignment]
        dying, other = made.routers
        for _ in range(4):
            dying.ask(1)
        virtual.run(0.5)
        assert made.num_open == 4
        other.ask(1)
        virtual.run(0.5)
        assert (made.num_open, made.num_refused) == (4, 1)
        made.kill(dying)
        virtual.run(7.0)
        other.ask(1)
        virtual.run(0.5)
        assert made.num_open == 1


def test_a_client_with_one_request_at_a_time_is_not_refused_by_the_next_router() -> None:
    with world(3) as virtual:
        made = QuotaWorld(virtual, 3, TenantLimits(1, 0, 0))
        virtual.run(25.0)
        made.rng.expovariate = lambda rate: 0.05  # type: ignore[method-assign, assignment]
        for number in range(60):
            made.routers[number % 3].ask(1)
            virtual.run(0.06)
            assert made.most_open == 1
        assert made.num_refused == 0
        assert len(made.let_through["acme"]) == 60


def test_without_a_bucket_each_router_takes_an_even_share() -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 0, LIMITS)
        made.broker.is_down = True
        for _ in range(4):
            made.add()
        virtual.run(12.0)
        virtual.run(WINDOW_S - made.broker.now % WINDOW_S)
        made.load(20.0, 60.0, lambda: 10)
        virtual.run(61.0)
        assert 0.8 * 240 <= sum(made.requests.values()) <= 1.2 * 240
        assert all(router.quota.num_routers == 4 for router in made.routers)


def test_a_router_that_can_not_know_what_is_left_of_a_day_gives_a_lease_and_then_no_more_than_passes_of_it() -> None:
    day = 86_400
    with world(5) as virtual:
        made = QuotaWorld(virtual, 2, TenantLimits(), None, KeyLimits(tokens_per_day=day))
        virtual.run(25.0)
        asked, other = made.routers
        for _ in range(day // 400 + 10):
            asked.ask(400)
        virtual.run(10.0)
        before = sum(made.tokens.values())
        assert day <= before <= day + 400
        made.broker.is_down = True
        virtual.run(12.0)
        for _ in range(1_000):
            other.ask(10)
        virtual.run(1.0)
        assert sum(made.tokens.values()) - before <= day / 256 / 2 + 10
        before = sum(made.tokens.values())
        virtual.run(60.0)
        for _ in range(1_000):
            other.ask(10)
        virtual.run(1.0)
        assert 20 <= sum(made.tokens.values()) - before <= 61 / 2 + 10
        made.broker.is_down = False
        virtual.run(20.0)
        num_refused = made.num_refused
        other.ask(10)
        virtual.run(1.0)
        assert made.num_refused == num_refused + 1, "the record says that nothing is left"


def test_of_a_day_s_limit_a_router_that_is_killed_has_leased_less_than_two_parts_in_vain() -> None:
    share, record = WindowShare(256_000, DAY_S), None
    share.roll(0.0)
    for _ in range(2_000):
        if share.needs_lease:
            leased = share.lease(record, "r1", 1)
            assert leased is not None
            share.take(leased)
            record = leased.record
        share.charge(100)
        assert share.rest <= 1_500


def test_a_window_that_is_left_to_routers_without_the_record_is_asked_for_again() -> None:
    share = WindowShare(100, DAY_S)
    share.roll(10.0)
    half = share.lease(Record(0, 50.0), "r1", num_routers=2, num_sharing=1)
    assert half
    share.take(half)
    assert (share.is_full, share.wait_s(10.0)) == (True, 1.0)
    share.tick(2, 11.0)
    more = share.lease(half.record, "r1", num_routers=2)
    assert not share.is_full
    assert more
    assert more.lease.granted > 0


@pytest.mark.parametrize("taken", [math.nan, math.inf, -1.0, 1e300])
def test_a_record_with_what_is_no_amount_is_replaced(taken: float) -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 1, LIMITS)
        virtual.run(25.0)
        window = int(made.broker.now // WINDOW_S)
        damaged = msgspec.msgpack.encode(Record(window, taken))
        made.broker.entries["=acme.requests"] = Entry("=acme.requests", damaged, 10_000, made.broker.stamp)
        made.routers[0].ask(10)
        virtual.run(1.0)
        assert (made.num_refused, len(made.let_through["acme"])) == (0, 1)
        assert math.isfinite(msgspec.msgpack.decode(made.broker.entries["=acme.requests"].value or b"").get("taken"))


def test_what_is_told_to_be_left_of_a_day_follows_what_other_routers_have_taken() -> None:
    day = 1_000_000
    with world(5) as virtual:
        made = QuotaWorld(virtual, 2, TenantLimits(), None, KeyLimits(tokens_per_day=day))
        virtual.run(25.0)
        rare, busy = made.routers
        rare.ask(10)
        for _ in range(100):
            busy.ask(5_000)
        virtual.run(2 * WINDOW_S)
        rare.ask(10)  # the record is read again
        virtual.run(1.0)
        told = rare.quota.report(ADDRESS._replace(key_id=KEY_ID))
        assert told
        assert told.tokens
        assert told.tokens.remaining == pytest.approx(day - 500_020, abs=2 * day / 256)


def test_a_bucket_that_is_full_takes_nothing_from_clients_whose_limits_it_has_and_gives_others_even_shares() -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 2, LIMITS)
        virtual.run(25.0)
        made.routers[0].ask(1)
        virtual.run(WINDOW_S - made.broker.now % WINDOW_S + 0.5)
        made.broker.is_full = True
        for tenant in ("acme", "globex"):
            for number in range(40):
                made.routers[number % 2].ask(1, tenant)
        virtual.run(1.0)
        counts = {tenant: len(times) for tenant, times in made.let_through.items()}
        assert counts["acme"] == 41
        assert 16 <= counts["globex"] <= 18
        assert all(router.quota.is_leasing for router in made.routers)


def test_the_bucket_that_is_back_is_used_again_and_a_lost_one_is_made_again() -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 2, LIMITS)
        virtual.run(25.0)
        assert all(router.quota.is_leasing for router in made.routers)
        made.broker.is_down = True
        virtual.run(4.0)
        assert not any(router.quota.is_leasing for router in made.routers)
        made.broker.is_down = False
        made.broker.lose()
        virtual.run(35.0)
        assert all(router.quota.is_leasing for router in made.routers)


def test_a_limit_of_less_than_a_request_in_a_window_lets_one_through_now_and_then() -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 2, TenantLimits(0, 3, 0))
        virtual.run(25.0)
        made.load(5.0, 120.0, lambda: 10)
        virtual.run(121.0)
        assert 8 <= sum(made.requests.values()) <= 11


def test_a_request_that_is_larger_than_a_window_is_delayed_and_not_locked_out() -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 1, TenantLimits(0, 0, 6_000))
        virtual.run(25.0)
        made.load(5.0, 120.0, lambda: 3_000)
        virtual.run(121.0)
        assert 3 <= sum(made.requests.values()) <= 6


def test_tenants_that_ask_for_more_than_they_may_get_shares_by_their_limits_and_none_stands_still() -> None:
    """16 clients of four tenants at four times what all limits together allow, at three routers."""
    weights = {"a": 8, "b": 4, "c": 2, "d": 1}
    limits = {tenant: TenantLimits(0, 0, 60_000 * weight) for tenant, weight in weights.items()}
    with world(11) as virtual:
        made = QuotaWorld(virtual, 3, TenantLimits(), limits)
        virtual.run(25.0)
        for tenant in weights:
            for _ in range(4):  # each of the 16 clients asks for a sixteenth of four times 900,000 tokens a minute
                at = virtual.now + virtual.rng.random()
                for number in range(1_125):
                    router = made.rng.choice(made.routers)
                    virtual.at(at + number * 60 / 1_125, lambda r=router, t=tenant: r.ask(200, t))  # type: ignore[misc]
        virtual.run(61.0)
        counts = {tenant: len(times) for tenant, times in made.let_through.items()}
        for tenant, weight in weights.items():
            assert counts[tenant] / sum(counts.values()) == pytest.approx(weight / 15, rel=0.1)
            times = made.let_through[tenant]
            assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 5.0


def test_a_request_waits_for_its_own_leases_only() -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 1, TenantLimits(requests_per_minute=600))
        (router,) = made.routers
        virtual.run(25.0)
        made.broker.slow = {f"=slow{number}": 1.5 for number in range(20)}
        for number in range(20):
            router.ask(1, f"slow{number}")
        virtual.run(0.1)
        began = virtual.now
        router.ask(1, "calm")
        virtual.run(3.0)
        assert made.let_through["calm"][0] - began < 0.05
        assert all(made.let_through[tenant][0] - began > 1.0 for tenant in (f"slow{number}" for number in range(20)))


def test_a_request_comes_before_leases_that_no_request_waits_for() -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 1, TenantLimits(requests_per_minute=600))
        (router,) = made.routers
        virtual.run(25.0)
        idle = [f"idle{number}" for number in range(1_000)]
        for tenant in idle:
            router.ask(1, tenant)
        virtual.run(2.0)
        made.broker.slow = {f"={tenant}": 0.1 for tenant in idle}
        router.limits.wanted.update(dict.fromkeys(router.limits.windows))
        router.process.call(router.limits.on_wanted)
        virtual.run(0.01)
        began = virtual.now
        router.ask(1, "calm")
        virtual.run(5.0)
        assert made.let_through["calm"][0] - began < 0.2  # of more than 3 s that all of them take
        assert not router.limits.wanted


@pytest.mark.parametrize(
    ("remaining_s", "waits_s", "code"),
    [
        (0.3, 0.3, errors.Code.DEADLINE_EXCEEDED),
        (9.0, 2.0, errors.Code.OVERLOADED),
        (None, 2.0, errors.Code.OVERLOADED),
    ],
)
def test_a_request_waits_for_a_lease_within_its_own_time_and_for_two_seconds_at_most(
    remaining_s: float | None, waits_s: float, code: errors.Code
) -> None:
    with world(5) as virtual:
        made = QuotaWorld(virtual, 1, TenantLimits(requests_per_minute=600))
        (router,) = made.routers
        virtual.run(25.0)
        made.broker.slow = {"=acme": 5.0}
        began = virtual.now
        router.ask(1, "acme", remaining_s)
        virtual.run(4.0)
        ((refused_at, why),) = made.refused["acme"]
        assert (refused_at - began, why) == (pytest.approx(waits_s, abs=0.03), code)
        made.broker.slow = {}
        virtual.run(5.0)
        router.ask(1, "acme", remaining_s)
        virtual.run(0.1)
        assert len(made.let_through["acme"]) == 1
