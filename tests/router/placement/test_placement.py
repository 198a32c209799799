"""A request goes to the worker with the lowest cost, and ties favour nobody."""

import random
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from tests.router.builders import at, card, events, known, stored
from tokenbus.protocol.wire import codec, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import NoWorker, Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import (
    ENTRY_POINTS,
    POLICIES,
    KvAware,
    LeastLoaded,
    Policy,
    RoundRobin,
    View,
    draw,
    make_policies,
)
from tokenbus.router.placement.sites import OwnSite
from tokenbus.router.placement.worker_table import Floats
from tokenbus.router.workers.speed import StepTimes

ANYONE = PlacementOptions()


def fleet_of(*max_num_seqs: int) -> Fleet:
    """Returns a fleet of workers w0, w1 and so on, which run at most that many requests each."""
    fleet = Fleet(began_at=0.0)
    for number, places in enumerate(max_num_seqs):
        fleet.apply_card(card(f"w{number}", max_num_seqs=places), 0.0)
    return fleet


def place(
    fleet: Fleet,
    policy: Policy,
    rng: random.Random,
    hashes: Sequence[int] = (),
    now: float = 0.0,
    options: PlacementOptions = ANYONE,
) -> Placement | NoWorker:
    prompt = PlacementRequest(f"r{rng.getrandbits(64)}", num_tokens=16 * len(hashes) + 1, hashes=hashes)
    return fleet.place("demo", prompt, policy, rng, now, options)


def placed(fleet: Fleet, policy: Policy, rng: random.Random) -> str:
    """Places one request and returns the id of its worker."""
    placement = place(fleet, policy, rng)
    assert isinstance(placement, Placement)
    return placement.worker.card.worker_id


def requests_at(fleet: Fleet) -> list[int]:
    return [worker.num_requests for worker in fleet.workers_of("demo")]


@pytest.mark.parametrize("name", POLICIES)
def test_without_workers_there_is_no_placement(name: str) -> None:
    assert place(Fleet(began_at=0.0), make_policies()[name], random.Random(1)) == NoWorker()


@pytest.mark.parametrize("name", POLICIES)
def test_the_only_worker_is_chosen_and_the_policy_is_named(name: str) -> None:
    fleet = fleet_of(8)
    placement = place(fleet, make_policies()[name], random.Random(1))
    assert isinstance(placement, Placement)
    assert (placement.worker, placement.policy) == (fleet.workers_of("demo")[0], name)


def test_there_is_one_policy_of_each_name() -> None:
    assert {name: policy.name for name, policy in make_policies().items()} == {name: name for name in POLICIES}


class Favourite:
    name = "favourite"

    def costs(self, view: View) -> Floats:
        return -view.max_num_seqs


def test_an_installed_package_can_add_a_policy_but_not_replace_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [EntryPoint(name, f"{__name__}:Favourite", ENTRY_POINTS) for name in ("favourite", "kv")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: found if group == ENTRY_POINTS else [])
    policies = make_policies()
    assert isinstance(policies["kv"], KvAware)
    assert placed(fleet_of(4, 9, 5), policies["favourite"], random.Random(1)) == "w1"


def test_the_worker_with_the_lowest_cost_wins_whatever_is_drawn() -> None:
    for seed in range(20):
        fleet = fleet_of(8, 8, 8)
        for number, running in enumerate((3, 1, 2)):
            fleet.apply_events("demo", events(f"w{number}", load=messages.Load(running=running)), 0.0)
        assert placed(fleet, LeastLoaded(), random.Random(seed)) == "w1"


def test_waiting_requests_count_as_much_as_running_ones() -> None:
    fleet = fleet_of(8, 8)
    fleet.apply_events("demo", events("w0", load=messages.Load(running=1, waiting=2)), 0.0)
    fleet.apply_events("demo", events("w1", load=messages.Load(running=2)), 0.0)
    assert placed(fleet, LeastLoaded(), random.Random(1)) == "w1"


def test_a_larger_worker_is_given_more_in_proportion() -> None:
    fleet = fleet_of(4, 12)
    rng = random.Random(1)
    for _ in range(16):
        placed(fleet, LeastLoaded(), rng)
    assert requests_at(fleet) == [4, 12]


def test_ties_are_drawn_evenly_and_only_from_the_cheapest() -> None:
    rng = random.Random(42)
    drawn = Counter(draw(np.array([1.0, 2.0, 1.0, 1.0, 1.0]), rng) for _ in range(4_000))
    assert sorted(drawn) == [0, 2, 3, 4]
    assert all(900 < count < 1_100 for count in drawn.values()), drawn


def test_with_a_temperature_higher_costs_are_drawn_less_often() -> None:
    rng = random.Random(42)
    drawn = Counter(draw(np.array([0.0, 5.0, 10.0]), rng, temperature=0.5) for _ in range(4_000))
    assert drawn[0] > drawn[1] > drawn[2] > 0
    assert {draw(np.array([0.0, 0.0]), rng, temperature=0.5) for _ in range(50)} == {0, 1}


def test_a_burst_spreads_evenly_before_any_worker_has_reported() -> None:
    fleet = fleet_of(8, 8, 8, 8)
    rng = random.Random(3)
    for count in range(1, 33):
        placed(fleet, LeastLoaded(), rng)
        assert max(requests_at(fleet)) - min(requests_at(fleet)) <= 1, count
    assert requests_at(fleet) == [8, 8, 8, 8]


def test_a_booking_taken_back_makes_its_worker_cheap_again() -> None:
    fleet = fleet_of(8, 8)
    fleet.book(at("w0"), PlacementRequest("a", 1), 0.0)
    fleet.book(at("w1"), PlacementRequest("b", 1), 0.0)
    fleet.unbook(at("w1"), "b")
    assert placed(fleet, LeastLoaded(), random.Random(1)) == "w1"


def test_a_worker_that_may_take_no_work_is_not_chosen_however_cheap() -> None:
    fleet = fleet_of(8, 8, 8)
    fleet.apply_events("demo", events("w0", load=messages.Load(running=7)), 0.0)
    fleet.apply_events("demo", events("w1", state=messages.WorkerState.DRAINING), 0.0)
    fleet.apply_events("demo", events("w2", load=messages.Load(step_age_ms=2_001.0)), 0.0)
    assert placed(fleet, LeastLoaded(), random.Random(1)) == "w0"


def test_round_robin_chooses_every_worker_once_before_any_twice() -> None:
    fleet = fleet_of(4, 8, 64)
    policy, rng = RoundRobin(), random.Random(5)
    turns = [placed(fleet, policy, rng) for _ in range(12)]
    assert sorted(turns[:3]) == ["w0", "w1", "w2"]
    assert turns == turns[:3] * 4


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    "full", [messages.Load(running=8), messages.Load(running=2, used_blocks=90, expected_blocks=100)]
)
def test_a_worker_without_room_is_chosen_only_when_all_are_full(name: str, full: messages.Load) -> None:
    fleet = fleet_with_blocks(0, 0)
    policy, rng = make_policies()[name], random.Random(5)
    fleet.apply_events("demo", events("w1", seq=1, load=full), 0.0)
    assert [placed(fleet, policy, rng) for _ in range(3)] == ["w0"] * 3
    fleet.apply_events("demo", events("w0", seq=1, load=full), 0.0)
    assert {placed(fleet, policy, random.Random(seed)) for seed in range(9)} == {"w0", "w1"}


def test_of_full_workers_the_one_where_streams_end_sooner_is_chosen() -> None:
    fleet = fleet_with_blocks(0, 0)
    for number, running in enumerate((2, 4)):  # of four streams that fill the memory one ends sooner than of two
        load = codec.replace(FULL, running=running)
        fleet.apply_events("demo", events(f"w{number}", seq=1, load=load), 0.0)
    assert chosen(fleet).worker.card.worker_id == "w1"


def test_round_robin_chooses_a_new_worker_next() -> None:
    fleet = fleet_of(8, 8)
    policy, rng = RoundRobin(), random.Random(5)
    for _ in range(5):
        placed(fleet, policy, rng)
    fleet.apply_card(card("new"), 0.0)
    assert placed(fleet, policy, rng) == "new"
    assert sorted(placed(fleet, policy, rng) for _ in range(3)) == ["new", "w0", "w1"]


def test_round_robin_skips_workers_that_are_not_eligible() -> None:
    fleet = fleet_of(8, 8, 8)
    policy, rng = RoundRobin(), random.Random(5)
    for _ in range(3):
        placed(fleet, policy, rng)
    fleet.apply_events("demo", events("w1", state=messages.WorkerState.RESTARTING), 0.0)
    assert {placed(fleet, policy, rng) for _ in range(4)} == {"w0", "w2"}


def test_a_worker_with_max_num_seqs_0_does_not_stop_placement_on_the_others() -> None:
    fleet = fleet_of(0, 8)
    assert placed(fleet, LeastLoaded(), random.Random(1)) == "w1"


BLOCKS = {"kv_block_size": 16, "total_kv_blocks": 100}
PROMPT = range(1_000, 1_010)
"""The hashes of ten blocks."""


def fleet_with_blocks(*held: int, **more: int) -> Fleet:
    """Returns a fleet of workers w0, w1 and so on, which hold that many leading blocks of the prompt each."""
    fleet = Fleet(began_at=0.0)
    for number, count in enumerate(held):
        fleet.apply_card(card(f"w{number}", **(BLOCKS | more)), 0.0)
        fleet.apply_events("demo", events(f"w{number}", stored=stored(PROMPT[:count])), 0.0)
    return fleet


def chosen(fleet: Fleet, hashes: Sequence[int] = PROMPT, now: float = 0.0, seed: int = 1) -> Placement:
    placement = place(fleet, KvAware(), random.Random(seed), hashes, now)
    assert isinstance(placement, Placement)
    fleet.check_integrity()
    return placement


def test_a_prompt_goes_to_the_worker_that_holds_most_of_it() -> None:
    placement = chosen(fleet_with_blocks(0, 7, 3))
    assert (placement.worker.card.worker_id, placement.overlap_blocks) == ("w1", 7)


def test_a_placed_prompt_is_predicted_to_be_cached_at_once_and_for_a_while_only() -> None:
    fleet = fleet_with_blocks(0, 0, 0, 0)
    first = chosen(fleet)
    assert first.overlap_blocks == 0
    fleet.unbook(at(first.worker.card.worker_id), next(iter(first.worker.bookings)))
    again = chosen(fleet, seed=2)
    assert (again.worker, again.overlap_blocks) == (first.worker, 10)
    for number in range(4):
        fleet.apply_events("demo", events(f"w{number}", seq=1), 6.0)
    assert chosen(fleet, now=6.0).overlap_blocks == 0


def test_an_overloaded_worker_gets_no_more_for_the_prefix_that_it_holds() -> None:
    fleet = fleet_with_blocks(10, 0)
    busy = messages.Load(running=1, queued_prefill_tokens=1_000)
    fleet.apply_events("demo", events("w0", seq=1, load=busy), 0.0)
    assert chosen(fleet).worker.card.worker_id == "w1"


FULL = messages.Load(running=2, used_blocks=60, expected_blocks=100, expected_answer_tokens=200)
"""Streams live for 4 s, as a decode step counts as 20 ms, and take all memory."""
TO_STEP_S = 1.5 * 0.02
"""A prompt waits this long for streams in any case."""


@pytest.mark.parametrize(
    ("load", "wait_s"),
    [
        (FULL, 4.0 * 1 / 2),  # one of two streams has to end, however little is lacking
        (codec.replace(FULL, expected_blocks=90), 4.0 * 0.9 / 2),
        (codec.replace(FULL, expected_blocks=89), 0.0),
        (codec.replace(FULL, expected_blocks=150), 4.0 * 1.5 / 2),  # two of them have more than fits
        (codec.replace(FULL, expected_blocks=0, running=8, waiting=3), 4.0 * 4 / 8),
        (codec.replace(FULL, running=8, waiting=3), 4.0 * 4 / 8),
        (codec.replace(FULL, expected_blocks=0, running=7), 0.0),
    ],
)
def test_the_forecast_is_that_places_and_memory_come_free_while_streams_live(
    load: messages.Load, wait_s: float
) -> None:
    fleet = fleet_with_blocks(0)
    fleet.apply_events("demo", events("w0", seq=1, load=load), 0.0)
    assert chosen(fleet).wait_s == pytest.approx(TO_STEP_S + wait_s)


def test_a_prefix_that_all_requests_share_does_not_send_them_all_to_one_worker() -> None:
    """Sequences that share their blocks use little memory, but still slow each other down."""
    fleet = fleet_with_blocks(0, 0, 0, 0, context_length=4_096, max_num_seqs=64)
    shared, at = list(range(60)), Counter[str]()
    for number in range(1, 65):
        worker = chosen(fleet, [*shared, 1_000 + number, 2_000 + number], now=0.001 * number, seed=number).worker
        name = worker.card.worker_id
        at[name] += 1
        load = messages.Load(running=at[name], used_blocks=60 + 2 * at[name])
        own = [1_000 + number, 2_000 + number]
        said = events(name, seq=at[name], load=load, started=tuple(worker.bookings), stored=stored([*shared, *own]))
        fleet.apply_events("demo", said, 0.001 * number)
    assert len(at) == 4
    assert max(at.values()) <= 32, at


def test_requests_that_arrive_one_by_one_are_spread() -> None:
    """The fleet is idle again before each request. Without utilization one worker would get them all."""
    fleet = fleet_with_blocks(0, 0, 0, 0, context_length=4_096)
    rng, counts, done = random.Random(1), Counter[str](), Counter[str]()
    for number in range(1, 101):
        hashes = [rng.getrandbits(64) for _ in range(20)]
        worker = chosen(fleet, hashes, now=number - 0.5, seed=number).worker
        name = worker.card.worker_id
        counts[name] += 1
        done[name] += 321
        fleet.unbook(at(name), next(iter(worker.bookings)))
        for one in range(4):
            load = messages.Load(computed_tokens=done[f"w{one}"])
            fleet.apply_events("demo", events(f"w{one}", seq=number, load=load), float(number))
    assert max(counts.values()) <= 30, counts


def test_a_worker_that_has_just_started_does_not_draw_a_whole_burst() -> None:
    fleet = fleet_with_blocks(0, 0, 0, 0, max_num_seqs=64)
    for number in range(3):
        load = messages.Load(running=4, generated_tokens=1_000)
        fleet.apply_events("demo", events(f"w{number}", seq=1, load=load), 0.0)
    rng = random.Random(1)
    assert placed(fleet, KvAware(), rng) == "w3"
    for _ in range(27):
        place(fleet, KvAware(), rng)
    assert sum(requests_at(fleet)) == 40
    assert max(requests_at(fleet)) <= 11, requests_at(fleet)


def test_what_a_worker_did_before_the_router_heard_it_is_not_its_most_work() -> None:
    """Or nothing that it does would be a share worth mentioning, for as long as that counts."""
    fleet = Fleet(began_at=0.0)
    for number, blocks in enumerate([stored(PROMPT), ()]):
        fleet.apply_card(card(f"w{number}", **BLOCKS), 0.0)
        load = messages.Load(computed_tokens=10**9)
        fleet.apply_events("demo", events(f"w{number}", load=load, stored=blocks), 0.0)
    assert chosen(fleet).worker.card.worker_id == "w0"
    fleet.unbook(at("w0"), next(iter(known(fleet, "w0").bookings)))
    for number, tokens in enumerate([1_000, 0]):
        load = messages.Load(computed_tokens=10**9 + tokens)
        fleet.apply_events("demo", events(f"w{number}", seq=1, load=load), 60.0)
    other = [*PROMPT[:2], *range(5_000, 5_000 + len(PROMPT) - 2)]
    assert chosen(fleet, other, now=60.0).worker.card.worker_id == "w1"


@pytest.mark.parametrize("held", [6, 8, 10])
def test_a_conversation_returns_to_the_worker_that_has_just_computed_most_of_it(held: int) -> None:
    """That worker has done more than ever before, and the other one nothing."""
    fleet = fleet_with_blocks(held, 0)
    for number, tokens in enumerate([16 * held, 0]):
        load = messages.Load(computed_tokens=tokens)
        fleet.apply_events("demo", events(f"w{number}", seq=1, load=load), 0.1)
    assert chosen(fleet, now=0.2).worker.card.worker_id == "w0"


def test_removed_blocks_and_those_of_a_dead_engine_are_no_longer_held() -> None:
    fleet = fleet_with_blocks(10, 4)
    fleet.apply_events("demo", events("w0", seq=1, removed=tuple(PROMPT[2:])), 0.0)
    assert chosen(fleet).overlap_blocks == 4
    fleet = fleet_with_blocks(10, 4)
    fleet.apply_events("demo", events("w0", seq=1, cleared=True, stored=stored(PROMPT[:1])), 0.0)
    worker = fleet.find_worker(at("w0"))
    assert worker is not None
    assert chosen(fleet).overlap_blocks == 4


def test_a_worker_without_blocks_is_chosen_by_its_load() -> None:
    fleet = Fleet(began_at=0.0)
    for name in ("w0", "w1"):
        fleet.apply_card(card(name), 0.0)
    fleet.apply_events("demo", events("w0", load=messages.Load(running=2, queued_prefill_tokens=50)), 0.0)
    assert chosen(fleet).worker.card.worker_id == "w1"


def test_a_request_can_be_pinned_to_a_worker_and_kept_from_others() -> None:
    fleet = fleet_with_blocks(9, 5, 0)
    rng = random.Random(1)
    other = place(fleet, KvAware(), rng, PROMPT, options=PlacementOptions(exclude=("w0",)))
    assert isinstance(other, Placement)
    assert other.worker.card.worker_id == "w1"
    pinned = place(fleet, KvAware(), rng, PROMPT, options=PlacementOptions(only="w2"))
    assert isinstance(pinned, Placement)
    assert pinned.worker.card.worker_id == "w2"
    assert place(fleet, KvAware(), rng, PROMPT, options=PlacementOptions(only="w0", exclude=("w0",))) == NoWorker()


def test_a_prompt_that_fits_no_workers_context_is_not_placed() -> None:
    assert place(fleet_with_blocks(0, context_length=100), KvAware(), random.Random(1), PROMPT) == NoWorker()


def test_a_report_lists_every_candidate_with_its_overlap_load_and_cost() -> None:
    fleet = fleet_with_blocks(4, 0)
    load = messages.Load(running=1, used_blocks=7, queued_prefill_tokens=32)
    fleet.apply_events("demo", events("w1", seq=1, load=load), 0.0)
    placement = place(fleet, KvAware(), random.Random(1), PROMPT, options=PlacementOptions(explain=True))
    assert isinstance(placement, Placement)
    assert placement.report == messages.RoutingReport(
        chosen="w0",
        policy="kv",
        candidates=[
            messages.Candidate(
                worker_id="w0", cost=0.0297, overlap_blocks=4, prefill_blocks=7, decode_blocks=0, state="ready"
            ),
            messages.Candidate(
                worker_id="w1", cost=0.094715, overlap_blocks=0, prefill_blocks=13, decode_blocks=7, state="ready"
            ),
        ],
    )


@pytest.mark.parametrize("policy", make_policies().values(), ids=lambda policy: policy.name)
def test_a_policy_has_a_finite_cost_for_every_candidate(policy: Policy) -> None:
    zeros = np.zeros(3)
    view = View(17, StepTimes(), *([zeros] * (len(View._fields) - 2)))
    view = view._replace(waited_s=0.1, session=None, fetchable=None, distance_s=None)
    costs = policy.costs(view)
    assert costs.shape == (3,)
    assert np.isfinite(costs).all()


def test_a_worker_that_never_reports_blocks_is_called_silent_and_nothing_is_predicted_for_it() -> None:
    fleet = fleet_with_blocks(0, context_length=4_096)
    rng = random.Random(1)
    for number in range(3):
        worker = chosen(fleet, [1, 2, 3], now=0.0).worker
        assert fleet.card_view(worker, 0.0).watched.events == "live"  # type: ignore[union-attr]
        (key,) = worker.bookings
        fleet.apply_events("demo", events("w0", seq=2 * number + 1, started=(key,)), 0.0)
        fleet.apply_events("demo", events("w0", seq=2 * number + 2, finished=(key,)), 0.0)
    fleet.renew_all_leases(9.0)
    assert fleet.card_view(worker, 0.0).watched.events == "silent"  # type: ignore[union-attr]
    again = [rng.getrandbits(64) for _ in range(9)]
    assert [chosen(fleet, again, now=9.0).overlap_blocks for _ in range(2)] == [0, 0]
    fleet.apply_events("demo", events("w0", seq=7, stored=stored([1])), 9.0)
    assert fleet.card_view(worker, 0.0).watched.events == "live"  # type: ignore[union-attr]


def test_a_session_returns_to_its_worker_unless_that_costs_much_more() -> None:
    fleet = Fleet(began_at=0.0)
    for name in ("w0", "w1", "w2", "w3"):
        fleet.apply_card(card(name), 0.0)
    said = PlacementRequest("k", 100, session="t s")
    first = fleet.place("demo", said, KvAware(), random.Random(0), 0.0, PlacementOptions())
    assert isinstance(first, Placement)
    home = first.worker.card.worker_id
    for seed in range(9):
        fleet.unbook(at(home), "k")
        again = fleet.place("demo", said, KvAware(), random.Random(seed), 0.5, PlacementOptions())
        assert isinstance(again, Placement)
        assert again.worker.card.worker_id == home
    fleet.apply_events("demo", events(home, load=messages.Load(running=8, waiting=9)), 0.5)
    away = fleet.place("demo", said, KvAware(), random.Random(0), 0.5, PlacementOptions())
    assert isinstance(away, Placement)
    assert away.worker.card.worker_id != home


def test_a_worker_that_is_four_times_slower_gets_fewer_requests() -> None:
    """The router learns it from the events: the same work between them takes four times as long."""
    fleet = Fleet(began_at=0.0)
    slow_s = {"w0": 0.1, "w1": 0.41}
    for name, step_s in slow_s.items():
        fleet.apply_card(card(name, context_length=1 << 20, max_num_seqs=64), 0.0)
        for seq in range(60):
            load = messages.Load(running=1, queued_prefill_tokens=60_000 - 1_000 * seq, computed_tokens=1_000 * seq)
            fleet.apply_events("demo", events(name, seq=seq, load=load), seq * step_s)
        fleet.apply_events("demo", events(name, seq=60, load=messages.Load()), 40.0)
    fleet.renew_all_leases(40.0)
    fleet.sweep(40.0)
    counts = Counter[str]()
    for number in range(50):
        placement = fleet.place(
            "demo", PlacementRequest(str(number), 1_000), KvAware(), random.Random(number), 40.0, PlacementOptions()
        )
        assert isinstance(placement, Placement)
        counts[placement.worker.card.worker_id] += 1
    assert counts["w1"] <= 0.6 * counts["w0"], counts


def sited(*sites: str, own: str = "here", cost_s: float = 0.25) -> Fleet:
    """Returns what a router at a site knows of workers w0, w1 and so on at these."""
    fleet = Fleet(began_at=0.0, own_site=OwnSite(own, cost_s))
    for number, site in enumerate(sites):
        fleet.apply_card(card(f"w{number}", site=site), 0.0)
    return fleet


@pytest.mark.parametrize(
    ("own", "sites", "expected"),
    [
        ("here", ("there", "here"), {"w1"}),
        ("here", ("there", ""), {"w1"}),  # a worker without a site counts as near
        ("here", ("there", "elsewhere"), {"w0", "w1"}),
        ("", ("there", "elsewhere"), {"w0", "w1"}),
    ],
)
def test_a_router_prefers_workers_of_its_own_site(own: str, sites: tuple[str, ...], expected: set[str]) -> None:
    rng = random.Random(1)
    chosen = set()
    for _ in range(20):
        chosen.add(placed(sited(*sites, own=own), KvAware(), rng))
    assert chosen == expected


def test_a_worker_of_another_site_is_chosen_once_those_here_would_take_longer_than_the_way_there() -> None:
    fleet = sited("here", "there")
    for queued, expected in ((1_900, "w0"), (2_000, "w1")):  # a token takes 0.1 ms, and steps 20 ms
        load = messages.Load(running=1, queued_prefill_tokens=queued)
        fleet.apply_events("demo", events("w0", queued, load=load), 0.0)
        placement = place(fleet, KvAware(), random.Random(1), options=PlacementOptions(explain=True))
        assert isinstance(placement, Placement)
        assert placement.worker.card.worker_id == expected
        assert placement.report is not None
        assert {one.worker_id: one.site for one in placement.report.candidates} == {"w0": "here", "w1": "there"}


def test_a_worker_that_moves_to_another_site_costs_more_from_then_on() -> None:
    fleet = sited("here", "here")
    fleet.apply_card(card("w0", site="there"), 0.0)
    assert {placed(fleet, KvAware(), random.Random(seed)) for seed in range(5)} == {"w1"}
    assert [fleet.is_distant(worker) for worker in fleet.workers_of("demo")] == [True, False]
    fleet.check_integrity()


def test_a_site_that_is_longer_than_a_name_is_refused_with_its_card() -> None:
    fleet = sited("x" * 129)
    assert not fleet.workers_of("demo")
