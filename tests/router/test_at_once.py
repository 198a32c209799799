"""A request that nothing has to be waited for is placed in the call that receives it, and handed over in the one that
receives its worker's accept; whatever else happens is left to a task."""

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest
from nats.aio.msg import Msg

from tests.router.builders import card, events
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_ring import KeyRing
from tokenbus.protocol.access.keys import KeyLimits, KeyRecord
from tokenbus.protocol.bus import bus
from tokenbus.protocol.telemetry.tracing import NoopTracer
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects
from tokenbus.router.access.key_checks import KeyChecks
from tokenbus.router.access.limits import TenantLimits
from tokenbus.router.requests.flights.ends import BY_WORKER, RequestEnd
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.serve import Router
from tokenbus.router.settings import RouterSettings

NAMES = subjects.Subjects()
CLIENT = "_INBOX.client.1"
_runs = codec.Decoder(internal.Run)
_drops = codec.Decoder(internal.Control)
_chunks = codec.Decoder(messages.Chunk)
ACCEPTED = internal.RunReply(accepted=True)
BUSY = internal.RunReply(accepted=False, error=errors.make_error(errors.Code.OVERLOADED))


class Broker(RecordingBus):
    """A recording bus that delivers what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: dict[str, bus.Callback] = {}

    def new_inbox(self) -> str:
        return "_INBOX.router"

    async def subscribe(self, subject: str, callback: bus.Callback, queue: str = "") -> str:
        self._callbacks[subject] = callback
        return subject

    async def unsubscribe(self, subscription: str) -> None:
        del self._callbacks[subscription]

    async def flush(self, timeout_s: float) -> None: ...

    def deliver(self, pattern: str, subject: str, data: bytes, reply: str = "") -> None:
        self._callbacks[pattern](Msg(_client=None, subject=subject, reply=reply, data=data))  # type: ignore[arg-type]


class Testbed:
    """A router of two workers that each take one request at a time."""

    __test__ = False

    def __init__(self, keys: KeyChecks | None = None, **settings: object) -> None:
        self.broker = Broker()
        made = RouterSettings(router_id="r", **settings)  # type: ignore[arg-type]
        self.router = Router(self.broker, NAMES, "r", made, random.Random(1), NoopTracer(), keys)  # type: ignore[arg-type]
        for name in ("w1", "w2"):
            self.router.fleet.apply_card(card(name, max_num_seqs=1), 0.0)
            self.router.fleet.apply_events("demo", events(name), 0.0)
        self.router.fleet.renew_all_leases(asyncio.get_running_loop().time())

    async def open(self) -> "Testbed":
        await self.router._workers.open()
        await self.router._intake.open()
        self.broker.take()
        return self

    def ask(self, request_id: str = "a", **fields: object) -> None:
        body = {"id": request_id, "token_ids": [1, 2, 3], **fields}
        subject = NAMES.generate("demo")
        pattern = next(one for one in NAMES.all_of("generate") if one.count(".") == subject.count("."))
        self.broker.deliver(pattern, subject, msgspec.json.encode(body), CLIENT)

    def ask_with_key(self, operation: str, key_id: str, tenant: str = "acme", **fields: object) -> None:
        subject = f"{NAMES.prefix}.{operation}.demo.{tenant}.{key_id}"
        self.broker.deliver(NAMES.of_keys(operation), subject, msgspec.json.encode({"id": "a", **fields}), CLIENT)

    def runs(self) -> list[bus.Outgoing]:
        return [one for one in self.broker.take() if one.subject.endswith(".run")]

    def answer(self, run: bus.Outgoing, reply: internal.RunReply) -> None:
        self.broker.deliver("_INBOX.router.*", run.reply, codec.encode(reply))

    def terminals(self) -> list[messages.Chunk]:
        sent = [one for one in self.broker.take() if one.subject == CLIENT]
        return [_chunks.decode(one.payload, codec.Encoding.JSON) for one in sent]

    @property
    def flight(self) -> Flight:
        (one,) = self.router.flights.all()
        return one

    @property
    def num_tasks(self) -> int:
        return len(self.router._lifecycle._tasks)


@pytest.fixture
async def testbed() -> AsyncIterator[Testbed]:
    made = await Testbed().open()
    yield made
    made.router.flights.check_integrity()
    for task in list(made.router._lifecycle._tasks):
        task.cancel()
    await turns()


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_its_run_leaves_at_once_and_an_accept_hands_it_over_without_any_task(testbed: Testbed) -> None:
    testbed.ask()
    (run,) = testbed.runs()
    assert _runs.decode(run.payload).request_id == "default:a"
    assert (testbed.flight.in_doubt, testbed.flight.awaiting_worker_id) == (True, run.subject.split(".")[-2])
    testbed.answer(run, ACCEPTED)
    await asyncio.sleep(0)
    assert testbed.flight.worker_id == run.subject.split(".")[-2]
    assert (testbed.flight.in_doubt, testbed.flight.awaiting_worker_id) == (False, None)
    assert testbed.num_tasks == 0


async def test_after_a_refusal_another_worker_gets_it(testbed: Testbed) -> None:
    testbed.ask()
    (first,) = testbed.runs()
    testbed.answer(first, BUSY)
    await turns()
    (second,) = testbed.runs()
    assert second.subject != first.subject
    assert _runs.decode(second.payload).attempt == 2
    testbed.answer(second, ACCEPTED)
    await turns()
    assert testbed.flight.worker_id == second.subject.split(".")[-2]
    assert testbed.num_tasks == 0


async def test_an_accept_that_is_late_is_revoked_and_not_taken_for_one_anymore(testbed: Testbed) -> None:
    testbed.ask()
    (run,) = testbed.runs()
    (sent,) = testbed.router._lifecycle._sent.values()
    testbed.router._lifecycle.tick(sent.sent_at + limits.ACCEPT_TIMEOUT_S - 0.01)
    assert testbed.num_tasks == 0
    sent.sent_at -= limits.ACCEPT_TIMEOUT_S
    testbed.router._lifecycle.tick(sent.sent_at + limits.ACCEPT_TIMEOUT_S)
    async with asyncio.timeout(5):
        while not (asked := [one for one in testbed.broker.take() if one.subject.endswith(".control")]):
            await asyncio.sleep(0)
    assert _drops.decode(asked[0].payload).op == "drop"
    testbed.answer(run, ACCEPTED)
    await turns()
    assert testbed.flight.worker_id is None
    testbed.broker.deliver("_INBOX.router.*", asked[0].reply, codec.encode(internal.ControlReply(ok=True)))
    await turns()
    assert len(testbed.runs()) == 1


async def test_one_that_has_to_wait_for_its_turn_gets_a_task(testbed: Testbed) -> None:
    for number in range(8):
        testbed.ask(f"r{number}")
    num_waiting = 8 - len(testbed.runs())
    assert num_waiting > 0
    assert testbed.num_tasks == num_waiting
    await turns()
    assert testbed.router._queue.depths() == {"demo": num_waiting}


async def test_a_cancel_that_comes_before_the_accept_reaches_the_worker(testbed: Testbed) -> None:
    testbed.ask()
    (run,) = testbed.runs()
    assert testbed.router._lifecycle.cancel("default:a", "demo")
    testbed.answer(run, ACCEPTED)
    await asyncio.sleep(0)
    assert [one.subject for one in testbed.broker.take()] == [NAMES.worker("demo", "w1", "control")]


async def test_an_accept_after_the_workers_own_report_of_the_end_changes_nothing(testbed: Testbed) -> None:
    testbed.ask()
    (run,) = testbed.runs()
    testbed.router.flights.remove(testbed.flight)
    testbed.answer(run, ACCEPTED)
    await turns()
    assert (len(testbed.router.flights), testbed.num_tasks, testbed.broker.take()) == (0, 0, [])


async def test_one_whose_id_runs_in_the_same_inbox_ends_silently(testbed: Testbed) -> None:
    testbed.ask()
    (run,) = testbed.runs()
    testbed.answer(run, msgspec.structs.replace(BUSY, same_reply=True))
    await turns()
    assert (len(testbed.router.flights), testbed.broker.take()) == (0, [])


async def test_a_router_that_drains_waits_for_the_answer(testbed: Testbed) -> None:
    testbed.ask()
    (run,) = testbed.runs()
    draining = asyncio.create_task(testbed.router.drain())
    await turns()
    assert not draining.done()
    testbed.answer(run, ACCEPTED)
    await turns()
    assert draining.done()


async def test_a_bug_while_it_is_placed_ends_it_in_internal(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed.router._queue, "place_at_once", lambda *arguments: 1 / 0)
    testbed.ask()
    (terminal,) = testbed.terminals()
    assert terminal.error
    assert terminal.error.code is errors.Code.INTERNAL
    assert len(testbed.router.flights) == 0


async def test_a_bug_while_it_is_read_leaves_its_client_a_terminal(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testbed.router._intake._models, "with_adapter", lambda address: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # which the connection logs
        testbed.ask()
    (terminal,) = testbed.terminals()
    assert terminal.error
    assert (terminal.id, terminal.error.code) == ("a", errors.Code.INTERNAL)
    assert len(testbed.router.flights) == 0


async def test_a_bug_while_it_is_read_again_after_the_end_of_its_namesake_leaves_its_client_a_terminal(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testbed.router._lifecycle, "admit", duplicate)
    testbed.ask()
    ((timer, try_again),) = testbed.router._intake._duplicates.items()
    timer.cancel()
    monkeypatch.setattr(testbed.router._lifecycle, "admit", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # which the event loop logs
        try_again()
    (terminal,) = testbed.terminals()
    assert terminal.error
    assert terminal.error.code is errors.Code.INTERNAL


def duplicate(*arguments: object) -> None:
    raise errors.request_error(errors.Code.DUPLICATE_REQUEST)


async def test_a_bug_with_one_request_of_a_lost_worker_keeps_none_of_its_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    testbed = await Testbed().open()
    lost = testbed.router.fleet.find_worker(subjects.WorkerAddress("demo", "w1"))
    assert lost is not None
    for name in "ab":
        testbed.ask(name)
        testbed.answer(testbed.runs()[0], ACCEPTED)
        await turns()
    a, b = testbed.router.flights.all()
    rerouted = testbed.router._lifecycle._telemetry.rerouted
    bugs = iter([True, False])
    monkeypatch.setattr(
        testbed.router._lifecycle._telemetry,
        "rerouted",
        lambda *arguments: 1 / 0 if next(bugs) else rerouted(*arguments),
    )
    for one in (a, b):
        testbed.router._lifecycle.recover(one, lost, is_certain=True)
    (terminal,) = testbed.terminals()
    assert terminal.error
    assert (terminal.id, terminal.error.code) == ("a", errors.Code.INTERNAL)
    assert testbed.router.flights.all() == [b]
    for task in list(testbed.router._lifecycle._tasks):
        task.cancel()
    await turns()


async def test_who_asks_for_traces_without_end_is_told_when_to_ask_again(testbed: Testbed) -> None:
    def ask(reply: str) -> messages.TraceReply:
        testbed.broker.deliver(NAMES.trace[0], NAMES.trace[0], b"", reply)
        (sent,) = (one for one in testbed.broker.take() if one.subject == reply)
        return codec.Decoder(messages.TraceReply).decode(sent.payload, codec.Encoding.JSON)

    for number in range(20_000):
        if (answer := ask(f"_INBOX.greedy.{number}")).error is not msgspec.UNSET:
            break
    assert answer.error is not msgspec.UNSET
    assert answer.error.code is errors.Code.OVERLOADED
    assert answer.error.retry_after_ms
    assert ask("_INBOX.another.1").error is msgspec.UNSET, "another connection has an account of its own"


async def test_a_bug_while_its_accept_is_read_ends_it_in_internal(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed.ask()
    (run,) = testbed.runs()
    monkeypatch.setattr(testbed.router.fleet, "is_lost", lambda card: 1 / 0)
    testbed.answer(run, ACCEPTED)
    await asyncio.sleep(0)
    (terminal,) = testbed.terminals()
    assert terminal.error
    assert terminal.error.code is errors.Code.INTERNAL


async def test_what_no_worker_would_accept_is_refused_at_once() -> None:
    testbed = await Testbed().open()
    testbed.ask("c", token_ids=[1] * 600)
    refusals = [(one.error.code, one.error.param) for one in testbed.terminals() if one.error]
    assert refusals == [(errors.Code.PROMPT_TOO_LONG, "token_ids")]
    assert (len(testbed.router.flights), testbed.num_tasks) == (0, 0)


async def test_a_terminal_is_not_sent_again_for_a_later_request_of_the_same_id(testbed: Testbed) -> None:
    lifecycle = testbed.router._lifecycle
    testbed.ask(token_ids=[1] * 600)
    assert lifecycle.replay("default:a")
    testbed.ask()
    (run,) = testbed.runs()
    testbed.answer(run, ACCEPTED)
    await asyncio.sleep(0)
    lifecycle.finish(testbed.flight)
    assert not lifecycle.replay("default:a")  # its worker has the terminal


async def test_a_request_beyond_a_limit_is_refused_at_once_with_what_is_left_and_when_more_is() -> None:
    testbed = await Testbed(tenant_limits=TenantLimits(tokens_per_minute=4)).open()
    testbed.ask("a", max_tokens=2)
    await turns()  # its router takes its share first
    (run,) = testbed.runs()
    assert _runs.decode(run.payload).charged_tokens == 5
    testbed.ask("b", max_tokens=2)
    (terminal,) = testbed.terminals()
    assert terminal.error
    assert terminal.error.code is errors.Code.OVERLOADED
    assert terminal.error.rate_limits
    assert terminal.error.rate_limits.tokens
    assert (terminal.error.rate_limits.tokens.limit, terminal.error.rate_limits.tokens.remaining) == (4, 0)
    assert terminal.error.retry_after_ms
    assert 12_000 < terminal.error.retry_after_ms <= 16_000


async def test_the_answer_is_charged_as_it_was_and_not_as_it_could_have_been() -> None:
    testbed = await Testbed(tenant_limits=TenantLimits(tokens_per_minute=6_000)).open()
    testbed.ask("a", max_tokens=32_000)
    await turns()
    (run,) = testbed.runs()
    sent = _runs.decode(run.payload)
    assert sent.charged_tokens == 3 + 256
    assert sent.rate_limits
    testbed.answer(run, ACCEPTED)
    await turns()
    testbed.flight.completion.token_ids.extend([5] * 10)
    testbed.router._lifecycle.finish(testbed.flight)
    (share,) = testbed.router._limits.windows.values()
    assert share.spent == 13
    testbed.ask("b", max_tokens=32_000)
    assert _runs.decode(testbed.runs()[0].payload).charged_tokens == 3 + 10


KEY = keys.new_key()
RECORD = KeyRecord(id=KEY.id, hash=KEY.hash, tenant="acme", limits=KeyLimits(max_tokens=7), models=("demo",))


async def keyed(record: KeyRecord = RECORD) -> Testbed:
    ring = KeyRing()
    ring.put(record)
    ring.heard(asyncio.get_running_loop().time())
    return await Testbed(KeyChecks(ring)).open()


async def test_a_request_of_a_key_is_bounded_by_it_and_names_it_to_the_next_guardian() -> None:
    testbed = await keyed()
    testbed.ask_with_key("generate", KEY.id, token_ids=[1, 2, 3])
    run = _runs.decode(testbed.runs()[0].payload)
    assert (run.key_id, run.params.max_tokens, run.request_id) == (KEY.id, 7, "acme:a")


@pytest.mark.parametrize("operation", ["generate", "embed", "tokenize"])
@pytest.mark.parametrize("tenant", ["acme", "globex"])
async def test_a_key_that_is_unknown_or_another_tenants_is_refused(operation: str, tenant: str) -> None:
    testbed = await keyed()
    testbed.ask_with_key(operation, "aaaaaaaaaa" if tenant == "acme" else KEY.id, tenant, token_ids=[1], prompt="x")
    (terminal,) = testbed.terminals()
    assert terminal.error
    assert terminal.error.code is errors.Code.UNAUTHORIZED


async def test_the_end_of_a_request_is_told_once_with_its_counts() -> None:
    testbed = await keyed()
    ends: list[RequestEnd] = []
    testbed.router.ends.add(ends.append)
    testbed.ask_with_key("generate", KEY.id, token_ids=[1, 2, 3])
    testbed.answer(testbed.runs()[0], ACCEPTED)
    await asyncio.sleep(0)
    flight = testbed.flight
    flight.completion.token_ids.extend([5, 6])
    testbed.router._lifecycle.finish(flight)
    address = subjects.ModelAddress("demo", "acme", KEY.id)
    assert ends == [RequestEnd("generate", address, "a", BY_WORKER, None, 3, 0, 2)]


async def test_a_call_that_fails_is_told_and_a_request_that_is_left_to_another_router_is_not() -> None:
    testbed = await keyed()
    ends: list[RequestEnd] = []
    testbed.router.ends.add(ends.append)
    testbed.ask_with_key("generate", KEY.id, token_ids=[1, 2, 3])
    testbed.answer(testbed.runs()[0], ACCEPTED)
    await asyncio.sleep(0)
    testbed.router._lifecycle.forget(testbed.flight, "by_router")
    assert ends == []
    testbed.ask_with_key("embed", KEY.id, input=["x"])
    await turns()
    assert [(one.operation, one.reason, one.code) for one in ends] == [("embed", "error", errors.Code.UNSUPPORTED)]
