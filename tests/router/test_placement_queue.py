"""Requests wait while every worker is busy, and are placed as soon as one has capacity."""

import asyncio
import random

import pytest

from tests.router.builders import card, events, flight, known, stored
from tokenbus.protocol.wire import block_hash, codec, errors, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import NoWorker, Placement
from tokenbus.router.placement.policies import View, make_policies
from tokenbus.router.placement.worker_table import Floats
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.requests.queueing.placement_queue import PlacementQueue, PolicySettings, QueueSettings
from tokenbus.router.telemetry.metrics import RouterMetrics

FULL = messages.Load(running=9)
"""A worker that runs 8 requests gets one more, and no further ones."""


class Broken:
    """A plug-in policy with a bug."""

    name = "broken"

    def costs(self, view: View) -> Floats:
        raise ZeroDivisionError


class Testbed:
    """A placement queue over one worker, which is full unless a test says otherwise."""

    __test__ = False

    def __init__(self, *, max_requests: int = 10, load: messages.Load = FULL) -> None:
        self.fleet = Fleet(0.0)
        self.fleet.apply_card(card(), 0.0)
        self.fleet.renew_all_leases(asyncio.get_running_loop().time())
        self.seq = -1
        policy = PolicySettings(make_policies() | {"broken": Broken()}, "kv", random.Random(1))
        self.queue = PlacementQueue(self.fleet, policy, QueueSettings(max_requests=max_requests), RouterMetrics())
        self.report(load)

    def report(self, load: messages.Load) -> None:
        self.seq += 1
        now = asyncio.get_running_loop().time()
        self.fleet.apply_events("demo", events(seq=self.seq, load=load), now)
        self.queue.place_waiting(now)
        self.queue.check_integrity()

    def place(self, name: str, **fields: object) -> "asyncio.Task[Placement | NoWorker | None]":
        return self.place_flight(flight(name, received_at=asyncio.get_running_loop().time(), **fields))

    def place_flight(self, one: Flight) -> "asyncio.Task[Placement | NoWorker | None]":
        one.prompt_ids, one.num_prompt_tokens = b"\x01\0\0\0", 1
        return asyncio.create_task(self.queue.place(one, ()))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_with_capacity_a_request_is_placed_at_once() -> None:
    testbed = Testbed(load=messages.Load(running=8))
    assert isinstance(await testbed.place("a"), Placement)
    second = testbed.place("b")
    await settle()
    assert not second.done(), "the first was booked"
    second.cancel()


async def test_without_capacity_it_waits_and_one_free_slot_is_given_to_one_request() -> None:
    testbed = Testbed()
    first, second = testbed.place("a"), testbed.place("b")
    await settle()
    assert len(testbed.queue) == 2
    testbed.report(messages.Load(running=8))
    assert isinstance(await first, Placement)
    await settle()
    assert not second.done()
    testbed.report(messages.Load(running=7))
    assert isinstance(await second, Placement)
    assert len(testbed.queue) == 0


async def test_a_new_request_does_not_overtake_waiting_ones() -> None:
    testbed = Testbed()
    first = testbed.place("a")
    await settle()
    testbed.fleet.apply_events(
        "demo", events(seq=testbed.seq + 1, load=messages.Load(running=8)), asyncio.get_running_loop().time()
    )
    testbed.seq += 1
    second = testbed.place("b")
    assert isinstance(await first, Placement)
    await settle()
    assert not second.done()
    second.cancel()


async def test_a_request_that_has_begun_overtakes_all_others_but_waits_for_capacity_too() -> None:
    testbed = Testbed()
    waiting = testbed.place("a")
    await settle()
    lost = flight("b", received_at=asyncio.get_running_loop().time())
    lost.first_accepted_at = 0.0
    begun = testbed.place_flight(lost)
    await settle()
    assert len(testbed.queue) == 2
    testbed.report(messages.Load(running=8))
    assert isinstance(await begun, Placement)
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize(("hash_scheme", "kind"), [("xxh3-64:0", Placement), ("xxh3-64:1", NoWorker)])
async def test_a_completion_goes_on_only_where_its_tokens_mean_the_same(hash_scheme: str, kind: type) -> None:
    testbed = Testbed(load=messages.Load())
    lost = flight("b", received_at=asyncio.get_running_loop().time())
    lost.first_accepted_at, lost.hash_scheme = 0.0, hash_scheme
    assert isinstance(await testbed.place_flight(lost), kind)


async def test_a_policy_that_raises_only_ends_the_request_that_named_it() -> None:
    testbed = Testbed()
    first, second = testbed.place("a", routing=messages.RoutingOptions(policy="broken")), testbed.place("b")
    await settle()
    testbed.report(messages.Load(running=7))
    with pytest.raises(ZeroDivisionError):
        await first
    assert isinstance(await second, Placement)


async def test_priority_orders_waiting_requests() -> None:
    testbed = Testbed()
    first, urgent = testbed.place("a"), testbed.place("b", priority=-10)
    await settle()
    testbed.report(messages.Load(running=8))
    assert isinstance(await urgent, Placement)
    assert not first.done()
    first.cancel()


async def test_a_request_beyond_the_limit_is_refused_with_a_retry_hint() -> None:
    testbed = Testbed(max_requests=1)
    first, second = testbed.place("a"), testbed.place("b")
    with pytest.raises(errors.RequestError) as refused:
        await second
    assert refused.value.error.code is errors.Code.OVERLOADED
    assert refused.value.error.retry_after_ms is not None
    assert not first.done()
    first.cancel()


async def test_without_a_queue_a_request_that_would_wait_is_refused() -> None:
    testbed = Testbed(max_requests=0)
    with pytest.raises(errors.RequestError):
        await testbed.place("a")
    testbed.queue.check_integrity()


async def test_a_deadline_that_passes_in_the_queue_ends_the_request() -> None:
    testbed = Testbed()
    with pytest.raises(errors.RequestError) as ended:
        await testbed.place("a", timeout_ms=5.0)
    assert ended.value.error.code is errors.Code.DEADLINE_EXCEEDED
    assert len(testbed.queue) == 0


async def test_a_cancel_ends_the_wait_and_empties_the_queue() -> None:
    testbed = Testbed()
    one = flight("a", received_at=asyncio.get_running_loop().time())
    task = testbed.place_flight(one)
    await settle()
    testbed.queue.cancel(one)
    assert await task is None
    testbed.queue.cancel(one)
    testbed.queue.check_integrity()
    assert len(testbed.queue) == 0


async def test_a_pinned_request_goes_to_its_worker_at_once() -> None:
    testbed = Testbed()
    placed = await testbed.place("a", routing=messages.RoutingOptions(worker_id="w1"))
    assert isinstance(placed, Placement)


async def test_when_the_last_worker_leaves_waiting_requests_end() -> None:
    testbed = Testbed()
    task = testbed.place("a")
    await settle()
    testbed.fleet.apply_card(card(state=messages.WorkerState.STOPPED), 0.0)
    testbed.queue.place_waiting(asyncio.get_running_loop().time())
    assert await task == NoWorker()
    testbed.queue.check_integrity()


async def test_while_the_only_worker_restarts_its_engine_requests_keep_waiting() -> None:
    testbed = Testbed()
    task = testbed.place("a")
    await settle()
    now = asyncio.get_running_loop().time()
    for state in (messages.WorkerState.RESTARTING, messages.WorkerState.READY):
        assert not task.done()
        testbed.fleet.apply_card(card(state=state), now)
        testbed.seq += 1
        testbed.fleet.apply_events("demo", events(seq=testbed.seq, state=state), now)
        testbed.queue.place_waiting(now)
    assert isinstance(await task, Placement)


async def test_new_limits_apply_to_requests_that_wait_already() -> None:
    testbed = Testbed(max_requests=10)
    waiting = [testbed.place(name) for name in "abc"]
    await settle()
    testbed.queue.update_settings("kv", 0.0, QueueSettings(max_requests=2))
    late = testbed.place("d")
    with pytest.raises(errors.RequestError) as caught:
        await late
    assert caught.value.error.code is errors.Code.OVERLOADED
    await settle()
    testbed.queue.check_integrity()
    assert sum(not task.done() for task in waiting) == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_tenant_pays_for_what_answers_are_expected_to_have_and_not_for_a_larger_max_tokens() -> None:
    busy = messages.Load(running=9, expected_answer_tokens=100)
    testbed = Testbed(load=busy)
    now = asyncio.get_running_loop().time()
    asked = [flight(f"b{n}", tenant="small", received_at=now, max_tokens=100) for n in range(9)]
    asked.append(flight("a", tenant="large", received_at=now, max_tokens=32_000))
    waiting = [testbed.place_flight(one) for one in asked]
    await settle()
    for placed in range(4):  # bookings count, so that each report leaves room for one more
        testbed.report(codec.replace(busy, running=8 - placed))
        await settle()
    assert waiting[-1].done(), "a quantum is enough for two small requests, and for the large one in its turn"
    for task in waiting:
        task.cancel()


def show_speed(testbed: Testbed, name: str) -> None:
    """Has a worker show that it computes 125 tokens a second."""
    for _ in range(10):
        worker = known(testbed.fleet, name)
        worker.speed.observe_loads(messages.Load(queued_prefill_tokens=999), messages.Load(computed_tokens=25), 0.2)
    testbed.fleet.apply_events("demo", events(name), asyncio.get_running_loop().time())


async def test_only_a_worker_that_holds_blocks_of_the_very_adapters_is_a_holder() -> None:
    """Another one holds the whole prompt, computed without them or at another scale."""
    testbed, now = Testbed(), asyncio.get_running_loop().time()
    fields = {"kv_block_size": 16, "total_kv_blocks": 100, "kv_identity": "k", "kv_token_bytes": 10_000}
    style = messages.CardAdapter(name="style", digest="d1")
    for name in ("w1", "w2", "w3", "w4"):
        one = codec.replace(card(name, **fields), features=["generate", "lora"], adapters=[style])
        testbed.fleet.apply_card(one, now)
    asked = flight("a", received_at=now)
    asked.request = codec.replace(asked.request, lora=[messages.Lora(name="style", scale=0.5)])
    asked.prompt_ids, asked.num_prompt_tokens = block_hash.pack_token_ids(range(160)), 160
    scheme = testbed.fleet.model("demo").hash_scheme
    assert scheme is not None
    for name, seq, used, held in (
        ("w1", 1, (), 10),
        ("w2", 0, (block_hash.Adapter("d1", 1.0),), 10),
        ("w3", 0, (block_hash.Adapter("d1", 0.5),), 9),
    ):
        hashes = scheme.hashes(asked.prompt_ids, "default", "", used)[:held]
        left = events(name, seq, state=messages.WorkerState.LEAVING, stored=stored(hashes))
        testbed.fleet.apply_events("demo", left, now)
    show_speed(testbed, "w4")
    testbed.fleet.sweep(now)
    placement = await testbed.queue.place(asked, ())
    assert isinstance(placement, Placement)
    assert placement.worker.card.worker_id == "w4"
    assert placement.fetch_from is known(testbed.fleet, "w3")
    assert placement.fetch_blocks == 9


async def test_a_stream_that_a_leaving_worker_gives_up_takes_its_blocks_along() -> None:
    """The prompt has 8 blocks, and 4 were sampled: the leaving worker holds all of them."""
    testbed, now = Testbed(), asyncio.get_running_loop().time()
    fields = {"kv_block_size": 16, "total_kv_blocks": 100, "kv_identity": "k", "kv_token_bytes": 10_000}
    for name in ("w1", "w2"):
        testbed.fleet.apply_card(card(name, **fields), now)
    begun = flight("a", received_at=now)
    begun.prompt_ids, begun.num_prompt_tokens = block_hash.pack_token_ids(range(128)), 128
    begun.first_accepted_at = now
    for token_id in range(64):
        begun.completion.append(token_id, 1)
    scheme = testbed.fleet.model("demo").hash_scheme
    assert scheme is not None
    hashes = scheme.hashes(begun.prompt_ids + block_hash.pack_token_ids(range(64)), "default")
    left = events("w1", 1, state=messages.WorkerState.LEAVING, stored=stored(hashes))
    testbed.fleet.apply_events("demo", left, now)
    show_speed(testbed, "w2")
    testbed.fleet.sweep(now)
    placement = await testbed.queue.place(begun, ())
    assert isinstance(placement, Placement)
    assert placement.worker.card.worker_id == "w2"
    assert placement.fetch_from is known(testbed.fleet, "w1")
    assert placement.fetch_blocks == 12


class AdapterBed(Testbed):
    """Two workers: w1, which is full, has the adapter `style`, and w2 is free."""

    def __init__(self) -> None:
        super().__init__()
        self.set_adapters("w1", "style")
        self.set_adapters("w2")
        self.fleet.apply_events("demo", events("w2"), asyncio.get_running_loop().time())

    def set_adapters(self, worker: str, *names: str) -> None:
        had = [messages.CardAdapter(name=name, digest=f"digest of {name}") for name in names]
        known_card = codec.replace(card(worker), features=["generate", "lora"], adapters=had)
        self.fleet.apply_card(known_card, asyncio.get_running_loop().time())

    def place_with_adapter(self, name: str) -> "asyncio.Task[Placement | NoWorker | None]":
        one = flight(name, received_at=asyncio.get_running_loop().time())
        one.request = codec.replace(one.request, lora=[messages.Lora(name="style")])
        return self.place_flight(one)


async def test_a_request_whose_adapter_only_busy_workers_have_waits_and_others_overtake_it() -> None:
    testbed = AdapterBed()
    first, second = testbed.place_with_adapter("a"), testbed.place_with_adapter("b")
    await settle()
    assert len(testbed.queue) == 2
    overtaking = await testbed.place("c")
    assert isinstance(overtaking, Placement)
    assert overtaking.worker.card.worker_id == "w2"
    testbed.report(messages.Load(running=8))
    placed = await first
    assert isinstance(placed, Placement)
    assert placed.worker.card.worker_id == "w1"
    await settle()
    assert not second.done()
    testbed.report(messages.Load(running=7))
    assert isinstance(await second, Placement)


async def test_a_request_that_waits_for_an_adapter_takes_another_worker_that_gets_it() -> None:
    testbed = AdapterBed()
    task = testbed.place_with_adapter("a")
    await settle()
    testbed.set_adapters("w2", "style")
    testbed.queue.place_waiting(asyncio.get_running_loop().time())
    placed = await task
    assert isinstance(placed, Placement)
    assert placed.worker.card.worker_id == "w2"


async def test_a_request_that_waits_for_an_adapter_ends_when_nobody_has_it_any_more() -> None:
    testbed = AdapterBed()
    task = testbed.place_with_adapter("a")
    await settle()
    testbed.set_adapters("w1")
    testbed.queue.place_waiting(asyncio.get_running_loop().time())
    with pytest.raises(errors.RequestError) as ended:
        await task
    assert ended.value.error.code is errors.Code.MODEL_NOT_FOUND
    testbed.queue.check_integrity()


NEEDS: dict[str, dict[str, object]] = {
    "reasoning_budget": {"reasoning": messages.ReasoningOptions(max_tokens=9)},
    "continue_final_message": {"continue_final_message": True},
}
"""What a request may need that workers of earlier versions lack, with a field that needs it."""
NEEDED = pytest.mark.parametrize("feature", NEEDS)


class FeatureBed(Testbed):
    """Two workers: w1, which is full, has a feature, and w2 is free and of an earlier version."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        self.feature = feature
        self.set_features("w1", "generate", feature)
        self.set_features("w2", "generate")
        self.fleet.apply_events("demo", events("w2"), asyncio.get_running_loop().time())

    def set_features(self, worker: str, *features: str) -> None:
        self.fleet.apply_card(card(worker, features=list(features)), asyncio.get_running_loop().time())

    def place_with_need(self, name: str) -> "asyncio.Task[Placement | NoWorker | None]":
        return self.place(name, **NEEDS[self.feature])


@NEEDED
async def test_a_request_waits_for_a_worker_that_has_what_it_needs(feature: str) -> None:
    testbed = FeatureBed(feature)
    first = testbed.place_with_need("a")
    await settle()
    assert len(testbed.queue) == 1
    testbed.set_features("w2", "generate", feature)
    testbed.queue.place_waiting(asyncio.get_running_loop().time())
    placed = await first
    assert isinstance(placed, Placement)
    assert placed.worker.card.worker_id == "w2"


async def test_a_budget_that_is_a_hint_asks_for_no_particular_worker() -> None:
    hint = messages.ReasoningOptions(max_tokens=9, optional=True)
    placed = await FeatureBed("reasoning_budget").place("a", reasoning=hint)
    assert isinstance(placed, Placement)
    assert placed.worker.card.worker_id == "w2"


@NEEDED
async def test_a_request_ends_when_no_worker_has_what_it_needs_any_more(feature: str) -> None:
    testbed = FeatureBed(feature)
    task = testbed.place_with_need("a")
    await settle()
    testbed.set_features("w1", "generate")
    testbed.queue.place_waiting(asyncio.get_running_loop().time())
    assert isinstance(await task, NoWorker)
    testbed.queue.check_integrity()
