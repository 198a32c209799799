"""Requests wait while every worker is busy, and are placed as soon as one is not."""

import asyncio
import random

import pytest

from tests.router.builders import card, events, flight
from tokenbus.protocol.wire import errors, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.placement.placement import NoWorker, Placement
from tokenbus.router.placement.policies import View, make_policies
from tokenbus.router.placement.worker_table import Floats
from tokenbus.router.requests.flight import Flight
from tokenbus.router.requests.placement_queue import PlacementQueue, PolicySettings, QueueSettings

FULL = messages.Load(running=9)
"""A worker that can run 8 has one more, which is all that it gets."""


class Broken:
    """A policy that somebody has installed."""

    name = "broken"

    def costs(self, view: View) -> Floats:
        raise ZeroDivisionError


class Bed:
    """One worker, full unless a test says otherwise, and the requests that were asked for."""

    def __init__(self, *, max_requests: int = 10, load: messages.Load = FULL) -> None:
        self.fleet = Fleet(0.0)
        self.fleet.apply_card(card(), 0.0)
        self.fleet.renew_all_leases(asyncio.get_running_loop().time())
        self.seq = -1
        policy = PolicySettings(make_policies() | {"broken": Broken()}, "kv", random.Random(1))
        self.queue = PlacementQueue(self.fleet, policy, QueueSettings(max_requests=max_requests), RouterMetrics())
        self.hear(load)

    def hear(self, load: messages.Load) -> None:
        self.seq += 1
        now = asyncio.get_running_loop().time()
        self.fleet.apply_events("demo", events(seq=self.seq, load=load), now)
        self.queue.work_off(now)
        self.queue.check_integrity()

    def ask(self, name: str, **fields: object) -> "asyncio.Task[Placement | NoWorker | None]":
        return self.take(flight(name, received_at=asyncio.get_running_loop().time(), **fields))

    def take(self, asked: Flight) -> "asyncio.Task[Placement | NoWorker | None]":
        asked.prompt_ids, asked.num_prompt_tokens = b"\x01\0\0\0", 1
        return asyncio.create_task(self.queue.place(asked, ()))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_with_room_a_request_is_placed_at_once() -> None:
    bed = Bed(load=messages.Load(running=8))
    assert isinstance(await bed.ask("a"), Placement)
    second = bed.ask("b")
    await settle()
    assert not second.done(), "the first was booked"
    second.cancel()


async def test_without_room_it_waits_until_there_is_some_and_takes_it_alone() -> None:
    bed = Bed()
    first, second = bed.ask("a"), bed.ask("b")
    await settle()
    assert len(bed.queue) == 2
    bed.hear(messages.Load(running=8))
    assert isinstance(await first, Placement)
    await settle()
    assert not second.done()
    bed.hear(messages.Load(running=7))
    assert isinstance(await second, Placement)
    assert len(bed.queue) == 0


async def test_who_comes_while_others_wait_does_not_overtake_them() -> None:
    bed = Bed()
    first = bed.ask("a")
    await settle()
    bed.fleet.apply_events(
        "demo", events(seq=bed.seq + 1, load=messages.Load(running=8)), asyncio.get_running_loop().time()
    )
    bed.seq += 1
    second = bed.ask("b")
    assert isinstance(await first, Placement)
    await settle()
    assert not second.done()
    second.cancel()


async def test_a_policy_that_fails_ends_the_request_that_wants_it_and_no_other() -> None:
    bed = Bed()
    first, second = bed.ask("a", routing=messages.RoutingOptions(policy="broken")), bed.ask("b")
    await settle()
    bed.hear(messages.Load(running=7))
    with pytest.raises(ZeroDivisionError):
        await first
    assert isinstance(await second, Placement)


async def test_priority_decides_among_those_that_wait() -> None:
    bed = Bed()
    first, urgent = bed.ask("a"), bed.ask("b", priority=-10)
    await settle()
    bed.hear(messages.Load(running=8))
    assert isinstance(await urgent, Placement)
    assert not first.done()
    first.cancel()


async def test_one_too_many_is_told_when_to_come_again() -> None:
    bed = Bed(max_requests=1)
    first, second = bed.ask("a"), bed.ask("b")
    with pytest.raises(errors.RequestError) as refused:
        await second
    assert refused.value.error.code is errors.Code.OVERLOADED
    assert refused.value.error.retry_after_ms is not None
    assert not first.done()
    first.cancel()


async def test_with_a_queue_of_none_whoever_would_wait_is_refused() -> None:
    bed = Bed(max_requests=0)
    with pytest.raises(errors.RequestError):
        await bed.ask("a")
    bed.queue.check_integrity()


async def test_whose_time_passes_while_it_waits_ends_so() -> None:
    bed = Bed()
    with pytest.raises(errors.RequestError) as ended:
        await bed.ask("a", timeout_ms=5.0)
    assert ended.value.error.code is errors.Code.DEADLINE_EXCEEDED
    assert len(bed.queue) == 0


async def test_a_cancel_ends_the_waiting_and_leaves_no_trace() -> None:
    bed = Bed()
    asked = flight("a", received_at=asyncio.get_running_loop().time())
    task = bed.take(asked)
    await settle()
    bed.queue.cancel(asked)
    assert await task is None
    bed.queue.cancel(asked)
    bed.queue.check_integrity()
    assert len(bed.queue) == 0


async def test_a_pinned_request_goes_to_its_worker_and_waits_there() -> None:
    bed = Bed()
    placed = await bed.ask("a", routing=messages.RoutingOptions(worker_id="w1"))
    assert isinstance(placed, Placement)


async def test_when_the_last_worker_leaves_those_who_wait_are_told() -> None:
    bed = Bed()
    task = bed.ask("a")
    await settle()
    bed.fleet.apply_card(card(state=messages.WorkerState.STOPPED), 0.0)
    bed.queue.work_off(asyncio.get_running_loop().time())
    assert await task == NoWorker()
    bed.queue.check_integrity()


async def test_while_the_only_worker_restarts_its_engine_those_who_wait_go_on_waiting() -> None:
    bed = Bed()
    task = bed.ask("a")
    await settle()
    now = asyncio.get_running_loop().time()
    for state in (messages.WorkerState.RESTARTING, messages.WorkerState.READY):
        assert not task.done()
        bed.fleet.apply_card(card(state=state), now)
        bed.seq += 1
        bed.fleet.apply_events("demo", events(seq=bed.seq, state=state), now)
        bed.queue.work_off(now)
    assert isinstance(await task, Placement)


async def test_other_bounds_hold_for_those_who_wait_already() -> None:
    bed = Bed(max_requests=10)
    waiting = [bed.ask(name) for name in "abc"]
    await settle()
    bed.queue.adopt("kv", 0.0, QueueSettings(max_requests=2))
    late = bed.ask("d")
    with pytest.raises(errors.RequestError) as caught:
        await late
    assert caught.value.error.code is errors.Code.OVERLOADED
    await settle()
    bed.queue.check_integrity()
    assert sum(not task.done() for task in waiting) == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
