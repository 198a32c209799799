"""A prefix that keeps requests waiting gets another copy once they have waited for as long as it takes."""

import random

import pytest

from tests.router.builders import card, events, stored
from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement import prefix_waits
from tokenbus.router.placement.placement import Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import KvAware
from tokenbus.router.placement.prefix_waits import PrefixWaits

SHARED = list(range(1, 101))
"""100 blocks of 16 tokens take 160 ms, and a stream makes prompts wait for 30 ms, while nothing else is known."""


def fleet_of_two() -> Fleet:
    """Returns a fleet whose worker w0 holds the prefix and always runs one stream, while w1 is idle."""
    fleet = Fleet(began_at=0.0)
    sizes = {"kv_block_size": 16, "total_kv_blocks": 10_000, "context_length": 100_000}
    for name in ("w0", "w1"):
        fleet.apply_card(card(name, **sizes), 0.0)
    load = messages.Load(running=1, used_blocks=100, free_blocks=9_900)
    fleet.apply_events("demo", events("w0", load=load, stored=stored(SHARED)), 0.0)
    return fleet


def place(fleet: Fleet, number: int, own: int = 0) -> Placement:
    """Places a prompt that begins with the shared prefix, and takes the booking back."""
    hashes = [*SHARED, 1_000 + own]
    request = PlacementRequest(f"k{number}", 16 * len(hashes), hashes)
    found = fleet.place("demo", request, KvAware(), random.Random(number), 0.0, PlacementOptions())
    assert isinstance(found, Placement)
    fleet.unbook(found.worker.card.address, request.key)
    return found


def test_requests_wait_for_a_busy_worker_until_a_copy_would_have_cost_no_more() -> None:
    fleet = fleet_of_two()
    chosen = [place(fleet, number, own=number).worker.card.worker_id for number in range(8)]
    assert chosen[:4] == ["w0"] * 4
    assert "w1" in chosen


def test_nothing_is_copied_for_requests_that_need_not_wait() -> None:
    fleet = fleet_of_two()
    fleet.apply_events("demo", events("w0", seq=1, load=messages.Load()), 0.0)
    assert {place(fleet, number, own=number).worker.card.worker_id for number in range(50)} == {"w0"}


def test_what_a_copy_took_is_no_longer_owed() -> None:
    fleet, owed = fleet_of_two(), [0.0]
    while place(fleet, len(owed), own=len(owed)).worker.card.worker_id == "w0":
        owed.append(fleet.model("demo")._waits.get(SHARED[-1]))
    assert owed == pytest.approx([0.03 * number for number in range(len(owed))])
    assert fleet.model("demo")._waits.get(SHARED[-1]) == pytest.approx(max(0.0, owed[-1] - 0.16))


def test_the_prefix_whose_requests_waited_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_waits, "MAX_PREFIXES", 2)
    waits = PrefixWaits()
    for last_hash in (1, 2, 1, 3):
        waits.put(last_hash, 0.1 * last_hash)
    assert [waits.get(last_hash) for last_hash in (1, 2, 3)] == pytest.approx([0.1, 0.0, 0.3])
    assert len(waits) == 2
