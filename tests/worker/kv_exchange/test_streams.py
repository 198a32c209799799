"""Whatever happens to a stream while its blocks come, it has exactly one terminal or, if it is dropped, none."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.arithmetic import ArithmeticRunner, exchanging, make_config
from tests.support.engines import thread_engine
from tests.support.run_sender import RunSender, Streamed
from tokenbus.cli.console import nats_server
from tokenbus.protocol.bus import connection
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, internal, limits, messages, subjects
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.lifeline import Lifeline
from tokenbus.worker.broker.replica_state import ReplicaEvent
from tokenbus.worker.contract import contract
from tokenbus.worker.engine_client.listener import EngineListener
from tokenbus.worker.engine_client.supervisor import EngineSupervisor
from tokenbus.worker.kv_exchange import fetcher
from tokenbus.worker.replica.frontend import Frontend
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.streams.stream import WorkerStream
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics

SIZE = 16
NAMES = subjects.Subjects()


class Worker(EngineListener):
    """A frontend with an engine in a thread."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url

    async def start(self) -> None:
        self.bus, self.incoming = await self._connect(), await self._connect()
        metrics = ReplicaMetrics(WorkerMetrics(), "demo", self.name)
        settings = FrontendSettings(debug=True)
        line = Lifeline(self.bus, self.incoming, NAMES, self.name)
        self.frontend = Frontend(line, NAMES, "demo", self.name, settings, metrics, tracing.NoopTracer())
        await self.frontend.open(self._connect)
        self.engine = thread_engine(lambda _: ArithmeticRunner(exchanging(make_config())))
        self.engine.listener = self
        self.supervisor = EngineSupervisor(self.engine, self.name, step_timeout_s=30.0)
        self._tasks = [asyncio.create_task(self.supervisor.run()), asyncio.create_task(line.run())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.frontend.close()
        await self.supervisor.cleanup()
        for bus in (self.bus, self.incoming):
            await bus.close()

    def stand_still(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has the engine give no block any more: whoever fetches, waits."""

        async def never(*_: object, **__: object) -> tuple[int, list[bytes]]:
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(self.engine, "export_blocks", never)

    def hold_blocks(self, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
        """Has the engine grant leases, and give blocks only once the event is set."""
        export, may_give = self.engine.export_blocks, asyncio.Event()

        async def later(
            prefix: contract.CachedPrefix, first: int, max_blocks: int, *, is_last: bool = False
        ) -> tuple[int, list[bytes]]:
            if max_blocks:
                await may_give.wait()
            return await export(prefix, first, max_blocks, is_last=is_last)

        monkeypatch.setattr(self.engine, "export_blocks", later)
        return may_give

    async def _connect(self) -> Bus:
        return await connection.connect(connection.BusSettings(url=self._url), self.name)

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        self.frontend.engine_started(engine, config)

    def engine_died(self) -> None:
        self.frontend.engine_died()

    def step_done(self) -> None:
        self.frontend.step_done()


class Fleet:
    """Workers a and b, and a sender of runs."""

    def __init__(self, a: Worker, b: Worker, sender: RunSender) -> None:
        self.a = a
        self.b = b
        self.sender = sender

    async def fetching(self, token_ids: list[int], **params: object) -> Streamed:
        """A stream of b, which asks a for blocks."""
        streamed = await self.sender.run("b", token_ids, fetch_from=self.sender.source("a"), **params)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while not streamed.chunks:
                await asyncio.sleep(0.01)
        return streamed

    async def settled(self) -> None:
        """Asserts that b holds nothing of earlier streams."""
        async with asyncio.timeout(60):
            await self.b.engine.drain()
        assert not self.b.frontend.streams
        assert not self.b.frontend.exchange._fetches


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    broker = await nats_server.start(0, tmp_path / "nats.log")
    workers = [Worker(name, broker.url) for name in ("a", "b")]
    for worker in workers:
        await worker.start()
    client = await RunSender.connect(broker.url)
    sender = RunSender(client)
    await sender.open("a", "b")
    yield Fleet(workers[0], workers[1], sender)
    await client.close()
    for worker in workers:
        await worker.stop()
    broker.stop()


def prompt(number: int, length: int = 100) -> list[int]:
    return [7 + (31 * number + 13 * place + place * place) % 90 for place in range(length)]


async def test_blocks_are_fetched_and_the_answer_is_the_same(fleet: Fleet) -> None:
    first = await fleet.sender.ask("a", prompt(1))
    second = await fleet.sender.ask("b", prompt(1), fetch_from=fleet.sender.source("a"))
    assert second.token_ids == first.token_ids
    usage = second.terminals[0].usage
    assert isinstance(usage, messages.Usage)
    assert usage.cached_tokens == 96
    told = await fleet.sender.until_fetched(1)
    assert (told.worker_id, told.fetched_tokens, told.fetched_bytes) == ("a", 96, 6 * 8 * SIZE)
    await fleet.settled()


async def test_a_stream_that_is_cancelled_has_one_terminal(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.sender.ask("a", prompt(2))
    fleet.a.stand_still(monkeypatch)
    streamed = await fleet.fetching(prompt(2))
    await fleet.sender.cancel("b", "r-1")
    assert (await streamed.terminal()).finish_reason == "cancelled"
    await fleet.settled()
    assert len(streamed.terminals) == 1


async def test_a_stream_whose_time_is_over_has_one_terminal(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.sender.ask("a", prompt(3))
    fleet.a.stand_still(monkeypatch)
    streamed = await fleet.sender.run("b", prompt(3), fetch_from=fleet.sender.source("a"), remaining_ms=50.0)
    terminal = await streamed.terminal()
    assert terminal.error
    assert terminal.error.code == "deadline_exceeded"
    await fleet.settled()


async def test_a_stream_that_is_dropped_has_no_terminal(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.sender.ask("a", prompt(4))
    fleet.a.stand_still(monkeypatch)
    streamed = await fleet.fetching(prompt(4))
    drop = internal.Control(op="drop", request_id="default:r-1", attempt=1)
    await fleet.sender.nats.request(NAMES.worker("demo", "b", "control"), codec.encode(drop), timeout=60)
    await fleet.settled()
    assert not streamed.terminals


async def test_a_stream_is_taken_while_its_blocks_come(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.sender.ask("a", prompt(5))
    fleet.a.stand_still(monkeypatch)
    streamed = await fleet.fetching(prompt(5))
    fleet.b.frontend.announcer.change(ReplicaEvent.DRAIN)
    fleet.b.frontend.announcer.change(ReplicaEvent.LEAVE)
    take = internal.Take(request_id="default:r-1", attempt=1, router_id="test")
    reply = await fleet.sender.nats.request(NAMES.worker("demo", "b", "take"), codec.encode(take), timeout=60)
    taken = codec.Decoder(internal.TakeReply).decode(reply.data)
    assert (taken.ok, taken.num_tokens) == (True, 0)
    await fleet.settled()
    assert not streamed.terminals


async def test_an_engine_that_dies_is_followed_by_one_that_computes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await fleet.sender.ask("a", prompt(6))
    fleet.a.stand_still(monkeypatch)
    streamed = await fleet.fetching(prompt(6))
    assert fleet.b.engine._connection is not None
    fleet.b.engine._connection.link.kill()
    assert (await streamed.terminal()).finish_reason == "length"
    assert streamed.token_ids == expected.token_ids
    await fleet.settled()


async def test_a_holder_that_gives_nothing_costs_a_second(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await fleet.sender.ask("a", prompt(7))
    fleet.a.stand_still(monkeypatch)
    streamed = await fleet.fetching(prompt(7))
    await streamed.terminal()
    assert streamed.token_ids == expected.token_ids
    assert (await fleet.sender.until_fetched(1)).fetched_tokens == 0


async def test_a_bug_while_blocks_are_taken_over_does_not_hold_the_stream(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    expected = await fleet.sender.ask("a", prompt(10))
    monkeypatch.setattr(fleet.b.engine, "put_blocks", fail)
    answer = await fleet.sender.ask("b", prompt(10), fetch_from=fleet.sender.source("a"))
    assert answer.terminals[0].finish_reason == "length"
    assert answer.token_ids == expected.token_ids
    await fleet.settled()


async def test_a_third_fetch_is_computed_at_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MAX_FETCHES", 0)
    await fleet.sender.ask("a", prompt(8))
    answer = await fleet.sender.ask("b", prompt(8), fetch_from=fleet.sender.source("a"))
    assert answer.terminals[0].finish_reason == "length"
    assert fleet.sender.fetches == []


async def test_a_leaving_worker_still_gives_blocks(fleet: Fleet) -> None:
    await fleet.sender.ask("a", prompt(9))
    fleet.a.frontend.announcer.change(ReplicaEvent.DRAIN)
    fleet.a.frontend.announcer.change(ReplicaEvent.LEAVE)
    await fleet.sender.ask("b", prompt(9), fetch_from=fleet.sender.source("a"))
    assert (await fleet.sender.until_fetched(1)).fetched_tokens == 96


async def test_a_worker_leaves_when_those_that_read_its_blocks_have_them(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.sender.ask("a", prompt(10))
    may_give = fleet.a.hold_blocks(monkeypatch)
    streamed = await fleet.fetching(prompt(10))
    async with asyncio.timeout(60):
        while not fleet.a.frontend.exchange.num_leases:
            await asyncio.sleep(0.01)
    left = asyncio.create_task(fleet.a.frontend.wait_left())
    _, waiting = await asyncio.wait([left], timeout=2 * limits.TICK_S)
    assert waiting
    may_give.set()
    await streamed.terminal()
    assert (await fleet.sender.until_fetched(1)).fetched_tokens == 96
    async with asyncio.timeout(60):
        await left


async def test_a_prompt_counts_as_queued_while_its_blocks_come(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.sender.ask("a", prompt(11))
    may_give = fleet.a.hold_blocks(monkeypatch)
    streamed = await fleet.fetching(prompt(11))
    load = fleet.b.engine.load()
    assert (load.waiting, load.queued_prefill_tokens) == (1, 100)
    may_give.set()
    await streamed.terminal()
    assert fleet.b.engine.load().queued_prefill_tokens == 0


@pytest.mark.parametrize(("owner", "part"), [(Announcer, "num_held"), (WorkerStream, "fetched")])
async def test_a_bug_before_or_after_a_fetch_does_not_hold_the_stream(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, owner: type, part: str
) -> None:
    """Before it, the prompt is computed instead. Afterwards the stream ends: the same would fail again."""

    def fail(*_: object) -> None:
        raise KeyError(part)

    expected = await fleet.sender.ask("a", prompt(9))
    monkeypatch.setattr(owner, part, fail)
    streamed = await fleet.sender.run("b", prompt(9), fetch_from=fleet.sender.source("a"))
    terminal = await streamed.terminal()
    if part == "num_held":
        assert streamed.token_ids == expected.token_ids
    else:
        assert terminal.error
        assert terminal.error.code == "internal"
    await fleet.settled()
