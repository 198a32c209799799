"""A worker fetches blocks from the one that holds most of them, where that is quicker than to compute them."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.builders import card, events, fleet_of, known, part, stored
from tokenbus.protocol.wire import codec, internal, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.kv_exchange import FetchOffer, FetchPlanner, HolderCandidate
from tokenbus.router.placement.placement import Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import POLICIES, KvAware, View, make_policies
from tokenbus.router.placement.prefix_index import PrefixIndex
from tokenbus.router.workers.speed import FIRST_MB_PER_S, TransferRate

BLOCK = 16
KB = 10_000
"""Bytes of a token: at 60 MB/s it moves in 1/6 ms."""
PROMPT = range(1, 31)


def fleet(holdings: dict[str, int], prefill_s: float = 0.001, **changes: object) -> Fleet:
    """Returns workers that hold so many blocks of the prompt, and compute a token in `prefill_s`."""
    fields: dict[str, object] = {"kv_identity": "k", "kv_token_bytes": KB} | changes
    cards = [card(name, kv_block_size=BLOCK, total_kv_blocks=100, **fields) for name in holdings]
    found = fleet_of(*cards)
    for name, held in holdings.items():
        found.apply_events("demo", events(name, stored=stored(PROMPT[:held])), 0.0)
        learn_speed(found, name, prefill_s)
    found.sweep(0.0)
    return found


def learn_speed(found: Fleet, name: str, prefill_s: float) -> None:
    before = messages.Load(queued_prefill_tokens=1_000)
    after = messages.Load(computed_tokens=round(0.2 / prefill_s))
    for _ in range(10):
        known(found, name).speed.observe_loads(before, after, 0.2)


def place(
    found: Fleet, chosen: str, now: float = 0.0, *, blocks: int = len(PROMPT), policy: str = "kv", explain: bool = False
) -> Placement:
    """Places the prompt on that worker, while all workers whose leases have not expired are heard."""
    found.renew_all_leases(now)
    request = PlacementRequest(f"r{random.random()}", BLOCK * blocks + 1, PROMPT[:blocks])
    options = PlacementOptions(only=chosen, explain=explain)
    placement = found.place("demo", request, make_policies()[policy], random.Random(1), now, options)
    assert isinstance(placement, Placement)
    return placement


def source(placement: Placement) -> str | None:
    return None if placement.fetch_from is None else placement.fetch_from.card.worker_id


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_the_policy_the_missing_blocks_come_from_the_worker_with_the_most(policy: str) -> None:
    placement = place(fleet({"a": 2, "b": 20, "c": 25}), "a", policy=policy)
    assert (source(placement), placement.overlap_blocks, placement.fetch_blocks) == ("c", 2, 23)


def test_blocks_that_will_be_fetched_are_not_booked_as_work_and_are_predicted_to_be_there() -> None:
    found = fleet({"a": 0, "b": 20})
    place(found, "a", blocks=20)
    assert [booking.prefill_tokens for booking in known(found, "a").bookings.values()] == [1]
    assert place(found, "a", blocks=20).overlap_blocks == 20


@pytest.mark.parametrize(("held", "expected"), [(7, None), (8, "b")])
def test_fewer_than_128_tokens_are_not_fetched(held: int, expected: str | None) -> None:
    found = fleet({"a": 0, "b": held})
    assert source(place(found, "a")) == expected


def test_what_the_worker_will_hold_soon_is_not_fetched_and_nothing_is_fetched_from_where_it_will_be() -> None:
    found = fleet({"a": 0, "b": 0, "c": 9})
    place(found, "b")
    assert source(place(found, "a")) == "c"
    assert source(place(found, "b")) is None


@pytest.mark.parametrize(("prefill_s", "expected"), [(0.00034, "b"), (0.00033, None)])
def test_moving_must_cost_less_than_half_of_computing(prefill_s: float, expected: str | None) -> None:
    found = fleet({"a": 0, "b": 20}, prefill_s)
    place(found, "a", blocks=10)  # the first fetch is tried in any case
    found.apply_events("demo", fetched("a", "b", mb=0.0, ms=1.0), 5.0)
    assert source(place(found, "a", 5.0)) == expected


def test_where_moving_is_too_slow_one_fetch_is_tried_in_a_minute() -> None:
    found = fleet({"a": 0, "b": 20}, prefill_s=1e-6)
    tried = [source(place(found, "a", now)) for now in (0.0, 6.0, 53.0, 60.0, 66.0)]
    assert tried == ["b", None, None, "b", None]


def test_a_measured_rate_decides_from_then_on() -> None:
    found = fleet({"a": 0, "b": 20}, prefill_s=0.0001)
    place(found, "a")
    found.apply_events("demo", fetched("a", "b", mb=10.0, ms=10.0), 6.0)
    assert found.model("demo").transfer_mb_per_s == 1_000.0
    assert source(place(found, "a", 6.0)) == "b"


def test_a_worker_whose_speed_is_unknown_counts_like_the_fastest() -> None:
    found = fleet({"a": 0, "b": 20}, prefill_s=0.001)
    found.apply_card(card("new", kv_block_size=BLOCK, total_kv_blocks=100, kv_identity="k", kv_token_bytes=KB), 0.0)
    found.apply_events("demo", events("new"), 0.0)
    found.sweep(0.0)
    place(found, "a")
    assert source(place(found, "new", 1.0)) == "b"


@pytest.mark.parametrize("changes", [{"kv_identity": ""}, {"kv_token_bytes": 0}])
def test_workers_that_exchange_nothing_are_asked_for_nothing(changes: dict[str, object]) -> None:
    assert source(place(fleet({"a": 0, "b": 20}, **changes), "a")) is None


def test_blocks_of_another_identity_are_not_fetched() -> None:
    found = fleet({"a": 0, "b": 20, "c": 10})
    found.apply_card(card("b", kv_block_size=BLOCK, total_kv_blocks=100, kv_identity="other", kv_token_bytes=KB), 0.0)
    assert source(place(found, "a")) == "c"
    found.check_integrity()


@pytest.mark.parametrize("state", [messages.WorkerState.DRAINING, messages.WorkerState.LEAVING])
def test_a_worker_that_leaves_gives_its_blocks_to_those_that_continue_its_streams(state: messages.WorkerState) -> None:
    found = fleet({"a": 0, "b": 20})
    found.apply_events("demo", events("b", 1, state=state), 0.0)
    assert source(place(found, "a")) == "b"


def test_a_worker_that_is_lost_or_stuck_or_restarts_is_not_asked() -> None:
    found = fleet({"a": 0, "lost": 20, "stuck": 20, "restarts": 20, "slow": 10})
    found.apply_events("demo", events("stuck", 1, load=messages.Load(step_age_ms=2_001.0)), 0.0)
    found.apply_events("demo", events("restarts", 1, state=messages.WorkerState.RESTARTING), 0.0)
    for name in ("a", "slow", "stuck", "restarts"):
        found.renew_lease(known(found, name).card, 2.0)
    assert [worker.card.worker_id for worker in found.expire_leases(2.0)] == ["lost"]
    assert source(place(found, "a", 2.0)) == "slow"


def fetched(receiver: str, holder: str, mb: float, ms: float, seq: int = 1) -> internal.Events:
    one = internal.Fetched(stream_no=1, worker_id=holder, fetched_bytes=round(mb * 1e6), fetch_ms=ms)
    return internal.Events(
        worker_id=receiver,
        epoch="100-a",
        seq=seq,
        load=messages.Load(),
        state=messages.WorkerState.READY,
        fetches=[one],
    )


def test_a_holder_that_gives_to_two_is_passed_over_until_one_of_them_has_ended() -> None:
    found = fleet({"a": 0, "b": 0, "c": 0, "most": 20, "less": 10})
    assert [source(place(found, name, blocks=20)) for name in "abc"] == ["most", "most", "less"]
    found.apply_events("demo", fetched("a", "most", mb=3.2, ms=53.0), 0.1)
    found.apply_card(card("d", kv_block_size=BLOCK, total_kv_blocks=100, kv_identity="k", kv_token_bytes=KB), 0.1)
    found.apply_events("demo", events("d"), 0.1)
    found.sweep(0.1)
    assert source(place(found, "d", 0.1, blocks=20)) == "most"
    found.check_integrity()


def test_a_worker_that_fetches_twice_computes_a_third_prompt_until_a_fetch_is_over() -> None:
    found = fleet({"a": 0, "b": 10, "c": 20})
    other = [fleet_prompt(found, "a", number) for number in (100, 200, 300)]
    assert other == ["c", "c", None]


def fleet_prompt(found: Fleet, chosen: str, start: int, now: float = 0.0) -> str | None:
    """Places a prompt of its own that two others hold, so that no holder is busy."""
    hashes = range(start, start + 10)
    for name in ("b", "c"):
        worker = known(found, name)
        seq = 1 + (worker.log.seq or 0)
        found.apply_events("demo", events(name, seq, stored=stored(hashes)), now)
    request = PlacementRequest(f"p{start}", 161, hashes)
    placement = found.place("demo", request, KvAware(), random.Random(1), now, PlacementOptions(only=chosen))
    assert isinstance(placement, Placement)
    return None if placement.fetch_from is None else "c"


def test_a_transfer_that_nobody_reports_ends_after_five_seconds() -> None:
    found = fleet({"a": 0, "b": 0, "c": 0, "most": 20})
    assert [source(place(found, name, blocks=20)) for name in "abc"] == ["most", "most", None]
    assert source(place(found, "c", 4.9, blocks=8)) is None
    assert source(place(found, "c", 5.1, blocks=19)) == "most"


def test_an_explanation_names_the_holder_and_what_each_candidate_would_fetch() -> None:
    found = fleet({"a": 2, "b": 20})
    report = place(found, "a", explain=True).report
    assert report is not None
    assert report.fetch_from == "b"
    assert [(one.worker_id, one.overlap_blocks, one.fetch_blocks) for one in report.candidates] == [("a", 2, 18)]


def test_an_explanation_says_how_much_a_fetch_that_is_only_tried_would_bring() -> None:
    found = fleet({"a": 2, "b": 20}, prefill_s=1e-6)
    reports = [place(found, "a", explain=True).report for _ in range(2)]
    assert [(one.fetch_from, one.candidates[0].fetch_blocks) for one in reports if one] == [("b", 18), ("", 0)]


def test_what_is_fetched_counts_less_than_what_is_computed_but_more_than_what_is_there() -> None:
    found = fleet({"a": 0, "b": 20})
    request = PlacementRequest("r", 321, PROMPT[:20])
    placement = found.place("demo", request, KvAware(), random.Random(1), 0.0, PlacementOptions(explain=True))
    assert isinstance(placement, Placement)
    assert placement.report is not None
    costs = {one.worker_id: one.cost for one in placement.report.candidates}
    assert costs["b"] < costs["a"] < 321


def test_a_holder_whose_blocks_are_replaced_by_a_snapshot_gives_what_the_snapshot_says() -> None:
    found = fleet({"a": 0, "b": 20})
    place(found, "a", blocks=20)
    found.mark_behind(known(found, "b").card)
    found.snapshots_due(0.0, 1.0)
    found.apply_snapshot_part("demo", part("b", 0, runs=stored(PROMPT[:9])), 0.0)
    found.check_integrity()
    assert source(place(found, "a", 5.1, blocks=8)) == "b"


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ((6_000_000, 100.0), 60.0),
        ((6_000_000, 10.0), 600.0),
        ((0, 49.0), FIRST_MB_PER_S),  # refused
        ((0, 51.0), 0.0),
        ((6_000_000, 0.0), FIRST_MB_PER_S),
        ((6_000_000, float("nan")), FIRST_MB_PER_S),
        ((6_000_000, float("inf")), FIRST_MB_PER_S),
        ((-6_000_000, 100.0), 0.0),
    ],
)
def test_the_first_fetch_that_says_something_replaces_the_guess(sample: tuple[int, float], expected: float) -> None:
    rate = TransferRate()
    rate.observe_fetch(internal.Fetched(stream_no=1, worker_id="w", fetched_bytes=sample[0], fetch_ms=sample[1]))
    assert rate.mb_per_s == expected


def test_later_fetches_change_the_rate_slowly() -> None:
    rate = TransferRate()
    for _ in range(20):
        rate.observe_fetch(internal.Fetched(stream_no=1, worker_id="w", fetched_bytes=6_000_000, fetch_ms=100.0))
    rate.observe_fetch(internal.Fetched(stream_no=1, worker_id="w", fetched_bytes=0, fetch_ms=1_000.0))
    assert rate.mb_per_s == pytest.approx(54.0)


def test_blocks_are_fetched_only_within_a_site() -> None:
    found = fleet({"w0": 30, "w1": 0, "w2": 0}, site="here")
    assert source(place(found, "w1")) == "w0"
    found.apply_card(codec.replace(known(found, "w2").card, site="there"), 0.0)
    assert source(place(found, "w2", 10.0)) is None


def view_of(overlap: list[int]) -> View:
    columns = dict.fromkeys(View._fields, np.zeros(len(overlap)))
    columns |= {"block_size": np.full(len(overlap), float(BLOCK)), "overlap_tokens": BLOCK * np.array(overlap, float)}
    return View(**(columns | {"prompt_tokens": 10_000, "session": None, "fetchable": None, "distance_s": None}))  # type: ignore[arg-type]


WORKERS = st.lists(
    st.tuples(st.sampled_from(["", "x", "y"]), st.integers(0, 40), st.integers(0, 40), st.booleans()), min_size=1
)


@given(WORKERS, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_every_candidate_is_offered_what_the_best_free_worker_of_its_group_has_beyond_its_own(
    workers: list[tuple[str, int, int, bool]], transfers: list[tuple[int, int]]
) -> None:
    exchange, index = FetchPlanner(), PrefixIndex()
    for identity, held, _, _ in workers:
        row = index.add_worker(1_000)
        index.store(row, range(1, held + 1))
        exchange.set_worker(row, identity, KB)
    given_by, received = [0] * len(workers), [0] * len(workers)
    for holder, receiver in transfers:
        if max(holder, receiver) < len(workers):
            exchange.begin(holder, receiver, 0.0)
            given_by[holder] += 1
            received[receiver] += 1
    exchange.check_integrity()
    own = [max(held, predicted) for _, held, predicted, _ in workers]
    rows = np.arange(len(workers))
    offer = exchange.offer(
        index.match(range(1, 41)),
        rows,
        view_of(own),
        np.full(len(workers), 1.0),
        60.0,
        lambda row: workers[row][3],
        1.0,
    )
    for row, (identity, _, _, _) in enumerate(workers):
        best = max(
            (
                held
                for at, (name, held, _, can) in enumerate(workers)
                if name == identity != "" and can and given_by[at] < 2
            ),
            default=0,
        )
        extra = (best - own[row]) * BLOCK if received[row] < 2 else 0
        expected = extra if extra >= 128 else 0
        assert _offered(offer, row) == expected
        holder = None if offer is None else offer.holder_for(row)
        assert (holder is not None) == (expected > 0)
        if holder is not None:
            assert workers[holder.row][:2] == (identity, best)
            assert isinstance(holder, HolderCandidate)
    for row in range(len(workers)):
        exchange.remove_worker(row)
        exchange.check_integrity()
    assert not exchange.is_possible


def _offered(offer: FetchOffer | None, row: int) -> float:
    return 0.0 if offer is None else float(offer.fetchable.tokens[row])


def test_an_exchange_is_possible_once_two_workers_have_the_same_identity() -> None:
    exchange = FetchPlanner()
    seen = []
    for row, identity in enumerate(["x", "y", "", "y"]):
        exchange.set_worker(row, identity, KB)
        seen.append(exchange.is_possible)
    exchange.remove_worker(1)
    assert (seen, exchange.is_possible) == ([False, False, False, True], False)
